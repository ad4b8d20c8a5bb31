"""Cost predictions for a mesh before it is made: links, times, stages, memory, traffic, lint findings and rankings. Uses no torch and no processes."""
