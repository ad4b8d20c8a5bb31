"""Plain facts -> what a person reads."""
