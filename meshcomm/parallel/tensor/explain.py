"""Why does a split module fail on the example that it computed before the split? Which part, which size, which cure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, final

import torch
from torch import Tensor, nn

from meshcomm.errors import TrainingError
from meshcomm.parallel.tensor.plan import Rule
from meshcomm.parallel.tensor.split import TensorSplit

Shapes = dict[str, tuple[int, ...]]
"""By argument of a forward, by place or name: the shape of its tensor."""


@final
class Calls:
    """While open: what every part of a module is called with, and which parts have not returned."""

    def __init__(self, module: nn.Module) -> None:
        self.kinds = {name: type(part).__name__ for name, part in module.named_modules()}
        self.given: dict[str, list[Shapes]] = {name: [] for name in self.kinds}
        self.open: list[str] = []
        self._module = module
        self._hooks: list[Any] = []

    def __enter__(self) -> Calls:
        for name, part in self._module.named_modules():
            self._hooks += [
                part.register_forward_pre_hook(self._called(name), with_kwargs=True),
                part.register_forward_hook(self._returned),
            ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _returned(self, *_: Any) -> None:
        self.open.pop()

    def _called(self, name: str) -> Any:
        def before(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.open.append(name)
            every: dict[str, Any] = {**{str(place): value for place, value in enumerate(args)}, **named}
            self.given[name].append(
                {key: tuple(x.shape) for key, x in every.items() if isinstance(x, Tensor)}
            )

        return before


def explained(
    error: Exception,
    split: TensorSplit,
    module: nn.Module,
    rules: Mapping[str, Rule],
    example: Sequence[Any] | Mapping[str, Any],
    before: Calls,
    after: Calls,
) -> TrainingError:
    """The error for what `error` was in torch's words: the part that raised it, its sizes before and now, cures."""
    name = after.open[-1] if after.open else ""
    part = module.get_submodule(name)
    calls = after.given[name]
    now = calls[-1] if calls else {}
    past = before.given[name]
    was = past[len(calls) - 1] if 0 < len(calls) <= len(past) else {}
    label = f'"{name}"' if name else "the module itself"
    sizes = [
        f"its argument {key} has shape {now[key]}, before the split {was[key]}"
        for key in now
        if key in was and now[key] != was[key]
    ]
    rule = rules.get(name, Rule())
    cures = [
        *_of_linear(split, name, part, rule, now, was),
        *_of_sequence(split, name, now, was),
        *_of_heads(split, name, part, rules),
        *_of_labels(name, rules, example),
    ]
    (said, *_) = str(error).strip().splitlines() or [type(error).__name__]
    return TrainingError(
        f'the module split along "{split.dim}" fails on its example in {label}, a {before.kinds[name]}',
        given="\n".join([f"{type(error).__name__}: {said}", *sizes]),
        expected="what it computed before the split",
        hint="\n".join(cures)
        or 'a style for each part that gets or makes a slice, and "set" for its numbers of heads',
    )


def _of_linear(
    split: TensorSplit, name: str, part: nn.Module, rule: Rule, now: Shapes, was: Shapes
) -> Iterator[str]:
    """A row that the plan forgot, or one with nothing split before it."""
    if not isinstance(part, nn.Linear) or not now.get("0") or not was.get("0"):
        return
    given, all_inputs = now["0"][-1], was["0"][-1]
    if rule.style != "row" and given * split.size == all_inputs:
        yield f'"{name}": "row", as it gets {given} of its {all_inputs} inputs'
    elif rule.style == "row" and given == all_inputs:
        yield f'"{name}" gets all of its {all_inputs} inputs: a "column" before it, or no style for it'


def _of_sequence(split: TensorSplit, name: str, now: Shapes, was: Shapes) -> Iterator[str]:
    """A part that needs the whole sequence, or takes its length from a slice."""
    for key in now if split.sequence_parallel else ():
        axis = split.axis
        if key not in was or len(now[key]) <= axis or len(was[key]) != len(now[key]):
            continue
        if now[key][axis] * split.size == was[key][axis]:
            places = f"it gets {now[key][axis]} of {was[key][axis]} places of the sequence"
            yield f'"{name}": "enter" if it takes the length from its input, "replicate" if it needs all: {places}'
            yield "positions (position_ids) given by you where the module counts its input's places"
            return


def _of_heads(split: TensorSplit, name: str, part: nn.Module, rules: Mapping[str, Rule]) -> Iterator[str]:
    """Numbers of heads that were not divided, or cannot be."""
    columns = [
        other
        for other, rule in rules.items()
        if rule.style == "column" and other.rpartition(".")[0] == name and rule.output == "split"
    ]
    if not columns:
        return
    done = rules.get(name, Rule()).set
    holders = [vars(part), vars(getattr(part, "config", None) or object) if hasattr(part, "config") else {}]
    for own, holder in zip((True, False), holders, strict=True):
        for key, value in holder.items():
            if "head" not in key or "dim" in key or "size" in key or key in done:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                continue
            if value % split.size:
                yield f"a size of {split.dim} that divides {key} = {value}, which cannot be split by {split.dim} = {split.size}"
            elif own:
                yield f'"{name}": {{"set": {{"{key}": "split"}}}}, {value} now'


def _of_labels(
    name: str, rules: Mapping[str, Rule], example: Sequence[Any] | Mapping[str, Any]
) -> Iterator[str]:
    """A loss that the module computes itself, from a slice of its logits."""
    whole_numbers = [
        x
        for x in (example.values() if isinstance(example, Mapping) else example)
        if isinstance(x, Tensor) and x.dtype == torch.int64
    ]
    heads = [
        other
        for other, rule in rules.items()
        if rule.style == "column" and rule.output == "split" and other.rpartition(".")[0] == name
    ]
    if len(whole_numbers) > 1 and heads:
        yield (
            f'with labels the module takes its loss from a slice of the logits: "{heads[-1]}": "column:whole", '
            "or no labels, and cross_entropy(split, logits, labels)"
        )
