"""Measures meshcomm and plain torch.distributed in the same run."""
