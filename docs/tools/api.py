"""Generate the API reference from signatures and docstrings: `python docs/tools/api.py`.

It writes docs/reference/api.md and docs/reference/api/. Each public name has an entry on one page of PAGES. The labels in a
docstring (`Args:`, `Shape:`, `Raises:`, parameter names) become tables and lists, and names of entries become links.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any, Final

from pydantic import BaseModel

REFERENCE: Final = Path(__file__).parents[1] / "reference"
# Page -> title, first paragraph, and the names in meshcomm that the page documents. `x.*` means all public names of module x
# that no other page has. `mesh.x=` is the name under which a user calls the function.
PAGES: Final[Mapping[str, tuple[str, str, str]]] = {
    "init": (
        "Opening a mesh",
        "`meshcomm.init` opens a mesh. The other functions use process groups that the program creates.",
        "init from_groups watch mesh.Watch",
    ),
    "mesh": (
        "Mesh",
        "Collectives, messages, and information about ranks. Guides: [groups](../../guide/groups.md), [communication](../../guide/communication.md).",
        "Mesh show.grid.RankGrid",
    ),
    "debug": (
        "mesh.debug",
        "What the ranks of a mesh do: breakpoints, traces, stragglers. Guides: [hangs](../../guide/hangs.md), "
        "[counters, timeline, logs](../../guide/stats.md).",
        "mesh.debug=mesh.debug.Debug",
    ),
    "elastic": (
        "mesh.elastic",
        "The mesh after ranks were lost and replaced. Guide: [when a rank dies](../../guide/elastic.md).",
        "mesh.elastic=mesh.elastic.Elastic rendezvous.generation.Generation",
    ),
    "functional": (
        "mesh.functional",
        "Collectives with gradients. Guide: [gradients across ranks](../../guide/gradients.md).",
        "mesh.functional=comm.functional.Functional",
    ),
    "objects": (
        "mesh.objects",
        "Python objects along dims. Guide: [communication](../../guide/communication.md).",
        "mesh.objects=comm.objects.Objects",
    ),
    "store": (
        "mesh.store",
        "The key-value store of the job. Guide: [communication](../../guide/communication.md).",
        "mesh.store=rendezvous.store.MeshStore",
    ),
    "handle": ("Handle", "The result of a call with `async_op=True`.", "Handle comm.handle.UnwaitedHandle"),
    "stats": (
        "Statistics and traces",
        "The results of the measuring methods of `Mesh` and `mesh.debug`. Guide: [counters, timeline, logs](../../guide/stats.md).",
        "mesh.stats.Stats mesh.stats.CallStats mesh.all_ranks.StatsOfAll mesh.all_ranks.Spread "
        "mesh.all_ranks.Stragglers mesh.all_ranks.Straggler mesh.all_ranks.Arrivals mesh.tracing.Trace",
    ),
    "patterns": (
        "Patterns",
        "The steps of `Mesh.rearrange`, as data. Guide: [patterns](../../guide/patterns.md).",
        "explain_pattern pattern.*",
    ),
    "transfer": (
        "Transfer between two meshes",
        "Tensors and weights from the ranks of one mesh to the ranks of another. Guides: "
        "[from one mesh to another](../../guide/transfer.md), [costs](../../guide/costs.md#transfer).",
        "link transfer.link.Link transfer.weights.Weights transfer.weights.Push explain_transfer transfer.explain.TransferCost",
    ),
    "layout": (
        "Layout and Plan",
        "The positions of the ranks and the resulting groups, computed without starting processes.",
        "Layout Plan plan GroupOptions layout.*",
    ),
    "config": (
        "Configuration",
        "Reading a configuration in Python. [Configuration](../config.md) lists every key.",
        "load_config Config MeshConfig config.*",
    ),
    "data_parallel": (
        "Data and pipeline parallelism",
        "Building blocks for custom training loops. Guides: [your own loop](../../guide/own.md), [pipelines](../../guide/pipeline.md).",
        "GradientSync clip_grad_norm_ parallel.Pipelined parallel.* parallel.optimizer.decay_groups "
        "parallel.dropout.Dropout parallel.dropout.Drops",
    ),
    "tensor_parallel": (
        "Tensor parallelism",
        "Guide: [tensor parallelism](../../guide/tensor.md).",
        "tensor_parallel parallel.tensor.*",
    ),
    "context_parallel": (
        "Context parallelism",
        "Guide: [context parallelism](../../guide/context.md).",
        "parallel.context.*",
    ),
    "experts": ("Experts", "Guide: [experts](../../guide/experts.md).", "parallel.expert.*"),
    "models": (
        "ModelSpec",
        "The description of a model that meshcomm can split. Guide: [your own model in a config](../../guide/models.md).",
        "ModelSpec models.* models.check.check_model models.check.Use",
    ),
    "trainer": (
        "Trainer and callbacks",
        "Guides: [training from a config](../../guide/training.md), [metrics and early stop](../../guide/metrics.md).",
        "Trainer train.Callback train.*",
    ),
    "testing": (
        "Simulator and tests",
        "Guide: [simulator and pytest plugin](../../guide/simulator.md).",
        "simulate testing.*",
    ),
    "errors": (
        "Errors",
        "All errors that meshcomm raises. For each error, [Errors](../errors.md) shows a program that raises it, and its text.",
        "MeshcommError errors.*",
    ),
    "doctor": ("Doctor", "The results of `meshcomm doctor`, as data.", "doctor.*"),
    "algorithms": (
        "Algorithms",
        "All-reduce schedules as data. Guide: [costs and placement](../../guide/costs.md).",
        "algorithms.*",
    ),
    "predict": (
        "Predictions",
        "The predicted costs of a mesh, before it is created. Guide: [costs and placement](../../guide/costs.md).",
        " ".join(
            f"predict.{module}.{name}"
            for module, names in {
                "lint": "lint LintFinding footprint Footprint",
                "place": "place_config rank_placements write_placement Ranking Placement Share",
                "estimate": "workload Workload expected flows Flow memory Memory weights Weights Counts Sizes",
                "stages": "split_layers model_stages stages_of_rank part_costs Stage PartCosts",
                "passes": "orders timeline bubble schedule_properties Timeline Slot Pass Costs ScheduleProperties",
                "links": "machine known_machine discovered span Machine Level Span Route Hop",
                "times": "lines best backend_lines fastest bus_factor Line",
            }.items()
            for name in names.split()
        ),
    ),
}
# The maximum length of a signature on one line.
_WIDTH: Final = 100
# Methods that the rest of the package calls on configurations, results and meshes. They are not documented.
_INNER: Final = {
    *("problems", "given", "written", "place", "rules", "count", "at", "has"),
    *("model_post_init", "model_copy", "merging", "expert_gradient_dims", "sums", "key", "ranks_of"),
    *(
        "MeshStore.close",
        "Debug.metrics",
        "Debug.without_calls",
        "Pool.call",
        "Layout.digits",
        "Layout.others",
        "Layout.home",
        "Layout.rest",
    ),
}
# Classes that only the package instantiates. The arguments of their constructors are not documented.
_MADE: Final = {
    *(
        "Mesh",
        "Debug",
        "Elastic",
        "Handle",
        "Functional",
        "Objects",
        "MeshStore",
        "Watch",
        "Trace",
        "RankGrid",
    ),
    "RankFailure",
}
# Parts of other classes. Their members are not documented.
_BRIEF: Final = ("Engine", "Checkpoints", "Workload")
_LABELS: Final = (
    *(
        "Shape",
        "Called by",
        "Returns",
        "Gradient",
        "Steps",
        "Order",
        "Sent",
        "Numbers",
        "Parameters",
        "Raises",
    ),
    "Source",
)
_CODE: Final = re.compile(r"(``.+?``|`[^`]+`)")


def pages() -> dict[str, str]:
    """All pages by path in docs/reference: the index, and then the pages in PAGES."""
    names = _Names()
    lines = [
        "# API",
        "",
        "This page links to the entry of every public name: its arguments, shapes, result and errors, and the ranks that must call it. Names that",
        "begin with an underscore, and modules that are not listed on this page, may change between versions. Made by `python docs/tools/api.py` from the docstrings.",
    ]
    made = {"api.md": ""}
    for page, (title, opening, _) in PAGES.items():
        lines += ["", f"## [{title}](api/{page}.md)", "", "| name | description |", "|---|---|"]
        text = [f"# {title}", "", opening]
        for anchor, found in names.entries[page].items():
            entry = _Entry(names, page, anchor, found)
            lines.append(f"| [`{anchor}`](api/{page}.md#{anchor}) | {_cell(entry.first())} |")
            text += entry.lines()
        text += [
            "",
            "Made by `python docs/tools/api.py` from the docstrings; the [index](../api.md) has every name.",
        ]
        made[f"api/{page}.md"] = "\n".join(text) + "\n"
    made["api.md"] = "\n".join(lines) + "\n"
    return made


class _Names:
    """All entries by page and anchor, and the link targets of names in texts."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {page: {} for page in PAGES}
        self.pages: dict[str, str] = {}
        known: list[Any] = []
        # Among `meshcomm.x.*`, inner packages are first, so that a name is listed in the module that defines it.
        listed = [(path, page) for page, (_, _, paths) in PAGES.items() for path in paths.split()]
        for path, page in sorted(
            listed, key=lambda one: (one[0].endswith("*"), -one[0].count(".") * one[0].endswith("*"))
        ):
            for anchor, found in _found(path):
                if not any(found is each for each in known):
                    known.append(found)
                    self.entries[page][anchor] = found
        for page, entries in self.entries.items():
            for anchor, found in entries.items():
                self.pages[anchor] = page
                if inspect.isclass(found):
                    self.pages |= {f"{anchor}.{name}": page for name, _ in _members(found)}
        # Endings that belong to only one anchor, such as `Layout` or `Mesh.step`.
        ends: dict[str, set[str]] = {}
        for anchor in self.pages:
            parts = anchor.split(".")
            for at, part in enumerate(parts):
                if part[:1].isupper():
                    ends.setdefault(".".join(parts[at:]), set()).add(anchor)
        self.ends = {end: found.pop() for end, found in ends.items() if len(found) == 1}

    def link(self, text: str, name: str, page: str, owner: str = "") -> str | None:
        """Markdown that links `text` to the entry for `name`. None if there is no entry, or if it is the owner's own entry."""
        inside = [f"{'.'.join(owner.split('.')[:end])}.{name}" for end in (-1, None)] if owner else []
        name_of_mesh = re.sub(r"^mesh\.", "meshcomm.Mesh.", name)
        for anchor in (*inside, name, name_of_mesh, f"meshcomm.{name}", self.ends.get(name, "")):
            if anchor in self.pages:
                if anchor == owner:
                    return None
                to = "" if self.pages[anchor] == page else f"{self.pages[anchor]}.md"
                return f"[`{text}`]({to}#{anchor})"
        return None


