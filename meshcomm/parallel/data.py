"""Data parallelism: averages or sums gradients along dims of the mesh, in buckets, during the backward pass."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from types import TracebackType
from typing import Any, final
from weakref import WeakSet, finalize, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from meshcomm.comm.checks import is_wrapper
from meshcomm.errors import CallMismatchError, TrainingError
from meshcomm.layout import Dims
from meshcomm.layout.names import listed
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor import local
from meshcomm.transport.support import name_of
from meshcomm.watching.verdict import alike, blamed, majority

# Those whose step may be under way.
_STARTED: WeakSet[GradientSync] = WeakSet()


def check_summed(parameters: Iterable[Tensor], what: str) -> None:
    """Raise TrainingError about `what` if the step of a GradientSync of these parameters is under way: gradients are partial."""
    started = [sync for sync in _STARTED if sync._active]
    open_ids = {id(slot.parameter) for sync in started for slot in sync._slots}
    if open_ids and not open_ids.isdisjoint(map(id, parameters)):
        raise TrainingError(
            f"{what} within `with sync:`, before the gradients are summed",
            given="parameters of a GradientSync whose step is under way",
            expected="complete gradients, which are the same on all ranks",
            hint="move the call after the `with sync:` block",
        )


@final
class GradientSync:
    """Averages the gradients of each step over `dims` in buckets, overlapping with the backward pass.

    GradientSync computes the same gradients as DistributedDataParallel. If all ranks have equally many samples, and each
    rank's loss is the mean over its samples, the result is the gradient of the mean loss over the samples on all ranks.

        sync = GradientSync(mesh, "dp", model)
        for x, y in batches:
            with sync:
                loss_of(model(x), y).backward()
            optimizer.step()

    Parameters are assigned to buckets of at most `bucket_mb` in reverse order of registration, approximately
    the order in which backward reaches them. A parameter larger than `bucket_mb` gets its own bucket. Each `.grad` is a view
    into its bucket's flat buffer, so gradients are never packed or unpacked. A bucket starts one asynchronous all_reduce of
    its buffer when each of its gradients has received `microbatches` contributions and all earlier buckets have been sent.
    Buckets are sent in the same order on all ranks.

    As in DDP, the module's buffers on coord 0 are broadcast to all ranks after each step.

    Called by: every rank along `dims`.
    Raises:    CallMismatchError in the constructor, on every rank along `dims`, if names, shapes, dtypes, order or requires_grad of
               the parameters differ between ranks, or op, bucket_mb or broadcast. TrainingError if a parameter gets no gradient in a step, if backward runs outside of a step, or
               if a `.grad` is replaced. TrainingError is also raised if a `with` block begins before the previous step's
               gradients were used, or if the module was cast, moved, frozen, unfrozen or extended after GradientSync was
               created.

    Args:
        dims: the dims to average or sum over. If None, or if all sizes are 1, nothing is sent.
        model: a module, or (name, parameter) pairs in registration order. Parameters are plain tensors or DTensors.
        op: "avg", or "sum" if losses are already divided by the number of samples or tokens on all ranks.
        microbatches: the number of backward passes per step. Microbatches' gradients are added, whatever the op.
        bucket_mb: the maximum bucket size, in units of 10^6 bytes.
        broadcast: whether to broadcast the values on coord 0 to all ranks, as DDP does: parameters in the
            constructor, and a module's buffers in the constructor and after each step.
        hooks: whether backward calls post-accumulate-grad hooks. If not, as in a pipeline schedule that splits backward,
            `finish` sends all buckets.
        zeros: whether a parameter without a gradient has a gradient of zeros on this rank, instead of an error.
    """

    def __init__(
        self,
        mesh: Mesh,
        dims: Dims | None,
        model: nn.Module | Iterable[tuple[str, nn.Parameter]],
        *,
        op: str = "avg",
        microbatches: int = 1,
        bucket_mb: float = 25,
        broadcast: bool = True,
        hooks: bool = True,
        zeros: bool = False,
    ) -> None:
        if op not in ("avg", "sum"):
            raise TrainingError(
                "GradientSync cannot reduce gradients with this operation",
                given=f"op={op!r}",
                expected="avg or sum",
                hint='"avg" if each rank\'s loss is a mean over its own samples, "sum" if it is a share of the global sum',
            )
        self._op, self._hooks, self._mesh = op, hooks, mesh
        self._detects = hooks and not zeros
        self._dims = dims if dims is not None and mesh.size(dims) > 1 else None
        self._microbatches, self._bucket_mb = microbatches, bucket_mb
        self._broadcast = broadcast and self._dims is not None
        self._module = model if isinstance(model, nn.Module) else None
        self._named = list(model.named_parameters() if isinstance(model, nn.Module) else model)
        wrappers = {name: local(parameter.detach()) for name, parameter in self._named}
        if elsewhere := [f"{name}, a {type(x).__name__}" for name, x in wrappers.items() if is_wrapper(x)]:
            raise TrainingError(
                "GradientSync was given parameters that keep their values in other tensors",
                given=listed(elsewhere),
                expected="plain tensors, or DTensors of plain tensors",
                hint="leave such parameters out: (name, parameter) pairs of the trained ones instead of the module",
            )
        if self._dims is not None:
            settings = f"op={op!r}, bucket_mb={bucket_mb}, broadcast={broadcast}"
            _compare(mesh, self._dims, [settings, *map(_described, self._named)])
        if self._broadcast and self._dims is not None:
            broadcast_values(mesh, [self._dims], [parameter for _, parameter in self._named], bucket_mb)
        self._send_buffers()
        needed = {parameter: name for name, parameter in reversed(self._named) if parameter.requires_grad}
        self._buckets = [
            _Bucket(place, [(needed[parameter], parameter) for parameter in run])
            for place, run in enumerate(_cut(needed, bucket_mb))
        ]
        self._slots = [slot for bucket in self._buckets for slot in bucket.slots]
        self._handles = [
            slot.parameter.register_post_accumulate_grad_hook(_hook(ref(self), place))
            for place, slot in enumerate(self._slots if hooks else ())
        ]
        self._sent = 0
        self._active = False
        # Whether the gradients of a finished step are still unused; see `__enter__`.
        self._unused = False
        used = ref(self)
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: _stepped(used(), optimizer))
        for handle in (hook, *self._handles):
            finalize(self, handle.remove)

    def _check_unchanged(self) -> None:
        """Raise TrainingError if the buckets no longer match the parameters."""
        named = self._named if self._module is None else self._module.named_parameters()
        slot_of = {slot.parameter: slot for slot in self._slots}
        name_of = {parameter: name for name, parameter in named}
        changed = [
            name
            for parameter, name in name_of.items()
            if parameter.requires_grad != (parameter in slot_of)
            or (parameter in slot_of and not slot_of[parameter].fits())
        ]
        changed += [slot.name for parameter, slot in slot_of.items() if parameter not in name_of]
        if changed:
            raise TrainingError(
                "the module has changed since its GradientSync was created",
                given=listed(changed),
                expected="the same parameters, with the same requires_grad, dtype and device",
                hint="create a new GradientSync after the change, on every rank",
            )

    def _send_buffers(self) -> None:
        if self._broadcast and self._dims is not None and self._module is not None:
            broadcast_values(self._mesh, [self._dims], self._module.buffers(), self._bucket_mb)

    @property
    def buckets(self) -> list[list[str]]:
        """The parameter names in each bucket, in the order in which buckets are sent."""
        return [[slot.name for slot in bucket.slots] for bucket in self._buckets]

    def __enter__(self) -> GradientSync:
        if self._unused and self._still_there():
            raise TrainingError(
                "a step began before the previous step's gradients were used",
                given="`with sync:` twice, without an optimizer step in between",
                expected="a single `with sync:` around all backward passes of a step",
                hint="microbatches=2 for two backward passes per step; optimizer.zero_grad() to drop gradients",
            )
        self.start()
        return self

    def _still_there(self) -> bool:
        """Return whether the step's gradients still exist and have not been used.

        Returns False after zero_grad, or if a loss scaler skips the step.
        """
        flats = [bucket.flat for bucket in self._buckets]
        return (
            all(slot.parameter.grad is slot.grad for slot in self._slots)
            and all(slot.parameter._version == slot.version for slot in self._slots)
            and all(bool(flat.isfinite().all()) for flat in flats)
            and any(bool(flat.any()) for flat in flats)
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
            self._unused = True
        else:
            self._active = False

    def close(self) -> None:
        """Remove the hooks from the parameters, so that another GradientSync can use them."""
        for handle in self._handles:
            handle.remove()

    def start(self) -> None:
        """Begin a step and zero every gradient.

        Raises TrainingError if the module was moved or cast, or if its parameters have changed.
        """
        self._check_unchanged()
        self._unused = False
        self._sent = 0
        self._active = True
        _STARTED.add(self)
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.waiting = len(bucket.slots)
            for slot in bucket.slots:
                slot.count = 0
                slot.parameter.grad = slot.grad

    def finish(self, *, raises: bool = True) -> list[str]:
        """Wait until every `.grad` holds the mean or sum over `dims`. Call this after the last backward pass.

        Returns the parameters that got no gradient on this rank in this step. If `raises`, raises TrainingError that names them,
        before it sends what is left.
        """
        self._active = False
        slots = self._slots
        missing = [slot.name for slot in slots if self._detects and not slot.count]
        if not (missing and raises):
            # A parameter that only some of the microbatches used leaves its bucket waiting.
            self._send(len(self._buckets))
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
        if raises:
            check_complete(missing, len(slots))
        replaced = [slot.name for slot in slots if slot.parameter.grad is not slot.grad or not slot.fits()]
        if replaced:
            raise TrainingError(
                f"the .grad of {replaced[0]} was replaced during the step",
                given=listed(replaced),
                expected="gradients accumulated in place in the views that start() attached",
                hint="do not call zero_grad, set .grad or move the module between start() and finish()",
            )
        for slot in slots:
            slot.version = slot.parameter._version
        self._send_buffers()
        return missing

    def _accumulated(self, slot: _Slot) -> None:
        """Record that backward has accumulated into a parameter's gradient."""
        if not self._active:
            raise TrainingError(
                f"backward reached {slot.name} outside of a step",
                given="a backward pass before start() or after finish()",
                expected="start(), then all backward passes of the step, then finish()",
                hint="`with sync:` around the backward passes of each step, or call start() and finish(). Beside a Trainer: "
                "torch.autograd.grad in place of backward(). If another loss sends gradients through this module, as in a GAN: "
                "module.requires_grad_(False) before that loss, and module.requires_grad_(True) after it",
            )
        slot.count += 1
        if slot.count == self._microbatches:
            bucket = self._buckets[slot.bucket]
            bucket.waiting -= 1
            if not bucket.waiting:
                ready = self._sent
                while ready < len(self._buckets) and not self._buckets[ready].waiting:
                    ready += 1
                self._send(ready)
        elif slot.count > self._microbatches:
            raise TrainingError(
                f"backward reached {slot.name} {slot.count} times in one step",
                given=f"{slot.count} gradients for one parameter",
                expected=f"{self._microbatches}, the number of microbatches",
                hint="one backward pass for each microbatch",
            )

    def count(self, module: nn.Module) -> None:
        """Count a backward pass through a module that was not run. Not for a step's last pass."""
        parameters = {*module.parameters()}
        for slot in self._slots if self._hooks else ():
            slot.count += slot.parameter in parameters

    def _send(self, end: int) -> None:
        if self._dims is not None:
            for bucket in self._buckets[self._sent : end]:
                bucket.work = self._mesh.all_reduce(self._dims, bucket.flat, self._op, async_op=True)
        self._sent = end


