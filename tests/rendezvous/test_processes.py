"""Two processes that claim one rank are named, and names of processes are told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshcomm.config import ProcessConfig
from meshcomm.errors import LaunchError, MeshMismatchError
from meshcomm.rendezvous.meeting import meet
from meshcomm.rendezvous.processes import Owner, blame, claim, is_running, known_everywhere, process_name
from tests.rendezvous.test_meeting import SINGLE, processes


def twice(store: Any, first: str, kept: bool) -> str:
    store.set("meshcomm/owner/1", first)
    try:
        claim(store, 1, kept=kept)
    except LaunchError as error:
        assert store.get("meshcomm/owner/1").decode() == first
        return str(error)
    assert store.get("meshcomm/owner/1").decode() == process_name()
    return "taken over"


def test_a_rank_that_comes_twice(tmp_path: Path) -> None:
    running, ended = processes()
    assert is_running(process_name())
    assert is_running(running)
    assert is_running(ended) is False
    elsewhere = "process 7 of another-host, started at 1"
    assert is_running(elsewhere) is None
    stores = {
        "TCPStore": dist.PrefixStore("job", dist.TCPStore("127.0.0.1", 0, is_master=True)),
        "HashStore": dist.HashStore(),
        "FileStore": dist.FileStore(str(tmp_path / "store"), 2),
    }
    for kind, store in stores.items():
        missing = MeshMismatchError("rank 2 never arrived", given="ranks 0 1", expected="", hint="")
        missing.missing = (2,)
        blame(missing, store)
        assert (missing.given, missing.mismatched_ranks) == ("ranks 0 1", ()), kind
        # The same process claims its rank again: it opens several meshes, at once or in turn.
        for _ in range(2):
            claim(store, 1, kept=False)
        # The rank of an ended process is claimed again, as by an agent or script that restarts the rank.
        assert twice(store, ended, kept=False) == twice(store, ended, kept=True) == "taken over", kind
        assert twice(store, elsewhere, kept=True) == "taken over", kind
        for first, kept in ((running, True), (elsewhere, False)):
            text = twice(store, first, kept)
            assert text.startswith("rank 1 exists twice: another process has already claimed rank 1"), kind
            assert f"{first}\n            {process_name()} (this one)" in text, kind
        blame(missing, store)
        assert missing.mismatched_ranks == (1,), kind
        assert missing.missing == (2,), kind
        # The note about the ended process is ignored, because that process no longer owns the rank.
        assert missing.given == f"ranks 0 1\nrank 1 exists twice: {elsewhere}; and {process_name()}", kind


def test_a_rank_that_comes_twice_by_file(tmp_path: Path) -> None:
    path = str(tmp_path / "rendezvous")
    running, _ = processes()
    file = dist.FileStore(path, 2)
    file.set("meshcomm/process/0", running)
    with pytest.raises(LaunchError, match=f"rank 0 exists twice.*\n *given: *{running}\n"):
        meet(ProcessConfig(init="file", path=path, rank=0, world_size=2), SINGLE, 5)


def test_which_names_are_of_other_jobs() -> None:
    here, there = (f"process 7 of {host}, started at 1" for host in ("a", "b"))
    for job, other, may_be in (
        ("Slurm step 7.0", "Slurm step 7.0", True),
        ("Slurm step 7.0", "Slurm step 7.1", False),
        ("Slurm step 7.0", "", True),
        ("", "Slurm step 7.0", True),
        (f"the job of {here}", "the job of process 8 of a, started at 1", False),
        # A separate process on each host starts the ranks, or rank 0 has started the others.
        (f"the job of {here}", f"the job of {there}", True),
        ("the job of process 1 of a, started at 1", f"the job of {here}", True),
    ):
        assert Owner(job, here).may_be(other) is may_be, (job, other)
    assert not known_everywhere(f"the job of {here}")
    assert known_everywhere("the job of mpiexec at a:44915")
