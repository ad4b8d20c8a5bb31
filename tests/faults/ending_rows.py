"""The store dies under an open mesh, ranks die while closing, and the disk is full while a checkpoint is saved."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

import meshcomm
from meshcomm.mesh import Mesh
from tests.faults.death_rows import peers
from tests.faults.row import (
    DIFFERS_S,
    ENDS,
    TIMEOUT_S,
    End,
    Rank,
    both,
    check,
    everyone,
    opened,
    row,
    without,
)

_VICTIM: Final = 1
_SQUARE: Final = {"dp": 2, "tp": 2}


# -- closing ------------------------------------------------------------------------------------------


def _ends_in_close(how: End, me: Rank, mesh: Mesh) -> None:
    mesh.warm_up()
    if me.number == _VICTIM:
        mesh._state.held.resources.callback(lambda: me.end(how))  # before the groups are released


def _ends_before_close(how: End, me: Rank, mesh: Mesh) -> None:
    mesh.warm_up()
    if me.number == _VICTIM:
        me.end(how)


def _forgets(me: Rank) -> None:
    """Rank 1 never closes its mesh; its process ends while the others still call."""
    if me.number == _VICTIM:
        more = {"timeout_s": TIMEOUT_S, "reports": str(me.folder / "reports")}
        mesh = meshcomm.init({"mesh": {"dims": _SQUARE, "device": "cpu", **more}})
        mesh.all_reduce("tp", torch.ones(2))
        me.strike()
        return
    with me.mesh() as mesh:
        mesh.all_reduce("tp", torch.ones(2))
        for _ in range(3):
            check(mesh.all_reduce("tp", torch.ones(2)), 2.0)


def _calls_after_close(me: Rank, mesh: Mesh) -> None:
    check(mesh.all_reduce("tp", torch.ones(2)), 2.0)
    if me.number == _VICTIM:
        me.strike()
        mesh.close()
    check(mesh.all_reduce("tp", torch.ones(2)), 2.0)


# -- the store ------------------------------------------------------------------------------------------


def _store_ends(me: Rank, mesh: Mesh, dim: str = "tp") -> None:
    """The store dies after every rank has used its group along `dim`."""
    check(mesh.all_reduce(dim, torch.ones(2)), float(mesh.size(dim)))
    me.say(f"used {me.number}")
    if me.number == 0:
        for rank in range(4):
            me.wait_for(f"used {rank}")
        me.end_server()
        me.say("dead")
    me.wait_for("dead")


def _goes_on_without(me: Rank, mesh: Mesh) -> None:
    mesh.warm_up()
    _store_ends(me, mesh)
    for _ in range(50):
        check(mesh.all_reduce("tp", torch.ones(2)), 2.0)
        check(mesh.all_reduce("dp", torch.ones(2)), 2.0)


def _meets_without(me: Rank, mesh: Mesh) -> None:
    """The first call along dp comes after the store is gone. Its ranks are connected and no longer need the store."""
    _store_ends(me, mesh)
    check(mesh.all_reduce("dp", torch.ones(2)), 2.0)


def _dies_without(me: Rank, mesh: Mesh) -> None:
    _store_ends(me, mesh, "dp")
    if me.number == _VICTIM:
        me.end("SIGKILL")
    mesh.all_reduce("dp", torch.ones(2))


def _asks_dead_store(me: Rank, mesh: Mesh) -> None:
    _store_ends(me, mesh)
    mesh.store.get("a note")


def _never_set(me: Rank, mesh: Mesh) -> None:
    me.strike()
    if me.number == _VICTIM:
        mesh.store.get("nobody sets this", timeout_s=1.0)


def _host_dies(me: Rank, mesh: Mesh) -> None:
    """Rank 0, which holds the store, is killed between calls along tp."""
    check(mesh.all_reduce("tp", torch.ones(2)), 2.0)
    mesh.barrier()
    if me.number == 0:
        me.end("SIGKILL")
    for _ in range(20):
        check(mesh.all_reduce("tp", torch.ones(2)), 2.0)


# -- saving -----------------------------------------------------------------------------------------------


def _saves(fault: Callable[[Rank], None], me: Rank, mesh: Mesh) -> None:
    """Saves two checkpoints. The fault is in the second; the first has to be complete afterwards."""
    # Imported here, because few rows need it and importing it takes seconds.
    from meshcomm.config import TrainConfig
    from meshcomm.train import Checkpoints
    from meshcomm.train.checkpoint.lock import Lock

    batch: dict[str, Any] = {"steps": 9, "global_batch_size": 4, "micro_batch_size": 1}
    checkpoints = Checkpoints(mesh, TrainConfig(**batch, out=str(me.folder / "run"), checkpoint_every=1))
    # The tensors are equal on all ranks, and each rank writes its share.
    state = {f"w{i}": torch.full((4096,), float(i)) for i in range(8)}
    first = checkpoints.save(Lock(1, 0.0, "", {}, {}, {}), state)
    if me.number == _VICTIM:
        fault(me)
    try:
        checkpoints.save(Lock(2, 0.0, "", {}, {}, {}), state)
    finally:
        at = time.monotonic()
        _whole(checkpoints, first)
        me.raised_at = at


def _whole(checkpoints: Any, first: Path) -> None:
    """The first checkpoint is the last complete one, and holds the saved numbers."""
    from meshcomm.train.checkpoint.folder import complete
    from meshcomm.train.checkpoint.reader import Saved

    if complete(checkpoints.folder) != [first]:
        raise AssertionError(f"complete: {complete(checkpoints.folder)}")
    found = {f"w{i}": torch.zeros(4096) for i in range(8)}
    Saved(first).fill(found)
    for i in range(8):
        check(found[f"w{i}"], float(i))


def _small_files(me: Rank) -> None:
    """The system refuses this process every file larger than 4 KiB: EFBIG instead of ENOSPC."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    me.strike()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def _no_space(me: Rank) -> None:
    """Raises the error of a full file system when the rank's file is synced."""

    def full(_: int) -> None:
        me.strike()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.fsync = full


