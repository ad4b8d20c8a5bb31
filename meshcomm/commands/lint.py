"""Findings about a mesh, as facts and as text."""

from __future__ import annotations

from collections.abc import Sequence

from meshcomm.config import Config, TopologyConfig
from meshcomm.layout import Plan
from meshcomm.predict.links import machine
from meshcomm.predict.lint import LintFinding, footprint
from meshcomm.show.page import Facts
from meshcomm.show.units import count


def lint_facts(
    settings: Config, plan: Plan, topology: TopologyConfig, findings: Sequence[LintFinding]
) -> Facts:
    """Return the output of `meshcomm lint` as JSON-serializable data: link levels, one rank's footprint, and findings."""
    where = machine(topology)
    return {
        "world_size": plan.layout.world_size,
        "links": [] if where is None else [str(level) for level in where.levels],
        "rank": footprint(settings, plan, plan.layout.world_size)._asdict(),
        "findings": [finding.facts() for finding in findings],
    }


def lint_text(source: str, facts: Facts, findings: Sequence[LintFinding]) -> str:
    """Return the facts as text for the terminal."""
    rank = facts["rank"]
    lines = [f"{count(len(findings), 'finding')} on {count(facts['world_size'], 'rank')}: {source}"]
    if facts["links"]:
        lines.append("links: " + "; ".join(facts["links"]))
    nccl = f"{count(rank['nccl'], 'NCCL communicator')} (about {rank['nccl_mb'] / 1000:.1f} GB)"
    gloo = f"{count(rank['gloo'], 'Gloo group')} ({count(rank['descriptors'], 'file descriptor')})"
    if rank["nccl"] or rank["gloo"]:
        lines.append(
            f"a rank has up to {' and '.join([nccl] * bool(rank['nccl']) + [gloo] * bool(rank['gloo']))}"
        )
    return "\n\n".join(["\n".join(lines), *map(str, findings)])
