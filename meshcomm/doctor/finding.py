"""One thing that was looked at: well, doubtful or wrong; what was found, what to try; and how all of it is shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from meshcomm.errors import MeshcommError
from meshcomm.layout.sizes import coords_text

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

Level: TypeAlias = Literal["ok", "warn", "error"]
Facts: TypeAlias = dict[str, Any]

_KEYS: Final = ("level", "what", "given", "expected", "try")
_STYLES: Final = {"ok": "green", "warn": "yellow", "error": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """level "error": the job will fail. "warn": it may, or is slow, or others can reach it."""

    level: Level
    what: str
    given: str | None = None
    expected: str | None = None
    hint: str | None = None

    @classmethod
    def of(cls, error: MeshcommError, level: Level = "error") -> Finding:
        """What an error would have said."""
        return cls(level, error.what, error.given, error.expected, error.hint)

    @classmethod
    def read(cls, facts: Facts) -> Finding:
        """The reverse of `facts`."""
        return cls(*(facts[key] for key in _KEYS))

    def facts(self) -> Facts:
        """As plain data, with the keys level, what, given, expected, try."""
        return dict(zip(_KEYS, astuple(self), strict=True))

    def __str__(self) -> str:
        text = MeshcommError(self.what, given=self.given, expected=self.expected, hint=self.hint)
        return f"{self.level}: {text}"


def exit_code(findings: Iterable[Finding]) -> int:
    """1 where something is an error, else 0."""
    return int(any(finding.level == "error" for finding in findings))


def view(facts: Facts) -> Group:
    """Facts first, then findings, the worst last, where the eye is."""
    from rich.console import Group
    from rich.text import Text

    tables = [_pairs("versions", facts["versions"]), _backends(facts), _support(facts)]
    tables += [_host(facts), _limits(facts)]
    if facts["environment"]:
        tables.append(_pairs("environment", facts["environment"]))
    if facts["ranks"] is not None:
        tables.append(_ranks(facts))
    findings = [Finding.read(found) for found in facts["findings"]]
    lines: list[RenderableType] = []
    for level, style in _STYLES.items():
        for found in findings:
            if found.level == level:
                text = f"ok: {found.what}" + (f" ({found.given})" if found.given else "")
                lines.append(Text(text if level == "ok" else str(found), style=style))
    return Group(*(each for table in tables for each in (table, Text())), *lines, Text(headline(findings)))


def headline(findings: list[Finding]) -> str:
    """
    >>> headline([Finding("ok", "a"), Finding("warn", "b")])
    '0 errors, 1 warning'
    """
    levels = [found.level for found in findings]
    errors, warnings = levels.count("error"), levels.count("warn")
    return f"{errors} error{'' if errors == 1 else 's'}, {warnings} warning{'' if warnings == 1 else 's'}"


def _backends(facts: Facts) -> Table:
    found = facts["backends"]
    auto: dict[str, list[str]] = {}
    for device, backend in found["auto"].items():
        auto.setdefault(backend, []).append(device)
    names = dict.fromkeys((*found["available"], *found["registered"]))
    here = {name: "yes" if found["available"].get(name, True) else "no" for name in names}
    rows = [(name, here[name], " ".join(auto.get(name, ())) or "-") for name in names]
    return _table("backends", ("backend", "here", "auto on"), rows)


def _support(facts: Facts) -> Table:
    dtypes: dict[tuple[str, str], list[str]] = {}
    for row in facts["support"]:
        dtypes.setdefault((row["backend"], row["ops"]), []).append(row["dtype"])
    rows = [(*key, " ".join(names)) for key, names in dtypes.items()]
    return _table("reductions", ("backend", "ops", "dtypes"), rows)


def _host(facts: Facts) -> Table:
    host, here = facts["host"], facts["devices"]
    rows = [("name", "", " ".join(host["addresses"]) or "none")]
    for each in host["interfaces"]:
        rows.append((each["name"], "up" if each["up"] else "down", " ".join(each["addresses"]) or "none"))
    rows.append(("cores", str(here["cpus"]), ""))
    rows += [(f"cuda:{index}", name, "") for index, name in enumerate(here["cuda"])]
    return _table(f"host {host['name']}", ("what", "state", "addresses"), rows)


def _limits(facts: Facts) -> Table:
    def figure(value: int | None, none: str) -> str:
        return none if value is None else f"{value:,}"

    rows = [
        (each["name"], each["scope"], figure(each["limit"], "none"), f"{each['used']:,}", figure(each["needed"], "-"))
        for each in facts["limits"]
    ]  # fmt: skip
    table = _table("limits", ("what", "of the", "limit", "in use", "plan adds at most"), rows)
    if (cost := facts["gloo_group"]) is not None:
        table.caption = (
            f"one Gloo group, measured here: {cost['descriptors']} descriptors and {cost['threads']} threads, "
            "and a descriptor for each peer it talks to"
        )
        table.caption_justify = "left"
    return table


def _ranks(facts: Facts) -> Table:
    rows = []
    for row in facts["ranks"]:
        where = (row["host"], row["interface"] or "-", row["address"], row["device"])
        rows.append((str(row["rank"]), coords_text(row["coords"] or {}) or "-", *where))
    return _table("ranks", ("rank", "coords", "host", "interface", "address", "device"), rows)


def _pairs(title: str, values: dict[str, str | None]) -> Table:
    rows = [(name, "none" if value is None else value) for name, value in values.items()]
    return _table(title, ("name", "value"), rows)


def _table(title: str, columns: Sequence[str], rows: Iterable[tuple[str, ...]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.collapse_padding = True
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
