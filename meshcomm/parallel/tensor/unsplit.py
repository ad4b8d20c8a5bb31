"""The state dicts of a split module and of its optimizer, with full, plain tensors: gathered, and loaded."""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshcomm.errors import LayoutError, MeshMismatchError
from meshcomm.layout.names import listed
from meshcomm.layout.sizes import ranks_text
from meshcomm.parallel.tensor.parameters import as_mesh_errors, assign, check_assigned, split_groups, whole
from meshcomm.parallel.torch_private import map_with_paths
from meshcomm.parallel.tree import tensors_of
from meshcomm.transfer.fused import Kept, fused_parts, unfused
from meshcomm.watching.verdict import alike, blamed, majority


def unsplit_state(module: nn.Module) -> dict[str, Any]:
    """Return a copy of the module's `state_dict()` with full, plain tensors in the layout from before the split.

    `load_unsplit_state` loads it into a module that is split in any way, and `load_state_dict` into one that is not.

    Called by: every rank that holds a part. Each rank receives the full dict.
    Returns:   what `state_dict()` has, also the versions of modules. What is not split, such as buffers and a module's extra
               state, is this rank's, and is not compared.
    Raises:    LayoutError if `module` is not an nn.Module; MeshClosed; MeshMismatchError, on every rank that holds a part, if
               ranks have different split tensors, or if one of them raises an error.
    """
    _check_module(module)
    metadata: dict[str, Any] = {}

    def values() -> dict[str, Any]:
        state = module.state_dict(keep_vars=True)
        metadata.update(copy.deepcopy(getattr(state, "_metadata", {})))
        return dict(state)

    def kept(name: str, _: str, tensor: Tensor) -> Tensor | Kept:
        return Kept(tensor, fused[name]) if name in fused else tensor

    fused = fused_parts(module)
    full = OrderedDict(_unsplit("the module's state", module, values, kept))
    # load_state_dict reads the versions of modules from this attribute.
    full._metadata = metadata  # type: ignore[attr-defined]
    return full


def unsplit_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a copy of the optimizer's `state_dict()` with full, plain tensors, in the layout from before the split.

    `load_unsplit_optimizer_state` loads it into the optimizer of a module that is split in any way. An optimizer of the unsplit
    module loads it with `load_state_dict`. Both must have been created from the parameters in the same order.

    Called by: every rank that holds a part. Each rank receives the full dict, with the numbers that its own optimizer gives to
               parameters. Tensors in lists, tuples and dicts of the state are gathered too.
    Raises:    LayoutError for arguments of other types, for parameters that the module does not have, for state of a split
               parameter that is not a DTensor, and for state of a multi-part weight, such as q, k and v in one, that is not
               split as the weight. MeshClosed. MeshMismatchError on the other ranks that hold parts if a rank raises an error,
               and on all of them if ranks have different state or settings: split tensors of other shapes, or other numbers.
    """
    _check_module(module)
    _check_optimizer(optimizer)
    fused = fused_parts(module)
    parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    names = {id(tensor): name for name, tensor in module.named_parameters(remove_duplicate=False)}
    # Ranks may have given the parameters to their optimizers in different orders.
    keys: dict[str, Any] = {}

    def values() -> dict[str, Any]:
        _check_parameters(parameters, names)
        state = optimizer.state_dict()
        for key in state["state"]:
            keys[names[id(parameters[key])] if isinstance(key, int) else str(key)] = key
        found = {name: state["state"][key] for name, key in keys.items()}
        return {**found, **{key: value for key, value in state.items() if key != "state"}}

    def kept(name: str, path: str, tensor: Tensor) -> Tensor | Kept:
        key, parts = keys.get(name), fused.get(name)
        parameter = parameters[key] if isinstance(key, int) else None
        if tensor.ndim == 0 or not isinstance(parameter, DTensor):
            # The number of steps, for example.
            return tensor
        if not isinstance(tensor, DTensor) or (parts and _split(tensor) != _split(parameter)):
            raise _unknown_split(name + path, f"{_split(tensor)}; the parameter is {_split(parameter)}")
        return Kept(tensor, parts) if parts else tensor

    def owner(name: str) -> Tensor | None:
        key = keys.get(name)
        return parameters[key] if isinstance(key, int) else None

    full = _unsplit("the optimizer's state", module, values, kept, owner)
    state = {key: full.pop(name) for name, key in keys.items()}
    return {"state": state, **full}


@torch.no_grad()
def load_unsplit_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the state of a plain module, as of `unsplit_state` or `state_dict()`, into the same module after it was split.

    Called by: every rank that holds a part, with the full state. Does not communicate.
    Raises:    LayoutError, before it writes, for arguments of other types, for names that only one of both has, for other shapes,
               and for modules of another version, whose state only `load_state_dict` of the plain module converts.
    """
    _check_module(module)
    held = module.state_dict(keep_vars=True)
    own = unfused(held, module)
    _check_names("the state", own, state)
    _check_versions(getattr(held, "_metadata", {}), getattr(state, "_metadata", {}))
    split = {name: tensor for name, tensor in own.items() if isinstance(tensor, Tensor | Kept)}
    for name, tensor in split.items():
        check_assigned(tensor, state[name], name)
    for name, tensor in split.items():
        assign(tensor, state[name])
    if extra := {name: state[name] for name in own if name not in split}:
        module.load_state_dict(extra, strict=False)


