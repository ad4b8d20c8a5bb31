"""Kinds of models for test_oracles: recurrent, graphs, prototypes, detection, complex weights, shared weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

from torch import Tensor, nn

from meshcomm.mesh import Mesh
from meshcomm.models import Attend, ModelSpec, StageContext
from tests.oracles import codes, detection, graphs, sequences, shared, spectral
from tests.oracles.kind import Kind
from tests.train.oracle_case import Case


def _recurrent(kind: Kind) -> ModelSpec:
    return ModelSpec(
        module=kind.module,
        hidden_size=8,
        vocab_size=sequences.WORDS,
        layers="layers",
        first=("tokens",),
        last=("head",),
        split={"tokens": "vocab", "head": "column"},
        loss=kind.loss,
    )


def _tagger() -> ModelSpec:
    return ModelSpec(
        module=sequences.Tagger, split={"up": "column", "down": "row"}, loss=sequences.TAGGER.loss
    )


def _graph(kind: Kind) -> ModelSpec:
    return ModelSpec(
        module=kind.module,
        layers="rounds",
        split={"rounds.*.message": "column", "rounds.*.update": "row"},
        loss=kind.loss,
    )


def _on_a_stage(module: Any, x: Tensor, here: StageContext) -> Tensor:
    """Of the models with parts named lift and head."""
    if here.stage.is_first:
        x = module.lift(x)
    for layer in here.layers:
        x = here.through(layer, x, module.edges) if hasattr(module, "edges") else here.through(layer, x)
    y: Tensor = module.head(x) if here.stage.is_last else x
    return y


def _one_graph() -> ModelSpec:
    spec = _graph(graphs.EDGES_IN_A_BUFFER)
    return replace(spec, hidden_size=8, first=("lift",), last=("head",), forward=_on_a_stage)


def _autoencoder() -> ModelSpec:
    split = {"up": "column", "down": "row", "back": "column", "out": "row"}
    return ModelSpec(module=codes.Autoencoder, split=split, loss=codes.loss)


def _summed(mesh: Mesh) -> ModelSpec:
    """The statistics of prototypes are summed over the ranks with other samples."""

    def total(x: Tensor) -> Tensor:
        for dim in ("dp", "fsdp"):
            if dim in mesh.dims:
                x = mesh.all_reduce(dim, x)
        return x

    return replace(_autoencoder(), module=lambda: codes.Autoencoder(total))


def _detector(kind: Kind) -> ModelSpec:
    columns = dict.fromkeys(("query", "key", "value", "up"), "column")
    return ModelSpec(module=kind.module, split={**columns, "out": "row", "down": "row"}, loss=kind.loss)


def _filters() -> ModelSpec:
    return ModelSpec(
        module=spectral.Filters,
        layers="layers",
        split={
            "layers.*.up": "column",
            "layers.*.filter.weight": {"style": "split", "axis": 1},
            "layers.*.down": "row",
        },
        loss=spectral.FILTERS.loss,
        hidden_size=6,
        first=("lift",),
        last=("head",),
        forward=_on_a_stage,
    )


def _attention(module: nn.Module, attend: Attend) -> None:
    for part in module.modules():
        if isinstance(part, shared.Block):
            part.attend = attend


def _shared(kind: Kind) -> ModelSpec:
    columns = {f"blocks.*.{name}": "column" for name in ("query", "key", "value", "up")}
    rows = {f"blocks.*.{name}": "row" for name in ("out", "down")}
    return ModelSpec(
        module=kind.module,
        hidden_size=8,
        vocab_size=sequences.WORDS,
        layers="blocks",
        first=("tokens", "places"),
        last=("norm", "head"),
        split={"tokens": "vocab", **columns, **rows, "head": "column"},
        tied=("tokens.weight", "head.weight"),
        attention=_attention,
        positions="places",
        loss=kind.loss,
    )


def _transposed() -> ModelSpec:
    return ModelSpec(
        module=shared.Transposed,
        split={"middle": "column", "back": "row"},
        loss=shared.TRANSPOSED.loss,
    )


def _transposed_split() -> ModelSpec:
    return replace(_transposed(), split={"up": "column", "middle": "row"})


_BUILT: Final[dict[str, tuple[str, ...]]] = {
    "tp=2": ("tensor_parallel",),
    "pp=2": ("parallel.pipeline",),
    "cp=2": ("parallel.context",),
    "dp=2 tp=2": ("tensor_parallel",),
}
"""A module of which nothing is known."""


def _but(*meshes: str, **more: Any) -> dict[str, tuple[str, ...]]:
    """No pipeline and no context, without these meshes."""
    return {name: words for name, words in (("pp=2", ("parallel.pipeline",)), ("cp=2", ("parallel.context",))) if name not in meshes}


CASES: Final[dict[str, Case]] = {
    "LSTM": Case(sequences.LSTM, partial(_recurrent, sequences.LSTM)),
    "LSTM, bare layers": Case(sequences.BARE_LSTM, partial(_recurrent, sequences.BARE_LSTM)),
    "packed GRU": Case(sequences.TAGGER, _tagger),
    "graphs, adjacency": Case(graphs.DENSE, partial(_graph, graphs.DENSE)),
    "graphs, padded edges": Case(graphs.PADDED_EDGES, partial(_graph, graphs.PADDED_EDGES)),
    "graphs, shared edges": Case(graphs.SHARED_EDGES, partial(_graph, graphs.SHARED_EDGES)),
    "one graph": Case(graphs.EDGES_IN_A_BUFFER, _one_graph),
    "prototypes": Case(codes.VQ, _autoencoder, micro=8),
    "prototypes, microbatches": Case(codes.VQ, _autoencoder),
    "prototypes, summed": Case(codes.VQ, on_mesh=_summed, micro=8),
    "detection": Case(detection.DETECTION, partial(_detector, detection.DETECTION)),
    "detection, by batch": Case(detection.DETECTION_BY_BATCH, partial(_detector, detection.DETECTION_BY_BATCH)),
    "Fourier operator": Case(spectral.FNO),
    "Fourier filters": Case(spectral.FILTERS, _filters),
    "tied embeddings": Case(shared.TIED, partial(_shared, shared.TIED)),
    "repeated block": Case(shared.REPEATED, partial(_shared, shared.REPEATED)),
    "repeated in the list": Case(shared.LISTED, partial(_shared, shared.LISTED)),
    "tied layers": Case(shared.TIED_LAYERS, partial(_shared, shared.TIED_LAYERS)),
    "transposed, split": Case(shared.TRANSPOSED, _transposed_split),
    "transposed": Case(shared.TRANSPOSED, _transposed),
}
