"""The state dicts of a split module and of its optimizer, with full, plain tensors."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshcomm.errors import LayoutError, MeshcommError, MeshMismatchError
from meshcomm.layout.names import listed
from meshcomm.layout.sizes import ranks_text
from meshcomm.parallel.tensor.parameters import split_groups, whole
from meshcomm.parallel.torch_private import map_with_paths
from meshcomm.transfer.fused import Kept, fused_parts
from meshcomm.watching.verdict import alike, blamed, majority


def unsplit_state(module: nn.Module) -> dict[str, Any]:
    """Return a copy of the module's `state_dict()` with full, plain tensors in the layout from before the split.

    Called by: every rank that holds a part. Each rank receives the full dict.
    Returns:   what `state_dict()` has. The tensors in a module's extra state are full, too.
    Raises:    LayoutError if `module` is not an nn.Module; MeshMismatchError, on every rank that holds a part, if ranks have
               different tensors.
    """
    _check_module(module)
    fused = fused_parts(module)

    def kept(name: str, _: str, tensor: Tensor) -> Tensor | Kept:
        return Kept(tensor, fused[name]) if name in fused else tensor

    return _unsplit("the module's state", module, lambda: module.state_dict(keep_vars=True), kept)


def unsplit_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a copy of the optimizer's `state_dict()` with full, plain tensors, in the layout from before the split.

    An optimizer of the unsplit module loads it with `load_state_dict`, if it was created from the parameters in the same order.
    The optimizer of the split module loads its own `state_dict()`, of the same split. `Trainer.save` writes state that every
    mesh loads.

    Called by: every rank that holds a part. Each rank receives the full dict, with the numbers that its own optimizer gives to
               parameters. Tensors in lists, tuples and dicts of the state are gathered too.
    Raises:    LayoutError for arguments of other types, for parameters that the module does not have, for state of a split
               parameter that is not a DTensor, and for state of a multi-part weight, such as q, k and v in one, that is not
               split as the weight. MeshMismatchError on the other ranks that hold parts if a rank raises LayoutError, and on
               all of them if ranks have different state.
    """
    _check_module(module)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise LayoutError(
            "the optimizer is not a torch.optim.Optimizer",
            given=f"a {type(optimizer).__name__}",
            expected="an optimizer of the module's parameters",
            hint="unsplit_optimizer_state(module, optimizer)",
        )
    state = optimizer.state_dict()
    fused = fused_parts(module)
    parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    names = {id(tensor): name for name, tensor in module.named_parameters(remove_duplicate=False)}
    # Ranks may have given the parameters to their optimizers in different orders.
    keys = {
        names.get(id(parameters[key]), "") if isinstance(key, int) else str(key): key
        for key in state["state"]
    }

    def values() -> dict[str, Any]:
        if foreign := [tuple(tensor.shape) for tensor in parameters if id(tensor) not in names]:
            raise LayoutError(
                "the optimizer has parameters that the module does not have",
                given=f"{len(foreign)} of {len(parameters)}, the first of shape {foreign[0]}",
                expected="an optimizer of this module's parameters",
                hint="create the optimizer after tensor_parallel and fully_shard, which replace parameters",
            )
        return {name: state["state"][key] for name, key in keys.items()}

    def kept(name: str, path: str, tensor: Tensor) -> Tensor | Kept:
        key, parts = keys[name], fused.get(name)
        parameter = parameters[key] if isinstance(key, int) else None
        if tensor.ndim == 0 or not isinstance(parameter, DTensor):
            # The number of steps, for example.
            return tensor
        if not isinstance(tensor, DTensor) or (parts and _split(tensor) != _split(parameter)):
            raise LayoutError(
                f"nothing says how {name}{path} in the optimizer's state is split",
                given=f"{_split(tensor)}; the parameter is {_split(parameter)}",
                expected="state that is split as its parameter, as of AdamW or SGD with momentum",
                hint="save each rank's optimizer.state_dict(), or use an optimizer whose state has the parameter's shape",
            )
        return Kept(tensor, parts) if parts else tensor

    full = _unsplit("the optimizer's state", module, values, kept)
    settings = copy.deepcopy({key: value for key, value in state.items() if key != "state"})
    return {**settings, "state": {key: full[name] for name, key in keys.items()}}


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise LayoutError(
            "the module is not an nn.Module",
            given=f"a {type(module).__name__}",
            expected="the module that tensor_parallel or fully_shard has split",
            hint="unsplit_state(module), unsplit_optimizer_state(module, optimizer)",
        )