@torch.no_grad()
def load_unsplit_optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Load the state of a plain module's optimizer, as of `unsplit_optimizer_state` or `state_dict()`, into the optimizer of the
    same module after it was split.

    The optimizers must have been created from the parameters in the same order.

    Called by: every rank that holds a part, with the full state. Does not communicate.
    Raises:    LayoutError, before it writes, for arguments of other types, for parameters that the module does not have, for
               another number of parameters, and for tensors of a split parameter that do not have its full shape.
    """
    _check_module(module)
    _check_optimizer(optimizer)
    fused = fused_parts(module)
    names = {id(tensor): name for name, tensor in module.named_parameters(remove_duplicate=False)}
    parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    _check_parameters(parameters, names)
    _check_names("the optimizer's state", ("state", "param_groups"), state)
    sizes = [
        [len(group["params"]) for group in groups]
        for groups in (state["param_groups"], optimizer.param_groups)
    ]
    if sizes[0] != sizes[1]:
        raise LayoutError(
            "the optimizer's state is of other parameters",
            given=f"groups of {sizes[0]} parameters",
            expected=f"groups of {sizes[1]} parameters",
            hint="create both optimizers from the parameters in the same order",
        )

    def part(key: Any, path: str, value: Any) -> Any:
        parameter = parameters[key] if isinstance(key, int) else None
        if not isinstance(value, Tensor) or value.ndim == 0 or not isinstance(parameter, DTensor):
            return copy.deepcopy(value)
        name = names[id(parameter)]
        held: Tensor = torch.empty_like(parameter, dtype=value.dtype)
        whole_part = Kept(held, fused[name]) if name in fused else held
        check_assigned(whole_part, value, f"{name}{path} in the optimizer's state")
        assign(whole_part, value)
        return held

    held = {key: map_with_paths(partial(part, key), value) for key, value in state["state"].items()}
    optimizer.load_state_dict({**state, "state": held})


def _check_names(what: str, own: Collection[str], given: Any) -> None:
    if not isinstance(given, Mapping):
        raise LayoutError(
            f"{what} is not a dict",
            given=f"a {type(given).__name__}",
            expected="a full state dict, the same on every rank",
            hint="torch.load(path); on every rank, not only on one",
        )
    without, more = sorted(set(own) - set(given)), sorted(map(str, set(given) - set(own)))
    if without or more:
        lines = [
            f"{words} {listed(some, 3)}" for words, some in (("without", without), ("with", more)) if some
        ]
        raise LayoutError(
            f"{what} has other names",
            given="\n".join(lines),
            expected="the state of the same module, before it was split",
            hint="print(list(state))",
        )


def _check_versions(own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for name in own.keys() & given.keys():
        versions = [facts[name].get("version") for facts in (given, own)]
        if versions[0] != versions[1]:
            raise LayoutError(
                f"the state is of another version of {name or 'the module'}",
                given=f"version {versions[0]}",
                expected=f"version {versions[1]}",
                hint="plain.load_state_dict(state) converts it; then load_unsplit_state(module, plain.state_dict())",
            )


def _check_parameters(parameters: Sequence[Tensor], names: Mapping[int, str]) -> None:
    """Raise LayoutError for an optimizer's parameters without a name in the module. names: by id."""
    foreign = [tuple(tensor.shape) for tensor in parameters if id(tensor) not in names]
    if foreign:
        raise LayoutError(
            "the optimizer has parameters that the module does not have",
            given=f"{len(foreign)} of {len(parameters)}, the first of shape {foreign[0]}",
            expected="an optimizer of this module's parameters",
            hint="create the optimizer after tensor_parallel and fully_shard, which replace parameters",
        )


