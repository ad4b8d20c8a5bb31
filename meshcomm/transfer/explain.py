"""`meshcomm.explain_transfer`: what a transfer between two meshes sends, and how near it is to the least possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np

from meshcomm.config import Config, TopologyConfig
from meshcomm.errors import LayoutError, PatternError
from meshcomm.layout import Layout
from meshcomm.layout.layout import Ranks
from meshcomm.layout.sizes import whole
from meshcomm.predict.links import Machine, machine, nodes_of, places_of
from meshcomm.show.page import Facts, View, as_text
from meshcomm.show.transfer import transfer_view
from meshcomm.transfer import bounds
from meshcomm.transfer.bounds import Sums
from meshcomm.transfer.placement import Placement, check_pattern, placements_of
from meshcomm.transfer.plan import (
    BUCKET_BYTES,
    PACKED_BYTES,
    Ends,
    Entry,
    Leg,
    Loads,
    Pieces,
    Plan,
    elements_of,
    pieces_of,
    sliced,
)

if TYPE_CHECKING:
    from meshcomm.layout import Plan as MeshPlan
    from meshcomm.mesh import Mesh

    Side: TypeAlias = Layout | MeshPlan | Config | Mesh


def explain_transfer(
    source: Side,
    target: Side,
    tensors: Mapping[str, tuple[Any, ...]],
    /,
    *,
    stripes: Sequence[str] | None = None,
    topology: TopologyConfig | int | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> TransferCost:
    """Return what a transfer of tensors between two meshes sends, beside the least possible, and how long it takes.

        a = meshcomm.Layout({"fsdp": 8})
        b = meshcomm.Layout({"copy": 2, "tp": 4}, rank_order=range(8, 16))
        print(meshcomm.explain_transfer(a, b, {"w": ((4096, 4096), torch.bfloat16, "n/fsdp k -> n/tp k")}, topology=8))

    Requires neither processes nor tensors. Print the result to read it; `facts()` returns it as data.

    Args:
        source, target: a Layout, Plan, Config or open Mesh. Equal ranks of both are the same rank.
        tensors:      by name: the full shape, the dtype (torch's or numpy's) in which it is sent, and the placements of both sides,
                      as for `Link.transfer`. A fourth item, sizes by name, gives the sections of an axis such as (q+k+v)/tp.
        stripes:      dims of the target along which copies receive different stripes and gather them from each other. By default
                      those that `meshcomm.link` chooses.
        topology:     the number of ranks on each node, or a [topology]. By default that of the source, if it is a Config or Mesh.
        bucket_bytes: as for `meshcomm.link`.

    The bound of receiving is what a rank needs and does not hold. The bound of sending counts each element that another rank
    needs once: what only a set of ranks holds is sent by them, so one of them sends at least its share.

    Seconds are computed from the bytes and latencies of [topology], and are None without ranks_per_node. Each rank sends and
    receives at the same time, by each class of links at the same time.

        bound              no plan is faster: a node's ranks together receive what the node needs and does not hold, and send what
                           only they hold, through one port each; a rank's own bounds at the speed of all its links together. No latency.
        direct, striped    the rank, direction and class of links with the most bytes times seconds per byte, and one latency of
                           the slowest link for each round
        gather, broadcast  every rank of the target receives all bytes through its slowest link, while a rank of the source gathers
                           them; two latencies for each bucket

    Raises: PatternError and ShapeError for placements; UnknownDim for a dim that a mesh does not have; LayoutError.
    """
    layouts = _layout_of(source), _layout_of(target)
    entries = [_entry(name, tensor) for name, tensor in tensors.items()]
    return cost(*layouts, entries, _topology(topology, source), stripes, bucket_bytes)


def _layout_of(side: Any) -> Layout:
    if isinstance(side, Config):
        return side.plan(None).layout
    layout = getattr(side, "layout", side)
    if not isinstance(layout, Layout):
        raise LayoutError(
            "explain_transfer needs two meshes",
            given=f"a {type(side).__name__}",
            expected="a Layout, Plan, Config or Mesh",
            hint='meshcomm.Layout({"dp": 2, "tp": 4})',
        )
    return layout


def _topology(given: TopologyConfig | int | None, source: Any) -> TopologyConfig:
    if isinstance(given, TopologyConfig):
        return given
    if given is not None:
        return TopologyConfig(ranks_per_node=whole(given, "topology"))
    own = getattr(source, "topology", None)
    return own if isinstance(own, TopologyConfig) else TopologyConfig()


def _entry(name: str, tensor: Any) -> Entry:
    parts = tuple(tensor) if isinstance(tensor, tuple | list) else ()
    itemsize = getattr(parts[1], "itemsize", None) if len(parts) in (3, 4) else None
    if not isinstance(itemsize, int):
        raise PatternError(
            f"{name} is not described by a shape, a dtype and placements",
            given=repr(tensor),
            expected='(shape, dtype, "placement -> placement"), and sizes of sections if there are any',
            hint='{"w": ((4096, 4096), torch.bfloat16, "n/tp/fsdp k -> n/tp k")}',
        )
    shape, _, text, sizes = (*parts, {})[:4]
    check_pattern(text, sizes)
    return Entry(name, itemsize, *(Placement.read(side, shape, sizes) for side in placements_of(text)))


@final
@dataclass(frozen=True, slots=True)
class TransferCost:
    """The result of `explain_transfer`."""

    _facts: Facts = field(repr=False)

    def facts(self) -> Facts:
        """Return JSON-serializable data: bytes, seconds, and the coords of the busiest ranks."""
        return self._facts

    def __rich__(self) -> View:
        """Return tables of the bytes and of the seconds."""
        return transfer_view(self._facts)

    def __str__(self) -> str:
        return as_text(self.__rich__())


def cost(
    source: Layout,
    target: Layout,
    entries: Sequence[Entry],
    topology: TopologyConfig,
    stripes: Sequence[str] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> TransferCost:
    """Return the cost of a transfer. See `explain_transfer`."""
    links = machine(topology)
    ends = Ends.of(source, target, partial(nodes_of, topology))
    planned = partial(Plan, ends, entries, bucket_bytes=bucket_bytes)
    plan = planned(stripes=ends.levels(stripes))
    along = _stripes(plan)
    direct = planned() if along else plan
    loads, (messages, pieces) = plan.loads(), counts(plan)
    need, least = bounds.received(entries, ends), bounds.sent(entries, ends)
    both = np.isin(ends.target_ranks, ends.source_ranks)
    nbytes = sum(int(np.prod(entry.source.shape, dtype=np.int64)) * entry.itemsize for entry in entries)
    facts: Facts = {
        "source": _side(source),
        "target": _side(target),
        "ranks_on_both": int(both.sum()),
        "tensors": len(entries),
        "bytes": nbytes,
        "stripes": along,
        "legs": max(map(len, plan.legs), default=1),
        "loads": [
            _load("source", "sends", source, loads.sent[ends.source_ranks], least),
            _load("source", "receives", source, loads.received[ends.source_ranks], None),
            _load("target", "sends", target, loads.sent[ends.target_ranks], None),
            _load("target", "receives", target, loads.received[ends.target_ranks], float(need.max())),
        ],
        "kept_bytes": float(direct.loads().copied.sum()) if ends.overlap else 0.0,
        "messages": messages,
        "pieces": pieces,
        "rounds": len(plan.rounds()),
        "bucket_bytes": bucket_bytes,
        "buffers_bytes": _buffers(plan),
        "links": [] if links is None else [str(level) for level in links.levels],
        "seconds": None,
    }
    if links is not None:
        others = [dim for dim in target.dims if target.size(dim) > 1]
        striped = plan if along else planned(stripes=ends.levels(others))
        along = _stripes(striped)
        places = places_of(topology, np.union1d(source.ranks, target.ranks))
        slowest = links.levels[-1] if len(np.unique(places // links.ranks_per_node)) > 1 else links.levels[0]
        facts["seconds"] = {
            "bound": _least_seconds(entries, ends, links, places, need, least),
            "direct": _seconds(direct, links, places),
            "striped": _seconds(striped, links, places) if along else None,
            "striped_along": along,
            "gather_broadcast": float(
                nbytes * slowest.beta_s + 2 * -(-nbytes // bucket_bytes) * (slowest.alpha_s + links.call_s)
            ),
        }
    return TransferCost(facts)


def _stripes(plan: Plan) -> list[str]:
    """Return the dims along which copies of some tensor receive stripes."""
    striped = {
        dim
        for legs in plan.legs
        for dim in {*legs[0].target.placement.dims} - {*legs[-1].target.placement.dims}
    }
    return [*dict.fromkeys(split.dim for split in chain(*plan.stripes) if split.dim in striped)]


def _side(layout: Layout) -> Facts:
    return {"dims": dict(layout.dims), "ranks": layout.world_size}


def _load(side: str, direction: str, layout: Layout, nbytes: Sums, bound: float | None) -> Facts:
    """Return what the ranks of a side send or receive. nbytes: by position."""
    busiest = layout.rank_of(int(nbytes.argmax()))
    most = float(nbytes.max())
    return {
        "side": side,
        "direction": direction,
        "max_bytes": most,
        "mean_bytes": float(nbytes.mean()),
        "bound_bytes": bound,
        "ratio": most / bound if bound else None,
        "rank": busiest,
        "coords": layout.coords(busiest),
    }


# -- messages and buffers -------------------------------------------------------------------------------


def counts(plan: Plan) -> tuple[int, int]:
    """Return how many messages and pieces all ranks send. What a rank sends another in a round is one message, except for
    large pieces, each of which is one.
    """
    numbers: dict[Any, int] = {}
    kinds = {
        leg: numbers.setdefault((leg.source.placement.axes, leg.target.placement, leg.ends), len(numbers))
        for leg in plan.weighted_legs()
    }
    known: dict[Any, list[tuple[int, int]]] = {}
    messages = pieces = 0
    for parts in plan.rounds():
        times = Counter((plan.legs[part.entry][part.leg], plan.itemsizes[part.entry]) for part in parts)
        # Pairs of ranks only move with the coords at which a disjoint source holds all tensors, so they are counted once.
        places = {leg.source.placement.at for leg, _ in times}
        held = {len(coords) for place in places for _, coords in place}
        moves = len(places) == 1 and held <= {1} and not next(iter(times))[0].ends.overlap
        of_round = {
            (kinds[leg], itemsize, count, () if moves else leg.source.placement.at)
            for (leg, itemsize), count in times.items()
        }
        _, _, chunk, chunks = parts[0]
        key = frozenset(of_round), chunks
        if key not in known:
            known[key] = [*_counts(times, chunks)]
        messages, pieces = messages + known[key][chunk][0], pieces + known[key][chunk][1]
    return messages, pieces


def _counts(times: Mapping[tuple[Leg, int], int], chunks: int) -> Iterator[tuple[int, int]]:
    """Yield how many messages and pieces ranks send in a round, for each chunk. times: how many tensors of an itemsize take each leg."""
    every: Iterable[tuple[Pieces, int, int]] = (
        (pieces_of(pairs, leg.ends), itemsize, count)
        for (leg, itemsize), count in times.items()
        for pairs in leg.pairs()
    )
    if chunks > 1:
        every = [*every]
    for chunk in range(chunks):
        messages = pieces = 0
        packed = [np.zeros((0, 2), dtype=np.int64)]
        for of_leg, itemsize, count in every:
            boxes = sliced(*of_leg[2:], chunk, chunks) if chunks > 1 else of_leg[2:]
            nbytes = elements_of(*boxes) * itemsize
            nbytes[of_leg.is_local] = 0
            alone = nbytes > PACKED_BYTES
            pieces += count * int((nbytes > 0).sum())
            messages += count * int(alone.sum())
            packed.append(np.stack(of_leg[:2], axis=1)[(nbytes > 0) & ~alone])
        source, target = np.concatenate(packed).T
        pairs_of_ranks = np.sort(source << 32 | target)
        yield messages + int((np.diff(pairs_of_ranks, prepend=-1) > 0).sum()), pieces


def _buffers(plan: Plan) -> Facts:
    """Return how many bytes of buckets a rank of each side allocates at most: two for each direction that it uses."""
    source = target = 0
    for parts in plan.rounds():
        nbytes = sum(
            plan.legs[part.entry][part.leg].most(plan.itemsizes[part.entry], part.chunks) for part in parts
        )
        # Entries of different ranks are sent at once.
        nbytes = min(nbytes, plan.bucket_bytes) if len(parts) > 1 else nbytes
        source, target = max(source, nbytes * (parts[0].leg == 0)), max(target, nbytes * (parts[0].leg > 0))
    return {"source": 2 * source, "target": 2 * max(source, target) + 2 * target}


# -- seconds --------------------------------------------------------------------------------------------


def _seconds(plan: Plan, links: Machine, places: Ranks) -> float:
    """Return the seconds of a plan. See `explain_transfer`."""
    ends, levels = plan.ends, links.levels
    units = [places // level.ranks for level in levels[:-1]]
    sent, received = (np.zeros((len(levels), ends.size)) for _ in range(2))
    apart = not np.isin(units[-1][ends.target_ranks], units[-1][ends.source_ranks]).any()
    for leg, nbytes in plan.weighted_legs().items():
        if leg.ends is ends and apart:
            loads = Loads(ends.size)
            loads.add(leg, nbytes)
            sent[-1] += loads.sent
            received[-1] += loads.received
            continue
        for pairs in leg.pairs():
            every = pieces_of(pairs, leg.ends)
            every = every.of(~every.is_local)
            level = sum(
                ((unit[every.source] != unit[every.target]).astype(np.int64) for unit in units),
                start=np.zeros(len(every.source), dtype=np.int64),
            )
            for sums, ranks in ((sent, every.source), (received, every.target)):
                sums += np.bincount(
                    level * ends.size + ranks, every.elements * nbytes, len(levels) * ends.size
                ).reshape(sums.shape)
    most = np.maximum(sent, received).max(axis=1).tolist()
    used = [level for level, nbytes in zip(levels, most, strict=True) if nbytes]
    latency = (used[-1].alpha_s + links.call_s) * len(plan.rounds()) if used else 0
    return float(max(n * float(level.beta_s) for n, level in zip(most, levels, strict=True)) + float(latency))


def _least_seconds(
    entries: Sequence[Entry], ends: Ends, links: Machine, places: Ranks, need: Sums, least: float
) -> float:
    """Return the seconds that no plan goes below. See `explain_transfer`."""
    rate, seconds = float(1 / links.levels[0].beta_s), 0.0
    for inner, outer in pairwise(links.levels):
        units = np.unique(places // inner.ranks, return_inverse=True)[1]
        ports = np.bincount(units)
        rate += float(1 / outer.beta_s) * (len(ports) > 1)
        for crossing in (bounds.received(entries, ends, units), bounds.leaving(entries, ends, units)):
            seconds = max(seconds, float((crossing / ports).max()) * float(outer.beta_s))
    return max(seconds, max(float(need.max()), least) / rate)
