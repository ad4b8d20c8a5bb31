"""Findings about the ranks of a running job."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from meshcomm.config import Config, MeshConfig, load_config
from meshcomm.doctor import host, together
from meshcomm.rendezvous.launcher import find_launch
from meshcomm.testing import Pool
from tests.commands.test_doctor import KEYS
from tests.doctor.test_examine import MESH, found
from tests.doctor.test_host import lines
from tests.forked_jobs import Job
from tests.rendezvous.test_exposure import everywhere

pytestmark = pytest.mark.usefixtures("no_launcher")


def as_job() -> tuple[dict[str, Any] | None, int]:
    return together.examine_together(Config(mesh=MeshConfig(**MESH)), find_launch(os.environ), 30)


def test_every_rank_says_where_it_is(pool: Pool) -> None:
    (facts, code), *others = pool.run(as_job, ranks=4)
    assert others == [(None, code)] * 3
    assert code == 0
    assert facts is not None and list(facts) == KEYS
    assert [(row["rank"], row["coords"], row["address"]) for row in facts["ranks"]] == [
        (rank, {"pp": rank // 2, "dp": rank % 2}, "127.0.0.1") for rank in range(4)
    ]
    assert {row["host"] for row in facts["ranks"]} == {socket.gethostname()}


def judged(*rows: tuple[str, str, str], config: Config | None = None) -> list[str]:
    """Findings about ranks with these hosts, addresses and versions of torch."""
    common = {"meshcomm": "1", "python": "3", "hint": 'network.interfaces = ["eth0"]'}
    return lines(
        together.judge(
            [
                {"rank": rank, "host": host, "address": address, "torch": version, **common}
                for rank, (host, address, version) in enumerate(rows)
            ],
            config,
        )
    )


def test_ranks_that_cannot_talk_with_each_other() -> None:
    a, b, lost = ("a", "10.0.0.1", "2"), ("b", "10.0.0.2", "2"), ("b", "127.0.0.1", "2")
    (cyclic,) = judged(a, b, a, b)
    assert cyclic.startswith(
        "warn | ranks of one host are not consecutive: the last dims cross the network | a: ranks 0 2; b: "
    )
    mesh = {"mesh": {"dims": {"dp": 2, "tp": 2}}}
    (of_mesh,) = judged(a, b, a, b, config=load_config(mesh))
    assert of_mesh.startswith(
        "warn | tp crosses nodes, because the ranks of a node are not consecutive | a: ranks 0 2; b: "
    )
    assert of_mesh.endswith("or mesh.rank_order = [0, 2, 1, 3]")
    assert judged(a, b, a, b, config=load_config(mesh, ["mesh.rank_order = [0, 2, 1, 3]"])) == []
    assert judged(a, b) == judged(a, a, b, b) == judged(lost, lost) == []
    assert judged(a, a, lost, lost) == [
        "error | other hosts would connect to ranks 2 3 at the loopback address"
        " | a: ranks 0 1 at 10.0.0.1\nb: ranks 2 3 at 127.0.0.1"
        ' | network.interfaces = ["eth0"], or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME'
    ]
    (versions,) = judged(a, ("a", "10.0.0.1", "2.1"))
    assert versions.startswith("error | ranks have different versions of torch | rank 0: 2; rank 1: 2.1 | ")


def test_two_hosts_with_loopback_names_are_refused_by_all(pool: Pool) -> None:
    results = pool.run(as_two_hosts, ranks=4)
    facts = results[0][0]
    assert [code for _, code in results] == [1] * 4
    assert [row["host"] for row in facts["ranks"]] == ["here", "here", "there", "there"]
    assert found(facts, "other hosts would connect to ranks 0 1 2 3 at the loopback").startswith("error: ")


def as_two_hosts() -> tuple[dict[str, Any] | None, int]:
    rank = int(os.environ["RANK"])
    usual = socket.gethostname, host.resolve
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)}
    socket.gethostname = lambda: "here" if rank < 2 else "there"
    host.resolve = lambda host: ["127.0.1.1"]
    try:
        return together.examine_together(Config(mesh=MeshConfig(**MESH)), find_launch(os.environ), 30)
    finally:
        socket.gethostname, host.resolve = usual


def test_torchrun_prints_one_table(pool: Pool, tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "meshcomm", "doctor", "--json"]  # fmt: skip
    code, out, err = Job(pool, tmp_path, *command, env={"OMP_NUM_THREADS": "1"}).finish()
    assert code == 0, err
    facts = json.loads(out)
    assert [each["rank"] for each in facts["ranks"]] == [0, 1]
    assert facts["launch"]["kind"] == "torchrun"
    # The store of torchrun's agent listens on every address, whatever its settings.
    shown = found(facts, "others can reach the job's store at localhost:")
    assert shown.startswith("warn: ")
    assert f"; it listens on {everywhere()}\n" in shown
