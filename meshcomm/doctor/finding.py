"""One thing that was looked at: well, doubtful or wrong; what was found, what to try; and how all of it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from meshcomm.errors import MeshcommError
from meshcomm.layout.sizes import coords_text
from meshcomm.show.page import Cells, Folded

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

Level: TypeAlias = Literal["ok", "warn", "error"]
Facts: TypeAlias = dict[str, Any]

_KEYS: Final = ("level", "what", "given", "expected", "try")
# The worst first.
_STYLES: Final = {"error": "bold red", "warn": "yellow", "ok": "green"}


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
    """Findings first, the worst first; then the facts."""
    from rich.console import Group

    findings = [Finding.read(found) for found in facts["findings"]]
    lines: list[RenderableType] = [Folded(headline(findings))]
    for level, style in _STYLES.items():
        for found in findings:
            if found.level == level:
                text = f"ok: {found.what}" + (f" ({found.given})" if found.given else "")
                lines.append(Folded(text if level == "ok" else str(found), style))
    tables = {
        "versions": _pairs(facts["versions"]),
        "backends": _backends(facts),
        "reductions": _support(facts),
        f"host {facts['host']['name']}": _host(facts),
        "limits": _limits(facts),
        "environment": _pairs(facts["environment"]),
        "ranks": _ranks(facts),
    }
    for title, table in tables.items():
        if table.rows:
            lines += [Folded(""), Folded(title), table]
            if title == "limits" and (cost := facts["gloo_group"]) is not None:
                lines.append(
                    Folded(
                        f"one Gloo group, measured here: {cost['descriptors']} descriptors and {cost['threads']} threads, "
                        "and a descriptor for each peer it talks to"
                    )
                )
    return Group(*lines)


def headline(findings: list[Finding]) -> str:
    """
    >>> headline([Finding("ok", "a"), Finding("warn", "b")])
    '0 errors, 1 warning'
    """
    levels = [found.level for found in findings]
    errors, warnings = levels.count("error"), levels.count("warn")
    return f"{errors} error{'' if errors == 1 else 's'}, {warnings} warning{'' if warnings == 1 else 's'}"


def _backends(facts: Facts) -> Cells:
    found = facts["backends"]
    auto: dict[str, list[str]] = {}
    for device, backend in found["auto"].items():
        auto.setdefault(backend, []).append(device)
    names = dict.fromkeys((*found["available"], *found["registered"]))
    here = {name: "yes" if found["available"].get(name, True) else "no" for name in names}
    rows = [(name, here[name], " ".join(auto.get(name, ())) or "-") for name in names]
    return Cells(("backend", "here", "auto on"), tuple(rows))


def _support(facts: Facts) -> Cells:
    dtypes: dict[tuple[str, str], list[str]] = {}
    for row in facts["support"]:
        dtypes.setdefault((row["backend"], row["ops"]), []).append(row["dtype"])
    rows = [(*key, " ".join(names)) for key, names in dtypes.items()]
    return Cells(("backend", "ops", "dtypes"), tuple(rows), once=1)


def _host(facts: Facts) -> Cells:
    host, here = facts["host"], facts["devices"]
    rows = [("name", "", " ".join(host["addresses"]) or "none")]
    for each in host["interfaces"]:
        rows.append((each["name"], "up" if each["up"] else "down", " ".join(each["addresses"]) or "none"))
    rows.append(("cores", str(here["cpus"]), ""))
    rows += [(f"cuda:{index}", name, "") for index, name in enumerate(here["cuda"])]
    return Cells(("what", "state", "addresses"), tuple(rows))


def _limits(facts: Facts) -> Cells:
    return Cells.of(
        facts["limits"],
        {
            "what": lambda each: each["name"],
            "of the": lambda each: each["scope"],
            ">limit": lambda each: "none" if each["limit"] is None else each["limit"],
            ">in use": lambda each: each["used"],
            ">plan adds at most": lambda each: each["needed"],
        },
    )


def _ranks(facts: Facts) -> Cells:
    return Cells.of(
        facts["ranks"] or (),
        {
            "rank": lambda row: str(row["rank"]),
            "coords": lambda row: coords_text(row["coords"] or {}) or "-",
            **{key: partial(_of_rank, key) for key in ("host", "interface", "address", "device")},
        },
    )


def _of_rank(key: str, row: Facts) -> str:
    return row[key] or "-"


def _pairs(values: dict[str, str | None]) -> Cells:
    return Cells(("name", "value"), tuple((name, value or "none") for name, value in values.items()))
