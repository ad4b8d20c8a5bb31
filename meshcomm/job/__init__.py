"""Start the ranks of a job, replace lost ones, and end all of them together."""
