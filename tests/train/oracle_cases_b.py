"""Kinds of models for test_oracles: recurrent, graphs, prototypes, detection, complex weights, shared weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias

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
    """The forward pass of one stage, for models with the parts lift and head."""
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
    """A specification whose statistics of prototypes are summed over the ranks with other samples."""

    def total(x: Tensor) -> Tensor:
        for dim in ("dp", "fsdp"):
            if dim in mesh.dims:
                x = mesh.all_reduce(dim, x)
        return x

    return replace(_autoencoder(), module=lambda: codes.Autoencoder(total))


def _detector(kind: Kind) -> ModelSpec:
    columns = dict.fromkeys(("query", "key", "value", "up"), "column")
    return ModelSpec(module=kind.module, split={**columns, "out": "row", "down": "row"}, loss=kind.loss)


def _operator() -> ModelSpec:
    return replace(_filters(), module=spectral.Operator, split={})


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


Refused: TypeAlias = dict[str, tuple[str, ...]]

_NO_CONTEXT: Final[Refused] = {"cp=2": ("parallel.context", "attention")}
_NO_STAGES: Final[Refused] = {"pp=2": ("parallel.pipeline", "layers"), **_NO_CONTEXT}
_NO_TREE: Final[Refused] = {"pp=2": ("parallel.pipeline", "one tensor that is not of tokens"), **_NO_CONTEXT}
_COMPLEX: Final[Refused] = {"fsdp=2": ("complex parameters", "torch.view_as_complex"), **_NO_CONTEXT}


def _on(meshes: str, *words: str) -> Refused:
    return dict.fromkeys(meshes.split(", "), words)


CASES: Final[dict[str, Case]] = {
    "LSTM": Case(sequences.LSTM, partial(_recurrent, sequences.LSTM), _NO_CONTEXT),
    "LSTM, residual around": Case(
        sequences.BARE_LSTM,
        partial(_recurrent, sequences.BARE_LSTM),
        {"pp=2": ("y, _ = layer(x)", "take and return hidden states"), **_NO_CONTEXT},
    ),
    "GRU, packed": Case(sequences.TAGGER, _tagger, _NO_STAGES),
    "graphs, adjacency": Case(graphs.DENSE, partial(_graph, graphs.DENSE), _NO_TREE),
    "graphs, mask as input": Case(
        graphs.DENSE_WITH_INPUTS, partial(_graph, graphs.DENSE_WITH_INPUTS), _NO_TREE
    ),
    "graphs, padded edges": Case(graphs.PADDED_EDGES, partial(_graph, graphs.PADDED_EDGES), _NO_TREE),
    "graphs, edges as input": Case(
        graphs.SHARED_EDGES,
        partial(_graph, graphs.SHARED_EDGES),
        {
            **_on("dp=2, fsdp=2, tp=2, dp=2 tp=2", "inputs[1] of shape (2, 9)", "expand", "buffer"),
            **_NO_TREE,
        },
    ),
    "graphs, edges in a buffer": Case(graphs.EDGES_IN_A_BUFFER, _one_graph, _NO_CONTEXT),
    "prototypes": Case(
        codes.VQ,
        _autoencoder,
        {**_on("dp=2, fsdp=2, dp=2 tp=2", "codes.sizes", "parallel.data", "mesh.all_reduce"), **_NO_STAGES},
        micro=8,
    ),
    "prototypes, microbatches": Case(
        codes.VQ,
        _autoencoder,
        {
            **_on("dp=2, fsdp=2, dp=2 tp=2", "codes.sizes", "parallel.data", "mesh.all_reduce"),
            **_on("tp=2", "codes.sizes", "microbatches", "train.micro_batch_size"),
            **_NO_STAGES,
        },
    ),
    "prototypes, summed": Case(codes.VQ, refused=_NO_STAGES, micro=8, on_mesh=_summed),
    "detection": Case(detection.DETECTION, partial(_detector, detection.DETECTION), _NO_STAGES),
    "detection, by batch": Case(
        detection.DETECTION_BY_BATCH,
        partial(_detector, detection.DETECTION_BY_BATCH),
        {**_on("dp=2, fsdp=2, tp=2, dp=2 tp=2", "microbatches", "scalars among the targets"), **_NO_STAGES},
    ),
    "Fourier operator": Case(
        spectral.FNO,
        _operator,
        {**_on("tp=2, dp=2 tp=2", "parallel.tensor", "split"), **_COMPLEX},
    ),
    "Fourier filters": Case(spectral.FILTERS, _filters, _COMPLEX),
    "tied embeddings": Case(shared.TIED, partial(_shared, shared.TIED)),
    "repeated block": Case(
        shared.REPEATED, partial(_shared, shared.REPEATED), {"pp=2": ("1 layers cannot fill 2",)}
    ),
    "repeated in the list": Case(
        shared.LISTED, partial(_shared, shared.LISTED), {"pp=2": ("blocks.1", "share their weights")}
    ),
    "tied layers": Case(
        shared.TIED_LAYERS,
        partial(_shared, shared.TIED_LAYERS),
        {"pp=2": ("blocks.0.up.weight, blocks.1.up.weight are one weight",)},
    ),
    "transposed": Case(shared.TRANSPOSED, _transposed, _NO_STAGES),
    "transposed, split": Case(
        shared.TRANSPOSED,
        _transposed_split,
        {**_on("tp=2, dp=2 tp=2", "self.up.weight.t()", "set a style"), **_NO_STAGES},
    ),
}
