"""Maps names and sizes to ranks and groups, and computes the plan. Needs no torch, processes or environment variables."""

from meshcomm.layout.layout import Digits, Dims, Layout, Ranks
from meshcomm.layout.plan import Family, Group, GroupOptions, Plan, RankPlan

__all__ = ["Digits", "Dims", "Family", "Group", "GroupOptions", "Layout", "Plan", "RankPlan", "Ranks"]
