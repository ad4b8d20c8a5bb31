"""What do steps change, and how is it put back? Weights, buffers, and the state of optimizer, modules and scheduler.

Tensors keep their names: `model.NAME`, `optimizer.NAME.KEY`. Everything else is plain data, which `encode` turns into
uint8 tensors: `plain.parameter.NAME` for what belongs to a parameter, `plain.module.NAME` for a module's extra state,
`plain.training` for the rest. A state that does not exist yet is not saved, and does not exist after a load.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.lr_scheduler import LRScheduler

from meshcomm.comm.codec import decode, encode
from meshcomm.errors import ObjectError, TrainingError
from meshcomm.parallel.tensor.parameters import fused_sizes, local, split_dims

# The dtype and the shape of each tensor of a checkpoint, by its name.
Kinds: TypeAlias = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

OF_PARAMETER: Final = "plain.parameter."
OF_MODULE: Final = "plain.module."
OF_TRAINING: Final = "plain.training"
EXTRA: Final = "_extra_state"

# Constants of a program: a run that resumes has them from its code.
_CODE: Final = (
    *(type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial),
    *(Enum, torch.dtype, torch.device, torch.layout, torch.memory_format),
)
# Attributes of an optimizer that torch makes.
_TORCHS_OWN: Final = frozenset(
    {
        *("defaults", "param_groups", "state", "step", "found_inf", "grad_scale", "_opt_called"),
        *("_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured"),
    }
)
_NUMBERS: Final = (int, float, bool, complex, str, bytes, type(None))
_HOST: Final = torch.device("cpu")


@final
class State:
    """All that a step changes on one rank.

    modules, optimizer: as they are before the first step: an entry of a parameter group, or an attribute of the
        optimizer, is state where it differs from now.
    named: gives this rank's parameters by their global names.
    tied: the one of them that embedding and head share.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        named: Callable[[], list[tuple[str, nn.Parameter]]],
        tied: str = "",
    ) -> None:
        self._modules, self._optimizer, self._named, self._tied = modules, optimizer, named, tied
        self._scheduler: LRScheduler | None = None
        # Whether each step is given its learning rate, so that those of the groups are no state.
        self.given_lr = False
        self._note()

    def follow(self, scheduler: LRScheduler) -> None:
        """The scheduler, before its first step, whose state is saved from now on."""
        self._scheduler = scheduler
        self._note()

    def _note(self) -> None:
        self._groups = [_encoded(_entries(group)) for group in self._optimizer.param_groups]
        self._attributes = _encoded(self._own_attributes())
        self._objects = self._digests()
        self._schedule = {} if self._scheduler is None else _encoded(self._scheduler.state_dict())

    # -- to save ----------------------------------------------------------------------------------

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Everything, by name. Parameters, buffers and tensors of the optimizer share their memory; nothing changes.

        Raises TrainingError that names what cannot be saved.
        """
        found: dict[str, Tensor] = {}
        groups = self._changed_groups()
        sizes = {name: each for module in self._modules for name, each in fused_sizes(module).items()}
        names: dict[int, list[str]] = {}
        for module in self._modules:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), []).append(name)
        for name, parameter in self._named():
            found[f"model.{name}"] = parameter.detach()
            facts: dict[str, Any] = {}
            if name in sizes:
                facts["parts"] = list(sizes[name])
            # Of a weight that embedding and head share, a stage may have one name.
            if len(names[id(parameter)]) > 1 and name != self._tied:
                facts["also"] = names[id(parameter)][1:]
            if groups.get(id(parameter)):
                facts["group"] = groups[id(parameter)]
            rest: dict[Any, Any] = {}
            held = self._optimizer.state.get(parameter, {})
            if not isinstance(held, Mapping):
                raise _refused(f"the optimizer's state of {name}", held)
            for key, value in held.items():
                what = f"optimizer.{name}.{key}"
                if isinstance(key, str) and _is_tensor(what, value, parameter):
                    found[what] = value
                else:
                    rest[key] = value
            if rest:
                facts["state"] = rest
            if facts:
                found[OF_PARAMETER + name] = _plain(f"the optimizer's state of {name}", facts)
        found |= self._buffers()
        for name, part in self._with_extra_state():
            value = part.get_extra_state()
            if type(value) is Tensor:
                found[_extra(name)] = value.detach()
            else:
                found[OF_MODULE + name] = _plain(f"the extra state of {name or 'the model'}", value)
        found[OF_TRAINING] = _plain("the optimizer's state", self._of_training())
        return found

    def _buffers(self) -> dict[str, Tensor]:
        """Those that are in the modules' state dicts, such as the running means of batch norms."""
        return {
            f"model.{name}": buffer
            for module in self._modules
            for name, buffer in _persistent(module)
        }  # fmt: skip

    def names(self) -> set[str]:
        """Of all tensors of a checkpoint that are read into the modules."""
        extra = (name for part, _ in self._with_extra_state() for name in (_extra(part), OF_MODULE + part))
        return {*(f"model.{name}" for name, _ in self._named()), *self._buffers(), *extra}

    def _with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        for module in self._modules:
            for name, part in module.named_modules():
                if type(part).get_extra_state is not nn.Module.get_extra_state:
                    yield name, part

    def _changed_groups(self) -> dict[int, dict[str, Any]]:
        """By the id of each parameter: the entries of its group that are others than at first, and what they were."""
        found: dict[int, dict[str, Any]] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            made = self._groups[number] if number < len(self._groups) else {}
            now = _encoded(_entries(group), f"param_groups[{number}]")
            changed = {key: group[key] for key in now if not _same(now[key], made.get(key))}
            if self.given_lr:
                changed.pop("lr", None)
            if not changed:
                continue
            before = {key: _decoded(made[key]) for key in changed if made.get(key) is not None}
            found |= {id(each): {"now": changed, "made": before} for each in group["params"]}
        return found

    def _of_training(self) -> dict[str, Any]:
        optimizer = self._optimizer
        if more := sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"})):
            raise _refused(f'state_dict()["{more[0]}"] of {type(optimizer).__name__}', None)
        digests = self._digests()
        for name, value in vars(optimizer).items():
            inner = isinstance(value, torch.optim.Optimizer | torch.Generator) and value is not optimizer
            if inner or digests.get(name) != self._objects.get(name):
                raise _refused(f"the attribute {name} of {type(optimizer).__name__}", value)
        found: dict[str, Any] = {"optimizer": type(optimizer).__name__}
        known = {id(parameter) for _, parameter in self._named()}
        shared = {
            key: value
            for key, value in optimizer.state.items()
            if not (isinstance(key, Tensor) and id(key) in known)
        }
        if shared:
            found["state"] = shared
        attributes = self._own_attributes()
        now = _encoded(attributes)
        changed = {key: attributes[key] for key in now if not _same(now[key], self._attributes.get(key))}
        if changed:
            found["attributes"] = changed
        if self._scheduler is not None:
            found["scheduler"] = self._of_scheduler(self._scheduler)
        return found

    def _own_attributes(self) -> dict[str, Any]:
        """The attributes of the optimizer that are plain data and that torch has not made."""
        return {
            name: value
            for name, value in vars(self._optimizer).items()
            if name not in _TORCHS_OWN and _is_plain(value)
        }

    def _digests(self) -> dict[str, str]:
        """Of its attributes that are not plain data, such as a deque: another digest, and it has changed."""
        return {
            name: found
            for name, value in vars(self._optimizer).items()
            if name not in _TORCHS_OWN and not _is_plain(value) and (found := _digest(value))
        }

    def _of_scheduler(self, scheduler: LRScheduler) -> dict[str, Any]:
        state = scheduler.state_dict()
        _encoded(state, f"{type(scheduler).__name__}.state_dict()")
        made = {key: _decoded(value) for key, value in self._schedule.items() if value is not None}
        now = {key: value for key, value in state.items() if not isinstance(value, _CODE)}
        return {"kind": type(scheduler).__name__, "made": _summary(made), "now": _difference(made, now)}

    # -- to put back ------------------------------------------------------------------------------

    @torch.no_grad()
    def put_back(self, kinds: Kinds, fill: Callable[[dict[str, Tensor]], None], steps: int) -> None:
        """Make this rank's state that of a checkpoint.

        kinds: of everything in the checkpoint. What it does not have of the optimizer's state is not there afterwards.
        fill:  writes the checkpoint's values into tensors, by their names.
        steps: how many were made when it was saved.
        Raises TrainingError that names what does not fit.
        """
        named = self._named()
        room: dict[str, Tensor] = {f"model.{name}": parameter.detach() for name, parameter in named}
        room |= self._buffers()
        extra = list(self._with_extra_state())
        texts = [OF_PARAMETER + name for name, _ in named] + [OF_MODULE + name for name, _ in extra]
        for name in (*(text for text in texts if text in kinds), OF_TRAINING):
            room[name] = torch.empty(kinds[name][1] if name in kinds else (0,), dtype=torch.uint8)
        for name, _ in extra:
            if _extra(name) in kinds:
                dtype, shape = kinds[_extra(name)]
                room[_extra(name)] = torch.empty(shape, dtype=dtype)
            elif OF_MODULE + name not in kinds:
                raise _unfit(
                    f"the extra state of {name or 'the model'}",
                    "none in the checkpoint",
                    "what get_extra_state gave",
                )
        own = self._room_for_optimizer(named, kinds)
        room |= {f"optimizer.{name}.{key}": each for name, held in own.items() for key, each in held.items()}
        fill(room)

        for name, part in extra:
            text = room.get(OF_MODULE + name)
            part.set_extra_state(room[_extra(name)] if text is None else decode(text, _device(part)))
        training = decode(room[OF_TRAINING], _HOST)
        facts = {
            name: decode(room[OF_PARAMETER + name], parameter.device) if OF_PARAMETER + name in room else {}
            for name, parameter in named
        }
        self._check_optimizer(training, bool(own) or any("state" in each for each in facts.values()))
        self._put_state(named, own, facts, training)
        self._put_groups(named, facts, training.get("scheduler"), steps)

    def _room_for_optimizer(
        self, named: list[tuple[str, nn.Parameter]], kinds: Kinds
    ) -> dict[str, dict[str, Tensor]]:
        parameters = dict(named)
        hosted = {
            id(each): not (group.get("capturable") or group.get("fused"))
            for group in self._optimizer.param_groups
            for each in group["params"]
        }
        own: dict[str, dict[str, Tensor]] = {}
        for full, kind in kinds.items():
            if not full.startswith("optimizer."):
                continue
            parts = full.split(".")[1:]
            # No parameter's name is the beginning of another's.
            names = (".".join(parts[:end]) for end in range(1, len(parts)))
            name = next((each for each in names if each in parameters), None)
            if name is not None:
                key = full.removeprefix(f"optimizer.{name}.")
                host = hosted.get(id(parameters[name]), True)
                own.setdefault(name, {})[key] = _room(parameters[name], key, kind, host)
        return own

    def _check_optimizer(self, training: Mapping[str, Any], there: bool) -> None:
        now = type(self._optimizer).__name__
        if there and training["optimizer"] != now:
            raise _unfit("the optimizer's state", f"that of {training['optimizer']}", f"that of {now}")

    def _put_state(
        self,
        named: list[tuple[str, nn.Parameter]],
        own: Mapping[str, Mapping[str, Tensor]],
        facts: Mapping[str, Mapping[str, Any]],
        training: Mapping[str, Any],
    ) -> None:
        optimizer = self._optimizer
        optimizer.state.clear()
        for name, parameter in named:
            held = {**own.get(name, {}), **facts[name].get("state", {})}
            if held:
                optimizer.state[parameter] = held
        optimizer.state.update(training.get("state", {}))
        vars(optimizer).update({key: _decoded(each) for key, each in self._attributes.items()})
        vars(optimizer).update(training.get("attributes", {}))

    def _put_groups(
        self,
        named: list[tuple[str, nn.Parameter]],
        facts: Mapping[str, Mapping[str, Any]],
        schedule: Mapping[str, Any] | None,
        steps: int,
    ) -> None:
        """Put back the entries of the groups, and the scheduler's state.

        A scheduler is stepped as often as there were steps. What it has become is then replaced by what was saved,
        unless its settings, or those of a group, are others than they were: then the new ones count from the first step.
        """
        scheduler, groups = self._scheduler, self._optimizer.param_groups
        for group, made in zip(groups, self._groups, strict=True):
            group.update({key: _decoded(value) for key, value in made.items() if value is not None})
        scheduled: list[set[str]] = [set() for _ in groups]
        if scheduler is not None:
            made = {key: _decoded(value) for key, value in self._schedule.items() if value is not None}
            scheduler.load_state_dict({**scheduler.state_dict(), **made})
            with warnings.catch_warnings():
                # torch asks for a step of the optimizer before each of these.
                warnings.simplefilter("ignore", UserWarning)
                for _ in range(steps):
                    scheduler.step()
            for place, (group, before) in enumerate(zip(groups, self._groups, strict=True)):
                now = _encoded(_entries(group))
                scheduled[place] = {key for key in now if not _same(now[key], before.get(key))}
        names = {id(parameter): name for name, parameter in named}
        saved = [self._saved_entries(group, names, facts) for group in groups]
        unchanged = False
        if scheduler is not None and schedule is not None:
            unchanged = [schedule["kind"], schedule["made"]] == [type(scheduler).__name__, _summary(made)]
        for before, entries in zip(self._groups, saved, strict=True):
            for key, was in entries.get("made", {}).items():
                unchanged &= _same(before.get(key), encode(was))
        for group, entries, moved in zip(groups, saved, scheduled, strict=True):
            now = entries.get("now", {})
            group.update({key: value for key, value in now.items() if unchanged or key not in moved})
        if unchanged and scheduler is not None and schedule is not None:
            state = _overlaid(scheduler.state_dict(), schedule["now"])
            scheduler.load_state_dict({**state, "_last_lr": [group["lr"] for group in groups]})

    def _saved_entries(
        self, group: Mapping[str, Any], names: Mapping[int, str], facts: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Any]:
        """The saved entries of the group that its parameters are in now. They were in one, or in groups alike."""
        found: dict[str, Any] | None = None
        first = ""
        for parameter in group["params"]:
            name = names[id(parameter)]
            entries = facts[name].get("group", {})
            if found is None:
                found, first = entries, name
            elif not _same(encode(found), encode(entries)):
                raise _unfit(
                    f"the parameter group of {first} and {name}",
                    f"{found.get('now', {})} for {first}, {entries.get('now', {})} for {name}",
                    "one value of each entry: the two are in one group on this mesh",
                )
        return found or {}


