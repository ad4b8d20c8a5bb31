"""Maps names and sizes to ranks and groups, and makes the plan. Pure: no torch, no process, no environment."""

from meshcomm.layout.layout import Digits, Dims, Layout, Ranks
from meshcomm.layout.plan import Family, Group, GroupOptions, Plan, RankPlan

__all__ = ["Digits", "Dims", "Family", "Group", "GroupOptions", "Layout", "Plan", "RankPlan", "Ranks"]
