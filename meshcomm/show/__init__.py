"""Plain facts -> what a person reads."""

from meshcomm.show.plan import (
    Facts,
    dims_table,
    facts_view,
    headline,
    plan_facts,
    plan_view,
    rank_line,
    rank_table,
)

__all__ = [
    "Facts",
    "dims_table",
    "facts_view",
    "headline",
    "plan_facts",
    "plan_view",
    "rank_line",
    "rank_table",
]
