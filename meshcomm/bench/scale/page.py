"""docs/reference/startup.md: `python -m meshcomm.bench.scale.page`. No process is started, torch is not loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from meshcomm.bench.scale.connections import meshed, nccl_peers, rings, sizes_of
from meshcomm.bench.scale.creators import (
    Creation,
    count,
    deepspeed,
    device_mesh,
    megatron,
    nanotron,
    ours,
    picotron,
    torchtitan,
)
from meshcomm.bench.scale.opening import Asked, Backend, asked, first_calls, gloo_at_once, opening
from meshcomm.layout import Layout, Plan

WORLDS: Final = {
    1024: {"pp": 8, "dp": 8, "cp": 2, "tp": 8},
    16384: {"pp": 16, "dp": 64, "cp": 2, "tp": 8},
    131072: {"pp": 16, "dp": 512, "cp": 2, "tp": 8},
}
# The ranks of one group over experts, in all of the meshes above.
_EXPERTS: Final = 8
_DIMS: Final = "four dims"
_NAMES: Final = "every name that Megatron makes"

# How often a rank looks whether it is asked something: see meshcomm.mesh.watch.
_LOOK_S: Final = 0.25
_LOOKS_A_SECOND: Final = 20_000
# Bytes of an error about ranks that differ, as one rank tells it to the others.
_TOLD: Final = 1_000


def asked_for(world: int) -> dict[str, Plan]:
    """The plans of one size of the world: dims alone, and all the groups that Megatron makes for them."""
    dims = WORLDS[world]
    view = {"pp": dims["pp"], "edp": dims["dp"] * dims["cp"] * dims["tp"] // _EXPERTS, "ep": _EXPERTS}
    merge = {
        "dp_cp": ("dp", "cp"),
        "model": ("pp", "tp"),
        "dp_cp_tp": ("dp", "cp", "tp"),
        "dp_tp": ("dp", "tp"),
        "cp_tp": ("cp", "tp"),
        "expert_model": ("pp", "ep"),
        "all": ("pp", "dp", "cp", "tp"),
    }
    return {
        _DIMS: Plan(Layout(dims)),
        _NAMES: Plan(Layout(dims, views={"expert": view}, merge=merge)),
    }


def page() -> str:
    """The page, with every number computed."""
    parts = [_HEAD, _reproduced(), _GROUPS, _groups(), _STORE, _store(), _SERVER, _server(), _CONNECTIONS]
    return "\n".join([*parts, _connections(), _ASSUMED])


def _megatron(world: int) -> Creation:
    dims = WORLDS[world]
    return count(megatron(world, tp=dims["tp"], pp=dims["pp"], cp=dims["cp"], ep=_EXPERTS, etp=1))


def _torchtitan(world: int) -> Creation:
    dims = WORLDS[world]
    return count(
        torchtitan(world, pp=dims["pp"], dp_shard=dims["dp"], cp=dims["cp"], tp=dims["tp"], ep=_EXPERTS)
    )


def _nanotron(world: int, *, pp: int, dp: int, cp: int, tp: int) -> Creation:
    made = count(nanotron(world, pp=pp, dp=dp, cp=cp, tp=tp), once=True)
    return made._replace(calls=made.calls + 1, member_0=made.member_0 + 1)  # and the world's group


def _reproduced() -> str:
    rows: list[tuple[str, str, Creation]] = [
        ("Megatron-Core", "8 ranks, tp=2 pp=2", count(megatron(8, tp=2, pp=2))),
        ("Megatron-Core", "1,024 ranks, tp=8 pp=8 cp=2 ep=8 etp=1", _megatron(1024)),
        ("torchtitan", "8 ranks, pp=2 dp=2 tp=2", count(torchtitan(8, pp=2, dp_shard=2, tp=2))),
        ("torchtitan", "1,024 ranks, pp=8 dp=8 cp=2 tp=8 ep=8", _torchtitan(1024)),
        ("nanotron", "8 ranks, pp=2 dp=2 tp=2", _nanotron(8, pp=2, dp=2, cp=1, tp=2)),
        ("nanotron", "1,024 ranks, pp=8 dp=8 cp=2 tp=8", _nanotron(1024, pp=8, dp=8, cp=2, tp=8)),
        ("picotron", "8 ranks, pp=2 dp=2 tp=2", count(picotron(dp=2, pp=2, cp=1, tp=2))),
        ("picotron", "1,024 ranks, pp=8 dp=8 cp=2 tp=8", count(picotron(dp=8, pp=8, cp=2, tp=8))),
        ("DeepSpeed", "1,024 ranks, pp=8 dp=16 mp=8", count(deepspeed(pp=8, dp=16, mp=8))),
        ("DeviceMesh", "8 ranks, (2, 2, 2)", count(device_mesh({"pp": 2, "dp": 2, "tp": 2}))),
        ("DeviceMesh", "1,024 ranks, (8, 8, 2, 8)", count(device_mesh(WORLDS[1024]))),
        ("DeviceMesh", "16,384 ranks, (16, 64, 2, 8)", count(device_mesh(WORLDS[16384]))),
    ]
    cells = [
        [
            who,
            mesh,
            f"{made.calls:,}"
            + (f" ({made.calls - made.fake:,} real, {made.fake:,} fake)" if made.fake else ""),
            f"{made.distinct:,}",
            f"{made.sets_of_0}",
            f"{made.member_0}",
        ]
        for who, mesh, made in rows
    ]
    head = [
        "creator",
        "mesh",
        "calls of `new_group`, each rank",
        "distinct rank sets",
        "rank 0 is in",
        "as a member of",
    ]
    return _table(head, cells)


def _groups() -> str:
    rows = {
        f"meshcomm, {_DIMS}": [ours(asked_for(world)[_DIMS]) for world in WORLDS],
        f"`init_device_mesh`, {_DIMS}": [count(device_mesh(dims)) for dims in WORLDS.values()],
        f"meshcomm, {_NAMES}": [ours(asked_for(world)[_NAMES]) for world in WORLDS],
        "Megatron-Core": [_megatron(world) for world in WORLDS],
        "torchtitan": [_torchtitan(world) for world in WORLDS],
    }
    return _by_world(
        "creating calls of each rank / groups it is a member of",
        {name: [f"{each.calls:,} / {each.member_0}" for each in made] for name, made in rows.items()},
    )


def _store() -> str:
    rows = {}
    for kind in (_DIMS, _NAMES):
        rows[f"meshcomm, {kind}, Gloo"] = [_rank_asks(asked_for(world)[kind], "gloo") for world in WORLDS]
    rows[f"torch as it comes, {_DIMS}, Gloo"] = [
        _then(_at_once([world, *dims.values()])) for world, dims in WORLDS.items()
    ]
    for kind in (_DIMS, _NAMES):
        rows[f"meshcomm, {kind}, NCCL"] = [_rank_asks(asked_for(world)[kind], "nccl") for world in WORLDS]
    rows["Megatron-Core's three Gloo twins alone"] = [
        _then(
            _at_once([dims["dp"] * dims["cp"], dims["dp"], dims["dp"] * dims["cp"] * dims["tp"] // _EXPERTS])
        )
        for dims in WORLDS.values()
    ]
    return _by_world("store calls of each rank to create, and for the first use", rows)


def _rank_asks(plan: Plan, backend: Backend) -> str:
    rank = plan.layout.world_size - 1
    return _then(asked(opening(plan, rank, backend=backend)), asked(first_calls(plan, rank, backend=backend)))


def _at_once(sizes: Sequence[int]) -> Asked:
    each = [gloo_at_once(size) for size in sizes]
    return Asked(sum(one.calls for one in each), sum(one.moved for one in each))


def _then(created: Asked, used: Asked | None = None) -> str:
    text = f"{created.calls:,} ({_bytes(created.moved)})"
    return text if used is None else f"{text} + {used.calls:,} ({_bytes(used.moved)})"


def _server() -> str:
    rows: dict[str, list[str]] = {
        "store calls until the mesh is there, four dims, Gloo": [],
        "store calls until every dim was used": [],
        "bytes of keys and values until then, at most": [],
        "of these, the list of who has come, read once": [],
        "connections that the server holds": [],
        "looks of the watch, a second": [],
        "bytes if a rank's mesh differs: one reads the list and tells the others, in 1 kB each": [],
    }
    for world in WORLDS:
        plan = asked_for(world)[_DIMS]
        each, used = asked(opening(plan, world - 1)), asked(first_calls(plan, world - 1))
        last = asked(opening(plan, world - 1, last=True))
        listed = last.moved - each.moved
        created = world * each.calls + last.calls - each.calls
        total = [
            f"{created:,}",
            f"{created + world * used.calls:,}",
            _bytes(world * (each.moved + used.moved) + listed),
            _bytes(listed),
            f"{world:,}",
            f"{world / max(_LOOK_S, world / _LOOKS_A_SECOND):,.0f}",
            _bytes(listed + world * _TOLD),
        ]
        for name, text in zip(rows, total, strict=True):
            rows[name].append(text)
    return _by_world("of all ranks together", rows)


def _connections() -> str:
    rows: dict[str, list[str]] = {}
    for kind in (_DIMS, _NAMES):
        sizes = [sizes_of(asked_for(world)[kind]) for world in WORLDS]
        rows[f"meshcomm, {kind}, Gloo: created"] = ["0"] * len(WORLDS)
        rows[f"meshcomm, {kind}, Gloo: an all_reduce along each"] = [f"{rings(each):,}" for each in sizes]
        rows[f"{kind}, NCCL: peers of all communicators, at most"] = [
            f"{sum(map(nccl_peers, each)):,}" for each in sizes
        ]
    rows[f"torch as it comes, {_DIMS}, Gloo: created"] = [
        f"{meshed([world, *dims.values()]):,}" for world, dims in WORLDS.items()
    ]
    return _by_world("connections of each rank to ranks", rows)


def _by_world(what: str, rows: dict[str, list[str]]) -> str:
    head = [what, *(f"{world:,} ranks" for world in WORLDS)]
    return _table(head, [[name, *cells] for name, cells in rows.items()])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join(lines) + "\n"


def _bytes(number: int) -> str:
    """In steps of a thousand, three digits."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} B"


