"""Makes a plain module tensor-parallel, following a plan that names the module's parts.

Module objects are kept, so names, hooks, shared modules and attributes do not change. Only the class of a part
changes, to a subclass of the original class, as in fully_shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshcomm.errors import MeshMismatchError, ShapeError
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh import Mesh
from meshcomm.parallel.become import become
from meshcomm.parallel.tensor.example import Seen, compare_outputs
from meshcomm.parallel.tensor.layers import (
    ColumnParallel,
    RowParallel,
    VocabParallelEmbedding,
    entered,
    is_conv1d,
)
from meshcomm.parallel.tensor.parameters import local
from meshcomm.parallel.tensor.plan import Entry, Rule, checked_rules
from meshcomm.parallel.tensor.replaced import note_replaced
from meshcomm.parallel.tensor.split import TensorSplit
from meshcomm.transfer.fused import FUSED, kept
from meshcomm.watching.verdict import majority

# The number of elements that a digest reads at a time.
_CHUNK = 1 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_parallel(
    module: nn.Module,
    mesh: Mesh,
    dim: str,
    plan: Mapping[str, Entry],
    *,
    sequence_parallel: bool = False,
    axis: int = 1,
    example: Sequence[Any] | Mapping[str, Any] | None = None,
) -> TensorSplit:
    """Split parts of `module` along `dim`, in place. Names, hooks and module objects do not change.

    plan: maps patterns of dotted names ("*" within a component, "**" for any components) to a style:

        "column"     nn.Linear (or transformers' Conv1D) with split outputs. Columns of one parent that read
                     the same tensor share one all_reduce in backward. With "column:3", {"style": "column",
                     "parts": 3} or "parts": [q, k, v] (sizes), the weight holds several matrices, and each
                     matrix is split. With "column:whole", the outputs are gathered.
        "row"        nn.Linear with split inputs, after columns. Its output is complete. Use {"style": "row",
                     "input": "whole"} after columns whose outputs were gathered.
        "vocab"      nn.Embedding with split rows. With sequence_parallel, add {"sequence": "whole"} to a
                     "column", "row" or "vocab" module that takes and returns full sequences.
        "latent"     nn.Linear that is not split. Its last {"size": n} outputs go to all heads, like the
                     rotary part of a key in multi-head latent attention.
        "enter"      a module that contains columns. `enter` is called once on its first argument ("args":
                     [0], or names), instead of at each column. With sequence_parallel, use this style for a
                     module that reads the sequence length from its input. Within the module, only columns may use the
                     argument. With {"shared": True}, siblings that are called with the same tensor share one `enter`.
        "sequence"   not split; operates on each token separately, like a norm.
        "heads"      not split; operates on each of this rank's heads, after columns, like a query norm.
        "replicate"  not split; needs the full sequence, or takes no activations. Use {"style": "replicate",
                     "input": "whole", "axis": 0} for a position embedding that returns (sequence, width). Parts
                     inside it that have styles are split and operate on full sequences.
        "split"      a parameter that the plan names, split along axis 0. For axis 1, use {"style": "split",
                     "axis": 1}. Use this style for a parameter that operates only on this rank's heads or
                     features, such as a sink for each head.
        {"set": {"heads": "split"}}  with or without a style: divides the module's attribute `heads`
                     by the number of ranks. Any other value is assigned unchanged.

    Called by:  every rank along `dim`, with equal weights (compared by digest).
    Returns:    the TensorSplit, for `cross_entropy` and `finish_gradients`.
    Parameters: become DTensors on `mesh[dim]` under their old names (parameters of RNNs, ParameterList and
                ParameterDict stay plain). `module.forward` reads this rank's part of each. Multi-part weights have an extra
                axis; see `unsplit_state`. Create optimizers and call fully_shard afterwards.
    sequence_parallel, axis: as for TensorSplit. With sequence_parallel, every part with parameters needs a
                style, and you must call `split.finish_gradients`.
    example:    arguments for `module`, positional or by name, equal along dim. The outputs and all gradients in
                eval mode are compared before and after the split. This detects mistakes that names do not
                reveal, such as a part missing from the plan or a number of heads that was not divided. The error names the
                part, gives its sizes before and after the split, and suggests fixes.
    Raises:     ConfigError that lists every problem in the plan, before anything changes; MeshMismatchError if
                ranks hold different weights; TrainingError if the example fails after the split, or gives
                different results.
    """
    split = TensorSplit(mesh, dim, sequence_parallel=sequence_parallel, axis=axis)
    rules = checked_rules(split, module, plan)
    if split.size == 1:
        for name, rule in rules.items():
            for key, value in rule.set.items():
                if value != "split":
                    setattr(module.get_submodule(name), key, value)
        return split
    _check_same(mesh, dim, module, repr(sorted(rules.items())))
    splitting = _Splitting(split, module, rules)
    if example is None:
        splitting.run()
        return split
    before = Seen(split, module, example)
    splitting.run()
    compare_outputs(split, before, Seen(split, module, example, before, rules))
    return split


class _Splitting:
    """The implementation of `tensor_parallel`, after all checks."""

    def __init__(self, split: TensorSplit, module: nn.Module, rules: Mapping[str, Rule]) -> None:
        self.split, self.module, self.rules = split, module, rules
        # The split for parts that receive full sequences.
        self.whole = TensorSplit(split.mesh, split.dim, split.dtype)
        self.names: dict[str, Any] = dict(module.named_modules(remove_duplicate=False))
        self.replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self.entries: dict[int, SharedEntry] = {}
        self.done: set[int] = set()
        self.running = Running()

    def run(self) -> None:
        """Split every part that has a rule, then turn the remaining parameters into DTensors."""
        for name, rule in self.rules.items():
            part = self.names[name]
            if id(part) not in self.done:
                self.done.add(id(part))
                self._apply(name, part, rule)
        for name, part in self.module.named_modules():
            self._keep(part, self.rules.get(name, Rule()))
        names = {id(new): name for name, new in self.module.named_parameters()}
        for old, new in self.replaced.values():
            if old.requires_grad and id(new) in names:
                note_replaced(old, names[id(new)])
        # The module's forward counts for all its parts, because some code reads a part's weight without calling the part.
        self._become(self.module, Around, self.split)

    def _apply(self, name: str, part: Any, rule: Rule) -> None:
        split = self.whole if rule.sequence == "whole" else self._split_in(name)
        for key, value in rule.set.items():
            setattr(part, key, getattr(part, key) // split.size if value == "split" else value)
        if rule.style == "column" or (rule.style == "vocab" and not isinstance(part, nn.Embedding)):
            part.meshcomm_entry, part.meshcomm_output = self._entry(name, split), rule.output
            part.meshcomm_transposed = is_conv1d(part)
            for key in ("weight", "bias"):
                self._place(part, rule, key)
            self._become(part, ColumnParallel, split)
            if rule.copied:
                split.share_heads(part, rule.heads, len(part.weight))
        elif rule.style == "row":
            self._place(part, rule, "weight")
            split.partial(part, "bias")
            part.meshcomm_input, part.meshcomm_transposed = rule.input, is_conv1d(part)
            self._become(part, RowParallel, split)
        elif rule.style == "vocab":
            self._place(part, rule, "weight")
            self._become(part, VocabParallelEmbedding, split)
        elif rule.style == "latent":
            self._become(part, Latent, split).meshcomm_size = rule.size
        elif rule.style == "enter":
            around = self._become(part, Around, split)
            around.meshcomm_enter = rule.args
            around.meshcomm_entry = self._entry(name, split) if rule.shared else split.enter
        elif rule.style in ("sequence", "heads"):
            styled_ids = {
                id(module) for styled in self._inside(name) for module in self.names[styled].modules()
            }
            for inner in (module for module in part.modules() if id(module) not in styled_ids):
                split.partial(inner, *inner._parameters, always=rule.style == "heads")
        elif rule.style == "replicate":
            around = self._become(part, Around, split)
            around.meshcomm_gather = rule.args if rule.input == "split" else ()
            around.meshcomm_scatter, around.meshcomm_axis = rule.output == "split", rule.axis

    def _inside(self, name: str) -> list[str]:
        """Return the parts inside `name` that have their own style."""
        within = f"{name}." if name else ""
        return [n for n, rule in self.rules.items() if rule.style and n != name and n.startswith(within)]

    def _split_in(self, name: str) -> TensorSplit:
        """Return the TensorSplit for a part. Inside a module that needs full sequences, it does not split sequences."""
        while name:
            name = name.rpartition(".")[0]
            if self.rules.get(name, Rule()).style == "replicate":
                return self.whole
        return self.split

    def _entry(self, name: str, split: TensorSplit) -> Callable[[Tensor], Tensor]:
        """Return the entry of the nearest module around `name` that is not a list or dict. Inside an "enter" module,
        return an entry that does nothing.
        """
        for outer, rule in self.rules.items():
            if rule.style == "enter" and (not outer or name.startswith(outer + ".")):
                return entered
        while name:
            name = name.rpartition(".")[0]
            around = self.names.get(name, self.module)
            if not isinstance(around, (nn.ModuleList, nn.ModuleDict)):
                break
        else:
            around = self.module
        if id(around) not in self.entries:
            self.entries[id(around)] = SharedEntry(split)
            self._become(around, Around, self._split_in(name)).meshcomm_shared = self.entries[id(around)]
        return self.entries[id(around)]

    def _become(self, part: Any, kind: type, split: TensorSplit) -> Any:
        """Return `part` as a module of `kind`, too."""
        if isinstance(part, kind):
            return part
        part.meshcomm_split = split
        if kind is Around:
            part.meshcomm_running = self.running
        return become(part, kind, prefix=kind.__name__)

    def _place(self, part: nn.Module, rule: Rule, key: str) -> None:
        old = part._parameters.get(key)
        if old is None:
            return
        axis, parts = rule.axis_of(part, key), rule.parts_of(part, key)
        if id(old) not in self.replaced:
            value = old if parts is None else kept(old.detach(), parts).requires_grad_(old.requires_grad)
            new = self.split.parameter_from(value, axis, uneven=rule.style == "vocab")
            # The old parameter is stored too: while it exists, no other parameter can get its id.
            self.replaced[id(old)] = (old, new)
        part._parameters[key] = self.replaced[id(old)][1]
        if parts is not None:
            setattr(part, FUSED, {**getattr(part, FUSED, {}), key: parts})

    def _keep(self, part: nn.Module, rule: Rule) -> None:
        placed = {id(new) for _, new in self.replaced.values()}
        unplaced = [key for key, p in part._parameters.items() if p is not None and id(p) not in placed]
        # An RNN keeps a list of its weights for the kernel; parameter lists and dicts have no forward.
        if not unplaced or isinstance(part, (nn.RNNBase, nn.ParameterList, nn.ParameterDict)):
            return
        for key in unplaced:
            self._place(part, Rule(own=rule.own), key)
        if not isinstance(part, (ColumnParallel, RowParallel, VocabParallelEmbedding)):
            self._become(part, Around, self.split)


# -- what parts become ---------------------------------------------------------------------------------


class SharedEntry:
    """Calls `split.enter` once for all column-parallel layers that read the same tensor.

    Sibling layers share one entry. The entry keeps its last input until the enclosing module returns. Until then, the
    same object is taken to be the same input, unless it was modified in between.
    """

    def __init__(self, split: TensorSplit) -> None:
        self._split = split
        self._given: Tensor | None = None
        self._entered: Tensor | None = None
        self._state: tuple[int, bool] = (0, False)

    def __call__(self, x: Tensor) -> Tensor:
        """Return `split.enter(x)`, computed once for each input."""
        if torch.compiler.is_compiling():
            return self._split.enter(x)
        state = (0 if x.is_inference() else x._version, torch.is_grad_enabled())
        if self._entered is None or x is not self._given or state != self._state:
            self._given, self._state = x, state
            self._entered = self._split.enter(x)
        return self._entered

    def clear(self) -> None:
        """Drop the stored tensors. Called when the module around the layers has returned."""
        self._given = self._entered = None


class Running:
    """Counts the forward calls in progress in one module and its parts."""

    def __init__(self) -> None:
        self.count = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Running:
        copied: Running = memo.setdefault(id(self), Running())
        return copied


class Around:
    """A module whose forward reads this rank's part of each parameter, including parameters of parts inside it. All other
    code reads a DTensor. The arguments and the result pass through `split.enter`, `gather` and `scatter`.

    This class does not use hooks: every hook has a unique ID, so torch.compile would recompile each layer.
    """

    meshcomm_split: TensorSplit
    meshcomm_running: Running
    meshcomm_enter: tuple[int | str, ...] = ()
    meshcomm_entry: Callable[[Tensor], Tensor]
    meshcomm_gather: tuple[int | str, ...] = ()
    meshcomm_scatter = False
    meshcomm_axis: int | None = None
    meshcomm_shared: SharedEntry | None = None

    def forward(self, *args: Any, **named: Any) -> Any:
        """Transform the arguments, run the original class's forward, and transform the result."""
        split, running = self.meshcomm_split, self.meshcomm_running
        shape: Sequence[int] = ()
        if self.meshcomm_enter or self.meshcomm_gather:
            args, named, shape = self.meshcomm_begun(args, named)
        running.count += 1
        try:
            y = super().forward(*args, **named)  # type: ignore[misc]
        finally:
            running.count -= 1
            if self.meshcomm_shared is not None and not torch.compiler.is_compiling():
                self.meshcomm_shared.clear()
        if not self.meshcomm_scatter:
            return y
        whole = y[0] if isinstance(y, tuple) else y
        if len(shape) == 3 and whole.ndim == 2 and len(whole) == shape[0] * shape[1]:
            # (batch * sequence, width), as mixture-of-experts layers return it.
            whole = whole.unflatten(0, shape[:2])
        part = split.scatter(whole, self.meshcomm_axis)
        return (part, *y[1:]) if isinstance(y, tuple) else part

    def meshcomm_begun(
        self, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Sequence[int]]:
        """Return the arguments after `enter` and `gather`, and the shape of the first argument that was gathered."""
        split = self.meshcomm_split
        arguments: dict[int | str, Any] = dict(enumerate(args))
        arguments.update(named)
        first: dict[int | str, int | str] = {} if args else dict(zip([0], named, strict=False))
        entering = [first.get(key, key) for key in self.meshcomm_enter]
        gathered = [first.get(key, key) for key in self.meshcomm_gather]
        for key in (*entering, *gathered):
            if not isinstance(arguments.get(key), Tensor):
                raise ShapeError(
                    f"a {type(self).__name__} was called without the argument that its plan names",
                    given=f"{len(args)} positional arguments" + "".join(f", {name}" for name in named),
                    expected=f"a tensor as argument {key!r}",
                    hint='"args": [0] for the first argument, "args": ["hidden_states"] for an argument by name',
                )
        for key in entering:
            arguments[key] = self.meshcomm_entry(arguments[key])
        for key in gathered:
            arguments[key] = split.gather(arguments[key], self.meshcomm_axis)
        shape = arguments[gathered[0]].shape if gathered else ()
        return (
            tuple(arguments[place] for place in range(len(args))),
            {key: arguments[key] for key in named},
            shape,
        )

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        if isinstance(value, DTensor) and self.__dict__["meshcomm_running"].count:
            return local(value)
        return value


class Latent:
    """A linear layer that is not split. Its last outputs go to this rank's heads, so their gradient is summed over ranks."""

    meshcomm_split: TensorSplit
    meshcomm_size = 0

    def forward(self, x: Tensor) -> Tensor:
        """Run the module's forward. The gradient of the last outputs is summed over ranks."""
        y: Tensor = super().forward(x)  # type: ignore[misc]
        size, split = self.meshcomm_size, self.meshcomm_split
        latent, of_positions = y.split([y.shape[-1] - size, size], -1)
        return torch.cat([latent, split.mesh.functional.identity(split.dim, of_positions, grad="sum")], -1)


# -- equal weights ---------------------------------------------------------------------------------------


def _check_same(mesh: Mesh, dim: str, module: nn.Module, plan: str) -> None:
    """Raise MeshMismatchError on every rank along `dim` if the plan, names, weights or buffers differ."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    shapes = [(name, tuple(x.shape), str(x.dtype)) for name, x in tensors.items()]
    # The plan is first, because weights can only be compared if names and shapes are equal.
    mine = {"the plan, or the names and shapes of the parameters,": repr((plan, shapes))}
    mine |= {name: _digest(x) for name, x in tensors.items() if not x.is_meta}
    table = mesh.objects.all_gather(dim, mine)
    for name in mine:
        usual, odd = majority({rank: row.get(name) for rank, row in zip(mesh.ranks(dim), table, strict=True)})
        if not odd:
            continue
        raise MeshMismatchError(
            f'{name} differs along "{dim}" before it is split',
            given=f"{ranks_text(odd)} of {mesh.ranks(dim)}, as seen from {mesh.label}: "
            f"{'the value differs from the one on most ranks' if usual else 'the values differ'}",
            expected=f"the same module, weights and plan on every rank along {dim}",
            hint=f"use the same torch.manual_seed(seed) along {dim} before the module is created, load the same "
            f'file on all ranks, or for each parameter p, call mesh.broadcast("{dim}", p.data, src=0)',
            mismatched_ranks=tuple(odd),
        )


@torch.no_grad()
def _digest(x: Tensor) -> str:
    """Return two sums over the bits of `x` modulo 2^64, one weighted by position. The sums distinguish -0.0 from 0.0."""
    flat = x.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    words = flat.view(_WORDS[flat.element_size()])
    digest = torch.zeros(2, dtype=torch.int64, device=x.device)
    for first in range(0, words.numel(), _CHUNK):
        some = words[first : first + _CHUNK].to(torch.int64)
        place = torch.arange(first, first + some.numel(), device=x.device) * 2654435761 + 1
        digest += torch.stack([some.sum(), (some * place).sum()])
    return str(digest.tolist())
