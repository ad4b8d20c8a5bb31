"""Where the parts of a tensor lie on a mesh, and who sends which of them to whom: between meshes, files and processes."""
