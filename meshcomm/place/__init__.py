"""Which sizes and which order of dims make the shortest step, as far as a model can say? No torch."""

from meshcomm.place.search import Placement, Ranking, rank_placements
from meshcomm.place.workload import Workload, workload
from meshcomm.place.written import placed_text

__all__ = ["Placement", "Ranking", "Workload", "placed_text", "rank_placements", "workload"]
