"""Benchmarks that compare meshcomm with plain torch.distributed in the same run."""
