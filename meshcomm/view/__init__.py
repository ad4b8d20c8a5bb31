"""A page in a browser: the mesh, turned by dim, what each dim carries, and how a run is doing. No torch."""
