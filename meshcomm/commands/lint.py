"""`meshcomm lint`: find settings of a mesh that will be slow or fail on its machines."""

from __future__ import annotations

from typing import Annotated

import typer

from meshcomm.commands.app import (
    AsJson,
    ConfigFile,
    Overrides,
    World,
    command,
    discovered_topology,
    show_facts,
)
from meshcomm.show.page import Facts, Line
from meshcomm.show.units import count


@command()
def lint(
    config: ConfigFile,
    world: World = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 1 if there is a finding.")] = False,
    json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Report mesh settings that will be slow or fail on the given machines, with the reason and a fix for each.

    With --strict, the exit code is 1 if there is a finding.
    """
    import resource

    from meshcomm.config import load_config
    from meshcomm.predict.links import machine
    from meshcomm.predict.lint import footprint
    from meshcomm.predict.lint import lint as find

    settings = load_config(config, overrides or ())
    topology = discovered_topology(settings)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    findings = find(settings, world, topology, None if soft == resource.RLIM_INFINITY else soft)
    plan, links = settings.plan(world), machine(topology)
    size = plan.layout.world_size
    facts = {
        "source": settings.source,
        "world_size": size,
        "links": [] if links is None else [str(level) for level in links.levels],
        "rank": footprint(settings, plan, size)._asdict(),
        "findings": [finding.facts() for finding in findings],
    }
    show_facts(facts, json, view)
    raise typer.Exit(int(strict and bool(findings)))


def view(facts: Facts) -> Line:
    """Return the links, the groups of one rank, and the findings, for a rich console."""
    from meshcomm.predict.lint import LintFinding

    rank = facts["rank"]
    findings = [str(LintFinding(*finding.values())) for finding in facts["findings"]]
    lines = [f"{count(len(findings), 'finding')} on {count(facts['world_size'], 'rank')}: {facts['source']}"]
    if facts["links"]:
        lines.append("links: " + "; ".join(facts["links"]))
    held = []
    if rank["nccl"]:
        held.append(f"{count(rank['nccl'], 'NCCL communicator')} (about {rank['nccl_mb'] / 1000:.1f} GB)")
    if rank["gloo"]:
        held.append(f"{count(rank['gloo'], 'Gloo group')} ({count(rank['descriptors'], 'file descriptor')})")
    if held:
        lines.append(f"a rank has up to {' and '.join(held)}")
    return Line("\n\n".join(["\n".join(lines), *findings]))