def _split(tensor: Tensor) -> str:
    """Return a tensor's shape, and how it is split. Equal text means an equal split."""
    shape = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    if not isinstance(tensor, DTensor):
        return f"{shape}, not a DTensor"
    where = tensor.device_mesh
    return f"{shape}, {tensor.placements} along {where.mesh_dim_names or where.shape}"


@torch.no_grad()
def _unsplit(
    what: str,
    module: nn.Module,
    values: Callable[[], dict[str, Any]],
    kept: Callable[[str, str, Tensor], Tensor | Kept],
) -> dict[str, Any]:
    """Return copies of named values in which all tensors are full.

    kept: returns a tensor as it is gathered, from the value's name, the tensor's path within the value, and the tensor.
    """
    failure: MeshcommError | None = None
    held: dict[str, Any] = {}
    tensors: dict[str, Tensor | Kept] = {}

    def note(name: str, path: str, leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            tensors[name + path] = kept(name, path, leaf)

    def full(name: str, path: str, leaf: Any) -> Any:
        return gathered[name + path] if isinstance(leaf, Tensor) else copy.deepcopy(leaf)

    try:
        held = values()
        for name, value in held.items():
            map_with_paths(partial(note, name), value)
    except MeshcommError as error:
        failure = error
    # The order of labels is the same on all ranks. That of an optimizer's parameters, or of keys, may not be.
    order = sorted(tensors)
    split = [f"{label}: {_split(_tensor(tensors[label]))}" for label in order if _is_split(tensors[label])]
    _compare(what, module, split, failure)
    gathered = {label: whole(tensors[label]).clone() for label in order}
    return {name: map_with_paths(partial(full, name), value) for name, value in held.items()}


def _tensor(tensor: Tensor | Kept) -> Tensor:
    return tensor.tensor if isinstance(tensor, Kept) else tensor


def _is_split(tensor: Tensor | Kept) -> bool:
    return isinstance(_tensor(tensor), DTensor)


def _compare(what: str, module: nn.Module, own: list[str], failure: MeshcommError | None) -> None:
    """Raise an error on every rank if `own` differs between the ranks that hold parts, or if one of them has a failure.

    Sends one message of 24 bytes along each dim along which the module is split.
    """
    groups = split_groups([*module.parameters(), *module.buffers()]).values()
    text = "\n".join(own) if failure is None else f"{type(failure).__name__}: {failure}"
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    # The largest digest, the smallest one, negated, and whether ranks of an earlier dim differ.
    seen = torch.tensor([digest, -digest, int(failure is not None)])
    for along in groups:
        sent = seen.to(along.device)
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=along.group)
        seen = sent.cpu()
        seen[2] = max(int(seen[2]), int(seen[0] != -seen[1]))
    if not seen[2]:
        return
    of_ranks: dict[int, tuple[bool, list[str]]] = {dist.get_rank(): (failure is not None, text.split("\n"))}
    for along in groups:
        parts: list[Any] = [None] * dist.get_world_size(along.group)
        dist.all_gather_object(parts, of_ranks, group=along.group)
        of_ranks = {rank: of_rank for part in parts for rank, of_rank in part.items()}
    if failure is not None:
        raise failure
    failed = sorted(rank for rank, (has_failed, _) in of_ranks.items() if has_failed)
    if failed:
        raise MeshMismatchError(
            f"{ranks_text(failed)} could not gather {what}",
            given="\n".join(of_ranks[failed[0]][1]),
            expected="the same call with the same state on every rank that holds a part",
            hint=f"see the error of {ranks_text(failed[:1])}",
            mismatched_ranks=tuple(failed),
        )
    usual, odd = majority({rank: tuple(lines) for rank, (_, lines) in of_ranks.items()})
    others = set(of_ranks[usual[0] if usual else odd[0]][1])
    lines = []
    for ranks in alike(odd, {rank: tuple(of_rank) for rank, (_, of_rank) in of_ranks.items()}):
        theirs = set(of_ranks[ranks[0]][1])
        for words, some in (("without", others - theirs), ("with", theirs - others)):
            if some:
                lines.append(f"{ranks_text(ranks)} {words} {listed(sorted(some), 3)}")
    raise MeshMismatchError(
        f"{what} differs between ranks: {blamed(odd, not usual, len(of_ranks))}",
        given="\n".join(lines),
        expected="the same split tensors on every rank that holds a part",
        hint="take the same steps with the same module and optimizer on every rank",
        mismatched_ranks=tuple(odd),
    )
