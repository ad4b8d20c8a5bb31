"""A module that knows nothing of meshes, made tensor-parallel by a plan that names its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from meshcomm.errors import ConfigError
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor import plan as plans
from meshcomm.parallel.tensor.agree import check_same
from meshcomm.parallel.tensor.attention import Attention
from meshcomm.parallel.tensor.checks import axis_of, part_sizes, problems_of
from meshcomm.parallel.tensor.example import Seen, compare
from meshcomm.parallel.tensor.fused import kept
from meshcomm.parallel.tensor.modules import (
    FUSED,
    Around,
    Column,
    Entry,
    LocalParameters,
    Row,
    Vocab,
    become,
    work_on_slices_of_the_sequence,
)
from meshcomm.parallel.tensor.plan import Entry as PlanEntry
from meshcomm.parallel.tensor.plan import Rule
from meshcomm.parallel.tensor.split import TensorSplit


def tensor_parallel(
    module: nn.Module,
    mesh: Mesh,
    dim: str,
    plan: Mapping[str, PlanEntry],
    *,
    sequence_parallel: bool = False,
    axis: int = 1,
    example: Sequence[Any] | Mapping[str, Any] | None = None,
) -> TensorSplit:
    """Split parts of `module` along `dim`, in place; names, hooks and objects stay.

    plan: patterns of dotted names ("*" within a component, "**" for any components) to a style:

        "column"     nn.Linear, outputs split. Columns of one parent that read the same tensor enter
                     once: one all_reduce in backward for all of them. "column:3" or {"style":
                     "column", "parts": 3} or "parts": [q, k, v] (sizes): the weight holds several,
                     and each of them is split. "column:whole": the outputs are gathered.
        "row"        nn.Linear, inputs split: behind columns. Its result is whole.
        "vocab"      nn.Embedding, rows split.
        "attention"  nn.MultiheadAttention, heads split.
        "enter"      a module around columns: its first argument ("args": [0], or names) enters here
                     and not at each column. For one that asks its input how long the sequence is,
                     with sequence_parallel; everything in it must go through columns.
        "sequence"   stays whole; works on each token by itself, as norms do.
        "replicate"  stays whole; needs all of the sequence, or does not take activations:
                     {"style": "replicate", "input": "whole", "axis": 0} for an embedding of
                     positions that gives (sequence, width).
        {"set": {"heads": "split"}}  besides, or instead: the module's attribute `heads` is divided
                     by the ranks; any other value is set as it is.

    Called by:  every rank along `dim`, with equal weights (they are compared by digest).
    Returns:    the TensorSplit, for `cross_entropy` and `finish_gradients`.
    Parameters: DTensors on `mesh[dim]` under their old names (those of RNNs, ParameterList and
                ParameterDict stay plain). A module's own forward reads what this rank holds of
                them. Weights with parts have one axis more; see `unsplit_state`. In the simulator
                all are plain parts. Make optimisers, and call fully_shard, afterwards.
    sequence_parallel, axis: as for TensorSplit. Every part with parameters then needs a style, and
                `split.finish_gradients(module)` is called once a step.
    example:    arguments of `module`, by place or by name, equal along dim: it is run on them forward and
                backward, in eval mode, before and after, and outputs and all gradients are compared. It
                finds what no look at the names can: a forgotten part of the plan, heads that were not divided.
                Where the split module fails, the error names the part, its sizes before and now, and cures.
    Raises:     ConfigError with everything that is wrong with the plan, before anything changes;
                MeshMismatchError where ranks hold other weights; TrainingError where the example
                fails behind the split, or comes out differently.
    """
    split = TensorSplit(mesh, dim, sequence_parallel=sequence_parallel, axis=axis)
    rules, problems = plans.read(plan)
    names = dict(module.named_modules(remove_duplicate=False))
    by_name, unmatched = plans.match(rules, names)
    problems += unmatched + problems_of(split, module, by_name)
    if problems:
        count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
        raise ConfigError(
            f'the plan to split a {type(module).__name__} along "{dim}" has {count}',
            given="\n".join(problems),
            expected=f"patterns that match its parts, sizes divisible by the {split.size} ranks along {dim}",
            hint="print([name for name, _ in module.named_modules()])",
        )
    if split.size == 1:
        for name, rule in by_name.items():
            for key, value in rule.set.items():
                if value != "split":
                    setattr(names[name], key, value)
        return split
    check_same(mesh, dim, module, repr(sorted(by_name.items())))
    before = None if example is None else Seen(split, module, example)
    _Splitting(split, module, by_name).run()
    if before is not None and example is not None:
        compare(split, before, Seen(split, module, example, before, by_name))
    return split


def _entered(x: Tensor) -> Tensor:
    """`x`, which a module around has put through `enter`."""
    return x


class _Splitting:
    """The work itself, behind all checks."""

    def __init__(self, split: TensorSplit, module: nn.Module, rules: Mapping[str, Rule]) -> None:
        self.split, self.module, self.rules = split, module, rules
        self.names = dict(module.named_modules(remove_duplicate=False))
        self.classes: dict[tuple[type, type], type] = {}
        self.replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self.entries: dict[int, Entry] = {}
        self.done: set[int] = set()

    def run(self) -> None:
        """Split every part that has a rule, then keep all others as they are, as DTensors."""
        for name, rule in self.rules.items():
            part = self.names[name]
            if id(part) not in self.done:
                self.done.add(id(part))
                self._apply(name, part, rule)
        for part in self.module.modules():
            self._keep(part)

    def _apply(self, name: str, part: Any, rule: Rule) -> None:
        split = self.split
        for key, value in rule.set.items():
            setattr(part, key, getattr(part, key) // split.size if value == "split" else value)
        if rule.style in ("column", "row", "vocab", "attention"):
            part.meshcomm_split = split
        if rule.style == "column":
            sizes = part_sizes(rule, part.out_features)
            part.meshcomm_entry, part.meshcomm_output = self._entry(name), rule.output
            for key in ("weight", "bias"):
                self._place(part, key, 0, sizes if len(sizes) > 1 else None)
            become(part, Column, self.classes)
        elif rule.style == "row":
            self._row(part)
        elif rule.style == "vocab":
            self._place(part, "weight", axis_of(rule), None)
            become(part, Vocab, self.classes)
        elif rule.style == "attention":
            for key in ("in_proj_weight", "in_proj_bias"):
                self._place(part, key, 0, (part.embed_dim,) * 3)
            # Tells nn.TransformerEncoderLayer not to compute past this forward.
            part._qkv_same_embed_dim = False
            part.out_proj.meshcomm_split = split
            self._row(part.out_proj)
            become(part, Attention, self.classes)
            part.meshcomm_entry = self._entry(name + ".in_proj")
        elif rule.style == "enter":
            self._around(part).meshcomm_enter = rule.args
        elif rule.style == "sequence":
            work_on_slices_of_the_sequence(split, part)
        elif rule.style == "replicate":
            around = self._around(part)
            around.meshcomm_gather = rule.args if rule.input == "split" else ()
            around.meshcomm_scatter, around.meshcomm_axis = rule.output == "split", rule.axis

    def _row(self, part: nn.Module) -> None:
        self._place(part, "weight", 1, None)
        self.split.partial(part, "bias")
        become(part, Row, self.classes)

    def _entry(self, name: str) -> Callable[[Tensor], Tensor]:
        """That of the nearest module around `name` which has a forward of its own; none in an "enter"."""
        for outer, rule in self.rules.items():
            if rule.style == "enter" and (not outer or name.startswith(outer + ".")):
                return _entered
        while name:
            name = name.rpartition(".")[0]
            around = self.names.get(name, self.module)
            if not isinstance(around, (nn.ModuleList, nn.ModuleDict)):
                break
        else:
            around = self.module
        if id(around) not in self.entries:
            self.entries[id(around)] = Entry(self.split)
            self._around(around).meshcomm_shared = self.entries[id(around)]
        return self.entries[id(around)]

    def _around(self, part: Any) -> Any:
        if not isinstance(part, Around):
            part.meshcomm_split = self.split
            become(part, Around, self.classes)
        return part

    def _place(self, part: nn.Module, key: str, axis: int | None, sizes: Sequence[int] | None) -> None:
        old = part._parameters.get(key)
        if old is None:
            return
        if id(old) not in self.replaced:
            value: Tensor = old if sizes is None else kept(old.detach(), sizes)
            new = self.split.parameter_from(value, axis)
            new.requires_grad_(old.requires_grad)
            # The old one too: while it lives, no other parameter can have its id.
            self.replaced[id(old)] = (old, new)
        part._parameters[key] = self.replaced[id(old)][1]
        if sizes is not None:
            setattr(part, FUSED, {**getattr(part, FUSED, {}), key: tuple(sizes)})

    def _keep(self, part: nn.Module) -> None:
        placed = {id(new) for _, new in self.replaced.values()}
        own = [key for key, p in part._parameters.items() if p is not None and id(p) not in placed]
        # An RNN hands its weights to the kernel from a list of its own; lists have no forward.
        if not own or isinstance(part, (nn.RNNBase, nn.ParameterList, nn.ParameterDict)):
            return
        for key in own:
            self._place(part, key, None, None)
        if not isinstance(part, (Column, Row, Vocab, Attention)):
            become(part, LocalParameters, self.classes)
