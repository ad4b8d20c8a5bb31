"""Renders plain facts as text, tables and pictures."""
