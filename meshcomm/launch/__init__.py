"""Start a job's ranks on one host, end all of them together, and report the root cause of a failure."""