@dataclasses.dataclass
class _Doc:
    """The parts of a docstring. blocks: paragraphs, and code as (language, text). fields: texts by label or parameter name."""

    blocks: list[str | tuple[str, str]] = dataclasses.field(default_factory=list)
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    # Tables and code blocks that belong to a field.
    under: dict[str, list[tuple[str, str]]] = dataclasses.field(default_factory=dict)

    def add(self, name: str, text: str) -> None:
        """Add a field, or append text to an existing field."""
        before = self.fields.get(name)
        self.fields[name] = text if before is None else f"{before.rstrip('.')}; {text}"


class _Entry:
    """The entry of one public name."""

    def __init__(self, names: _Names, page: str, anchor: str, found: Any) -> None:
        self.names, self.page, self.anchor, self.found = names, page, anchor, found
        self.kind: type | None = found if inspect.isclass(found) else None
        self.name = anchor.rpartition(".")[2]
        self.signature = _signature_of(found)
        documented = self.kind or _is_function(found) or _is_property(found)
        text = (inspect.getdoc(found) or "") if documented else "A constant or a type."
        if self.kind and self.kind.__name__ in _MADE:
            text = re.sub(r"\nArgs:\n(?: +.*\n?)+", "", text)
        self.doc = _parsed(text, list(self.signature))
        if self.kind:
            self.doc.fields = _field_texts(self.kind) | self.doc.fields

    def first(self) -> str:
        """The first sentence of the docstring, for a table."""
        text = next((block for block in self.doc.blocks if isinstance(block, str)), "")
        text = text or f"Record of {', '.join(self.doc.fields)}."
        return _prose(re.split(r"(?<=[.]) (?=[A-Z`])", text)[0], lambda name: None)

    def lines(self, level: int = 2) -> list[str]:
        """The Markdown lines of the entry. The entry of a class includes its members."""
        lines = ["", f'<a id="{self.anchor}"></a>', "", f"{'#' * level} `{self.anchor}`"]
        shown = self._shown()
        if shown:
            # With the quotes used in the source, since repr prefers the other kind.
            lines += ["", "```python", shown.replace("'", '"'), "```"]
        if self.kind and issubclass(self.kind, Exception):
            lines += ["", self._base(self.kind)]
        for block in self.doc.blocks:
            lines += ["", *self._block(block)]
        members = [
            _Entry(self.names, self.page, f"{self.anchor}.{name}", it)
            for name, it in (_members(self.kind) if self.kind else ())
        ]
        held = _is_result(self.found) or not shown
        rows = [self._row(name, text, held) for name, text in self.doc.fields.items() if not _is_label(name)]
        values = [each._value() for each in members if _is_property(each.found)]
        if held:
            lines += _table(("attribute", "type", "description"), [*rows, *values])
            values = []
        else:
            lines += _table(("argument", "type", "description"), rows)
        for name, blocks in self.doc.under.items():
            lines += [line for block in blocks for line in ("", f"`{name}`:", "", *self._block(block))]
        lines += self._labels()
        lines += _table(("attribute", "type", "description"), values)
        if self.kind and issubclass(self.kind, BaseModel):
            lines += ["", f"Keys: see [configuration](../config.md{_section(self.kind)})."]
        methods = [each for each in members if not _is_property(each.found)]
        if len(methods) > 3:
            rows = [(f"[`{each.name}`](#{each.anchor})", each.first()) for each in methods]
            lines += _table(("method", "description"), rows)
        return [*lines, *(line for each in methods for line in each.lines(level + 1))]

    def _shown(self) -> str:
        """The signature, or the value of a constant. Empty for classes that only the package instantiates."""
        if self.kind:
            hidden = issubclass(self.kind, (BaseModel, Exception)) or self.kind.__name__ in _MADE
            return "" if hidden else _written(self.name, self.signature, "")
        if _is_function(self.found):
            return _written(self.name, self.signature, _returned(self.found))
        return f"{self.name} = {_annotation_text(self.found)}"

    def _base(self, kind: type) -> str:
        base = kind.__bases__[0].__name__
        shown = f"## {kind.__name__}\n" in (REFERENCE / "errors.md").read_text(encoding="utf-8")
        example = f" [Example](../errors.md#{kind.__name__.lower()})." if shown else ""
        return f"Subclass of {self.names.link(base, base, self.page) or f'`{base}`'}.{example}"

    def _block(self, block: str | tuple[str, str]) -> list[str]:
        if isinstance(block, str):
            return [self._text(block)]
        language, text = block
        if language != "table":
            return [f"```{language}", text, "```"]
        rows = re.findall(r"^(\S.*?)(?: {2,}|$)(.*(?:\n .*)*)", text, re.MULTILINE)
        return _table(
            ("value", "description"), [(f"`{_bar(a)}`", self._text(" ".join(b.split()))) for a, b in rows]
        )[1:]

    def _row(self, name: str, text: str, anchored: bool) -> tuple[str, str, str]:
        """A table row for a parameter or an attribute."""
        names = [each.strip() for each in name.split(",")]
        annotations = {each: parameter.annotation for each, parameter in self.signature.items()}
        annotations = getattr(self.found, "__annotations__", {}) | annotations
        kinds = {self._type(annotations.get(each, inspect.Parameter.empty)) for each in names}
        return (
            ", ".join(
                f'<a id="{self.anchor}.{each}"></a>`{each}`' if anchored else f"`{each}`" for each in names
            ),
            kinds.pop() if len(kinds) == 1 else "",
            self._text(text),
        )

    def _value(self) -> tuple[str, str, str]:
        """A row for a property in the table of its class."""
        kind = self._type(inspect.signature(_function(self.found)).return_annotation)
        parts = [self._text(each) if isinstance(each, str) else f"`{each[1]}`" for each in self.doc.blocks]
        parts += [f"{label}: {self._text(text)}" for label, text in self.doc.fields.items()]
        return f'<a id="{self.anchor}"></a>`{self.name}`', kind, " ".join(parts)

    def _labels(self) -> list[str]:
        order = {label: at for at, label in enumerate(_LABELS)}
        labels = sorted(filter(_is_label, self.doc.fields), key=lambda name: order[name.split(",")[0]])
        listed = [f"- **{label}:** {self._text(self.doc.fields[label])}" for label in labels]
        return ["", *listed] if listed else []

    def _type(self, annotation: object) -> str:
        """The Markdown for a type. Each member of a union is linked if it has an entry."""
        if annotation is inspect.Parameter.empty:
            return ""
        module = vars(import_module(_function(self.found).__module__))
        parts = []
        for part in _union(_annotation_text(annotation)):
            known = [name for name in re.findall(r"\w+", part) if name in self.names.ends]
            link = self.names.link(_bar(part), known[0], self.page) if len(known) == 1 else None
            parts += [link] if link else [f"`{_bar(each)}`" for each in _choices(part, module)]
        return " or ".join(parts)

    def _text(self, text: str) -> str:
        own = {*self.signature, self.name}

        def link(name: str) -> str | None:
            found = self.names.link(name, name.removesuffix("()"), self.page, self.anchor)
            return None if name in own else found

        return _prose(text, link)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """The lines of a table after an empty line. Empty columns are omitted. Without rows, the result is empty."""
    kept = [at for at in range(len(head)) if any(row[at] for row in rows)]
    if not rows:
        return []
    cells = [
        [head[at] for at in kept],
        ["---"] * len(kept),
        *([_cell(row[at]) for at in kept] for row in rows),
    ]
    return ["", *(f"| {' | '.join(each)} |" for each in cells)]


