"""One log of a group's calls, one verdict on the calls of its ranks, and what reads them."""
