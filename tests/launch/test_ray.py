"""Ranks as actors of Ray, as far as that goes without Ray; `python -m tests.launchers.ray` is the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from meshcomm.errors import LaunchError
from meshcomm.launch import ray
from meshcomm.mesh.rank_failure import Failure


class RayError(Exception):
    """As Ray's own."""


@dataclass(eq=False)
class Stream:
    """What an actor's generator gives; an error where its actor has died."""

    items: Iterator[Any]

    def __next__(self) -> Any:
        return next(self.items)


def get(item: Any) -> Any:
    if isinstance(item, Exception):
        raise item
    return item


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Exit code, what was printed, and the lines about the failure."""
    fake = SimpleNamespace(
        get=get, wait=lambda streams, timeout: (streams, []), exceptions=SimpleNamespace(RayError=RayError)
    )
    monkeypatch.setitem(sys.modules, "ray", fake)

    def follow(*ranks: list[Any]) -> tuple[int, str, list[str]]:
        streams = {Stream(iter(items)): rank for rank, items in enumerate(ranks)}
        code = ray._follow(streams, [f"10.0.0.{rank}" for rank in range(len(ranks))])
        out, err = capfd.readouterr()
        return code, out, err.splitlines()

    return follow


def lost(rank: int, peer: int) -> list[Failure]:
    return [Failure(rank, f"rank {rank}", 1.0, "PeerLost", text="its text", follows=True, missing=[peer])]


def test_what_ranks_print_is_printed(followed: Callable[..., Any]) -> None:
    assert followed(["a\n", (0, [])], ["b\n", "c\n", (0, [])]) == (0, "a\nb\nc\n", [])


def test_the_actor_that_died_is_named_also_after_errors_that_follow(followed: Callable[..., Any]) -> None:
    gone = RayError("The actor died unexpectedly.\nmore")
    code, _, lines = followed([(1, lost(0, 2))], [(1, lost(1, 2))], ["x\n", "y\n", gone])
    assert code == 1
    assert lines == [
        "meshcomm: rank 2 lost its actor on 10.0.0.2: The actor died unexpectedly.",
        "meshcomm: ranks 0 1 followed: lost a peer, or were ended by the launcher",
    ]


def test_a_rank_that_a_signal_ended_and_one_that_raised(followed: Callable[..., Any]) -> None:
    code, _, lines = followed(["x\n", "x\n", (0, [])], [(-9, [])])
    assert (code, lines[0]) == (137, "meshcomm: rank 1 was ended by SIGKILL")
    raised = Failure(1, "rank 1 (dp=1)", 1.0, "ValueError: planted", text="rank 1: planted", code=1)
    code, _, lines = followed([(1, lost(0, 1))], [(1, [raised])])
    assert (code, lines[:2]) == (
        1,
        ["rank 1: planted", "meshcomm: rank 1 (dp=1) failed: ValueError: planted"],
    )


def test_the_variables_of_ranks_on_two_nodes() -> None:
    found = ray._variables(["a", "a", "b"], "10.0.0.1", 4711)
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [" ".join(each[name] for name in names) for each in found] == [
        "0 0 2 3 10.0.0.1 4711",
        "1 1 2 3 10.0.0.1 4711",
        "2 0 1 3 10.0.0.1 4711",
    ]
    assert len({each["TORCHELASTIC_RUN_ID"] for each in found}) == 1
    assert ray._variables(["a"] * 2, "10.0.0.1", 4711)[1]["MASTER_ADDR"] == "127.0.0.1"


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match=r"Ray is not installed(.|\n)*try:      pip install ray"):
        ray.launch(["run", "script.py"], 2)