def _unknown_split(label: str, given: str) -> LayoutError:
    return LayoutError(
        f"nothing says how {label} in the optimizer's state is split",
        given=given,
        expected="state that is split as its parameter, as of AdamW or SGD with momentum",
        hint="save each rank's optimizer.state_dict(), or use an optimizer whose state has the parameter's shape",
    )


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise LayoutError(
            "the optimizer is not a torch.optim.Optimizer",
            given=f"a {type(optimizer).__name__}",
            expected="an optimizer of the module's parameters",
            hint="unsplit_optimizer_state(module, optimizer)",
        )


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
    owner: Callable[[str], Tensor | None] | None = None,
) -> dict[str, Any]:
    """Return copies of named values in which all tensors are full.

    kept: returns a tensor as it is gathered, from the value's name, the tensor's path within the value, and the tensor.
    owner: returns the parameter of a value, or None for a value of all. If given, numbers, text and tensors without axes must be
           equal on the ranks that hold parts of the parameter.
    """
    failure: Exception | None = None
    held: dict[str, Any] = {}
    tensors: dict[str, Tensor | Kept] = {}
    own: list[_Line] = []

    def note(name: str, path: str, leaf: Any) -> None:
        label = name + path
        if isinstance(leaf, Tensor):
            tensors[label] = found = kept(name, path, leaf)
            if isinstance(_tensor(found), DTensor):
                own.append(_Line.of(f"{label}: {_split(_tensor(found))}", _tensor(found)))
            elif owner is not None and leaf.ndim == 0:
                own.append(_Line.of(f"{label} = {leaf.item()}", owner(name)))
        elif owner is not None and isinstance(leaf, int | float | str | None):
            own.append(_Line.of(f"{label} = {leaf}", owner(name)))
        elif any(isinstance(inner, DTensor) for inner in tensors_of(leaf)):
            raise _unknown_split(label, f"a DTensor in a {type(leaf).__name__}")

    def full(name: str, path: str, leaf: Any) -> Any:
        return gathered[name + path] if isinstance(leaf, Tensor) else copy.deepcopy(leaf)

    with as_mesh_errors():
        try:
            held = values()
            for name, value in held.items():
                map_with_paths(partial(note, name), value)
        except Exception as error:
            failure = error
        _compare(what, module, sorted(own), failure)
        # The order of labels is the same on all ranks. That of an optimizer's parameters, or of keys, may not be.
        gathered = {label: whole(tensors[label]).clone() for label in sorted(tensors)}
    return {name: map_with_paths(partial(full, name), value) for name, value in held.items()}


def _tensor(tensor: Tensor | Kept) -> Tensor:
    return tensor.tensor if isinstance(tensor, Kept) else tensor


class _Line(NamedTuple):
    """What must be equal on all ranks of some groups. groups: their names; None for all."""

    text: str
    groups: frozenset[str] | None

    @staticmethod
    def of(text: str, tensor: Tensor | None) -> _Line:
        return _Line(text, None if tensor is None else frozenset(split_groups([tensor])))


def _compare(what: str, module: nn.Module, own: list[_Line], failure: Exception | None) -> None:
    """Raise an error on every rank if `own` differs between the ranks that hold parts, or if one of them has a failure.

    Sends one message of 24 bytes along each dim along which the module is split. Along each, only what is split along it counts:
    ranks may hold other experts beside their parts of shared weights.
    """
    groups = split_groups([*module.parameters(), *module.buffers()])
    lines_of = {
        name: [text for text, some in own if some is None or name in some] if failure is None else []
        for name in groups
    }
    differ = int(failure is not None)
    for name, along in groups.items():
        digest = int.from_bytes(hashlib.sha256("\n".join(lines_of[name]).encode()).digest()[:7], "big")
        # The largest digest, the smallest one, negated, and whether ranks of an earlier dim differ.
        sent = torch.tensor([digest, -digest, differ]).to(along.device)
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=along.group)
        largest, smallest, differ = sent.tolist()
        differ = int(differ or largest != -smallest)
    if not differ:
        return
    failures = {} if failure is None else {dist.get_rank(): f"{type(failure).__name__}: {failure}"}
    found: list[Any] = []
    for name, along in groups.items():
        parts: list[Any] = [None] * dist.get_world_size(along.group)
        dist.all_gather_object(parts, (dist.get_rank(), failures, found, lines_of[name]), group=along.group)
        failures = {rank: text for _, failed, _, _ in parts for rank, text in failed.items()}
        found = next((each for _, _, each, _ in parts if each), [])
        if not (found or failures):
            found = _difference({rank: tuple(lines) for rank, _, _, lines in parts})
    if failure is not None:
        raise failure
    if failures:
        failed = sorted(failures)
        raise MeshMismatchError(
            f"{ranks_text(failed)} could not gather {what}",
            given=failures[failed[0]],
            expected="the same call with the same state on every rank that holds a part",
            hint=f"see the error of {ranks_text(failed[:1])}",
            mismatched_ranks=tuple(failed),
        )
    blames, given, odd = found
    raise MeshMismatchError(
        f"{what} differs between ranks: {blames}",
        given=given,
        expected="the same split tensors on every rank that holds a part",
        hint="take the same steps with the same module and optimizer on every rank",
        mismatched_ranks=tuple(odd),
    )


def _difference(lines_of: Mapping[int, tuple[str, ...]]) -> list[Any]:
    """Return the text that names ranks with other lines, how their lines differ, and these ranks; [] if none has."""
    usual, odd = majority(lines_of)
    others = set(lines_of[usual[0] if usual else odd[0]])
    differences = []
    for ranks in alike(odd, lines_of):
        theirs = set(lines_of[ranks[0]])
        for words, some in (("without", others - theirs), ("with", theirs - others)):
            if some:
                differences.append(f"{ranks_text(ranks)} {words} {listed(sorted(some), 3)}")
    return [blamed(odd, not usual, len(lines_of)), "\n".join(differences), odd] if odd else []
