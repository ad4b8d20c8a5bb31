"""Parses a user's plan for splitting a module, matches it with the module's parts, and checks it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.tensor import DTensor

from meshcomm.errors import ConfigError
from meshcomm.layout.names import did_you_mean, listed
from meshcomm.parallel.tensor.layers import is_conv1d
from meshcomm.parallel.tensor.split import TensorSplit
from meshcomm.transfer.fused import Parts

Entry: TypeAlias = str | Mapping[str, Any]

# The options of each style. All except "split" also have "set".
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "column": ("parts", "output", "sequence", "heads"),
    "row": ("input", "sequence"),
    "vocab": ("sequence",),
    "latent": ("size",),
    "enter": ("args", "shared"),
    **dict.fromkeys(("sequence", "heads"), ()),
    "replicate": ("input", "output", "axis", "args"),
    # For a parameter that the plan names.
    "split": ("axis",),
}
# The class that each style splits, and the axis along which its weight is split.
_KINDS: Mapping[str, tuple[type[nn.Module], int]] = {
    "column": (nn.Linear, 0),
    "row": (nn.Linear, 1),
    "vocab": (nn.Embedding, 0),
}
# Inside a module with one of these styles, parts may have another style; the outer style covers the rest.
_AROUND = ("", "enter", "replicate", "sequence")


@dataclass(frozen=True)
class Rule:
    """How one part of a module is split. With style "", only attributes are set, or some of the part's own parameters are
    split.

    own: the axis along which each parameter that the plan names is split.
    heads: the number of heads of a column-parallel layer, if it may be smaller than the number of ranks; else 0.
    copied: whether it is smaller, so that every rank has the whole weight.
    """

    style: str = ""
    parts: int | tuple[int, ...] = 1
    output: str = "split"
    input: str = "split"
    sequence: str = "split"
    axis: int | None = None
    args: tuple[int | str, ...] = (0,)
    shared: bool = False
    heads: int = 0
    copied: bool = False
    size: int = 0
    set: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, int] = field(default_factory=dict)

    def sizes(self, rows: int) -> tuple[int, ...]:
        """Return the sizes of the parts of a column-parallel weight with `rows` rows."""
        return self.parts if isinstance(self.parts, tuple) else (rows // self.parts,) * self.parts

    def axis_of(self, part: nn.Module, key: str) -> int | None:
        """Return the axis along which a parameter of `part` is split, or None if it is not split."""
        if key in self.own:
            return self.own[key]
        if self.style not in _KINDS or (self.style == "row" and key == "bias") or self.copied:
            return None
        axis = _KINDS[self.style][1]
        return 1 - axis if is_conv1d(part) and key == "weight" else axis

    def parts_of(self, part: nn.Module, key: str) -> Parts | None:
        """Return the parts of a parameter of `part`, or None if the parameter has only one part."""
        axis = self.axis_of(part, key)
        if axis is None or self.style != "column":
            return None
        sizes = self.sizes(part.get_parameter(key).shape[axis])
        return Parts(sizes, axis) if len(sizes) > 1 else None


def checked_rules(split: TensorSplit, module: nn.Module, plan: Mapping[str, Entry]) -> dict[str, Rule]:
    """Return each part's rule by the part's name. Raises ConfigError that lists every problem in the plan."""
    rules, problems = rules_of(split, module, plan)
    if not problems:
        return rules
    count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
    raise ConfigError(
        f'the plan to split a {type(module).__name__} along "{split.dim}" has {count}',
        given="\n".join(problems),
        expected=f"patterns that match its parts, sizes divisible by the {split.size} ranks along {split.dim}",
        hint="print([name for name, _ in module.named_modules()])",
    )


def rules_of(
    split: TensorSplit, module: nn.Module, plan: Mapping[str, Entry]
) -> tuple[dict[str, Rule], list[str]]:
    """Return each part's rule by the part's name, and the problems in the plan for this module and split."""
    read = {pattern: _rule(entry, split) for pattern, entry in plan.items()}
    problems = [f'"{pattern}": {problem}' for pattern, problem in read.items() if isinstance(problem, str)]
    names = dict(module.named_modules(remove_duplicate=False))
    owners = {
        f"{name}.{key}".lstrip("."): name
        for name, part in names.items()
        for key, parameter in part._parameters.items()
        if parameter is not None
    }
    rule_of = {pattern: rule for pattern, rule in read.items() if isinstance(rule, Rule)}
    # A wildcard whose style is for modules does not apply to parameters at the same level.
    of_modules = {pattern: rule for pattern, rule in rule_of.items() if rule.style != "split"}
    of_parameters = {pattern: rule for pattern, rule in rule_of.items() if rule.style == "split"}
    rules, unmatched = _match(of_modules, list(names), owners, 'is a parameter, whose style is "split"')
    of_parameter, more = _match(
        of_parameters, list(owners), names, 'is a module; style "split" is for parameters'
    )
    for name, rule in of_parameter.items():
        owner, key = owners[name], name.rpartition(".")[2]
        before = rules.get(owner, Rule())
        rules[owner] = replace(before, own={**before.own, key: rule.axis or 0})
    unmatched += more
    return rules, problems + unmatched + list(_problems(split, module, names, rules))


def _rule(entry: object, split: TensorSplit) -> Rule | str:
    """Return the rule that an entry describes, or the problem with the entry."""
    if isinstance(entry, str):
        style, _, more = entry.partition(":")
        options_of_entry: dict[str, Any] = {"style": style}
        if more:
            options_of_entry |= {"parts": int(more)} if more.isdecimal() else {"output": more}
    elif isinstance(entry, Mapping):
        options_of_entry = dict(entry)
    else:
        return f'{entry!r} is neither a style such as "column" nor a mapping such as {{"style": "column"}}'
    style = options_of_entry.pop("style", "")
    if style not in _OPTIONS and (style or "set" not in options_of_entry):
        named = ", ".join(f'"{name}"' for name in _OPTIONS)
        return _with_guess(f"style {style!r} is not one of {named}", style, _OPTIONS)
    options = (*_OPTIONS.get(style, ()), *(() if style == "split" else ("set",)))
    for name in options_of_entry:
        if name not in options:
            what = f'style "{style}"' if style else "an entry without a style"
            return _with_guess(
                f"{what} has no option {name!r}; its options are {', '.join(('style', *options))}",
                name,
                options,
            )
    for name in ("input", "output", "sequence"):
        if options_of_entry.get(name, "split") not in ("split", "whole"):
            return f'{name} is {options_of_entry[name]!r}; it must be "split" or "whole"'
    axis = options_of_entry.get("axis")
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int) or axis < 0):
        return f"axis is {axis!r}; it must be an integer of 0 or more"
    parts = options_of_entry.get("parts", 1)
    if isinstance(parts, Sequence) and not isinstance(parts, str):
        parts = options_of_entry["parts"] = tuple(parts)
    numbers = parts if isinstance(parts, tuple) else (parts,)
    if not numbers or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in numbers):
        return f"parts is {parts!r}; it must be a number of equal parts, such as 3, or a list of sizes"
    heads = options_of_entry.get("heads", 0)
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 0 or (heads and parts != 1):
        return f"heads is {heads!r}; it must be the number of heads of a column without parts, such as 2"
    args = options_of_entry.get("args", (0,))
    if not isinstance(args, (list, tuple)) or not all(isinstance(arg, (int, str)) for arg in args):
        return f"args is {args!r}; it must list arguments of forward, as in [0] or ['hidden_states']"
    if options_of_entry.get("output") == "whole" and style == "column" and parts != 1:
        return 'output "whole" would mix up the parts of a column; remove one of the two'
    if not isinstance(options_of_entry.get("shared", False), bool):
        return f"shared is {options_of_entry['shared']!r}; it must be true or false"
    if not isinstance(options_of_entry.get("set", {}), Mapping):
        return f'set is {options_of_entry["set"]!r}; it must map attributes to values, as in {{"heads": "split"}}'
    copied = split.shares_heads(heads)
    return Rule(**{**options_of_entry, "style": style, "args": tuple(args), "copied": copied})


def _match(
    rules: Mapping[str, Rule], names: list[str], others: Iterable[str], else_said: str
) -> tuple[dict[str, Rule], list[str]]:
    """Return the rule for each name that a pattern matches, and the problems.

    A name may have only one style, but any number of patterns may set its attributes.
    others, else_said: names that these rules do not apply to, and the message for a pattern that matches only such names.
    """
    rule_of: dict[str, Rule] = {}
    pattern_of: dict[str, str] = {}
    problems = []
    for pattern, rule in rules.items():
        hits = [name for name in names if matches(pattern, name)]
        if not hits and any(matches(pattern, name) for name in others):
            problems.append(f'"{pattern}" {else_said}')
        elif not hits:
            shapes = {".".join("*" if c.isdecimal() else c for c in name.split(".")) for name in names}
            known_names = sorted({*shapes, *names} - {""})
            problems.append(_with_guess(f'"{pattern}" matches no part of the module', pattern, known_names))
        for name in hits:
            before = rule_of.get(name, Rule())
            if before.style and rule.style:
                problems.append(
                    f'"{name}" is matched by "{pattern_of[name]}" and by "{pattern}"; a part has only one style'
                )
            else:
                rule_of[name] = replace(rule if rule.style else before, set={**before.set, **rule.set})
                pattern_of[name] = pattern if rule.style else pattern_of.get(name, pattern)
    return rule_of, problems


def matches(pattern: str, name: str) -> bool:
    """Return whether a plan's pattern matches a part's dotted name; "" is the module itself.

    "*" matches any text within one component, and "**" matches any number of components.
    """
    return _matches(pattern.split("."), name.split("."))


def _matches(pattern: list[str], name: list[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_matches(pattern[1:], name[skip:]) for skip in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _matches(pattern[1:], name[1:])


def _with_guess(text: str, word: object, known: Iterable[str]) -> str:
    guess = did_you_mean(str(word), known)
    return text if guess is None else f"{text}; {guess}"


def _problems(
    split: TensorSplit, module: nn.Module, names: Mapping[str, nn.Module], rules: Mapping[str, Rule]
) -> Iterator[str]:
    """Yield the problems with `rules` for this module and this split."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            yield f'"{name}" is already a DTensor; split a module only once'
            break
    for name, rule in rules.items():
        part = names[name]
        for text in (_unfit(split, part, rule), *_attributes(split, part, rule.set)):
            if text:
                yield f'"{name}", a {type(part).__name__}: {text}'
        within = f"{name}." if name else ""
        inside = [other for other in rules if other != name and other.startswith(within)]
        styled = [other for other in inside if rules[other].style]
        if rule.style not in _AROUND and styled:
            yield f'"{name}" has style "{rule.style}", but "{styled[0]}" inside it has another style'
    yield from _tied(names, rules)
    bare = [
        name or "the module itself"
        for name, part in names.items()
        if any(
            p is not None and key not in rules.get(name, Rule()).own for key, p in part._parameters.items()
        )
        and not _has_style(name, rules)
    ]
    if split.sequence_parallel and bare:
        yield (
            f"with sequence_parallel every part with parameters needs a style; these have none: {listed(bare)}. "
            'use "sequence" if it operates on each token separately (norms), "replicate" if it needs the full sequence'
        )


