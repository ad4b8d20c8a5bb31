"""Models that a configuration can name, and what any other must say about itself."""
