"""A browser page that shows the mesh by dim, the traffic along each dim, and the progress of a run. It works without torch."""
