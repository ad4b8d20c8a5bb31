"""Saves and restores everything that a step changes: weights, buffers, and the state of the optimizer, the modules and the
scheduler.

Tensors are named `model.NAME` and `optimizer.NAME.KEY`. All other state is plain data, which `encode` turns into uint8
tensors. Those tensors are named `plain.parameter.NAME` for a parameter's data, `plain.module.NAME` for a module's extra state,
and `plain.training` for the rest. The moving averages of weights are named `ema.NAME`, and `ema` is the number of averaged steps. Buffers of a loss that is a module are named `loss.NAME`. State that does not exist yet is not saved, and does not exist after a load.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
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
from meshcomm.parallel.average import Average
from meshcomm.parallel.loss import LossScale
from meshcomm.parallel.narrow_state import is_moment
from meshcomm.parallel.sparse import members_of, optimizers_in
from meshcomm.parallel.tensor.parameters import local, split_dims
from meshcomm.transfer.fused import Kept, Parts, fused_parts

# The dtype and the shape of each tensor in a checkpoint, by name.
Kinds: TypeAlias = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

OF_PARAMETER: Final = "plain.parameter."
OF_MODULE: Final = "plain.module."
OF_TRAINING: Final = "plain.training"
EXTRA: Final = "_extra_state"

# Types of program constants, which a resumed run gets from its code.
_CODE: Final = (
    *(type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial),
    *(Enum, torch.dtype, torch.device, torch.layout, torch.memory_format),
)
# Attributes of an optimizer that torch creates.
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
    """All state that a step changes on one rank.

    modules, optimizer: passed before the first step. A parameter group's entry, or an attribute of the optimizer, is state if
        its value has changed since this object was created.
    named: this rank's saved parameters with their global names.
    tied: the name of the parameter that the embedding and the head share.
    loss: the loss, if it is a module and this rank calls it.
    average: the moving average of the weights, if there is one.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        named: Sequence[tuple[str, nn.Parameter]],
        tied: str = "",
        loss: nn.Module | None = None,
        average: Average | None = None,
    ) -> None:
        self._modules, self._optimizer, self._named, self._loss = modules, optimizer, named, loss
        self._average = average
        self._fused = {name: parts for module in modules for name, parts in fused_parts(module).items()}
        names: dict[Tensor, list[str]] = {}
        for module in modules:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                names.setdefault(parameter, []).append(name)
        # In a stage, a weight that the embedding and the head share may have only one of its names.
        self._also = {name: names[parameter][1:] for name, parameter in named if name != tied}
        parts = optimizers_in(optimizer)[:-1]
        # An optimizer that consists of others, and shares their groups, has their state.
        self._parts = [
            part
            for part in parts
            if type(part).__module__.startswith(("torch.optim.", "meshcomm."))
            and all(
                any(group is param_group for param_group in optimizer.param_groups)
                for group in part.param_groups
            )
        ]
        self._holders = {
            id(parameter): part
            for part in self._parts
            for group in part.param_groups
            for parameter in group["params"]
        }
        self.scheduler: LRScheduler | None = None
        # The loss scale, which changes with each step in float16.
        self.loss_scale: LossScale | None = None
        # Whether each step is given its learning rate. If so, the groups' rates are not state.
        self.given_lr = False
        self._note()

    def follow(self, scheduler: LRScheduler) -> None:
        """Save the state of this scheduler from now on. Call this before the scheduler's first step."""
        self.scheduler = scheduler
        self._note()

    def _note(self) -> None:
        self._groups = [_texts(_entries(group)) for group in self._optimizer.param_groups]
        self._attributes = {name: _fingerprint(value) for name, value in self._own_attributes()}
        self._schedule = {} if self.scheduler is None else _texts(_leaves(self.scheduler.state_dict()))

    # -- to save ----------------------------------------------------------------------------------

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor | Kept]:
        """Return all state, by name. The tensors share memory with the parameters, the buffers and the optimizer's state.
        Nothing is changed.

        Raises TrainingError that names the state that cannot be saved.
        """
        groups = self._changed_groups()
        tensors = self.weights()
        for name, parameter in self._named:
            held, rest = self._of_parameter(name, parameter)
            for full, tensor in held.items():
                tensors[full] = self._before(name, tensor) if tensor.shape == parameter.shape else tensor
            facts: dict[str, Any] = {"also": self._also.get(name), "state": rest}
            facts["group"] = groups.get(id(parameter))
            if (holder := self._holder(parameter)) is not self._optimizer:
                facts["optimizer"] = type(holder).__name__
            if facts := {key: fact for key, fact in facts.items() if fact}:
                tensors[OF_PARAMETER + name] = _plain(f"the optimizer's state of {name}", facts)
        tensors |= self._of_loss() | self._averages()
        for name, part in self._with_extra_state():
            value = part.get_extra_state()
            if type(value) is Tensor:
                tensors[_extra(name)] = value.detach()
            else:
                tensors[OF_MODULE + name] = _plain(f"the extra state of {name or 'the model'}", value)
        tensors[OF_TRAINING] = _plain("the optimizer's state", self._of_training())
        return tensors

    def _of_parameter(self, name: str, parameter: nn.Parameter) -> tuple[dict[str, Tensor], dict[Any, Any]]:
        """Return the optimizer's state for a parameter: tensors by name, and all other values."""
        holder, state = self._holder(parameter), self._optimizer.state.get(parameter, {})
        if holder is not self._optimizer:
            own_state, state = state, holder.state.get(parameter, {})
            if own_state and own_state is not state:
                raise _refused(f"the state of {name} in two optimizers", _type(holder), "use one of them")
        if not isinstance(state, Mapping):
            raise _refused(f"the optimizer's state of {name}", _type(state))
        tensors: dict[str, Tensor] = {}
        rest: dict[Any, Any] = {}
        for key, value in state.items():
            full = f"optimizer.{name}.{key}"
            if isinstance(key, str) and _is_tensor(full, value, parameter):
                tensors[full] = value
            else:
                rest[key] = value
        return tensors, rest

    def weights(self, without: Tensor | None = None) -> dict[str, Tensor | Kept]:
        """Return the parameters but for `without`, and the buffers in the modules' state dicts, such as the running means of
        batch norms.
        """
        tensors = {
            f"model.{name}": self._before(name, parameter.detach())
            for name, parameter in self._named
            if parameter is not without
        }
        for module in self._modules:
            tensors |= _saved_buffers("model", module)
        return tensors

    def _before(self, name: str, tensor: Tensor) -> Tensor | Kept:
        """Return a tensor of a parameter in the layout of a checkpoint: the layout that the weight had before it was split."""
        return Kept(tensor, self._fused[name]) if name in self._fused else tensor

    def _averages(self) -> dict[str, Tensor | Kept]:
        if self._average is None:
            return {}
        self._average.settle()
        values = {f"ema.{name}": self._before(name, value) for name, value in self._average.values.items()}
        return {"ema": self._average.steps, **values}

    def _of_loss(self) -> dict[str, Tensor]:
        return {} if self._loss is None else _saved_buffers("loss", self._loss)

    def of_forward(self) -> dict[str, Any]:
        """Return copies of the state that a forward pass changes: buffers, with their versions, and extra state."""
        buffers: dict[str, Any] = {
            name: (buffer, buffer._version, buffer.clone()) for name, buffer in self._all_buffers()
        }
        return buffers | {
            _extra(name): deepcopy(part.get_extra_state()) for name, part in self._with_extra_state()
        }

    @torch.no_grad()
    def put_back_forward(self, before: Mapping[str, Any], spoilt: Tensor | None = None) -> None:
        """Restore buffers and extra state from the result of `of_forward`.

        spoilt: if given, they are restored only if this scalar is nonzero. Waits for its value only if there is extra state.
        """
        for name, buffer in self._all_buffers():
            held, version, value = before[name]
            # A buffer without changes, such as a table, may be a view that cannot be written.
            if buffer is not held or buffer._version != version or _differs(buffer, value):
                buffer.copy_(value if spoilt is None else torch.where(spoilt != 0, value, buffer))
        extra = list(self._with_extra_state())
        if extra and (spoilt is None or spoilt.item()):
            for name, part in extra:
                part.set_extra_state(before[_extra(name)])

    def _all_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for module in self._modules:
            for name, buffer in module.named_buffers():
                yield f"model.{name}", buffer
        for name, buffer in () if self._loss is None else self._loss.named_buffers():
            yield f"loss.{name}", buffer

    def names(self) -> set[str]:
        """Return the names of a checkpoint's tensors that are loaded into the modules."""
        extra = (name for part, _ in self._with_extra_state() for name in (_extra(part), OF_MODULE + part))
        return {*self.weights(), *extra}

    def _with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        for module in self._modules:
            for name, part in module.named_modules():
                if type(part).get_extra_state is not nn.Module.get_extra_state:
                    yield name, part

    def _changed_groups(self) -> dict[int, dict[str, Any]]:
        """Return, for each parameter's id, the entries of its group that have changed since the start, with their current and
        old values.
        """
        groups_of: dict[int, dict[str, Any]] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            as_made = self._groups[number] if number < len(self._groups) else {}
            changed = _changed(_entries(group), as_made, f"param_groups[{number}]")
            if self.given_lr:
                changed.pop("lr", None)
            if changed:
                before = _values({key: as_made.get(key) for key in changed})
                groups_of |= {
                    id(parameter): {"now": changed, "made": before} for parameter in group["params"]
                }
        return groups_of

    def _holder(self, parameter: Tensor) -> torch.optim.Optimizer:
        """Return the optimizer that has the state of a parameter."""
        return self._holders.get(id(parameter), self._optimizer)

    def _of_training(self) -> dict[str, Any]:
        optimizer, kind = self._optimizer, type(self._optimizer).__name__
        if more := sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"})):
            raise _refused(
                f'state_dict()["{more[0]}"] of {kind}', "an entry other than state and param_groups"
            )
        changed: dict[str, Any] = {}
        for name, value in self._own_attributes():
            if isinstance(value, torch.optim.Optimizer):
                raise _refused(
                    f"the attribute {name} of {kind}",
                    f"{_type(value)}, whose groups {kind} does not share",
                    f"self.param_groups = self.{name}.param_groups, or the groups of all of its optimizers of torch",
                )
            if isinstance(value, torch.Generator) or _fingerprint(value) != self._attributes.get(name, ""):
                if not _is_plain(value):
                    raise _refused(f"the attribute {name} of {kind}", _type(value))
                changed[name] = value
        parameter_ids = {id(parameter) for _, parameter in self._named}
        facts: dict[str, Any] = {
            "state": {
                key: value
                for key, value in optimizer.state.items()
                if not (isinstance(key, Tensor) and id(key) in parameter_ids)
            },
            "attributes": changed,
        }
        if self.loss_scale is not None:
            facts["loss_scale"] = [self.loss_scale.value.item(), self.loss_scale.steps.item()]
        if self.scheduler is not None:
            facts["scheduler"] = self._of_scheduler(self.scheduler)
        return {"optimizer": kind, **{key: value for key, value in facts.items() if value}}

    def _own_attributes(self) -> Iterator[tuple[str, Any]]:
        """Yield the attributes of the optimizer that torch did not create."""
        for name, value in vars(self._optimizer).items():
            parts = members_of(value) or [value]
            if all(any(attribute is part for part in (*self._parts, self._optimizer)) for attribute in parts):
                continue
            if name not in _TORCHS_OWN:
                yield name, value

    def _of_scheduler(self, scheduler: LRScheduler) -> dict[str, Any]:
        kind = type(scheduler).__name__
        changed = _changed(_leaves(scheduler.state_dict()), self._schedule, f"{kind}.state_dict()")
        return {"kind": kind, "made": _summary(_values(self._schedule)), "now": list(changed.items())}

    # -- to put back ------------------------------------------------------------------------------

    @torch.no_grad()
    def put_back(self, kinds: Kinds, fill: Callable[[dict[str, Tensor | Kept]], None], steps: int) -> None:
        """Load the state of a checkpoint.

        kinds: the dtype and shape of each tensor in the checkpoint. Optimizer state that is not in the checkpoint is removed.
        fill:  writes the checkpoint's values into tensors, by name.
        steps: the number of steps after which the checkpoint was saved.
        Raises TrainingError that names the mismatch.
        """
        named, extra = self._named, list(self._with_extra_state())
        room: dict[str, Any] = self.weights()
        # A run may continue with another loss.
        room |= {name: tensor for name, tensor in self._of_loss().items() if name in kinds}
        room |= self._averages() if "ema" in kinds else {}
        texts = [OF_PARAMETER + name for name, _ in named] + [OF_MODULE + name for name, _ in extra]
        for name in (*(text for text in texts if text in kinds), OF_TRAINING):
            room[name] = torch.empty(kinds[name][1] if name in kinds else (0,), dtype=torch.uint8)
        for name, _ in extra:
            if _extra(name) in kinds:
                dtype, shape = kinds[_extra(name)]
                room[_extra(name)] = torch.empty(shape, dtype=dtype)
        held_of = self._room_for_optimizer(kinds)
        parameters = dict(named)
        for name, held in held_of.items():
            for key, each in held.items():
                fits = each.shape == parameters[name].shape
                room[f"optimizer.{name}.{key}"] = self._before(name, each) if fits else each
        fill(room)

        if self._average is not None and "ema" not in kinds:
            self._average.begin()
        # Ranks fill in together, so what only some of them would raise comes afterwards.
        for name, _ in extra:
            if room.keys().isdisjoint((_extra(name), OF_MODULE + name)):
                what = f"the extra state of {name or 'the model'}"
                raise unfit(what, "none in the checkpoint", "the value of get_extra_state")
        for name, part in extra:
            text = room.get(OF_MODULE + name)
            part.set_extra_state(room[_extra(name)] if text is None else decode(text, _device(part)))
        training = decode(room[OF_TRAINING], _HOST)
        facts = {
            name: decode(room[OF_PARAMETER + name], parameter.device) if OF_PARAMETER + name in room else {}
            for name, parameter in named
        }
        learning = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        optimizer = self._optimizer
        self.check_optimizer(training["optimizer"], facts, bool(held_of))
        for one in (*self._parts, optimizer):
            one.state.clear()
        for name, parameter in named:
            state = {**held_of.get(name, {}), **facts[name].get("state", {})}
            if state and id(parameter) in learning:
                holder = self._holder(parameter)
                holder.state[parameter] = _fitting(holder, parameter, state)
        optimizer.state.update(training.get("state", {}))
        vars(optimizer).update(_values(self._attributes))
        vars(optimizer).update(training.get("attributes", {}))
        self._put_groups(facts, training.get("scheduler"), steps)
        if self.loss_scale is not None:
            self.loss_scale.put_back(*training.get("loss_scale", (self.loss_scale.first, 0)))

    def check_optimizer(
        self, made_by: str, facts: Mapping[str, Mapping[str, Any]], has_tensors: bool
    ) -> None:
        """Raise TrainingError if a checkpoint has the state of another optimizer. facts: the plain data of each parameter."""
        kind = type(self._optimizer).__name__
        if (has_tensors or any("state" in fact for fact in facts.values())) and made_by != kind:
            raise unfit("the optimizer's state", f"that of {made_by}", f"that of {kind}")
        for name, parameter in self._named:
            before, now = facts.get(name, {}).get("optimizer"), type(self._holder(parameter)).__name__
            if before is not None and before != now:
                raise unfit(f"the optimizer's state of {name}", f"that of {before}", f"that of {now}")

    def _room_for_optimizer(self, kinds: Kinds) -> dict[str, dict[str, Tensor]]:
        hosted = {
            id(parameter): not (group.get("capturable") or group.get("fused"))
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }
        rooms: dict[str, dict[str, Tensor]] = {}
        # The optimizer has no state for a parameter that was frozen after the checkpoint was saved.
        parameters = {name: parameter for name, parameter in self._named if id(parameter) in hosted}
        for full, kind in kinds.items():
            kept, *parts = full.split(".")
            # No parameter's name is a prefix of another's.
            names = (".".join(parts[:end]) for end in range(1, len(parts)))
            name = next((name for name in names if name in parameters), None)
            if kept == "optimizer" and name is not None:
                key = full.removeprefix(f"optimizer.{name}.")
                host = hosted[id(parameters[name])]
                rooms.setdefault(name, {})[key] = _room(
                    parameters[name], key, kind, host, self._fused.get(name)
                )
        return rooms

    def _put_groups(
        self, facts: Mapping[str, Mapping[str, Any]], schedule: Mapping[str, Any] | None, steps: int
    ) -> None:
        """Restore the groups' entries and the scheduler's state.

        The scheduler is stepped once per completed step, unless it takes a metric. The saved state then replaces the result, unless the settings of the
        scheduler or of a group have changed. Changed settings apply from the first step.
        """
        scheduler, groups = self.scheduler, self._optimizer.param_groups
        for group, as_made in zip(groups, self._groups, strict=True):
            group.update(_values(as_made))
        scheduled: list[set[str]] = [set() for _ in groups]
        unchanged = False
        measured = scheduler is not None and takes_metric(scheduler)
        if scheduler is not None:
            settings = _values(self._schedule)
            scheduler.load_state_dict(_overlaid(scheduler.state_dict(), settings))
            with warnings.catch_warnings():
                # torch expects an optimizer step before each scheduler step.
                warnings.simplefilter("ignore", UserWarning)
                for _ in range(0 if measured else steps):
                    scheduler.step()
            pairs = zip(groups, self._groups, strict=True)
            scheduled = [set(_changed(_entries(group), as_made)) for group, as_made in pairs]
            if schedule is not None:
                current = [type(scheduler).__name__, _summary(settings)]
                unchanged = [schedule["kind"], schedule["made"]] == current
        names = {id(parameter): name for name, parameter in self._named}
        saved = [self._saved_entries(group, names, facts) for group in groups]
        for as_made, entries in zip(self._groups, saved, strict=True):
            unchanged &= not _changed(entries.get("made", {}), as_made)
        if measured and schedule is not None and not unchanged:
            kind = type(scheduler).__name__
            raise unfit(
                f"the state of {kind}, which follows from a metric",
                f"other settings of {kind} or of the optimizer than in the checkpoint",
                "the same settings",
            )
        for group, entries, moved in zip(groups, saved, scheduled, strict=True):
            entries_of_group = entries.get("now", {})
            group.update(
                {key: value for key, value in entries_of_group.items() if unchanged or key not in moved}
            )
        if unchanged and scheduler is not None and schedule is not None:
            state = _overlaid(scheduler.state_dict(), {tuple(path): value for path, value in schedule["now"]})
            scheduler.load_state_dict({**state, "_last_lr": [group["lr"] for group in groups]})

    def _saved_entries(
        self, group: Mapping[str, Any], names: Mapping[int, str], facts: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the saved entries of a group. The group's parameters must have been saved in one group, or in equal
        groups."""
        called = [names[id(parameter)] for parameter in group["params"]]
        first = called[0] if called else ""
        first_entries: dict[str, Any] = facts[first].get("group", {}) if called else {}
        for name in called[1:]:
            entries = facts[name].get("group", {})
            if _text(entries) != _text(first_entries):
                raise unfit(
                    f"the parameter group of {first} and {name}",
                    f"{first_entries.get('now', {})} for {first}, {entries.get('now', {})} for {name}",
                    "equal entries, because both parameters are in one group on this mesh",
                )
        return first_entries


def takes_metric(scheduler: LRScheduler) -> bool:
    """Return whether a step of this scheduler needs a metric, as that of ReduceLROnPlateau does."""
    first = next(iter(inspect.signature(scheduler.step).parameters.values()), None)
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return first is not None and first.default is first.empty and first.kind in named


def _saved_buffers(kind: str, module: nn.Module) -> dict[str, Tensor]:
    saved = set(module.state_dict())
    return {f"{kind}.{name}": buffer for name, buffer in module.named_buffers() if name in saved}


def _differs(buffer: Tensor, before: Tensor) -> bool:
    """Return whether a buffer whose version is unchanged may have other values: torch's batch norm does not count its writes.

    Does not wait for a device.
    """
    if type(buffer) is not Tensor or buffer.layout is not torch.strided or not buffer.is_contiguous():
        return False
    return buffer.device.type != "cpu" or not torch.equal(buffer, before)


def _entries(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _text(value: Any) -> bytes:
    with torch.no_grad():
        return encode(value).numpy().tobytes()


def _texts(values: Mapping[Any, Any], where: str = "") -> dict[Any, bytes | None]:
    """Return the encoded values, without code. A value that cannot be encoded becomes None, or raises an error if `where` is
    given."""
    text_of: dict[Any, bytes | None] = {}
    for key, value in values.items():
        if isinstance(value, _CODE):
            continue
        try:
            text_of[key] = _text(value)
        except ObjectError as error:
            if where:
                name = ".".join(map(str, key)) if isinstance(key, tuple) else key
                raise _refused(f"{where}, {name}", _type(value)) from error
            text_of[key] = None
    return text_of


def _values(texts: Mapping[Any, bytes | str | None]) -> dict[Any, Any]:
    """Return the decoded values."""
    return {
        key: decode(torch.frombuffer(bytearray(text), dtype=torch.uint8), _HOST)
        for key, text in texts.items()
        if isinstance(text, bytes)
    }


def _changed(
    values: Mapping[Any, Any], before: Mapping[Any, bytes | None], where: str = ""
) -> dict[Any, Any]:
    """Return the values that differ from the old values, or that cannot be encoded."""
    texts = _texts(values, where)
    return {key: values[key] for key, text in texts.items() if text is None or text != before.get(key)}


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number or text, or a container of such values. Tensors are not plain data."""
    if type(value) is dict:
        return all(map(_is_plain, (*value, *value.values())))
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    return type(value) in _NUMBERS


@final
class _Outline(pickle.Pickler):
    """Pickles an object with its tensors' values, but without code or objects that are saved elsewhere."""

    def persistent_id(self, value: Any) -> str | None:
        """Return the text that replaces an object such as a tensor, or None to pickle the object."""
        if type(value) is Tensor:
            return hashlib.sha256(_text(value.detach())).hexdigest()
        elsewhere = (Tensor, nn.Module, torch.optim.Optimizer, LRScheduler, *_CODE)
        return str(type(value)) if isinstance(value, elsewhere) else None


def _fingerprint(value: Any) -> bytes | str:
    """Return encoded plain data, or a digest of an object's values. Return "" for an object that cannot be pickled, such
    as a mesh.
    """
    if _is_plain(value):
        return _text(value)
    text = io.BytesIO()
    try:
        _Outline(text).dump(value)
    except Exception:  # pickling may raise anything
        return ""
    return hashlib.sha256(text.getvalue()).hexdigest()


def _is_tensor(what: str, value: Any, parameter: Tensor) -> bool:
    """Return whether the value is saved as a tensor under this name, in parts if it is split. Any other value is plain
    data.

    Raises TrainingError for a tensor that is neither equal on all ranks nor a known part of a full tensor on each rank.
    """
    if not isinstance(value, Tensor):
        return False
    held = value.to_local() if isinstance(value, DTensor) else value
    if type(held) not in (Tensor, nn.Parameter) or held.layout != torch.strided:
        raise _refused(what, _type(held))
    if isinstance(value, DTensor):
        if any(placement.is_partial() for placement in value.placements):
            raise _refused(what, "a DTensor with a pending sum", "value.full_tensor()")
        return True
    if value.ndim == 0 or not split_dims(parameter):
        return True
    if value.shape == local(parameter.detach()).shape:
        raise _refused(
            what, "a plain tensor with the shape of this rank's part", "torch.zeros_like(parameter)"
        )
    return False


def _room(
    parameter: Tensor,
    key: str,
    kind: tuple[torch.dtype, tuple[int, ...]],
    hosted: bool,
    parts: Parts | None,
) -> Tensor:
    """Return memory for a tensor in the optimizer's state. If `hosted`, a step count is on the CPU, where torch keeps it."""
    dtype, shape = kind
    count = key == "step" and not shape
    if tuple(shape) == (Kept(parameter, parts).shape if parts else tuple(parameter.shape)) and not count:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False).detach()
    room = torch.empty(shape, dtype=dtype, device=_HOST if count and hosted else parameter.device)
    if isinstance(parameter, DTensor) and shape:
        mesh = parameter.device_mesh
        room = DTensor.from_local(room, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return room


def _fitting(optimizer: torch.optim.Optimizer, parameter: Tensor, state: dict[Any, Any]) -> dict[Any, Any]:
    """Return the state in the dtype that the optimizer uses, even if train.state_dtype was different when it was saved.

    In torch's optimizers, moments have the weights' dtype.
    """
    if type(optimizer).__module__.partition(".")[0] != "torch":
        return state
    return {
        key: value.to(parameter.dtype) if is_moment(value, parameter) else value
        for key, value in state.items()
    }


def _extra(name: str) -> str:
    return ".".join(("model", *([name] if name else []), EXTRA))


def _device(part: nn.Module) -> torch.device:
    return next((parameter.device for parameter in (*part.parameters(), *part.buffers())), _HOST)


def _plain(what: str, value: Any) -> Tensor:
    try:
        return encode(value)
    except ObjectError as error:
        hint = "use a split tensor under a separate key in the optimizer's state, and numbers instead of an object"
        raise _refused(what, error.what, hint) from error


def _type(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _refused(what: str, given: str, hint: str = "save the numbers that it contains instead") -> TrainingError:
    return TrainingError(
        f"{what} cannot be saved",
        given=given,
        expected="tensors and plain data, in the optimizer's state and its param_groups",
        hint=hint,
    )


def unfit(what: str, given: str, expected: str) -> TrainingError:
    """Return the error of a checkpoint that does not fit the model or its optimizer."""
    return TrainingError(
        f"the checkpoint does not fit: {what}",
        given=given,
        expected=expected,
        hint="resume with the same model and optimizer as in the checkpoint",
    )


# -- schedulers: nested dicts and lists of plain data -----------------------------------------------


def _leaves(state: Any, *path: Any) -> dict[tuple[Any, ...], Any]:
    """Return the entries of nested dicts and of lists of dicts by path, because schedulers may be nested. The groups' learning
    rates are left out, because ranks may have different numbers of groups.
    """
    leaves: dict[tuple[Any, ...], Any] = {}
    for key, value in dict(enumerate(state)).items() if isinstance(state, list) else state.items():
        if key != "_last_lr":
            leaves |= _leaves(value, *path, key) if _is_nested(value) else {(*path, key): value}
    return leaves


def _overlaid(state: Any, leaves: Mapping[tuple[Any, ...], Any]) -> Any:
    """Return `state` with these leaves replaced."""
    pairs = dict(enumerate(state)) if isinstance(state, list) else dict(state)
    inner: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for (key, *rest), value in leaves.items():
        if rest:
            inner.setdefault(key, {})[tuple(rest)] = value
        else:
            pairs[key] = value
    for key, more in inner.items():
        pairs[key] = _overlaid(pairs.get(key, {}), more)
    return list(pairs.values()) if isinstance(state, list) else pairs


def _is_nested(value: Any) -> bool:
    of_dicts = isinstance(value, list) and all(isinstance(member, dict) for member in value)
    return bool(value) and (isinstance(value, dict) or of_dicts)


def _summary(settings: Mapping[tuple[Any, ...], Any]) -> dict[str, Any]:
    """Return the settings with each list replaced by its distinct values, because parameter groups differ between ranks."""
    return {
        ".".join(map(str, path)): sorted(set(map(repr, value))) if isinstance(value, list | tuple) else value
        for path, value in settings.items()
    }
