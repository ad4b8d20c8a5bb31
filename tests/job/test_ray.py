"""Ranks as Ray actors, as far as this can be tested without Ray; `python -m tests.launchers.ray` tests the rest."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from meshcomm.config.elastic import ElasticConfig
from meshcomm.errors import ConfigError, LaunchError
from meshcomm.job import ray
from meshcomm.job.replacing import Replacing, Sizes
from meshcomm.job.supervisor import labels_of
from meshcomm.watching.ending import Failure


class RayError(Exception):
    """Replaces the base class of Ray's errors."""


@dataclass(eq=False)
class Ref:
    """A value from an actor, or an error if the actor has died."""

    item: Any


@dataclass(eq=False)
class Stream:
    """The generator that an actor returns."""

    items: Iterator[Any]

    def __next__(self) -> Ref:
        return Ref(next(self.items))


@dataclass(eq=False)
class Actor:
    """A rank that yields these items, on a node; its place may also be an error."""

    items: list[Any]
    place: Any
    variables: dict[str, str] = field(default_factory=dict)
    killed: int = 0

    @property
    def where(self) -> Any:
        return SimpleNamespace(remote=lambda: Ref(self.place))

    @property
    def run(self) -> Any:
        return SimpleNamespace(remote=self.start)

    def start(self, words: list[str], variables: dict[str, str], cwd: str) -> Stream:
        self.variables = variables
        return Stream(iter(self.items))


def get(given: Any, timeout: float = 0.0) -> Any:
    if isinstance(given, list):
        return [get(each) for each in given]
    if isinstance(given.item, Exception):
        raise given.item
    return given.item


def kill(actor: Actor) -> None:
    actor.killed += 1


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace Ray."""

    def wait(waited: list[Any], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[Any], list[Any]]:
        found = [each for each in waited if not isinstance(each, Ref) or each.item is not None]
        return found[:num_returns], []

    errors = SimpleNamespace(RayError=RayError)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get, wait=wait, kill=kill, exceptions=errors))


@pytest.fixture
def followed(capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs ranks and gives the exit code, the printed text, and the lines about the failure."""

    def follow(*ranks: list[Any]) -> tuple[int, str, list[str]]:
        actors = [Actor(items, (f"node {rank}", f"10.0.0.{rank}", 4711)) for rank, items in enumerate(ranks)]
        return ran(capfd, actors, Replacing(len(ranks), ElasticConfig()))

    return follow


def ran(
    capfd: pytest.CaptureFixture[str],
    actors: list[Actor],
    replacing: Replacing,
    store: Any = None,
    patience_s: float = 9.0,
) -> tuple[int, str, list[str]]:
    """Run ranks. Actors are created in this order, including replacements."""
    coming = iter(actors)
    ranks = ray._Ranks(
        lambda: next(coming),
        ["run", "script.py"],
        replacing,
        patience_s,
        lambda rank, dims: f"rank {rank}",
        ("10.0.0.9", store, 2),
    )
    code = ranks.run()
    ranks.close()
    out, err = capfd.readouterr()
    return code, out, err.splitlines()


def lost(rank: int, peer: int) -> str:
    return text_of(
        Failure(rank, f"rank {rank}", 1.0, "PeerLost", text="its text", follows=True, missing=[peer])
    )


def text_of(failure: Failure) -> str:
    return json.dumps(asdict(failure))


def test_what_ranks_print_is_printed(followed: Callable[..., Any]) -> None:
    assert followed(["a\n", (0, "")], ["b\n", "c\n", (0, "")]) == (0, "a\nb\nc\n", [])


def test_the_actor_that_died_is_named_also_after_errors_that_follow(followed: Callable[..., Any]) -> None:
    gone = RayError("The actor died unexpectedly.\nmore")
    code, _, lines = followed([(1, lost(0, 2))], [(1, lost(1, 2))], ["x\n", "y\n", gone])
    assert code == 1
    assert lines == [
        "meshcomm: rank 2 lost its actor on 10.0.0.2: The actor died unexpectedly.",
        "meshcomm: ranks 0 1 followed: lost a peer, or were ended by the launcher",
    ]


def test_a_rank_that_a_signal_ended_and_one_that_raised(followed: Callable[..., Any]) -> None:
    code, _, lines = followed(["x\n", "x\n", (0, "")], [(-9, "")])
    assert (code, lines[0]) == (137, "meshcomm: rank 1 was ended by SIGKILL")
    raised = Failure(1, "rank 1 (dp=1)", 1.0, "ValueError: planted", text="rank 1: planted", code=1)
    code, _, lines = followed([(1, lost(0, 1))], [(1, text_of(raised))])
    assert (code, lines[:2]) == (
        1,
        ["rank 1: planted", "meshcomm: rank 1 (dp=1) failed: ValueError: planted"],
    )