def _ends_in_write(how: End, me: Rank) -> None:
    from meshcomm.train.checkpoint import writer

    writer.write_part = lambda *_: me.end(how)  # type: ignore[assignment]


_OWN: Final[dict[str, Any]] = {"server": "own process"}
_SURVIVORS: Final = without(everyone(""), _VICTIM)

ROWS = [
    *(
        row(f"{how.lower()}-{name} | {how} | {moment} | all", opened(partial(act, how)), _SURVIVORS)
        for how in ENDS
        for name, moment, act in (
            ("in-teardown", "in teardown", _ends_in_close),
            ("before-teardown", "before teardown", _ends_before_close),
        )
    ),
    row(
        "forgotten-close | a process ends without closing its mesh | between calls | tp",
        *(_forgets, everyone("", r0="PeerLost"), (_VICTIM,)),
    ),
    row(
        "call-after-close | call on a closed mesh | after teardown | tp",
        *(opened(_calls_after_close), everyone("", r0="PeerLost", r1="MeshClosed"), (_VICTIM,)),
    ),
    row(
        "store-ends-live | store server dies | between calls | dp, tp",
        *(opened(_goes_on_without), everyone("")),
        **_OWN,
    ),
    row(
        "store-ends-then-sigkill | store server dies, then SIGKILL | in all_reduce | dp",
        *(opened(_dies_without), without(everyone("CommunicationError|PeerLost"), _VICTIM)),
        **{**_OWN, "dims": {"dp": 4}, "blameless": (0, 2, 3)},
    ),
    row(
        "store-ends-then-first-call | store server dies | before the first call on a group | dp",
        *(opened(_meets_without), everyone("")),
        **_OWN,
    ),
    row(
        "store-ends-then-asked | store server dies | in store.get | all",
        *(opened(_asks_dead_store), everyone("StoreError")),
        **_OWN,
    ),
    row(
        "store-key | a key that nobody sets | in store.get(timeout_s=1) | all",
        *(opened(_never_set), everyone("", r1="StoreTimeout")),
        promise_s=3.0,
    ),
    row(
        "sigkill-host-of-the-store | SIGKILL of the rank that holds the store | in all_reduce | tp",
        *(opened(_host_dies), peers(_SQUARE, "tp", 0, "PeerLost"), (0,)),
        server="rank 0",
    ),
    *(
        row(
            f"disk-full-{name} | disk full: {how} | while saving | all",
            *(opened(partial(_saves, fault)), everyone("TrainingError"), (_VICTIM,), DIFFERS_S),
        )
        for name, how, fault in (
            ("efbig", "RLIMIT_FSIZE, EFBIG", _small_files),
            ("enospc", "ENOSPC from fsync", _no_space),
        )
    ),
    *both(
        "saving | while saving | all",
        lambda how, me: opened(partial(_saves, partial(_ends_in_write, how)))(me),
        {0: "PeerLost", 2: "PeerLost|CollectiveTimeout", 3: "PeerLost"},
        {0: (1,), 2: (0,), 3: (1,)},
    ),
]
