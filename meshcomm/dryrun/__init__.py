"""Run one training step as any rank of any world, in one process, to get its memory, calls and bytes without a cluster."""