def _described(named: tuple[str, nn.Parameter]) -> str:
    name, value = named[0], local(named[1].detach())
    frozen = "" if named[1].requires_grad else ", frozen"
    strides = "" if value.is_contiguous() else f", strides {value.stride()}"
    return f"{name}, {name_of(value.dtype)} {tuple(value.shape)}{strides}{frozen}"


def _compare(mesh: Mesh, dims: Dims, mine: list[str]) -> None:
    """Raise CallMismatchError on every rank along `dims` if ranks synchronize other parameters. Gradients are sent in buckets, in
    which parameters have no names.

    mine: this rank's settings, then its parameters, as text.
    """
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    if len({*mesh.objects.all_gather(dims, digest)}) == 1:
        return
    lists = dict(zip(mesh.ranks(dims), mesh.objects.all_gather(dims, mine), strict=True))
    signs = {rank: tuple(names) for rank, names in lists.items()}
    usual, mismatched = majority(signs)
    place = next(index for index in count() if len({sign[index : index + 1] for sign in signs.values()}) > 1)

    def text(rank: int) -> str:
        if place >= len(lists[rank]):
            return f"only {place - 1} parameters"
        return f"parameter {place}: {lists[rank][place]}" if place else lists[rank][0]

    raise CallMismatchError(
        f'ranks synchronize other gradients along "{dims}": {blamed(mismatched, not usual)}; nothing was sent',
        given="\n".join(f"{ranks_text(same)}: {text(same[0])}" for same in alike(mismatched, signs)),
        expected=f"as {ranks_text(usual)}: {text(usual[0])}"
        if usual
        else "the same on every rank along the dims",
        hint="build the same modules in the same order on every rank, and freeze the same parameters",
        mismatched_ranks=tuple(mismatched),
    )


