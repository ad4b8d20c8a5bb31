"""All ranks of a mesh in one process: real data, real control flow, and deadlocks that are proved."""

from meshcomm.simulator.run import simulate

__all__ = ["simulate"]
