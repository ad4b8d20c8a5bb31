"""Faults before and while the groups are created: a rank differs, never arrives, or dies; and two jobs at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from meshcomm.mesh import Mesh, agree, groups
from tests.faults.row import (
    DIFFERS_S,
    ENDS,
    MISSING_S,
    TIMEOUT_S,
    End,
    Program,
    Rank,
    Row,
    both,
    check,
    everyone,
    row,
    struck,
    without,
)

_ODD = 2


def _opens(me: Rank, odd: Mapping[str, Any] = {}, usual: Mapping[str, Any] = {}) -> None:
    """Every started rank opens the mesh, rank 2 with other settings; the time counts from the last one."""
    me.strike()
    with me.mesh(**{**usual, **(odd if me.number == _ODD else {})}) as mesh:
        mesh.warm_up()


def _differs(
    name: str, fault: str, odd: Mapping[str, Any], usual: Mapping[str, Any] = {}, **more: Any
) -> Row:
    cells = f"{name} | {fault} | agreement | {more.pop('dim', 'all')}"
    program = partial(_opens, odd=odd, usual=usual)
    return row(cells, program, everyone("MeshMismatchError"), (_ODD,), DIFFERS_S, **more)


def _other_version(me: Rank) -> None:
    if me.number == _ODD:
        torch.__version__ = "2.12.1+cpu"
    _opens(me)


def _unreadable(me: Rank) -> None:
    me.strike()
    with me.mesh(**({"timeout": 3} if me.number == _ODD else {})):
        pass


def _ends_before(how: End, me: Rank) -> None:
    if me.number == 1:
        me.end(how)
    _opens(me)


def _ends_in_agreement(how: End, me: Rank) -> None:
    """Rank 1 has counted itself, and ends before it announces who it is."""
    if me.number == 1:
        agree._announce = lambda *_: me.end(how)
    _opens(me)


def _ends_signed_in(how: End, me: Rank) -> None:
    """Rank 1 has announced itself, and ends while it waits for the verdict."""
    if me.number == 1:
        agree._get = lambda *_: me.end(how)
    _then_used(me)


def _too_late(me: Rank) -> None:
    """Rank 3 arrives after the others have given up."""
    if me.number == 3:
        me.wait_for("gave up")
    else:
        me.strike()
    try:
        with me.mesh():
            pass
    finally:
        me.say("gave up")


def _then_used(me: Rank, dim: str = "tp") -> None:
    """Gloo's groups connect at first use, so a death before that shows there."""
    with me.mesh() as mesh:
        check(mesh.all_reduce(dim, torch.ones(3)), 2.0)


def _in_default_group(how: End, me: Rank) -> None:
    """All ranks have agreed; rank 1 ends before it joins torch's default group."""
    if me.number == 1:
        original = dist.init_process_group

        def instead(*args: Any, **options: Any) -> None:
            me.end(how)
            original(*args, **options)

        dist.init_process_group = instead
    _then_used(me)


def _in_creation(dim: str, act: Callable[[Rank], None], me: Rank) -> None:
    """All ranks have agreed, and some groups exist; rank 1 does not join the group of `dim`."""
    if me.number == 1:
        original = groups.create_group

        def instead(**options: Any) -> Any:
            if f"/{dim}/" in options["name"]:
                act(me)
            return original(**options)

        groups.create_group = instead
    _then_used(me, dim)


def _fails(me: Rank) -> None:
    me.strike()
    raise RuntimeError("Too many open files")


def _no_server(me: Rank) -> None:
    if me.number == 0:
        me.end_server()
        me.say("dead")
    me.wait_for("dead")
    me.strike()
    with me.mesh():
        pass


def _server_ends_in_agreement(me: Rank) -> None:
    """Rank 1 never arrives; the store dies while rank 0 waits for the verdict."""
    if me.number == 0:
        original = agree._get

        def instead(*args: Any) -> bytes:
            me.wait_for("here 2")
            me.wait_for("here 3")
            me.end_server()
            return original(*args)

        agree._get = instead
    announce = agree._announce

    def told(*args: Any) -> None:
        announce(*args)
        me.say(f"here {me.number}")

    agree._announce = told
    with me.mesh():
        pass