# -- the objects -------------------------------------------------------------------------------------------


def _found(path: str) -> Iterable[tuple[str, Any]]:
    """Pairs of anchor and object for a path in PAGES. `module.*` yields all public names of the module."""
    anchor, _, where = path.rpartition("=")
    module, _, name = f"meshcomm.{where}".rpartition(".")
    package = import_module(module)
    if name != "*":
        return [(anchor or f"{module}.{name}", getattr(package, name))]
    own = (name for name, it in vars(package).items() if getattr(it, "__module__", None) == module)
    listed = getattr(package, "__all__", None) or [name for name in own if not name.startswith("_")]
    return [(f"{module}.{name}", getattr(package, name)) for name in listed]


def _members(kind: type) -> list[tuple[str, Any]]:
    """Public methods and properties with a docstring, in source order. Those of base classes in meshcomm are first."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__) if kind.__name__ not in _BRIEF else ():
        for name in vars(base) if base.__module__.startswith("meshcomm") else ():
            value = inspect.getattr_static(kind, name)
            value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            public = not name.startswith("_") or name == "__getitem__"
            inner = name in _INNER or f"{kind.__name__}.{name}" in _INNER
            if public and not inner and (inspect.isfunction(value) or _is_property(value)) and value.__doc__:
                found[name] = value
    return list(found.items())


def _is_function(found: Any) -> bool:
    return callable(found) and inspect.isroutine(found)


def _is_property(found: Any) -> bool:
    return isinstance(found, (property, cached_property))


def _function(found: Any) -> Any:
    """The function behind a property. Any other object is returned as is."""
    return found.func if isinstance(found, cached_property) else getattr(found, "fget", found)


def _is_result(found: Any) -> bool:
    """Whether `found` is a record that calls return, whose fields a user only reads."""
    record = dataclasses.is_dataclass(found) or (inspect.isclass(found) and issubclass(found, tuple))
    return record and found.__name__ not in ("Plan", "ModelSpec", "GroupOptions")


def _is_label(name: str) -> bool:
    return name.split(",")[0] in _LABELS


def _section(kind: type) -> str:
    """The anchor of a section on the configuration page. "" means the whole page."""
    match = re.match(r"`\[([\w.]+)\]`", kind.__doc__ or "")
    return f"#{match[1].replace('.', '').lower()}" if match else ""


def _field_texts(kind: type) -> dict[str, str]:
    """The docstrings below the fields of a class, by field name."""
    try:
        body = ast.parse(dedent(inspect.getsource(kind))).body[0]
    except (OSError, SyntaxError):
        return {}
    found: dict[str, str] = {}
    if isinstance(body, ast.ClassDef) and not issubclass(kind, BaseModel):
        for field, text in pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(
                    inspect.cleandoc(ast.literal_eval(text.value)).split()
                )
    return found


# -- signatures ------------------------------------------------------------------------------------------


class _Written:
    """A text that appears in a signature without quotes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    __str__ = __repr__