def _unfit(split: TensorSplit, part: nn.Module, rule: Rule) -> str:
    """Return the reason why a part cannot be split in its rule's style, or "" if it can."""
    n, style = split.size, rule.style
    for key, axis in rule.own.items():
        shape = tuple(part.get_parameter(key).shape)
        if axis >= len(shape) or shape[axis] % n:
            return f"axis {axis} of its {key}, {shape}, is not divisible by the {n} ranks along {split.dim}"
    # A layer with an adapter has a different class.
    if style == "latent" and not 0 < rule.size < getattr(part, "out_features", 0):
        return f'style "latent" needs an nn.Linear with more outputs than its size, {rule.size}, which must be above 0'
    if style not in _KINDS:
        return ""
    kind = nn.Linear if style == "vocab" and isinstance(part, nn.Linear) else _KINDS[style][0]
    if not is_conv1d(part) and (not isinstance(part, kind) or type(part).forward is not kind.forward):
        with_forward = " with its own forward" if isinstance(part, kind) else ""
        return f'style "{style}" splits an nn.{kind.__name__}, but this is not one{with_forward}'
    if part._parameters.get("weight") is None:
        return "its weight is computed from other parameters (a parametrization) and cannot be split"
    size = part.get_parameter("weight").shape[rule.axis_of(part, "weight") or 0]
    if rule.heads and (size % rule.heads or not (rule.copied or rule.heads % n == 0)):
        ways = f"{rule.heads} % {n} and {n} % {rule.heads} are not 0"
        return f"its {size} outputs are those of {rule.heads} heads, which {n} ranks cannot share: {ways}"
    if rule.copied:
        return (
            ""
            if not is_conv1d(part) and rule.output == "split"
            else "heads that ranks share need an nn.Linear"
        )
    if style == "vocab" and (n - 1) * -(-size // n) >= size:
        return f"its {size} rows leave none for the last of {n} ranks along {split.dim}"
    if style != "vocab":
        what = "outputs" if style == "column" else "inputs"
        sizes = rule.sizes(size)
        if sum(sizes) != size:
            equal = f"{rule.parts} equal parts"
            sizes_text = " + ".join(map(str, sizes)) if isinstance(rule.parts, tuple) else equal
            return f"its {size} outputs are not {sizes_text}"
        counts = {*sizes, Parts(sizes).units}
    else:
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(part, option, None) not in (None, False):
                return f"an embedding with {option} cannot be split"
        return ""
    odd = [
        f"{s} {what} are not divisible by {split.dim}: {s} % {n} = {s % n}" for s in sorted(counts) if s % n
    ]
    vocab = '; style "vocab" splits a head whose outputs the ranks do not divide' if style == "column" else ""
    return odd[0] + vocab if odd else ""


def _attributes(split: TensorSplit, part: nn.Module, values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if not hasattr(part, name):
            numbers = [
                key
                for key, numbers_text in vars(part).items()
                if isinstance(numbers_text, int) and key[0] != "_"
            ]
            numbers_text = f"; its numbers are {', '.join(numbers)}" if numbers else ""
            yield _with_guess(f"it has no attribute {name!r} to set{numbers_text}", name, numbers)
        elif value == "split":
            now = getattr(part, name)
            if isinstance(now, bool) or not isinstance(now, int):
                yield f'{name} = {now!r} is not an integer; "split" divides an integer by the number of ranks'
            elif now % split.size:
                remainder = f"{now} % {split.size} = {now % split.size}"
                yield f"{name} = {now} is not divisible by {split.dim}: {remainder}"


def _tied(names: Mapping[str, nn.Module], rules: Mapping[str, Rule]) -> Iterator[str]:
    """Yield a problem for each parameter that several parts share but would split differently."""
    first: dict[int, tuple[str, tuple[Any, ...]]] = {}
    for name, part in names.items():
        rule = rules.get(name, Rule())
        for key, parameter in part._parameters.items():
            if parameter is None:
                continue
            axis = rule.axis_of(part, key)
            full = f"{name}.{key}".lstrip(".")
            how = (axis, rule.parts if axis == 0 else 1)
            other, before = first.setdefault(id(parameter), (full, how))
            if before != how:
                yield (
                    f'"{other}" and "{full}" are one parameter and would be split differently; '
                    'a tied embedding is "vocab" and its head "column"'
                )


def _has_style(name: str, rules: Mapping[str, Rule]) -> bool:
    """Return whether the rule for the part `name`, or for a part around it, covers its parameters."""
    while True:
        rule = rules.get(name)
        if rule is not None and rule.style not in ("", "enter"):
            return True
        if not name:
            return False
        name = name.rpartition(".")[0]
