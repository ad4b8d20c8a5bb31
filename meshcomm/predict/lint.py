"""Find performance problems and failures to expect from a mesh on a machine. Each finding gives a reason and a fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from meshcomm.config import Config, TopologyConfig
from meshcomm.config.parallel import USUAL_NAMES, ParallelRole
from meshcomm.config.rules_mesh import chosen
from meshcomm.errors import MeshcommError
from meshcomm.layout import Layout, Plan
from meshcomm.layout.sizes import divisors, ranks_text, toml_dims
from meshcomm.predict.links import ASSUMED_MEMORY_GB, Machine, Placed, Span, machine, places_of, span

# The largest share of a rank's memory that its communicators should use.
_MEMORY_SHARE: Final = 0.1
# The size of one NCCL communicator after its first all_reduce, in megabytes, as a user measured it on four A100s
# with NVLink under PyTorch in 2023: 544 for two ranks, 688 for more (github.com/NVIDIA/nccl, issue 964).
# It grows with the number of channels (issue 986), so it differs on other machines.
NCCL_MB_OF_TWO: Final = 544
NCCL_MB: Final = 688
# File descriptors that one idle Gloo group uses, measured on Linux by tests/doctor.
GLOO_DESCRIPTORS: Final = 4
# The number of nodes and ranks that a finding lists.
_NODES: Final = 4
_ORDERED: Final = 16


class LintFinding(NamedTuple):
    """rule: the rule's name. what: the problem and why it matters. given, expected, hint: as in MeshcommError."""

    rule: str
    what: str
    given: str
    expected: str
    hint: str | None

    def facts(self) -> dict[str, Any]:
        """Return the finding as plain data, with the keys rule, what, given, expected and try."""
        facts = self._asdict()
        return facts | {"try": facts.pop("hint")}

    def __str__(self) -> str:
        message = f"{self.rule}: {self.what}"
        return str(MeshcommError(message, given=self.given, expected=self.expected, hint=self.hint))


class Footprint(NamedTuple):
    """The resources that one rank uses when all of its groups are in use.

    nccl, gloo: the number of communicators, including torch.distributed's default group.
    nccl_mb: the estimated device memory in megabytes. descriptors: the number of file descriptors that Gloo opens.
    undecided: the number of groups whose backend depends on the device at startup; they are counted as nccl.
    """

    nccl: int
    gloo: int
    nccl_mb: int
    descriptors: int
    undecided: int


def footprint(settings: Config, plan: Plan, world: int) -> Footprint:
    """Return the resources that one rank's groups use. Communicators created by `ncclCommSplit` count like any other.

    The default group is idle unless a group of the plan contains all ranks. For an idle default group, Gloo opens no
    connections, and NCCL, which connects at the first call, uses no memory.
    """
    created = [(f.size, chosen(settings.mesh, f.options.backend)) for f in plan.families if f.creates]
    nccl = [size for size, backend in created if backend in ("nccl", None)]
    gloo = [size for size, backend in created if backend == "gloo"]
    default = chosen(settings.mesh, settings.mesh.backend) or "nccl"
    idle_gloo = default == "gloo" and world > 1
    return Footprint(
        nccl=len(nccl) + (default == "nccl" and world > 1),
        gloo=len(gloo) + idle_gloo,
        nccl_mb=sum(NCCL_MB_OF_TWO if size == 2 else NCCL_MB for size in nccl),
        descriptors=1 + GLOO_DESCRIPTORS * (len(gloo) + idle_gloo) + sum(size - 1 for size in gloo),
        undecided=sum(backend is None for _, backend in created),
    )


def lint(
    settings: Config, world: int | None, topology: TopologyConfig, descriptor_limit: int | None = None
) -> list[LintFinding]:
    """Return all findings about `settings` on `world` ranks.

    topology: the result of `discovered`. descriptor_limit: how many file descriptors a process may open; None skips
    the check. Raises ConfigError if the dim sizes do not match `world`.
    """
    settings = settings.resolved(world)
    plan = settings.plan(world)
    ranks = plan.layout.ranks
    size = world if world is not None else int(ranks.max()) + 1
    findings: list[LintFinding] = []
    where = machine(topology)
    if where is None:
        findings.append(
            LintFinding(
                "topology",
                "it is not known which ranks share a node: links are not checked",
                "no topology.ranks_per_node, and no launcher's LOCAL_WORLD_SIZE",
                "a number of ranks on each node",
                "--set topology.ranks_per_node=8",
            )
        )
    else:
        spans = {f.name: span(plan.layout.groups(f.name), where) for f in plan.families if f.size > 1}
        case = _Case(settings, plan, topology, where, spans, roles(settings), size)
        for rule in (_devices, _last_node, _tensor, _pipeline):
            findings.extend(rule(case))
        findings.extend(finding for finding in [scattered(plan, topology)] if finding is not None)
    findings.extend(_communicators(settings, plan, topology, size, descriptor_limit))
    return findings


