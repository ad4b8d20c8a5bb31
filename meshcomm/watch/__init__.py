"""The rule by which calls of several ranks belong together."""