def _annotation_text(annotation: object) -> str:
    """An annotation as written in the source, or without module names."""
    if isinstance(annotation, (str, _Written)):
        return str(annotation)
    if isinstance(annotation, typing.ForwardRef):
        return annotation.__forward_arg__
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=\w)", "", inspect.formatannotation(annotation))


def _signature_of(found: Any) -> dict[str, inspect.Parameter]:
    """The parameters by name, as written in the source. A default from a factory is shown as the factory's call."""
    kind = found if inspect.isclass(found) else None
    made: dict[str, str] = {}
    if kind and (issubclass(kind, (BaseModel, Exception)) or kind.__name__ in _MADE):
        return {}
    if dataclasses.is_dataclass(found):
        kinds = {
            each.name: getattr(each.default_factory, "__name__", "") for each in dataclasses.fields(found)
        }
        made = {name: {"dict": "{}", "list": "[]"}.get(each, f"{each}()") for name, each in kinds.items()}
    called = found.__call__ if getattr(found, "_is_protocol", False) else found
    parameters = {}
    given = inspect.signature(called).parameters if kind or _is_function(found) else {}
    for name, each in given.items():
        if name in ("self", "cls"):
            continue
        if each.annotation is not each.empty:
            each = each.replace(annotation=_Written(_annotation_text(each.annotation)))
        if repr(each.default) == "<factory>" or inspect.isfunction(each.default):
            each = each.replace(default=_Written(made.get(name, "...")))
        parameters[name] = each
    return parameters


