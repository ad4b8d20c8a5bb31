"""Run all ranks of a mesh in one process, with real data and control flow. Deadlocks are detected without a timeout."""

from meshcomm.simulator.run import simulate

__all__ = ["simulate"]
