"""Can a module be split as its plan says? Everything that is wrong, before anything changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from meshcomm.layout.names import did_you_mean
from meshcomm.parallel.tensor.fused import units
from meshcomm.parallel.tensor.plan import Rule
from meshcomm.parallel.tensor.split import TensorSplit


def part_sizes(rule: Rule, rows: int) -> tuple[int, ...]:
    """The sizes of a column's parts."""
    return rule.parts if isinstance(rule.parts, tuple) else (rows // rule.parts,) * rule.parts


def axis_of(rule: Rule) -> int | None:
    """Along which axis the weight of a styled part is split."""
    return {"column": 0, "row": 1, "vocab": 0, "attention": 0}.get(rule.style)


def problems_of(split: TensorSplit, module: nn.Module, rules: Mapping[str, Rule]) -> list[str]:
    """What is wrong with `rules`, by name of a part, for this module and this split."""
    names = dict(module.named_modules(remove_duplicate=False))
    found = [
        f'"{name}": it is a DTensor already; split a module once'
        for name, parameter in module.named_parameters()
        if isinstance(parameter, DTensor)
    ][:1]
    for name, rule in rules.items():
        part = names[name]
        found += [f'"{name}", {_kind(part)}: {text}' for text in _styled(split, part, rule)]
        found += [f'"{name}", {_kind(part)}: {text}' for text in _attributes(split, part, rule.set)]
        inside = [other for other in rules if other != name and _within(other, name) and rules[other].style]
        if rule.style not in ("", "enter") and inside:
            found.append(f'"{name}" has style "{rule.style}", and "{inside[0]}" inside of it one of its own')
    found += _tied(names, rules)
    if split.sequence_parallel:
        found += _uncovered(names, rules)
    return found


def _kind(part: nn.Module) -> str:
    return f"a {type(part).__name__}"


def _within(name: str, outer: str) -> bool:
    return not outer or name.startswith(outer + ".")


def _styled(split: TensorSplit, part: nn.Module, rule: Rule) -> list[str]:
    n, style = split.size, rule.style
    wanted: dict[str, type[nn.Module]] = {
        "column": nn.Linear,
        "row": nn.Linear,
        "vocab": nn.Embedding,
        "attention": nn.MultiheadAttention,
    }
    if style not in wanted:
        return []
    kind = wanted[style]
    if not isinstance(part, kind) or type(part).forward is not kind.forward:
        own = " with its own forward" if isinstance(part, kind) else ""
        return [f'style "{style}" splits an nn.{kind.__name__}, this is not one{own}']
    if style != "attention" and part._parameters.get("weight") is None:
        return ["its weight is computed from others (a parametrization), and cannot be split"]
    if isinstance(part, nn.Linear):
        size, what = (part.out_features, "outputs") if style == "column" else (part.in_features, "inputs")
        sizes = part_sizes(rule, size)
        if sum(sizes) != size:
            said = (
                " + ".join(map(str, sizes)) if isinstance(rule.parts, tuple) else f"{rule.parts} equal parts"
            )
            return [f"its {size} outputs are not {said}"]
        return [
            f"{s} {what} are not divisible by {split.dim}: {s} % {n} = {s % n}"
            for s in sorted({*sizes, units(sizes)})
            if s % n
        ][:1]
    if isinstance(part, nn.Embedding):
        refused = [
            option
            for option, on in (
                ("max_norm", part.max_norm is not None),
                ("scale_grad_by_freq", part.scale_grad_by_freq),
                ("sparse", part.sparse),
            )
            if on
        ]
        rows = part.num_embeddings
        if refused:
            return [f"an embedding with {refused[0]} cannot be split"]
        return (
            [f"{rows} rows are not divisible by {split.dim}: {rows} % {n} = {rows % n}"] if rows % n else []
        )
    assert isinstance(part, nn.MultiheadAttention)
    heads = part.num_heads
    if part.in_proj_weight is None or part.bias_k is not None or part.add_zero_attn:
        return ["kdim, vdim, add_bias_kv and add_zero_attn cannot be split"]
    return (
        [f"{heads} heads are not divisible by {split.dim}: {heads} % {n} = {heads % n}"] if heads % n else []
    )


def _attributes(split: TensorSplit, part: nn.Module, values: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in values.items():
        if not hasattr(part, name):
            numbers = [key for key, known in vars(part).items() if isinstance(known, int) and key[0] != "_"]
            guess = did_you_mean(name, numbers)
            known = f"; its numbers are {', '.join(numbers)}" if numbers else ""
            found.append(f"it has no attribute {name!r} to set{known}" + (f"; {guess}" if guess else ""))
        elif value == "split":
            now = getattr(part, name)
            if isinstance(now, bool) or not isinstance(now, int):
                found.append(f'{name} = {now!r} is no whole number; "split" divides one by the ranks')
            elif now % split.size:
                rest = f"{now} % {split.size} = {now % split.size}"
                found.append(f"{name} = {now} is not divisible by {split.dim}: {rest}")
    return found


def _tied(names: Mapping[str, nn.Module], rules: Mapping[str, Rule]) -> list[str]:
    """A parameter that several parts share must be split alike in all of them."""
    first: dict[int, tuple[str, tuple[Any, ...]]] = {}
    found = []
    for name, part in names.items():
        rule = rules.get(name, Rule())
        for key, parameter in part._parameters.items():
            if parameter is None:
                continue
            # A bias of a row is whole; that of a column goes with its rows.
            axis = None if rule.style == "row" and key == "bias" else axis_of(rule)
            if rule.style == "" and _owner(name, rules) == "attention":
                continue
            full = f"{name}.{key}".lstrip(".")
            how = (axis, rule.parts if axis == 0 else 1)
            other, before = first.setdefault(id(parameter), (full, how))
            if before != how:
                found.append(
                    f'"{other}" and "{full}" are one parameter and would be split differently; '
                    'a tied embedding is "vocab" and its head "column"'
                )
    return found


def _owner(name: str, rules: Mapping[str, Rule]) -> str:
    """The style of the nearest part at or around `name` that has one."""
    pieces = name.split(".") if name else []
    for end in range(len(pieces), -1, -1):
        rule = rules.get(".".join(pieces[:end]))
        if rule is not None and rule.style not in ("", "enter"):
            return rule.style
    return ""


def _uncovered(names: Mapping[str, nn.Module], rules: Mapping[str, Rule]) -> list[str]:
    bare = [
        name or "the module itself"
        for name, part in names.items()
        if any(p is not None for p in part._parameters.values()) and not _owner(name, rules)
    ]
    if not bare:
        return []
    listed = ", ".join(bare[:6]) + (", ..." if len(bare) > 6 else "")
    return [
        f"with sequence_parallel every part with parameters needs a style; these have none: {listed}. "
        '"sequence": it works on each token by itself (norms); "replicate": it needs all of the sequence'
    ]
