"""Predictions for a mesh before it is created: links, times, stages, memory, traffic, lint findings and rankings.

Predictions need neither torch nor running processes.
"""
