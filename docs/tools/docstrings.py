"""A griffe extension for mkdocstrings: reads the docstrings of meshcomm, whose form griffe's own parsers do not know.

A docstring has paragraphs, indented code, parameters or fields (`axis: the tensor axis`, below `Args:` or not), and labels
(`Shape:`, `Called by:`, `Raises:`). Parameters and fields become tables, labels become a list, and names become links.
"""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from textwrap import dedent
from typing import Any, Final

import griffe
from griffe import Class, DocstringAttribute, DocstringParameter, DocstringSection, Expr, Function, Object

_WORDS: Final = "Shape|Called by|Returns|Gradient|Steps|Order|Sent|Numbers|Parameters|Raises|Source"
_LABEL: Final = rf"(?:{_WORDS})(?:, [\w ]+)*: +(?=\S)|Raises (?=[A-Z`])"
# A sentence does not begin with a lowercase letter.
_FIELD: Final = r"[a-z]\w*(?:, [a-z]\w*)*: +(?=\S)"
_CODE: Final = re.compile(r"(``.+?``|`[^`]+`)")
# The attributes of a mesh that have a page.
_OF_MESH: Final = {
    "debug": "meshcomm.mesh.debug.Debug",
    "elastic": "meshcomm.mesh.elastic.Elastic",
    "functional": "meshcomm.comm.functional.Functional",
    "objects": "meshcomm.comm.objects.Objects",
    "store": "meshcomm.rendezvous.store.MeshStore",
}


