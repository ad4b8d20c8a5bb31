"""Start-up on paper: what a rank creates, asks the store for and connects to, at any number of ranks."""
