"""The rank grid: who sits where, in which group of one dim, as facts, text, picture or page."""
