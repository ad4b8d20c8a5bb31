"""Pure: names and sizes <-> ranks and groups, and the plan. No torch, no process, no environment."""

from meshcomm.layout.layout import Digits, Dims, Layout, Ranks
from meshcomm.layout.plan import Family, Group, GroupOptions, Plan, RankPlan

__all__ = ["Digits", "Dims", "Family", "Group", "GroupOptions", "Layout", "Plan", "RankPlan", "Ranks"]