class Docstrings(griffe.Extension):
    """Replaces the parser of every docstring, and lists attributes and properties in the tables of their classes."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.__class__ = _Docstring
            # Tables of methods show the first line: the first sentence.
            head, gap, rest = obj.docstring.value.partition("\n\n")
            first, *others = re.split(rf"(?<=\.)\s(?=[A-Z`]|{_FIELD})", head, maxsplit=1)
            obj.docstring.value = "\n".join([" ".join(first.split()), *others]) + gap + rest

    def on_function(self, *, func: Function, **_: Any) -> None:
        if func.overloads:
            # One signature, with the results of all overloads. There, X is a tensor or a list of tensors.
            results = {str(each.returns): each.returns for each in func.overloads}
            for each in results.values():
                for name in each.iterate() if isinstance(each, Expr) else ():
                    if isinstance(name, griffe.ExprName) and name.name == "X":
                        name.name = "Tensor"
            func.returns = reduce(lambda left, right: griffe.ExprBinOp(left, "|", right), results.values())
            func.overloads = None

    def on_class(self, *, cls: Class, **_: Any) -> None:
        cls.docstring = cls.docstring or _Docstring("", parent=cls)
        for each in cls.attributes.values():
            if not each.is_alias and each.docstring:
                # Without a docstring, it has no entry of its own.
                each.extra["meshcomm"]["text"], each.docstring = each.docstring.value, None


class _Docstring(griffe.Docstring):
    def parse(self, *_: Any, **__: Any) -> list[DocstringSection]:
        """The text, then a table of the parameters or fields, then a list of the labels."""
        obj = self.parent
        assert obj is not None
        taken = {each.name.strip("*"): each for each in getattr(obj, "parameters", ()) if each.name != "self"}
        held = {**obj.inherited_members, **obj.members} if isinstance(obj, Class) else {}
        texts, labels, rows = [], [], {}
        for name, text in _parts(self.value, list(taken)):
            text = _linked(text, obj, {*taken, obj.name})
            if not name:
                texts.append(text)
            elif re.match(_WORDS, name):
                labels.append(f"- **{name}:** {text}")
            else:
                rows[name] = text
        for name, each in held.items():
            # The page of all settings has the keys of a section.
            if (
                (text := each.extra.get("meshcomm", {}).get("text"))
                and name[0] != "_"
                and ("property" in each.labels or not _is_section(obj))
            ):
                rows.setdefault(name, _linked(" ".join(text.split()), obj, {name}))
        sections: list[DocstringSection] = [griffe.DocstringSectionText("\n\n".join(texts))]
        arguments, attributes = [], []
        for names, text in rows.items():
            each = [taken.get(name) for name in names.split(", ")]
            if isinstance(obj, Function) or (all(each) and "dataclass" not in obj.labels):
                arguments.append(DocstringParameter(names, description=text, annotation=_type(obj, each)))
            else:
                each = [held.get(name) for name in names.split(", ")]
                text += "".join(f"[](){{#{obj.path}.{name}}}" for name in names.split(", "))
                attributes.append(DocstringAttribute(names, description=text, annotation=_type(obj, each)))
        if arguments:
            sections.append(griffe.DocstringSectionParameters(arguments))
        if attributes:
            sections.append(griffe.DocstringSectionAttributes(attributes))
        return [*sections, griffe.DocstringSectionText("\n".join(labels))]


def _is_section(obj: Object) -> bool:
    return isinstance(obj, Class) and any(base.name == "Section" for base in [obj, *obj.mro()])


def _type(obj: Object, named: list[Any]) -> Expr | str | None:
    """The type of parameters or attributes in one row, if it is the same, with the definitions of aliases."""
    first, *others = [getattr(each, "annotation", None) for each in named]

    def defined(part: Any) -> Any:
        if isinstance(part, griffe.ExprBinOp):
            return replace(part, left=defined(part.left), right=defined(part.right))
        with suppress(KeyError, AttributeError, griffe.AliasResolutionError):
            alias = obj.modules_collection[part.canonical_path]
            if alias.is_attribute and alias.parent.is_module and isinstance(alias.value, Expr):
                return defined(alias.value)
        return part

    return defined(first) if all(str(each) == str(first) for each in others) else None


def _parts(text: str, names: list[str]) -> list[tuple[str, str]]:
    """The parts of a docstring: a parameter, field or label with its text, and "" with a paragraph or a block of code."""
    known = rf"\*{{0,2}}(?:{'|'.join(names) or '-'})(?:, \w+)*: +(?=\S)"
    field = re.compile(f"{_LABEL}|{known}|{_FIELD}")
    # A label begins at the start of a line or sentence, and a field too, but not in the text of a label.
    start = re.compile(rf"\n(?={_LABEL}|{known})|(?<=\.)\n(?={_FIELD})|(?<=\.) (?={_LABEL})")
    inside = re.compile(rf"(?<=[.;])\s(?={known})|(?<=\.)\s(?={_FIELD})")
    parts: list[tuple[str, str]] = []
    for block in re.split(r"\n\n(?! )|(?<=\S)\n\n(?= )", re.sub(r"(?m)^( +.*\n)\n(?= )", r"\1 \n", text)):
        if block.startswith((" ", ">>> ")):
            if parts and parts[-1][0] and parts[-1][1].endswith(":"):
                parts[-1] = (parts[-1][0], f"{parts[-1][1]}\n\n{_code(block)}")
            else:
                parts.append(("", _code(block)))
        elif block.startswith(("Args:\n", "Attributes:\n")):
            entries = re.split(r"\n(?=\S)", dedent(block.partition("\n")[2]))
            for name, _, said in (entry.partition(": ") for entry in entries):
                parts.append((" ".join(name.strip("*").split()), " ".join(said.split())))
        else:
            for part in start.split(block):
                for piece in [part] if re.match(_LABEL, part) else inside.split(part):
                    match = field.match(piece)
                    name = match[0].strip(" :*") if match else ""
                    parts.append((name, " ".join(piece[match.end() if match else 0 :].split())))
    return parts


def _code(text: str) -> str:
    """A block of code in Markdown: Python, a table of values, or plain text."""
    text = dedent(text).strip("\n")
    if text.startswith(">>> "):
        return f"```pycon\n{text}\n```"
    try:
        ast.parse(f"try: ...\n{text}" if text.startswith("except") else text)
    except SyntaxError:
        if not all(re.match(r"\S.*? {2,}\S| ", line) for line in text.splitlines()):
            return f"```text\n{text}\n```"
        rows = re.findall(r"^(\S.*?)(?: {2,}|$)(.*(?:\n .*)*)", text, re.MULTILINE)
        cells = (f"| `{value}` | {' '.join(said.split())} |" for value, said in rows)
        return "\n".join(["| value | description |", "| --- | --- |", *cells])
    return f"```python\n{text}\n```"


def _linked(text: str, obj: Object, own: set[str]) -> str:
    """Markdown in which the names of objects, and of pages, are links, where they have an entry."""
    if "```" in text:
        return text

    def link(shown: str, name: str) -> str:
        path = None if name in own else _path(obj, name)
        return f'<autoref identifier="{path}" optional>{shown}</autoref>' if path else shown

    pieces = _CODE.split(text)
    for at, piece in enumerate(pieces):
        if at % 2:
            section = re.fullmatch(r"`\[([\w.]+)\]`", piece)
            keys = section and f"[{piece}](../config.md#{section[1].replace('.', '').lower()})"
            pieces[at] = keys or link(piece, piece.strip("`").removesuffix("()"))
        else:
            piece = piece.replace("*", "\\*").replace("<", "&lt;").replace("__", "\\_\\_")
            piece = re.sub(r"(?<![\w./])[A-Z][a-z]+[A-Z]\w+\b", lambda match: link(match[0], match[0]), piece)
            pieces[at] = re.sub(r"\bdocs/([\w/]+)\.md", r"[\1](../../\1.md)", piece)
    return "".join(pieces)


def _path(obj: Object, name: str) -> str | None:
    """The path of the object that `name` means in the docstring of `obj`. None if there is none, or if it is `obj` itself."""
    of_mesh = re.match(r"mesh\.(\w+)", name)
    if of_mesh:
        name = _OF_MESH.get(of_mesh[1], f"meshcomm.Mesh.{of_mesh[1]}") + name[of_mesh.end() :]
    paths = [
        f"{obj.path if isinstance(obj, Class) else obj.parent and obj.parent.path}.{name}",
        name,
        f"meshcomm.{name}",
        f"meshcomm.errors.{name}",
    ]
    with suppress(griffe.NameResolutionError):
        paths.insert(1, obj.resolve(name.partition(".")[0]) + "".join(name.partition(".")[1:]))
    for path in paths:
        with suppress(KeyError, ValueError, griffe.AliasResolutionError, griffe.CyclicAliasError):
            found = obj.modules_collection[path]
            if found.is_module:
                continue
            if found.canonical_path == obj.canonical_path:
                return None
            if found.is_alias and not found.inherited:
                return found.canonical_path
            return (
                f"{found.parent.canonical_path}.{found.name}" if found.is_attribute and found.parent else path
            )
    return None
