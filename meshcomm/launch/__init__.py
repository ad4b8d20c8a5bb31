"""Start the ranks of a job on one host, end all of them together, and name the root cause of a failure."""
