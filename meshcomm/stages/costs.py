"""What does each part of the model cost beside the others, and how is it split into stages then?"""

from __future__ import annotations

from typing import NamedTuple

from meshcomm.config import ModelConfig
from meshcomm.stages.split import split_layers


class PartCosts(NamedTuple):
    """Multiply-adds of a forward pass per token. Backward costs twice as much in every part."""

    embedding: int
    layers: tuple[int, ...]
    head: int

    def of_stages(self, parts: list[range]) -> list[int]:
        """The cost of each stage, the embedding and the head with the first and the last."""
        costs = [sum(self.layers[layer] for layer in part) for part in parts]
        costs[0] += self.embedding
        costs[-1] += self.head
        return costs


def part_costs(model: ModelConfig, sequence: int) -> PartCosts:
    """What the matrices of each part cost; norms, rotations and the loss are not counted.

    sequence: tokens of a sample: each query meets all of their keys, also those that the causal
    mask then hides. The embedding looks rows up and multiplies nothing.
    """
    queries = model.heads * model.head_size
    keys = model.kv_heads * model.head_size
    attention = 2 * model.width * (queries + keys) + 2 * sequence * queries
    dense = 3 * model.width * model.ff
    layers = []
    for layer in range(model.layers):
        if model.has_experts(layer):
            router = model.width * model.experts
            layers.append(attention + router + min(model.experts_per_token, model.experts) * dense)
        else:
            layers.append(attention + dense)
    return PartCosts(0, tuple(layers), model.width * model.vocabulary)


def model_stages(model: ModelConfig, sequence: int, stages: int) -> list[range]:
    """The layers of each stage of this model, balanced by `part_costs`; see `split_layers`."""
    costs = part_costs(model, sequence)
    return split_layers(model.layers, stages, costs.layers, first=costs.embedding, last=costs.head)
