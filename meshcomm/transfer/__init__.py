"""Plans and runs transfers of tensors between meshes, files and processes: which rank has which part, and who sends what."""