def scattered(plan: Plan, topology: TopologyConfig) -> LintFinding | None:
    """Return a finding if some dims cross nodes only because the ranks of a node are not consecutive."""
    where = machine(topology)
    if not isinstance(topology, Placed) or where is None:
        return None
    layout, ranks = plan.layout, np.sort(plan.layout.ranks)
    order = ranks[places_of(topology, ranks).argsort()].tolist()
    cured = Layout(layout.dims, rank_order=order, views=layout.views, merge=layout.merge)
    crossing = [
        family.name
        for family in plan.families
        if span(layout.groups(family.name), where).most > 1 == span(cured.groups(family.name), where).most
    ]
    if not crossing:
        return None
    nodes = np.array(topology.nodes)
    ranks_of_node = {
        node: np.flatnonzero(nodes == node).tolist() for node in range(min(_NODES, nodes.max() + 1))
    }
    more = "; ..." if nodes.max() >= _NODES else ""
    return LintFinding(
        "scattered-ranks",
        f"{', '.join(crossing)} {'crosses' if len(crossing) == 1 else 'cross'} nodes, "
        "because the ranks of a node are not consecutive",
        "; ".join(f"node {node}: {ranks_text(ranks)}" for node, ranks in ranks_of_node.items()) + more,
        "ranks 0, 1, 2, ... on the first node, the next ranks on the second",
        "srun -m block, mpirun --map-by slot, or mesh.rank_order"
        + (f" = {order}" if len(order) <= _ORDERED else ""),
    )


def roles(settings: Config) -> dict[str, ParallelRole]:
    """Return a mapping from dim to part.

    The parts are read from [parallel], or inferred from common dim names such as "tp" and "pp" if it is missing.
    """
    if settings.parallel is not None:
        return {dim: part for part, dim in settings.parallel.parts.items()}
    names = [*settings.mesh.dims, *(name for sizes in settings.mesh.views.values() for name in sizes)]
    return {name: USUAL_NAMES[name] for name in names if name in USUAL_NAMES}


class _Case(NamedTuple):
    """settings: a resolved config. spans: the span of every family whose groups have at least two ranks, by name."""

    settings: Config
    plan: Plan
    topology: TopologyConfig
    machine: Machine
    spans: Mapping[str, Span]
    roles: Mapping[str, ParallelRole]
    world: int

    def of(self, part: ParallelRole) -> tuple[str, Span] | None:
        """Return a part's dim and its span, or None if it has no groups of at least two ranks."""
        dim = next((dim for dim, p in self.roles.items() if p == part and dim in self.spans), None)
        return None if dim is None else (dim, self.spans[dim])

    @property
    def dims_in_order(self) -> dict[str, int]:
        """The dims, whose order may be changed; empty if mesh.rank_order is set."""
        mesh = self.settings.mesh
        return dict(mesh.dims) if mesh.rank_order is None else {}

    def laid_out(self, dims: Mapping[str, int], along: str) -> Span:
        """Return the span of the groups along a dim in a mesh of `dims` on the same ranks."""
        return span(Layout(dims, rank_order=self.plan.layout.ranks.tolist()).groups(along), self.machine)


def _devices(case: _Case) -> Iterator[LintFinding]:
    devices, per_node = case.topology.devices_per_node, case.machine.ranks_per_node
    if case.settings.mesh.device == "cpu" or devices is None or min(per_node, case.world) <= devices:
        return
    yield LintFinding(
        "devices",
        "a node has more ranks than devices: two ranks would share a device, which NCCL does not allow",
        f"{min(per_node, case.world)} ranks on a node, {devices} devices",
        f"at most {devices} ranks on a node",
        f"--nproc-per-node {devices}, and topology.ranks_per_node = {devices}",
    )


def _last_node(case: _Case) -> Iterator[LintFinding]:
    per_node = case.machine.ranks_per_node
    rest = case.world % per_node
    if case.world > per_node and rest:
        full = case.world // per_node * per_node
        yield LintFinding(
            "last-node",
            "the last node is not full: its groups are placed differently from the rest, and links are shared unequally",
            f"{case.world} ranks, {per_node} on a node: {case.world} % {per_node} = {rest}",
            f"a multiple of {per_node} ranks",
            f"{full} or {full + per_node} processes",
        )


