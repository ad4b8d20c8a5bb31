"""Graph networks: on adjacency matrices, on edges that all graphs share, and on padded edges of each graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracles.kind import SAMPLES, Kind

NODES, FEATURES, CLASSES, EDGES = 8, 5, 3, 9


@dataclass(frozen=True, slots=True)
class Graphs:
    """nodes: (samples, NODES, FEATURES). adjacency: (samples, NODES, NODES). mask: bool (samples, NODES), of real nodes."""

    nodes: Tensor
    adjacency: Tensor
    mask: Tensor
    weights: Tensor | None = None
    source: str = "drawn"


class Round(nn.Module):
    """x + the update by the mean of the neighbours' messages."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        """(samples, nodes, width), (samples, nodes, nodes) -> the shape of x."""
        mean = adjacency / adjacency.sum(-1, keepdim=True).clamp(min=1)
        return x + self.update(F.relu(mean @ self.message(x)))  # type: ignore[no-any-return]


class GraphNet(nn.Module):
    """Classes of nodes."""

    def __init__(self, width: int = 8, rounds: int = 2) -> None:
        super().__init__()
        self.lift = nn.Linear(FEATURES, width)
        self.rounds = nn.ModuleList(Round(width) for _ in range(rounds))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, graphs: Graphs) -> Tensor:
        """-> (samples, NODES, CLASSES)."""
        x = self.lift(graphs.nodes)
        for each in self.rounds:
            x = each(x, graphs.adjacency) * graphs.mask[..., None]
        return self.head(x)  # type: ignore[no-any-return]


def drawn(step: int) -> tuple[Graphs, Tensor]:
    """Graphs with 1 to NODES nodes, and the classes of nodes."""
    generator = torch.Generator().manual_seed(step)
    nodes = torch.randn(SAMPLES, NODES, FEATURES, generator=generator, dtype=torch.float64)
    mask = torch.arange(NODES) < torch.randint(1, NODES + 1, (SAMPLES, 1), generator=generator)
    edges = torch.rand(SAMPLES, NODES, NODES, generator=generator) < 0.4
    adjacency = (edges & mask[:, None] & mask[..., None]).double()
    return Graphs(nodes, adjacency, mask), torch.randint(CLASSES, (SAMPLES, NODES), generator=generator)


def of_nodes(outputs: Tensor, targets: Tensor, inputs: Graphs) -> tuple[Tensor, Tensor]:
    """The sum of cross-entropies over the real nodes, and their number."""
    return F.cross_entropy(outputs[inputs.mask], targets[inputs.mask], reduction="sum"), inputs.mask.sum()


@dataclass
class Masked:
    """Targets with their mask."""

    classes: Tensor
    mask: Tensor


def of_masked(outputs: Tensor, targets: Masked) -> tuple[Tensor, Tensor]:
    """The same, of targets that have the mask."""
    return F.cross_entropy(
        outputs[targets.mask], targets.classes[targets.mask], reduction="sum"
    ), targets.mask.sum()


def with_mask(step: int) -> tuple[Graphs, Masked]:
    """Like `drawn`."""
    graphs, classes = drawn(step)
    return graphs, Masked(classes, graphs.mask)


DENSE = Kind(GraphNet, with_mask, of_masked)
DENSE_WITH_INPUTS = Kind(GraphNet, drawn, of_nodes, of_inputs=True)


class Along(nn.Module):
    """x + the update by the sum of messages along edges."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """x: (samples, nodes, width). edges: (2, edges), or (samples, 2, edges) with -1 for none."""
        found = edges.expand(len(x), *edges.shape[-2:])
        there = (found[:, 0] >= 0)[..., None]
        sources, ends = found.clamp(min=0).unbind(1)
        y = self.message(x)
        places = ends[..., None].expand(-1, -1, y.shape[-1])
        sent = y.gather(1, sources[..., None].expand_as(places)) * there
        return x + self.update(F.relu(torch.zeros_like(y).scatter_add(1, places, sent)))  # type: ignore[no-any-return]


class EdgeNet(nn.Module):
    """A number for each graph, of nodes and padded edges."""

    def __init__(self, width: int = 8, rounds: int = 2) -> None:
        super().__init__()
        self.lift = nn.Linear(FEATURES, width)
        self.rounds = nn.ModuleList(Along(width) for _ in range(rounds))
        self.head = nn.Linear(width, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """(samples, NODES, FEATURES), edges as for `Along` -> (samples, 1)."""
        x = self.lift(nodes)
        for each in self.rounds:
            x = each(x, edges)
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class OneGraph(EdgeNet):
    """A number for each node, where all samples have the same edges."""

    edges: Tensor

    def __init__(self, width: int = 8, rounds: int = 2) -> None:
        super().__init__(width, rounds)
        self.register_buffer("edges", _edges(0)[0])

    def forward(self, nodes: Tensor) -> Tensor:  # type: ignore[override]
        """(samples, NODES, FEATURES) -> (samples, NODES, 1)."""
        x = self.lift(nodes)
        for each in self.rounds:
            x = each(x, self.edges)
        return self.head(x)  # type: ignore[no-any-return]


def _edges(step: int) -> Tensor:
    """(SAMPLES, 2, EDGES)."""
    return torch.randint(NODES, (SAMPLES, 2, EDGES), generator=torch.Generator().manual_seed(50 + step))


def of_graphs(step: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Nodes and padded edges, and a number for each graph."""
    nodes = drawn(step)[0].nodes
    gone = torch.arange(EDGES) >= torch.randint(
        1, EDGES + 1, (SAMPLES, 1, 1), generator=torch.Generator().manual_seed(step)
    )
    return (nodes, _edges(step).masked_fill(gone, -1)), nodes.square().mean((1, 2))[:, None]


def shared(step: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The same, with edges (2, EDGES) that all samples share."""
    nodes = drawn(step)[0].nodes
    return (nodes, _edges(0)[0]), nodes.square().mean((1, 2))[:, None]


def of_one_graph(step: int) -> tuple[Tensor, Tensor]:
    """Nodes, and a number for each of them."""
    nodes = drawn(step)[0].nodes
    return nodes, nodes.square().mean(2, keepdim=True)


def _both(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return module(*inputs)


PADDED_EDGES = Kind(EdgeNet, of_graphs, F.mse_loss, _both)
SHARED_EDGES = Kind(EdgeNet, shared, F.mse_loss, _both)
EDGES_IN_A_BUFFER = Kind(OneGraph, of_one_graph, F.mse_loss)
