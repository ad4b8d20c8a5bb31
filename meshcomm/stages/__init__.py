"""Stages of a pipeline as plain data: which layers, which rank, which pass when. No torch, no process."""

from meshcomm.stages.costs import PartCosts, model_stages, part_costs
from meshcomm.stages.orders import Pass, ScheduleProperties, orders, schedule_properties
from meshcomm.stages.split import Stage, split_layers, stages_of_rank
from meshcomm.stages.timeline import Costs, Slot, Timeline, timeline

__all__ = [
    "Costs",
    "PartCosts",
    "Pass",
    "ScheduleProperties",
    "Slot",
    "Stage",
    "Timeline",
    "model_stages",
    "orders",
    "part_costs",
    "schedule_properties",
    "split_layers",
    "stages_of_rank",
    "timeline",
]