def _written(name: str, parameters: Mapping[str, inspect.Parameter], returns: str) -> str:
    """A signature on one line or, if it is too long, with one parameter per line."""
    signature = str(inspect.Signature(list(parameters.values()), __validate_parameters__=False))
    if len(name + signature + returns) <= _WIDTH:
        return name + signature + returns
    shown: list[str] = []
    for each in parameters.values():
        if (
            each.kind is not each.POSITIONAL_ONLY
            and any(it.kind is it.POSITIONAL_ONLY for it in parameters.values())
            and "/" not in shown
        ):
            shown.append("/")
        if each.kind is each.KEYWORD_ONLY and not any(one.startswith("*") for one in shown):
            shown.append("*")
        shown.append(str(each))
    return "\n".join([f"{name}(", *(f"    {each}," for each in shown), f"){returns}"])


def _returned(function: Any) -> str:
    """The return annotation of a function. For a function with overloads, the union of their return types."""
    texts = []
    for each in typing.get_overloads(function) or [function]:
        annotation = inspect.signature(each).return_annotation
        if annotation is not inspect.Signature.empty:
            # In overloads, the type variable X is a tensor or a list of tensors.
            texts += _union(re.sub(r"\bX\b", "Tensor", _annotation_text(annotation)))
    return f" -> {' | '.join(dict.fromkeys(texts))}" if texts else ""