def _server_ends_in_creation(me: Rank) -> None:
    original = groups.create_group

    def instead(**options: Any) -> Any:
        if me.number == 1:
            me.end_server()
            me.say("dead")
        me.wait_for("dead")
        return original(**options)

    groups.create_group = instead
    _then_used(me)


def _live(odd: Callable[[Mesh], object]) -> Program:
    """On an open mesh, every rank declares one more merged dim; rank 2 does something else."""

    def act(me: Rank, mesh: Mesh) -> None:
        if me.number == _ODD:
            odd(mesh)
        else:
            mesh.create_group("both", ("dp", "tp"))
            check(mesh.all_reduce("both", torch.ones(3)), 4.0)

    return struck(act)


def _not_here(mesh: Mesh) -> None:
    time.sleep(TIMEOUT_S + 1.5)  # the rank does other work, without the mesh


def _environment(**odd: str) -> Callable[[int], Mapping[str, str]]:
    return lambda rank: odd if rank == _ODD else {}


# -- two jobs at once on one host, whose launcher gives neither of them an address -----------------------

# The number of ranks in each of the two jobs of a row.
_EACH: Final = 2
_OF_TORCHRUN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _mpi(job: int, rank: int) -> Mapping[str, str]:
    world = "OMPI_COMM_WORLD_"
    ranks = {f"{world}RANK": str(rank), f"{world}LOCAL_RANK": str(rank)}
    return {**ranks, f"{world}SIZE": "2", f"{world}LOCAL_SIZE": "2", "PMIX_NAMESPACE": f"13317{job}2593"}


def _slurm(job: int, rank: int) -> Mapping[str, str]:
    ranks = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2"}
    return {**ranks, "SLURM_NNODES": "1", "SLURM_JOB_ID": "2711", "SLURM_STEP_ID": str(job)}


