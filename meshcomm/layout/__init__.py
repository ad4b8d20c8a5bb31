"""Pure: names and sizes <-> ranks and groups, and the plan. No torch, no process, no environment."""

from meshcomm.layout.digits import Digits, Ranks
from meshcomm.layout.dims import Dims
from meshcomm.layout.layout import Layout
from meshcomm.layout.plan import Family, Group, GroupOptions, Plan, RankPlan

__all__ = ["Digits", "Dims", "Family", "Group", "GroupOptions", "Layout", "Plan", "RankPlan", "Ranks"]