def _tensor(case: _Case) -> Iterator[LintFinding]:
    tensor = case.of("tensor")
    if tensor is None or tensor[1].most == 1:
        return
    dim, spans = tensor
    crossing = sum(n for name, n in spans.crosses.items() if name != "node")
    # A group that crosses nodes spans at least two, even if other groups stay inside a node.
    number = _range(spans._replace(fewest=max(spans.fewest, 2)))
    yield LintFinding(
        "tensor-across-nodes",
        f"{dim} crosses nodes: its all_reduces (or gathers and scatters), four or more in each layer and "
        "micro-batch, wait for the network instead of the node's links",
        f"{dim} = {spans.size}, {case.machine.ranks_per_node} ranks on a node: {crossing} of "
        f"{sum(spans.crosses.values())} groups span {number} nodes",
        f"{dim} innermost in mesh.dims, with a size that divides {case.machine.ranks_per_node}",
        _moved(case, dim),
    )


def _moved(case: _Case, dim: str) -> str | None:
    """Return the dims with `dim` innermost. Its size is reduced if its groups would not fit inside a node."""
    dims = case.dims_in_order
    if dim not in dims:
        return None
    others = {name: size for name, size in dims.items() if name != dim}
    grows = ("pipeline", "data", "shard")
    grown = next((n for n, part in case.roles.items() if part in grows and n in others), None)
    for size in reversed(divisors(dims[dim])[1:] if grown is not None else [dims[dim]]):
        mended = {n: number * (dims[dim] // size if n == grown else 1) for n, number in others.items()}
        mended[dim] = size
        if case.laid_out(mended, dim).most == 1:
            return f"mesh.dims = {toml_dims(mended)}"
    return None


def _pipeline(case: _Case) -> Iterator[LintFinding]:
    pipeline, data = case.of("pipeline"), case.of("data") or case.of("shard")
    if pipeline is None or data is None or pipeline[1].most > 1 or data[1].most == 1:
        return
    dim, other = pipeline[0], data[0]
    hint = None
    if dim in (dims := case.dims_in_order):
        mended = {dim: dims[dim], **{name: size for name, size in dims.items() if name != dim}}
        if case.laid_out(mended, other).most < data[1].most:
            hint = f"mesh.dims = {toml_dims(mended)}"
    yield LintFinding(
        "pipeline-inside-node",
        f"{dim} stays inside nodes while {other} crosses them: the fast links carry one activation for each "
        "micro-batch, and the network carries the gradients of all weights",
        f"{dim} = {pipeline[1].size} on {_range(pipeline[1])} node, {other} = {data[1].size} on "
        f"{_range(data[1])} nodes",
        f"{dim} outside {other}: the pipeline crosses nodes first",
        hint,
    )


def _communicators(
    settings: Config, plan: Plan, topology: TopologyConfig, world: int, descriptor_limit: int | None
) -> Iterator[LintFinding]:
    cost = footprint(settings, plan, world)
    memory_gb = topology.memory_gbytes or ASSUMED_MEMORY_GB
    if cost.nccl_mb > _MEMORY_SHARE * memory_gb * 1000:
        assumed = "" if topology.memory_gbytes else ", assumed"
        yield LintFinding(
            "communicators",
            f"NCCL's buffers take more than a tenth of a rank's memory: {cost.nccl} communicators on each rank",
            f"about {cost.nccl_mb / 1000:.1f} GB (0.5 GB for two ranks, 0.7 GB for more, as measured by a user on "
            f"A100; a rank has {memory_gb:g} GB{assumed})",
            f"at most {_MEMORY_SHARE * memory_gb:g} GB",
            "fewer merged dims and comm_ids, or NCCL_MAX_CTAS=8 for fewer channels",
        )
    if descriptor_limit is not None and cost.descriptors > descriptor_limit:
        yield LintFinding(
            "file-descriptors",
            "Gloo's connections need more file descriptors than a process may open: creating groups fails",
            f"{cost.descriptors} for {cost.gloo} groups with all peers connected, the limit here is {descriptor_limit}",
            f"a limit of at least {cost.descriptors}",
            f"ulimit -n {cost.descriptors + 256}, or smaller groups",
        )


def _range(span: Span) -> str:
    return f"{span.most}" if span.fewest == span.most else f"{span.fewest} to {span.most}"
