"""What was found, for a rich console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshcomm.doctor.finding import Facts, Finding

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

_ORDER = ("error", "warn", "ok")
_STYLES = {"error": "bold red", "warn": "yellow", "ok": "green"}


def view(facts: Facts) -> Group:
    """Facts first, then findings, the worst last, where the eye is."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_pairs("versions", facts["versions"]), _backends(facts), _support(facts)]
    parts += [_host(facts), _limits(facts)]
    if facts["environment"]:
        parts.append(_pairs("environment", facts["environment"]))
    if facts["ranks"] is not None:
        parts.append(_ranks(facts))
    findings = [Finding.read(found) for found in facts["findings"]]
    lines: list[RenderableType] = []
    for level in reversed(_ORDER):
        for found in findings:
            if found.level == level:
                text = f"ok: {found.what}" + (f" ({found.given})" if found.given else "")
                lines.append(Text(text if level == "ok" else str(found), style=_STYLES[level]))
    return Group(*(each for part in parts for each in (part, Text())), *lines, Text(headline(findings)))


def headline(findings: list[Finding]) -> str:
    """
    >>> headline([Finding("ok", "a"), Finding("warn", "b")])
    '0 errors, 1 warning'
    """
    counts = {level: sum(found.level == level for found in findings) for level in _ORDER}
    errors, warnings = counts["error"], counts["warn"]
    return f"{errors} error{'' if errors == 1 else 's'}, {warnings} warning{'' if warnings == 1 else 's'}"


def _backends(facts: Facts) -> Table:
    found = facts["backends"]
    auto: dict[str, list[str]] = {}
    for device, backend in found["auto"].items():
        auto.setdefault(backend, []).append(device)
    table = _table("backends", "backend", "here", "auto on")
    for name in dict.fromkeys((*found["available"], *found["registered"])):
        here = found["available"].get(name, True)
        table.add_row(name, "yes" if here else "no", " ".join(auto.get(name, ())) or "-")
    return table


def _support(facts: Facts) -> Table:
    table = _table("reductions", "backend", "ops", "dtypes")
    rows: dict[tuple[str, str], list[str]] = {}
    for row in facts["support"]:
        rows.setdefault((row["backend"], row["ops"]), []).append(row["dtype"])
    for (backend, ops), dtypes in rows.items():
        table.add_row(backend, ops, " ".join(dtypes))
    return table


def _host(facts: Facts) -> Table:
    host, here = facts["host"], facts["devices"]
    table = _table(f"host {host['name']}", "what", "state", "addresses")
    table.add_row("name", "", " ".join(host["addresses"]) or "none")
    for each in host["interfaces"]:
        state = {True: "up", False: "down", None: "unknown"}[each["up"]]
        table.add_row(each["name"], state, " ".join(each["addresses"]) or "none")
    table.add_row("cores", str(here["cpus"]), "")
    for index, name in enumerate(here["cuda"]):
        table.add_row(f"cuda:{index}", name, "")
    return table


def _limits(facts: Facts) -> Table:
    table = _table("limits", "what", "of the", "limit", "in use", "plan adds at most")
    for each in facts["limits"]:
        table.add_row(
            each["name"],
            each["scope"],
            "none" if each["limit"] is None else f"{each['limit']:,}",
            f"{each['used']:,}",
            "-" if each["needed"] is None else f"{each['needed']:,}",
        )
    cost = facts["gloo_group"]
    if cost is not None:
        table.caption = (
            f"one Gloo group, measured here: {cost['descriptors']} descriptors and {cost['threads']} threads, "
            "and a descriptor for each peer it talks to"
        )
        table.caption_justify = "left"
    return table


def _ranks(facts: Facts) -> Table:
    table = _table("ranks", "rank", "coords", "host", "interface", "address", "device")
    for row in facts["ranks"]:
        coords = " ".join(f"{name}={coord}" for name, coord in (row["coords"] or {}).items())
        table.add_row(
            str(row["rank"]),
            coords or "-",
            row["host"],
            row["interface"] or "-",
            row["address"],
            row["device"],
        )
    return table


def _pairs(title: str, values: dict[str, str | None]) -> Table:
    table = _table(title, "name", "value")
    for name, value in values.items():
        table.add_row(name, value if value is not None else "none")
    return table


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
