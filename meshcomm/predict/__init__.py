"""Predictions for a mesh before it is created: links, times, stages, memory, traffic, lint findings and rankings.

They need neither torch nor any processes.
"""
