"""Renders plain facts for readers."""
