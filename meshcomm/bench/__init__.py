"""Measurements of meshcomm beside raw torch.distributed, in the same run."""