_HEAD: Final = """\
# Start-up at scale, in counts

Made by `python -m meshcomm.bench.scale.page`; a test compares. Nothing on this page is a time: what was timed, up to 128 processes, is in
[benchmarks](../benchmarks.md). How the numbers are known: what a rank asks the store for and connects to was written down call by call and is compared with
real Gloo processes (2 to 8 ranks, torch 2.13); torch's own calls of `new_group` are counted on its fake backend up to 16,384 ranks; Megatron's and torchtitan's groups are lists of
the axes that each kind spans, counted by loops. Meshes: 1,024 ranks are pp=8 dp=8 cp=2 tp=8; 16,384 are pp=16 dp=64 cp=2 tp=8; 131,072 are
pp=16 dp=512 cp=2 tp=8; experts in groups of 8 where a row has any.

## Groups that others create

Everywhere but here a rank calls `new_group` for every group of the job, its own or not. Counts made before by running the projects' own code
(Megatron-Core 0.20 with `new_group` replaced by a counter; torchtitan of August 2026 and `init_device_mesh` on the fake backend) or its loops, here computed:
"""
_GROUPS: Final = """\
Every number that was counted before comes out; none differs. Rank sets: of two or more ranks, fake groups left out; at 1,024 ranks they had been counted for
Megatron and DeviceMesh only. At 8 ranks, torchtitan's merged group for the loss has the rank sets of dp. nanotron alone uses a rank set twice, 1,024 of its
calls make groups of one rank.

## Calls that create groups

A rank of meshcomm creates the groups that it is in, equal ones once; the others' calls grow with the job.
"""
_STORE: Final = """\
"every name that Megatron makes" as a plan: its dims, six merged dims, a view for the experts and a group of all; ten groups, as names with equal ranks share one. What it
leaves out is the group of the first and last stage for tied embeddings, which spans no dim: meshcomm sends messages there.

## What a rank asks the store for

Calls of the store, with the bytes of their keys and values in brackets, for the last rank, whose keys are the longest; after the plus sign the first all_reduce along every name.
A blocking `get` counts once.
"""
_SERVER: Final = """\
meshcomm: seven calls for the mesh (who I am, how many meshes I opened, three of the agreement, the default group's address, whose it is), and on Gloo one for each group; the rank that
completes the agreement has two more, or a few, while a rank that counted itself has not yet said who it is. Then two for each neighbour in a ring. None of it grows with the world.
torch on Gloo: one call for each group, and two for every rank in it. With NCCL groups ask for nothing until they are used.

## What the store's server sees
"""
_CONNECTIONS: Final = """\
One server answers all of it: TCPStore is a single thread in rank 0, the launcher or its agent, whose process needs a file descriptor for each rank (`ulimit -n`). The last row is the price of a wrong config at that size: one rank reads
who came with what, and all raise what it found.

## Connections
"""
_ASSUMED: Final = """\
Besides these, each rank has one connection to the store. Counted with `TORCH_GLOO_LAZY_INIT=1`, with which Gloo connects two ranks when they first talk. meshcomm does so, unless you set it, for
the default group and for groups of more than 64 ranks; those of up to 64 connect all with all while they are made, one address read and one connection for each other rank. Lazily connected,
all_reduce, all_gather and reduce_scatter need the neighbours of a ring; an all_to_all along a dim connects its ranks all with all.

## What is assumed

- NCCL was not run. Its row counts the ring and the two binary trees of one group (at most 8 peers), connected when the group is first used; each peer may take several connections (channels), by machine.
  With a bound device (`process.device_id`) meshcomm's groups come from `ncclCommSplit`, which asks the store for nothing; so do DeviceMesh's, by one `split_group` for each dim.
- Of Megatron-Core, 17 of the 20 kinds of groups were read in its source (commit 00caa53); the three over the axis gtp_remat, of size 1 here, are newer: they are known from later files of the
  project that use them, and the counts come out exactly with them. Distributed optimizer instances, hierarchical and hybrid context parallelism are off, as by default.
- Of torchtitan, that the axis `efsdp` is created as fake without expert parallelism follows from the count of fake groups (50) and from its earlier versions.
- Host names of twelve characters, process numbers of seven digits, Gloo's addresses over IPv4 (154 bytes; eight more for each rank where all connect at once).
"""


if __name__ == "__main__":
    print(page(), end="")