def _entries(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _encoded(values: Mapping[str, Any], where: str = "") -> dict[str, Tensor | None]:
    """Each value as bytes. Code is left out; what cannot be encoded is None, or refused where `where` names it."""
    found: dict[str, Tensor | None] = {}
    for key, value in values.items():
        if isinstance(value, _CODE):
            continue
        try:
            with torch.no_grad():
                found[key] = encode(value)
        except ObjectError as error:
            if where:
                raise _refused(f"{where}, {key}", value) from error
            found[key] = None
    return found


def _decoded(text: Tensor | None) -> Any:
    assert text is not None
    return decode(text, _HOST)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def _is_plain(value: Any) -> bool:
    """Numbers and text, and what holds nothing else: no tensors, which an optimizer keeps in its state."""
    if type(value) is dict:
        return all(map(_is_plain, (*value, *value.values())))
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    return type(value) in _NUMBERS


@final
class _Outline(pickle.Pickler):
    """Pickles an object: tensors by their values, without what is saved elsewhere, or is code."""

    def persistent_id(self, value: Any) -> str | None:
        """What stands for a tensor, say."""
        if type(value) is Tensor:
            return hashlib.sha256(encode(value.detach()).numpy().tobytes()).hexdigest()
        elsewhere = (Tensor, nn.Module, torch.optim.Optimizer, LRScheduler, *_CODE)
        return str(type(value)) if isinstance(value, elsewhere) else None


def _digest(value: Any) -> str:
    """Of an object's values; "" for one that cannot be pickled, such as a mesh."""
    text = io.BytesIO()
    try:
        _Outline(text).dump(value)
    except Exception:  # what it holds may raise anything
        return ""
    return hashlib.sha256(text.getvalue()).hexdigest()


def _is_tensor(what: str, value: Any, parameter: Tensor) -> bool:
    """Whether the value is written as a tensor of this name, in parts where it is split; else it is plain data.

    Raises TrainingError for a tensor that is not the same, or not a known part, on every rank.
    """
    if not isinstance(value, Tensor):
        return False
    if type(value) not in (Tensor, DTensor, nn.Parameter) or value.layout != torch.strided:
        raise _refused(what, value)
    if isinstance(value, DTensor):
        if any(each.is_partial() for each in value.placements):
            raise _refused(what, value, "a DTensor with a sum that was not made yet", "value.full_tensor()")
        return True
    if value.ndim == 0 or not split_dims(parameter):
        return True
    if value.shape == local(parameter.detach()).shape:
        raise _refused(
            what, value, "a plain tensor of the shape of this rank's part", "torch.zeros_like(parameter)"
        )
    return False


def _room(parameter: Tensor, key: str, kind: tuple[torch.dtype, tuple[int, ...]], hosted: bool) -> Tensor:
    """Memory for one tensor of the optimizer's state. Where a count of steps is kept, torch's optimizers decide."""
    dtype, shape = kind
    count = key == "step" and not shape
    if tuple(shape) == tuple(parameter.shape) and not count:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False).detach()
    made = torch.empty(shape, dtype=dtype, device=_HOST if count and hosted else parameter.device)
    if isinstance(parameter, DTensor) and shape:
        mesh = parameter.device_mesh
        made = DTensor.from_local(made, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return made


def _persistent(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    held = set(module.state_dict())
    return ((name, buffer) for name, buffer in module.named_buffers() if name in held)


def _extra(name: str) -> str:
    return ".".join(("model", *([name] if name else []), EXTRA))


def _device(part: nn.Module) -> torch.device:
    return next((each.device for each in (*part.parameters(), *part.buffers())), _HOST)


def _plain(what: str, value: Any) -> Tensor:
    try:
        return encode(value)
    except ObjectError as error:
        raise TrainingError(
            f"{what} cannot be saved",
            given=error.what,
            expected=error.expected,
            hint="a split tensor under a key of its own in the optimizer's state; numbers in place of an object",
        ) from error


def _refused(what: str, value: Any, given: str = "", hint: str = "") -> TrainingError:
    return TrainingError(
        f"{what} cannot be saved",
        given=given or f"{type(value).__module__}.{type(value).__qualname__}",
        expected="tensors and plain data, in the optimizer's state and its param_groups",
        hint=hint or "keep the numbers that it is made of instead",
    )


def _unfit(what: str, given: str, expected: str) -> TrainingError:
    return TrainingError(
        f"the checkpoint does not fit: {what}",
        given=given,
        expected=expected,
        hint="resume with the model and the optimizer of the checkpoint",
    )


# -- schedulers: nested dicts and lists of plain data -----------------------------------------------

# Follows from the groups, of which ranks may have different numbers.
_DERIVED: Final = "_last_lr"


def _difference(made: Any, now: Any) -> Any:
    """The entries of `now` that are others than in `made`; lists of dicts, as of nested schedulers, by place."""
    found: dict[Any, Any] = {}
    for key, value in now.items():
        before = made.get(key)
        if key == _DERIVED:
            continue
        if isinstance(value, dict) and isinstance(before, dict):
            inner = _difference(before, value)
        elif _of_dicts(value) and _of_dicts(before) and len(value) == len(before):
            inner = _difference(dict(enumerate(before)), dict(enumerate(value)))
        else:
            if not _same(encode(value), encode(before)):
                found[key] = value
            continue
        if inner:
            found[key] = inner
    return found


def _overlaid(state: Any, changed: Mapping[Any, Any]) -> Any:
    """`state` with the entries that `_difference` has found."""
    pairs = dict(enumerate(state)) if isinstance(state, list) else dict(state)
    for key, value in changed.items():
        nested = isinstance(value, dict) and (isinstance(pairs.get(key), dict) or _of_dicts(pairs.get(key)))
        pairs[key] = _overlaid(pairs[key], value) if nested else value
    return list(pairs.values()) if isinstance(state, list) else pairs


def _of_dicts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


def _summary(value: Any) -> Any:
    """Settings in which a list counts as the set of its values: groups of parameters differ from rank to rank."""
    if isinstance(value, dict):
        return {str(key): _summary(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return sorted({repr(_summary(each)) for each in value})
    return value
