"""Two versions of weights, pushed from a mesh of 2 x 2 to two copies of two ranks each, and what every rank says at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import meshcomm
from meshcomm.errors import MeshcommError
from meshcomm.mesh import Mesh
from meshcomm.transfer.agree import Staging
from meshcomm.transfer.link import Link
from meshcomm.transfer.weights import Weights

VERSIONS = (1, 2)
SOURCE, TARGET = range(4), range(4, 8)
COPIES = ((4, 5), (6, 7))
_SHAPES: Mapping[str, tuple[int, ...]] = {"matrix": (9, 6), "vector": (7,), "scalar": ()}
# Of the source, along fsdp and tp.
_SPLITS: Mapping[str, list[Placement]] = {
    "matrix": [Shard(0), Shard(1)],
    "vector": [Shard(0), Replicate()],
    "scalar": [Replicate(), Replicate()],
}


class Said(NamedTuple):
    """What a rank says at the end.

    version: that it holds; None if it refuses to be read. values: of its memory. error: the first one, as its type, text and
    `missing`; None if all went well. again: the same of the next call after that error. torn: why it refuses to be read, or "".
    """

    version: int | None
    values: dict[str, Tensor]
    error: tuple[str, str, tuple[tuple[str, int], ...]] | None
    again: tuple[str, str, tuple[tuple[str, int], ...]] | None
    torn: str = ""


def whole(version: int) -> dict[str, Tensor]:
    """Return the tensors of a version."""
    draw = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=draw) for name, shape in _SHAPES.items()}


def wanted(rank: int, version: int) -> dict[str, Tensor]:
    """Return what a rank of the target holds of a version."""
    tensors = whole(version)
    return {**tensors, "matrix": tensors["matrix"].chunk(2, 1)[rank % 2]}


def sent(rank: int, version: int) -> dict[str, Tensor]:
    """Return what a rank of the source holds of a version."""
    fsdp, tp = divmod(rank, 2)
    tensors = whole(version)
    rows = tensors["matrix"].chunk(2, 0)[fsdp]
    return {**tensors, "matrix": rows.chunk(2, 1)[tp], "vector": tensors["vector"].chunk(2)[fsdp]}


def opened(timeout_s: float) -> tuple[Mesh, Mesh, Link]:
    """Return both meshes, and a link that sends in many messages."""
    source = meshcomm.init(dims={"fsdp": 2, "tp": 2}, ranks=SOURCE, timeout_s=timeout_s, device="cpu")
    target = meshcomm.init(dims={"copy": 2, "tp": 2}, ranks=TARGET, timeout_s=timeout_s, device="cpu")
    return source, target, meshcomm.link(source, target, bucket_bytes=128)


def model_of(source: Mesh, target: Mesh) -> dict[str, Tensor]:
    """Return this rank's tensors: on the target, of no version."""
    if target.is_member:
        tensors = {name: torch.full_like(part, -1.0) for name, part in wanted(target.rank, 0).items()}
        part = tensors["matrix"].contiguous()
        return {**tensors, "matrix": DTensor.from_local(part, target["tp"], [Shard(1)], run_check=False)}
    mesh = source["fsdp", "tp"]
    return {
        name: DTensor.from_local(
            part.contiguous(),
            mesh,
            _SPLITS[name],
            run_check=False,
            shape=torch.Size(_SHAPES[name]),
            stride=torch.empty(_SHAPES[name]).stride(),
        )
        for name, part in sent(source.rank, 0).items()
    }


def memory(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's memory of each tensor."""
    return {name: x.to_local() if isinstance(x, DTensor) else x for name, x in model.items()}


def transfers(
    source: Mesh,
    weights: Weights,
    model: Mapping[str, Tensor],
    now: Callable[[int], None] = lambda version: None,
) -> Said:
    """Push and pull every version, and once more after an error.

    now: called with each version before its transfer.
    """

    def transfer(version: int) -> None:
        now(version)
        if not source.is_member:
            assert weights.pull() == version
            return
        for name, part in sent(source.rank, version).items():
            memory(model)[name].copy_(part)
        weights.push(version).wait()

    error = again = None
    try:
        for version in VERSIONS:
            transfer(version)
    except MeshcommError as raised:
        error = _error(raised)
        try:
            transfer(VERSIONS[-1] + 1)
        except MeshcommError as raised_again:
            again = _error(raised_again)
    read, torn = None, ""
    try:
        with weights.reading() as read:
            pass
    except MeshcommError as refused:
        torn = str(refused)
        assert weights.version is None or source.is_member
    values = {name: part.clone() for name, part in memory(model).items()}
    return Said(read if not source.is_member else weights.version, values, error, again, torn)


def _error(error: MeshcommError) -> tuple[str, str, tuple[tuple[str, int], ...]]:
    return type(error).__name__, str(error), tuple(getattr(error, "missing", ()))


def complaints(said: Mapping[int, Said], lost: int, staging: Staging) -> list[str]:
    """Return what is wrong with what the survivors of a death say."""
    wrong = []
    side = "source" if lost in SOURCE else "target"
    for rank in {*SOURCE, *TARGET} - {lost, *said}:
        wrong.append(f"rank {rank} says nothing")
    have_all = all(said[rank].version == VERSIONS[-1] for rank in said if rank in TARGET)
    for rank, (version, values, error, again, torn) in said.items():
        # A torn rank names itself, and no rank but the lost one.
        named = {at for at in (*SOURCE, *TARGET) if f"rank {at} of the" in torn} - {rank, lost}
        if named and rank in TARGET:
            wrong.append(f"rank {rank} says that it is torn because of {named}: {torn}")
        if have_all and error is not None and "was not transferred" in error[1].split("\n")[0]:
            wrong.append(f"rank {rank} denies a version that the target has: {error[1]}")
        if error is not None:
            kind, text, missing = error
            if kind != "TransferFailed" or (side, lost) not in missing:
                wrong.append(
                    f"rank {rank} does not name rank {lost} of the {side}: {missing}, {kind}: {text}"
                )
            elif f"rank {lost} of the {side}" not in text:
                wrong.append(f"rank {rank} does not name rank {lost} of the {side} in its text: {text}")
            if again is None or again[0] != "TransferFailed" or "cannot be used any more" not in again[1]:
                wrong.append(f"rank {rank} said {again} at the next call")
        elif version != VERSIONS[-1] or (
            # Every copy has what a rank of the source reports, before any rank is lost.
            rank in SOURCE and any(said[at].version != version for at in said if at in TARGET)
        ):
            wrong.append(f"rank {rank} has no error, and version {version}")
        if rank in TARGET:
            known = [at for at in VERSIONS if equal(values, wanted(rank, at))]
            if version is not None and known != [version]:
                wrong.append(
                    f"rank {rank} can be read as version {version}, but its values are those of {known}"
                )
            if staging == "whole" and not known and not equal(values, memory_at_first(rank)):
                wrong.append(f"rank {rank} has a mixture")
    for copy in COPIES:
        versions = {rank: said[rank].version for rank in copy if rank in said}
        if len(versions) == len(copy) and len({*versions.values()}) > 1:
            wrong.append(f"the ranks of a copy have versions {versions}")
    return wrong


def memory_at_first(rank: int) -> dict[str, Tensor]:
    """Return what a rank of the target holds before the first version."""
    return {name: torch.full_like(part, -1.0) for name, part in wanted(rank, 0).items()}


def equal(values: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Return whether some tensors are bit-equal to others of the same names."""
    return all(torch.equal(values[name], other) for name, other in others.items())
