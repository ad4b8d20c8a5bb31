"""One step of a training as any rank of any world, in one process: memory, calls and bytes before there is a cluster."""