def _union(text: str) -> list[str]:
    """The members of a union."""
    parts, depth = [""], 0
    for piece in re.split(r"([\[\](){}]| \| )", text):
        depth += piece in "[({" if piece else 0
        depth -= piece in "])}" if piece else 0
        if piece == " | " and not depth:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _choices(part: str, module: Mapping[str, Any]) -> list[str]:
    """The literals in a `Literal` type, the definition of a type alias, or else the type itself."""
    value = module.get(part)
    if isinstance(value, str):
        part = value
    elif typing.get_origin(value) in (typing.Union, types.UnionType):
        part = " | ".join(map(_annotation_text, typing.get_args(value)))
    elif typing.get_args(value):
        part = _annotation_text(value)
    texts = []
    for each in _union(part):
        literal = each.startswith("Literal[")
        texts += re.findall(r'"[^"]*"|\d+', each.replace("'", '"')) if literal else [each]
    return texts


# -- texts -----------------------------------------------------------------------------------------------


def _parsed(text: str, names: Iterable[str]) -> _Doc:
    """Split a docstring into parts. names: parameter names, which begin fields in the same way as labels."""
    label = rf"(?:{'|'.join(_LABELS)})(?:, [\w ]+)*: +(?=\S)|Raises (?=[A-Z`])"
    known = rf"\*{{0,2}}(?:{'|'.join(names) or '-'})(?:, \w+)*: +(?=\S)"
    # A sentence does not begin with a lowercase letter.
    any_name = r"[a-z]\w*(?:, [a-z]\w*)*: +(?=\S)"
    field = re.compile(f"{label}|{known}|{any_name}")
    behind = re.compile(rf"(?<=[.;]) (?={known})|(?<=\.) (?={any_name})")
    entry = re.compile(r" {4}\*{0,2}(\w+(?:, ?\w+)*): +(?=\S)")
    doc = _Doc()
    paragraph: list[str] = []
    current = ""
    section = gap = False

    def end() -> None:
        nonlocal current
        for part in re.split(rf"(?<=\.) (?={label})", " ".join(paragraph)) if paragraph else ():
            of_label = re.match(label, part)
            for piece in [part] if of_label else behind.split(part):
                if match := field.match(piece):
                    current = match[0].strip(" :*")
                    doc.add(current, piece[match.end() :])
                else:
                    doc.blocks.append(piece)
        paragraph.clear()

    # The names of one entry may span two lines.
    waiting = re.sub(r"(?m)^( +(?:\w+, ?)+)\n +(?=\w+[:,])", r"\1", text).splitlines()[::-1]
    while waiting:
        line = waiting.pop()
        indented = line.startswith(" ")
        if not line.strip():
            end()
            gap = True
        elif section and indented:
            if match := entry.match(line):
                current = match[1]
                doc.add(current, line[match.end() :])
            else:
                doc.fields[current] += f" {line.strip()}"
        elif gap and (indented or line.startswith(">>> ")):
            code = [line]
            while waiting and (waiting[-1].startswith(" ") or bool(waiting[-1].strip()) is not indented):
                code.append(waiting.pop())
            block = _code("\n".join(code))
            under = doc.fields.get(current, "").endswith(":") and not _is_label(current)
            (doc.under.setdefault(current, []) if under else doc.blocks).append(block)
        elif line in ("Args:", "Attributes:"):
            section = True
        else:
            # A field, or a sentence that follows a field.
            after = bool(paragraph) and not indented and paragraph[-1].endswith(".")
            if re.match(f"{label}|{known}", line) or (
                after and (field.match(line) or field.match(paragraph[0]))
            ):
                end()
            if not paragraph:
                current = ""
            section = gap = False
            paragraph.append(line.strip())
    end()
    return doc