def _hook(sync: ref[GradientSync], place: int) -> Callable[[Tensor], None]:
    """Return the hook for a parameter. The garbage collector cannot see the references that such a hook holds: if the hook
    referred to its own parameter, the parameter, its model and its gradients would never be freed.
    """

    def accumulated(_: Tensor) -> None:
        owner = sync()
        if owner is not None:
            owner._accumulated(owner._slots[place])

    return accumulated


def _stepped(sync: GradientSync | None, optimizer: torch.optim.Optimizer) -> None:
    """Called after each step of any optimizer, even one that changes parameters without autograd noticing."""
    if sync is not None and sync._unused:
        mine = {id(slot.parameter) for slot in sync._slots}
        stepped = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        sync._unused = mine.isdisjoint(stepped)


def broadcast_values(
    mesh: Mesh, dims: Iterable[Dims], tensors: Iterable[Tensor], most_mb: float = 25
) -> None:
    """Broadcast the values on coord 0 to all ranks along each of `dims`. Called by: every rank along `dims`."""
    values = [local(tensor.detach()) for tensor in tensors]
    for run in _cut([value for value in values if value.numel()], most_mb):
        for dim in dims:
            mesh.broadcast(dim, run, src=0)


class _Slot:
    """A parameter in bucket number `bucket`. Its `grad` is a view of the bucket's buffer `flat`."""

    def __init__(self, name: str, parameter: nn.Parameter, bucket: int, flat: Tensor, grad: Tensor) -> None:
        self.name, self.parameter, self.bucket, self.flat = name, parameter, bucket, flat
        self.count = 0
        self.version = parameter._version
        self.grad = grad
        if isinstance(parameter, DTensor):
            shape: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
            place = parameter.device_mesh, parameter.placements
            self.grad = DTensor.from_local(grad, *place, run_check=False, **shape)

    def fits(self) -> bool:
        """Return whether the gradient is still a view of the buffer, and has the parameter's dtype, device and shape."""
        value: Tensor = self.parameter
        grad, flat = self.grad, self.flat
        if isinstance(grad, DTensor):
            value, grad = local(value.detach()), local(grad)
        same = (value.dtype, value.device, value.shape) == (flat.dtype, flat.device, grad.shape)
        return same and grad.untyped_storage() is flat.untyped_storage()