def started(*nodes: str, store: Any = None, elastic: ElasticConfig | None = None) -> list[dict[str, str]]:
    """The variables of ranks on these nodes, which end at once."""
    actors = [Actor([(0, "")], (node, "10.0.0.1", 4711)) for node in nodes]
    made, replacing = iter(actors), Replacing(len(nodes), elastic or ElasticConfig())
    ranks = ray._Ranks(
        lambda: next(made), [], replacing, 9.0, lambda rank, dims: "", ("10.0.0.9", store, len({*nodes}))
    )
    assert ranks.run() == 0
    return sorted((each.variables for each in actors), key=lambda each: int(each["RANK"]))


def words(variables: dict[str, str], *names: str) -> str:
    return " ".join(variables[name] for name in names)


NAMES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_the_variables_of_ranks_on_two_nodes() -> None:
    found = started("a", "b", "a")
    assert [words(each, *NAMES) for each in found] == [
        "0 0 2 3 10.0.0.1 4711",
        "1 1 2 3 10.0.0.1 4711",
        "2 0 1 3 10.0.0.1 4711",
    ]
    assert len({each["TORCHELASTIC_RUN_ID"] for each in found}) == 1
    assert not {"MESHCOMM_GENERATION", "TORCHELASTIC_USE_AGENT_STORE"} & {*found[0]}
    assert words(started("a", "a")[1], *NAMES) == "1 1 2 2 127.0.0.1 4711"


class Store(dist.HashStore):  # type: ignore[misc]
    """A store with a port, as a TCPStore has."""

    port = 4712


def test_the_variables_of_an_elastic_job() -> None:
    found = started("a", "b", store=Store(), elastic=ElasticConfig(replace=1))
    assert words(found[0], *NAMES) == "0 0 1 2 10.0.0.9 4712"
    names = ("MESHCOMM_GENERATION", "MESHCOMM_ANNOUNCED_S", "TORCHELASTIC_USE_AGENT_STORE")
    assert words(found[1], *names) == "0 60 True"


@pytest.mark.parametrize("gone", [RayError("The node died."), (-9, "")])
def test_a_lost_rank_is_replaced(gone: Any, capfd: pytest.CaptureFixture[str]) -> None:
    store = Store()
    first = [
        Actor(["a\n"] * 9 + [(0, "")], ("A", "10.0.0.1", 1)),
        Actor(["b\n"] * 9 + [(0, "")], ("B", "10.0.0.2", 1)),
        Actor(["c\n", gone], ("B", "10.0.0.2", 1)),
    ]
    failed = Actor([], RayError("no such node"))
    new = Actor(["new\n", (0, "")], ("A", "10.0.0.1", 1))
    replacing = Replacing(3, ElasticConfig(replace=2))
    code, out, lines = ran(capfd, [*first, failed, new], replacing, store)
    assert (code, out.count("new\n")) == (0, 1)
    what = "was ended by SIGKILL" if isinstance(gone, tuple) else "lost its actor on 10.0.0.2: The node died."
    assert lines == [
        f"meshcomm: rank 2 {what}; replaced, replacements left: 1",
        "meshcomm: rank 2 could not be placed: no such node; replaced, replacements left: 0",
    ]
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MESHCOMM_GENERATION")
    assert words(new.variables, *names) == "2 1 2 2"
    assert [each.killed for each in (*first, failed, new)] == [1] * 5


def test_one_more_loss_than_can_be_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    actors = [
        Actor(["a\n"] * 9 + [(0, "")], ("A", "10.0.0.1", 1)),
        Actor([(-9, "")], ("B", "10.0.0.2", 1)),
        Actor(["new\n", (-11, "")], ("B", "10.0.0.2", 1)),
    ]
    code, _, lines = ran(capfd, actors, Replacing(2, ElasticConfig(replace=1)), Store())
    assert code == 128 + 11
    assert lines[1:] == [
        "meshcomm: rank 1 was ended by SIGSEGV",
        "meshcomm: rank 0 followed: lost a peer, or were ended by the launcher",
        "meshcomm: no rank had opened a mesh: only a Trainer, or a program that reopens its mesh, can continue",
    ]


def test_ranks_that_were_asked_to_end_are_not_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    actors = [Actor([(75, "")], (node, "10.0.0.1", 1)) for node in "AB"]
    code, _, lines = ran(capfd, actors, Replacing(2, ElasticConfig(replace=2)), Store())
    assert (code, lines[0]) == (75, "meshcomm: rank 0 ended with exit code 75")


