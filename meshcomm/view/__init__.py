"""A browser page that shows the mesh by dim, the traffic of each dim, and the progress of a run. Uses no torch."""