class _Bucket:
    """A flat buffer, the parameters whose gradients are stored in it, and its pending all_reduce."""

    def __init__(self, place: int, parameters: list[tuple[str, nn.Parameter]]) -> None:
        values = [local(parameter.detach()) for _, parameter in parameters]
        sizes = [value.numel() for value in values]
        self.flat = torch.zeros(sum(sizes), dtype=values[0].dtype, device=values[0].device)
        triples = zip(parameters, values, self.flat.split(sizes), strict=True)
        # Fused optimizers read a gradient in the layout of its parameter, such as channels_last.
        self.slots = [
            _Slot(
                *named, place, self.flat, part.as_strided(value.shape, _strides(value), part.storage_offset())
            )
            for named, value, part in triples
        ]
        self.waiting = len(self.slots)
        self.work: Any = None


def _strides(value: Tensor) -> tuple[int, ...]:
    """Return the strides of a dense tensor with the order of axes of `value`, as torch gives a gradient."""
    return torch.empty_like(value, device="meta").stride()


def _cut(tensors: Iterable[Tensor], most_mb: float) -> list[list[Any]]:
    """Return runs of tensors with the same dtype and device. Each run contains at most `most_mb` MB per rank, or a single
    tensor."""
    runs: list[list[Any]] = []
    kind, used = None, 0
    for tensor in tensors:
        size, this = local(tensor.detach()).nbytes, (tensor.dtype, tensor.device)
        if this != kind or used + size > most_mb * 1e6:
            runs.append([])
            kind, used = this, 0
        runs[-1].append(tensor)
        used += size
    return runs


def check_complete(missing: Sequence[str], total: int) -> None:
    """Raise TrainingError if any of the `total` parameters got no gradient in a step."""
    if missing:
        raise TrainingError(
            f"{len(missing)} of {total} parameters got no gradient",
            given=listed(missing),
            expected="every parameter of the model to contribute to the loss",
            hint="remove them, use them in forward, or freeze them: requires_grad = False, or train.frozen; or GradientSync(..., zeros=True)",
        )
