"""Moving tensors between two meshes, of one job or of two."""