def _own_job(me: Rank) -> None:
    """Each job adds up its own numbers; a rank in the wrong job gets wrong sums."""
    job = me.number // _EACH
    for name in (*_OF_TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    me.strike()
    with me.mesh(dims={"dp": _EACH}, timeout_s=10.0) as mesh:
        for _ in range(20):
            check(mesh.all_reduce("dp", torch.full((3,), 10.0**job)), _EACH * 10.0**job)


_MERGE = {"both": ["dp", "tp"]}
# The errors, and the ranks that they name, if rank 1 is lost before or during the creation of the groups along tp or dp.
# The groups along dp are created first: rank 3 waits for rank 1 there, rank 0 waits for it along tp, and rank 2 waits for
# rank 3, which has raised.
_LOST = {"tp": {0: "PeerLost", 2: "", 3: ""}, "dp": {0: "PeerLost", 2: "PeerLost", 3: "PeerLost"}}
_NAMED: dict[str, dict[int, tuple[int, ...]]] = {"tp": {0: (1,)}, "dp": {0: (1,), 2: (3,), 3: (1,)}}
_NO_ONE = everyone("MeshMismatchError")
_OWN_CONFIG = everyone("MeshMismatchError", r2="ConfigError")

ROWS = [
    _differs("other-size", "wrong size", {"dims": {"dp": 1, "tp": 4}}, quick=True),
    _differs("other-size-one-dim", "one dim more", {"dims": {"dp": 2, "cp": 1, "tp": 2}}, dim="cp"),
    _differs("swapped-dims", "swapped dims", {"dims": {"tp": 2, "dp": 2}}),
    _differs("other-rank-order", "other rank order", {"rank_order": [0, 2, 1, 3]}),
    _differs("missing-merge", "missing merge", {"merge": {}}, {"merge": _MERGE}, dim="both"),
    _differs("other-timeout", "other timeout", {"timeout_s": TIMEOUT_S + 1}),
    _differs("other-dim-timeout", "other timeout", {"options": {"tp": {"timeout_s": 9.0}}}, dim="tp"),
    _differs("other-validation", "other validate_calls", {"validate_calls": 0}),
    replace(_differs("other-version", "other torch version", {}), program=_other_version),
    row(
        "unreadable-config | one rank's config has an unknown key | agreement | all",
        *(_unreadable, _OWN_CONFIG, (_ODD,), DIFFERS_S),
    ),
    row(
        "wrong-world-size | wrong world size: WORLD_SIZE=5 on one rank | agreement | all",
        *(_opens, _OWN_CONFIG, (_ODD,), DIFFERS_S),
        environment=_environment(WORLD_SIZE="5"),
    ),
    row(
        "wrong-world-size-minus-one | wrong world size: WORLD_SIZE=6 on one rank, dp = -1 | agreement | dp",
        *(partial(_opens, usual={"dims": {"dp": -1, "tp": 2}}), _NO_ONE, (_ODD,), DIFFERS_S),
        environment=_environment(WORLD_SIZE="6"),
    ),
    row(
        "duplicate-rank | duplicate rank: two processes with RANK=1, none with 2 | agreement | all",
        *(_opens, everyone("MeshMismatchError|LaunchError"), dict.fromkeys(range(4), (1,))),
        environment=_environment(RANK="1"),
    ),
    row(
        "never-starts | a rank never starts | before agreement | all",
        *(_opens, without(_NO_ONE, 3), (3,)),
        absent=(3,),
    ),
    row("too-late | a rank comes after the others gave up | agreement | all", _too_late, _NO_ONE, (3,)),
    row(
        "two-never-start | two of eight ranks never start | before agreement | pp",
        *(_opens, without(everyone("MeshMismatchError", 8), 3, 6), (3, 6)),
        dims={"pp": 2, "dp": 2, "tp": 2},
        absent=(3, 6),
    ),
    *both("before-agreement | before agreement | all", _ends_before, without(_NO_ONE, 1), (1,)),
    *both("in-agreement | agreement, counted | all", _ends_in_agreement, without(_NO_ONE, 1), (1,)),
    *both("signed-in | agreement, signed in | tp", _ends_signed_in, _LOST["dp"], _NAMED["dp"]),
    *both(
        "in-the-default-group | creation, torch's default group | all",
        *(_in_default_group, _LOST["dp"], _NAMED["dp"]),
    ),
    *(
        row(
            f"{how.lower()}-in-creation-{dim} | {how} | creation | {dim}",
            *(partial(_in_creation, dim, lambda me, how=how: me.end(how)), _LOST[dim], _NAMED[dim]),
        )
        for how in ENDS
        for dim in ("dp", "tp")
    ),
    row(
        "exception-in-creation | one rank cannot create a group | creation | tp",
        *(partial(_in_creation, "tp", _fails), {**_LOST["tp"], 1: "CommunicationError"}, (1,)),
    ),
    row(
        "live-other-dims | mesh.create_group of another name on one rank | creation on a live mesh | both",
        _live(lambda mesh: mesh.create_group("other", ("dp", "tp"))),
        *(_NO_ONE, dict.fromkeys((0, 1, 3), (_ODD,)), MISSING_S),
    ),
    row(
        "live-other-order | mesh.create_group with other dims on one rank | creation on a live mesh | both",
        _live(lambda mesh: mesh.create_group("both", ("tp", "dp"))),
        *(_NO_ONE, (_ODD,), DIFFERS_S),
    ),
    row(
        "live-skipped | mesh.create_group skipped by one rank | creation on a live mesh | both",
        *(_live(_not_here), everyone("MeshMismatchError", r2=""), (_ODD,)),
    ),
    row(
        "store-ends-before | store server dies | before agreement | all",
        *(_no_server, everyone("LaunchError")),
        server="own process",
    ),
    row(
        "store-ends-in-agreement | store server dies | agreement | all",
        _server_ends_in_agreement,
        without(everyone("MeshMismatchError|LaunchError|StoreError"), 1),
        server="own process",
        absent=(1,),
    ),
    row(
        "store-ends-in-creation | store server dies | creation | dp",
        *(_server_ends_in_creation, everyone("CommunicationError|StoreError|PeerLost")),
        server="own process",
    ),
    row(
        "port-taken | port taken by another program | before agreement | all",
        *(_opens, everyone("LaunchError")),
        server="taken by a socket",
    ),
    row(
        "port-taken-by-a-store | port taken by another job's store | before agreement | all",
        *(_opens, everyone("LaunchError")),
        server="taken by a store",
    ),
    *(
        row(
            f"two-jobs-{name} | two jobs at once under {what} variables | before agreement | dp",
            *(_own_job, everyone(""), (), DIFFERS_S),
            environment=lambda rank, variables=variables: variables(rank // _EACH, rank % _EACH),
            quick=True,
        )
        for name, what, variables in (("mpi", "MPI", _mpi), ("slurm", "Slurm step", _slurm))
    ),
]
