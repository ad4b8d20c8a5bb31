"""Tests on real processes without the price of starting them: a pool of warm ranks."""

from meshcomm.testing.pool import Pool, RankFailure

__all__ = ["Pool", "RankFailure"]