def test_a_smaller_mesh_goes_on_and_grows_and_too_few_end(capfd: pytest.CaptureFixture[str]) -> None:
    store, sizes = Store(), Sizes({"dp": 3}, "dp", [2])

    class Waits(Actor):
        """Registers as waiting for its generation, so that the others meet it."""

        def start(self, words: list[str], variables: dict[str, str], cwd: str) -> Stream:
            number = variables["MESHCOMM_GENERATION"]
            replacing.store.set(f"meshcomm/waits/{number}/{variables['RANK']}", "")
            return super().start(words, variables, cwd)

    actors = [
        Actor([(-9, "")], ("A", "10.0.0.1", 1)),
        Actor(["b\n"] * 9 + [(0, "")], ("B", "10.0.0.2", 1)),
        Actor(["c\n"] * 9 + [(0, "")], ("C", "10.0.0.3", 1)),
        Waits(["new\n"] * 3 + [(0, "")], ("A", "10.0.0.1", 1)),
    ]
    elastic, clock = ElasticConfig(replace=1, min={"dp": 2}, delay_s=3), itertools.count()
    replacing = Replacing(3, elastic, sizes, now=lambda: next(clock))
    code, _, lines = ran(capfd, actors, replacing, store)
    assert code == 0 and lines == [
        "meshcomm: rank 0 was ended by SIGKILL; continues with dp=2",
        "meshcomm: new processes for rank 0; continues with dp=3",
    ]
    assert words(actors[3].variables, "RANK", "MESHCOMM_GENERATION") == "0 2"

    # Without a new process, the second loss is one too many. The error names it by its current rank.
    actors = [
        Actor([RayError("gone")], ("A", "10.0.0.1", 1)),
        Actor(["b\n"] * 9 + [(0, "")], ("B", "10.0.0.2", 1)),
        Actor(["c\n"] * 3 + [RayError("gone too")], ("C", "10.0.0.3", 1)),
    ]
    code, _, lines = ran(capfd, actors, Replacing(3, ElasticConfig(min={"dp": 2}), sizes), Store())
    assert code == 1 and lines[0].endswith("10.0.0.1: gone; continues with dp=2")
    assert lines[1] == "meshcomm: rank 1 lost its actor on 10.0.0.3: gone too"


def test_a_cluster_without_room_for_a_new_process(capfd: pytest.CaptureFixture[str]) -> None:
    actors = [
        Actor(["a\n"] * 10**6, ("A", "10.0.0.1", 1)),
        Actor([RayError("gone")], ("B", "10.0.0.2", 1)),
        Actor([], None),
    ]
    code, _, lines = ran(capfd, actors, Replacing(2, ElasticConfig(replace=1)), Store(), 0.05)
    assert code == 1
    assert lines[1] == (
        "meshcomm: rank 1 lost its actor on 10.0.0.2: gone; for 0.05 s the cluster had no room for a new process"
    )


def test_what_the_words_say_of_losses(tmp_path: Path) -> None:
    config = tmp_path / "mesh.toml"
    config.write_text('[mesh]\ndims = { dp = 4 }\ndevice = "cpu"\n[elastic]\nreplace = 3\n')
    path = str(config)
    said, settings, elastic = ray._read(["run", path, "script.py", "--replace", "7"], None)
    assert said == ["run", path, "script.py", "--replace", "7"] and elastic.replace == 3
    assert settings is not None and labels_of(settings, 4)(2, {}) == "rank 2 (dp=2)"
    assert labels_of(settings, 4)(1, {"dp": 2}) == "rank 1 (dp=1)"
    said, _, elastic = ray._read(["train", "--set", "elastic.min.dp=2", path], 5)
    assert said == ["train", "--replace", "5", "--set", "elastic.min.dp=2", path]
    assert elastic == ElasticConfig(replace=5, min={"dp": 2})
    assert ray._read(["run", "script.py"], 2) == (
        ["run", "--replace", "2", "script.py"],
        None,
        ElasticConfig(replace=2),
    )
    with pytest.raises(ConfigError):
        ray._read(["train", path, "--set", "elastic.replace=-1"], None)
    with pytest.raises(LaunchError, match=r"cannot start doctor(.|\n)*try:"):
        ray._read(["doctor"], None)


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match=r"Ray is not installed(.|\n)*try:      pip install ray"):
        ray.launch(["run", "script.py"], 2)


def test_help_says_how_ranks_are_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ray.py", "--help"])
    with pytest.raises(SystemExit):
        ray._main()
    assert "--replace N" in capsys.readouterr().out
