"""From measured times along dims to the speed of the machine's links, and to a `[topology]` that says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshcomm.config import Config, Links, TopologyConfig, load
from meshcomm.config.model import plain
from meshcomm.config.wording import key_path, whole_toml
from meshcomm.costs.fitting import Fit, Time, assumed, fit, work
from meshcomm.costs.route import route
from meshcomm.errors import ConfigError
from meshcomm.layout import Plan
from meshcomm.topology import Machine, span

# The first words of a file that may be written over.
MARK = "# Measured by `meshcomm bench"


class Fitted(NamedTuple):
    """What the times say.

    dims: each dim's own numbers. links: by link class, all dims of the class together.
    left_out: (dim, operation, why) for times that no constant was made from.
    """

    dims: Mapping[str, Fit]
    links: Mapping[str, Fit]
    left_out: tuple[tuple[str, str, str], ...]


def fit_links(times: Sequence[Time], plan: Plan, machine: Machine) -> Fitted:
    """Fit latency and bandwidth of each dim, and of each link class that the dims cross.

    plan: with every backend decided, as that of a live mesh. Each call's steps and bytes are those of the
    algorithm that `assumed` names, all on the slowest link that the dim's groups cross.
    Raises ConfigError as `fit` does, and where no operation was measured whose algorithm is known.
    """
    by_dim: dict[str, list[Time]] = {}
    left_out: dict[tuple[str, str], str] = {}
    link_of: dict[str, str] = {}
    for time in times:
        family = plan.family(time.dim)
        backend = family.options.backend
        found = span(plan.layout.groups(time.dim), machine)
        assert found.slowest is not None
        link_of[time.dim] = found.slowest
        if assumed(backend, time.operation) is None:
            left_out[time.dim, time.operation] = f"{backend}'s algorithm for it is not in the model"
        elif time.operation == "all_to_all" and len(route(found, machine).hops) > 1:
            left_out[time.dim, time.operation] = "its messages cross links of two classes"
        else:
            by_dim.setdefault(time.dim, []).append(time)
    if not by_dim:
        raise ConfigError(
            "no operation was measured from which latency and bandwidth follow",
            given=", ".join(f"{operation} along {dim}: {why}" for (dim, operation), why in left_out.items()),
            expected="an operation whose algorithm is known on this backend",
            hint="--op all_reduce --op all_gather --op sendrecv",
        )

    def together(dims: Sequence[str]) -> Fit:
        chosen = [time for dim in dims for time in by_dim[dim]]
        return fit(
            chosen,
            [
                work(plan.family(t.dim).options.backend, t.operation, t.size_bytes, plan.family(t.dim).size)
                for t in chosen
            ],
        )

    classes: dict[str, list[str]] = {}
    for dim in by_dim:
        classes.setdefault(link_of[dim], []).append(dim)
    order = [level.name for level in machine.levels if level.name in classes]
    return Fitted(
        dims={dim: together([dim]) for dim in by_dim},
        links={name: together(classes[name]) for name in order},
        left_out=tuple((*key, why) for key, why in left_out.items()),
    )


def measured_topology(topology: TopologyConfig, links: Mapping[str, Fit]) -> TopologyConfig:
    """`topology` with the links' speeds replaced by those measured; a link that was not is not known.

    What a call costs beside its messages is in the latencies, so `call_us` is 0.
    """
    speeds = Links(**{name: found.link for name, found in links.items()})
    return topology.model_copy(update={"links": speeds, "call_us": 0.0})


def measured_text(settings: Config, topology: TopologyConfig, links: Mapping[str, Fit], facts: str) -> str:
    """A TOML file with the mesh that was measured and `[topology]`: a config of its own, or to be pasted.

    facts: where, when and on what, for the first lines. Raises ConfigError where a part of it does not load.
    """
    written = measured_topology(topology, links)
    whole = _without_none(plain(written.model_dump()))
    sections = {
        "mesh": _without_none(plain(settings.mesh.model_dump(exclude_unset=True))),
        "topology": {name: value for name, value in whole.items() if name != "links"},
        "topology.links": whole["links"],
    }
    head = [f"{MARK} --fit`: {facts}"]
    for name, found in links.items():
        notes = "".join(f"; {note}" for note in found.notes)
        head.append(
            f"# links.{name}: {found.times} times along {', '.join(found.dims)}; "
            f"the model is {found.error:.0%} off in the median, {found.worst:.0%} at most{notes}"
        )
    text = head
    for section, table in sections.items():
        text += ["", f"[{section}]"]
        text += [f"{key_path([key])} = {whole_toml(value)}" for key, value in table.items()]
    # What is written must be what was measured, before anyone plans by it.
    assert load({"mesh": sections["mesh"], "topology": whole}).topology == written
    return "\n".join(text) + "\n"


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """Without None, which TOML does not know, and empty tables: here both are the defaults."""
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value is not None and value != {}
    }
