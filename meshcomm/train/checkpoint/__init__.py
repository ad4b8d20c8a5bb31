"""Checkpoints on disk: which parts ranks write and read, in which files, and which job may write them."""
