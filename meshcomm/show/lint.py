"""Findings about a mesh, as facts and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshcomm.config import Config, TopologyConfig
from meshcomm.layout import Plan
from meshcomm.predict.lint import Finding, footprint
from meshcomm.predict.machine import machine


def lint_facts(
    settings: Config, plan: Plan, topology: TopologyConfig, findings: Sequence[Finding]
) -> dict[str, Any]:
    """What `meshcomm lint` shows, as data that JSON can hold: levels, footprint of a rank, findings."""
    where = machine(topology)
    return {
        "world_size": plan.layout.world_size,
        "links": [] if where is None else [str(level) for level in where.levels],
        "rank": footprint(settings, plan, plan.layout.world_size)._asdict(),
        "findings": [finding.facts() for finding in findings],
    }


def lint_text(source: str, facts: dict[str, Any], findings: Sequence[Finding]) -> str:
    """The facts for a person."""
    rank = facts["rank"]
    lines = [f"{source}: {_count(len(findings), 'finding')} on {_count(facts['world_size'], 'rank')}"]
    if facts["links"]:
        lines.append("links: " + "; ".join(facts["links"]))
    kept = []
    if rank["nccl"]:
        kept.append(f"{_count(rank['nccl'], 'NCCL communicator')} (about {rank['nccl_mb'] / 1000:.1f} GB)")
    if rank["gloo"]:
        kept.append(
            f"{_count(rank['gloo'], 'Gloo group')} ({_count(rank['descriptors'], 'file descriptor')})"
        )
    if kept:
        lines.append(f"a rank has up to {' and '.join(kept)}")
    for finding in findings:
        lines += ["", str(finding)]
    return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