def _code(text: str) -> tuple[str, str]:
    """The language and text of an indented block: Python, a table with two columns, or plain text."""
    text = dedent(text).strip("\n")
    if text.startswith(">>> "):
        return "pycon", text
    try:
        ast.parse(f"try: ...\n{text}" if text.startswith("except") else text)
    except SyntaxError:
        pairs = all(re.match(r"\S.*? {2,}\S| ", line) for line in text.splitlines())
        return "table" if pairs else "text", text
    return "python", text


def _prose(text: str, link: Callable[[str], str | None]) -> str:
    """The Markdown for a text. Code that names an entry, errors, and pages become links. Other markup stays unchanged."""
    parts = []
    for piece in _CODE.split(text):
        if piece.startswith("`"):
            parts.append(link(piece.strip("`")) or piece)
            continue
        piece = piece.replace("*", "\\*").replace("<", "&lt;").replace("__", "\\_\\_")
        piece = re.sub(r"\bdocs/([\w/]+)\.md", r"[\1](../../\1.md)", piece)
        parts.append(re.sub(r"(?<![\w./\[])[A-Z][a-z]+[A-Z]\w+\b", lambda m: link(m[0]) or m[0], piece))
    return "".join(parts)


def _bar(text: str) -> str:
    return text.replace("|", "\\|")


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def main() -> None:
    """Write the pages, and delete pages that are no longer generated."""
    made = pages()
    (REFERENCE / "api").mkdir(exist_ok=True)
    for path in (REFERENCE / "api").glob("*.md"):
        if f"api/{path.name}" not in made:
            path.unlink()
    for name, text in made.items():
        (REFERENCE / name).write_text(text, encoding="utf-8")
    print(f"written: docs/reference/api.md and {len(made) - 1} pages of docs/reference/api")


if __name__ == "__main__":
    main()
