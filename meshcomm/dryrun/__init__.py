"""Run one training step as any rank of any world, in one process: memory, calls and bytes without a cluster."""
