"""The processes that continue after a loss, and the actions that a launcher takes; no process is started."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch.distributed as dist

from meshcomm.config import load_config
from meshcomm.config.elastic import ElasticConfig
from meshcomm.errors import ConfigError
from meshcomm.job.replacing import Places, Replacing, Sizes, sizes_of
from meshcomm.watching.ending import Failure


def lost(*processes: int, follows: bool = False, code: int = 137) -> dict[int, Failure]:
    return {
        each: Failure(
            each, f"rank {each}", 0.0, "was ended by SIGKILL", code=code, follows=follows, raised=False
        )
        for each in processes
    }


def sizes(dims: Mapping[str, int], dim: str, *fewer: int) -> Sizes:
    return Sizes(dims, dim, fewer or range(dims[dim] - 1, 0, -1))


def test_whole_copies_stay_and_gaps_are_filled() -> None:
    first = Places.first(8, sizes({"dp": 4, "cp": 2}, "dp"))
    assert first.dims == {}
    one = first.filled({*range(8)} - {3})
    assert one is not None and one.processes == (0, 1, 4, 5, 6, 7) and one.dims == {"dp": 3, "cp": 2}
    # Rank 2 is idle. When 5 is lost too, rank 2 takes over its work, although it had another part before.
    two = one.filled({*range(8)} - {3, 5})
    assert two is not None and two.processes == (0, 1, 4, 2, 6, 7)
    assert two.filled({*range(8)} - {3, 5, 0}).processes == (4, 2, 6, 7)  # type: ignore[union-attr]
    assert two.filled({*range(8)}) == first
    grown = two.filled({*range(8)} - {3, 5, 0})
    assert grown is not None
    assert grown.filled({*range(8)} - {3}).dims == {"dp": 3, "cp": 2}  # type: ignore[union-attr]


@pytest.mark.parametrize("dims", [{"dp": 2, "fsdp": 2}, {"fsdp": 4, "dp": 2}, {"fsdp": 3, "dp": 3}])
def test_every_shard_stays(dims: dict[str, int]) -> None:
    """After the loss of any process, those that continue have all shards, if there is a place for each."""
    count, size = dims["dp"] * dims["fsdp"], dims["fsdp"]
    first = Places.first(count, sizes(dims, "fsdp")._replace(shards=True))
    shards = first.sizes.replicas(range(count), size).tolist()  # type: ignore[union-attr]
    for lost in range(count):
        left = first.filled({*range(count)} - {lost})
        assert left is not None and left.size == size - 1
        assert lost not in left.processes and len({*left.processes}) == (size - 1) * dims["dp"]
        assert all({*left.processes} & {*shard} for shard in shards)


def test_too_few_or_a_size_that_does_not_fit() -> None:
    first = Places.first(8, sizes({"dp": 4, "cp": 2}, "dp", 2))
    assert first.filled({0, 1, 2, 3, 4, 6}).processes == (0, 1, 2, 3)  # type: ignore[union-attr]
    assert first.filled({0, 1, 2}) is None
    assert Places.first(4).filled({0, 1, 2}) is None
    assert Places.first(4).filled(range(4)) == Places.first(4)


@pytest.mark.parametrize(
    "dims", [{"pp": 2, "dp": 3, "tp": 2}, {"dp": 4, "tp": 2}, {"tp": 2, "dp": 4}, {"dp": 5}]
)
def test_any_losses_and_returns(dims: dict[str, int]) -> None:
    whole = 1
    for size in dims.values():
        whole *= size
    others = whole // dims["dp"]
    draw = random.Random(0)
    for _ in range(200):
        places, alive = Places.first(whole, sizes(dims, "dp")), {*range(whole)}
        for _ in range(8):
            alive ^= {draw.randrange(whole)}
            found = places.filled(alive)
            assert (found is None) == (len(alive) < others)
            if found is None:
                break
            assert found.size == len(alive) // others
            assert len({*found.processes}) == found.size * others and {*found.processes} <= alive
            # A complete copy of the model stays, and its processes keep their places in it.
            if found.size == places.size - 1 and len({*places.processes} - alive) == 1:
                kept = [each for each in places.processes if each in found.processes]
                assert len(kept) >= (places.size - 1) * others
            places = found


def test_sizes_are_those_that_the_training_fits() -> None:
    text: dict[str, Any] = {
        "mesh": {"dims": {"dp": 4}, "device": "cpu"},
        "parallel": {"data": "dp"},
        "model": {
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_layers": 1,
            "num_heads": 1,
            "num_kv_heads": 1,
        },
        "data": {"seq_len": 8},
        "train": {"steps": 2, "global_batch_size": 8, "micro_batch_size": 1},
        "elastic": {"min": {"dp": 1}},
    }
    assert sizes_of(load_config(text), 4) == Sizes({"dp": 4}, "dp", [2, 1])
    with pytest.raises(ConfigError, match=r"no size from 3 to 3 fits(?s:.)*not divisible by dp"):
        sizes_of(load_config(text, ["elastic.min.dp=3"]), 4)
    assert sizes_of(load_config(text, ["elastic.min={}"]), 4) is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"elastic": {"min": {"tp": 1}}}, "not a dim of the mesh"),
        ({"elastic": {"min": {"dp": 9}}}, "more than the mesh has along dp: 9 > 4"),
        ({"elastic": {"min": {"dp": 1, "pp": 1}}}, "2 dims"),
        (
            {"elastic": {"min": {"pp": 1}}, "parallel": {"data": "dp", "pipeline": "pp"}},
            "needs every rank along pp",
        ),
        ({"elastic": {"delay_s": 3.0}}, "no effect without elastic.replace"),
        ({"elastic": {"patience_s": 3.0}}, "without it, the other ranks always wait"),
        (
            {"mesh": {"dims": {"dp": 4}, "rank_order": [3, 2, 1, 0]}, "elastic": {"min": {"dp": 1}}},
            "cannot change its size",
        ),
    ],
)
def test_what_is_wrong_is_said(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config({"mesh": {"dims": {"pp": 2, "dp": 4}}, **more})


class Job:
    """The announcements of a launcher, with a clock that tests set."""

    def __init__(self, elastic: ElasticConfig, shrinks: Sizes | None = None, count: int = 4) -> None:
        self.at, self.store = 0.0, dist.HashStore()
        self.replacing = Replacing(count, elastic, shrinks, now=lambda: self.at)
        self.replacing.store = self.store

    def said(self, number: int) -> tuple[Any, ...]:
        found = json.loads(self.store.get(f"meshcomm/generation/{number}"))
        return [*found["lost"]], [*found["new"]], found["processes"], found["dims"]

    def starts(self) -> dict[int, int]:
        return {each: self.replacing.started(each) for each in self.replacing.starts()}

    def comes(self, process: int, number: int) -> None:
        self.store.set(f"meshcomm/waits/{number}/{process}", "")


def test_a_process_is_replaced_at_once() -> None:
    job = Job(ElasticConfig(replace=2))
    assert job.replacing.lost(lost(1), False)
    assert job.said(1) == (["1"], ["1"], [], {})
    assert job.starts() == {1: 1} and job.starts() == {}
    assert job.replacing.lost(lost(0), False) and job.starts() == {0: 2}
    assert not job.replacing.lost(lost(2), False)


def test_two_at_once_take_two_replacements(capsys: pytest.CaptureFixture[str]) -> None:
    assert Job(ElasticConfig(replace=3)).replacing.lost(lost(1) | lost(2), False)
    left = [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert left == ["2", "1"]


@pytest.mark.parametrize("failures", [lost(1, follows=True), lost(1, code=2), lost(1, code=130)])
def test_what_would_fail_again_is_not_replaced(failures: dict[int, Failure]) -> None:
    assert not Job(ElasticConfig(replace=2)).replacing.lost(failures, False)


def test_nobody_meets_one_that_has_ended() -> None:
    assert not Job(ElasticConfig(replace=2)).replacing.lost(lost(1), True)
    job = Job(ElasticConfig(replace=1, delay_s=5.0, min={"dp": 1}), sizes({"dp": 4}, "dp"))
    assert job.replacing.lost(lost(1), False)
    job.at = 5.0
    assert job.starts() == {1: 2}
    job.comes(1, 2)
    job.replacing.grow(True)
    assert job.replacing.number == 1


def test_the_others_go_on_and_grow_back() -> None:
    job = Job(ElasticConfig(replace=1, delay_s=5.0, min={"dp": 2}), sizes({"dp": 4}, "dp", 3, 2))
    assert job.replacing.lost(lost(1), False)
    assert job.said(1) == (["1"], [], [0, 2, 3], {"dp": 3})
    assert job.starts() == {}
    # No replacement is left for a second loss.
    assert job.replacing.lost(lost(2), False) and job.said(2) == (["2"], [], [0, 3], {"dp": 2})
    assert not job.replacing.lost(lost(3), False)
    job.at = 5.0
    assert job.starts() == {1: 3}
    job.replacing.grow(False)
    assert job.replacing.number == 2
    job.comes(1, 3)
    job.replacing.grow(False)
    assert job.said(3) == ([], ["1"], [0, 3, 1], {"dp": 3})


def test_the_mesh_does_not_grow_once_all_ranks_are_done() -> None:
    job = Job(ElasticConfig(replace=1, delay_s=1.0, min={"dp": 1}), sizes({"dp": 4}, "dp"))
    assert job.replacing.lost(lost(1), False)
    job.at = 1.0
    job.starts()
    job.comes(1, 2)
    job.store.set("meshcomm/next/2", "done")
    job.replacing.grow(False)
    assert job.replacing.number == 1


def test_within_their_patience_the_others_wait() -> None:
    job = Job(ElasticConfig(replace=1, delay_s=5.0, patience_s=5.0, min={"dp": 1}), sizes({"dp": 4}, "dp"))
    assert job.replacing.lost(lost(1), False)
    assert job.said(1) == (["1"], ["1"], [], {}) and job.starts() == {}
    job.at = 5.0
    assert job.starts() == {1: 1}


def test_one_that_dies_as_it_comes_back() -> None:
    job = Job(ElasticConfig(replace=2, delay_s=1.0, min={"dp": 1}), sizes({"dp": 4}, "dp"))
    assert job.replacing.lost(lost(1), False)
    job.at = 1.0
    assert job.starts() == {1: 2}
    assert job.replacing.lost(lost(1), False) and job.replacing.number == 1
    job.at = 2.0
    assert job.starts() == {1: 2}
    # This was the last replacement: the others continue without it.
    assert job.replacing.lost(lost(1), False) and job.replacing.number == 1
    job.at = 9.0
    assert job.starts() == {}


def test_any_order_of_losses_keeps_the_others() -> None:
    for order in itertools.permutations(range(4), 3):
        job = Job(ElasticConfig(min={"dp": 1}), sizes({"dp": 4}, "dp"))
        for each in order:
            assert job.replacing.lost(lost(each), False)
        assert job.replacing.places.processes == tuple({*range(4)} - {*order})


def test_one_that_does_not_come_in_time() -> None:
    job = Job(ElasticConfig(replace=1, patience_s=5.0, min={"dp": 1}), sizes({"dp": 4}, "dp"))
    assert job.replacing.lost(lost(1), False) and job.replacing.starts() == [1]
    job.replacing.lose_patience()
    assert job.replacing.number == 1
    job.at = 6.0
    job.replacing.lose_patience()
    assert job.said(2) == (["1"], [], [0, 2, 3], {"dp": 3})
    assert job.replacing.started(1) == 3
    job.comes(1, 3)
    job.replacing.grow(False)
    assert job.said(3) == ([], ["1"], [], {})


def test_without_a_smaller_mesh_the_others_wait_as_long_as_it_takes() -> None:
    job = Job(ElasticConfig(replace=1, delay_s=5.0))
    assert job.replacing.lost(lost(1), False)
    job.at = 4.0
    job.replacing.lose_patience()
    assert job.replacing.starts() == [] and job.said(1) == (["1"], ["1"], [], {})
    job.at = 5.0
    job.replacing.lose_patience()
    assert job.starts() == {1: 1} and job.replacing.number == 1


def test_one_that_the_others_waited_for_until_the_mesh_got_smaller() -> None:
    job = Job(ElasticConfig(replace=1, delay_s=5.0, patience_s=5.0, min={"dp": 1}), sizes({"dp": 4}, "dp"))
    assert job.replacing.lost(lost(1), False) and job.said(1) == (["1"], ["1"], [], {})
    # No replacement is left for this loss, and the first one has not arrived yet.
    assert job.replacing.lost(lost(2), False) and job.said(2)[2:] == ([0, 3], {"dp": 2})
    job.at = 5.0
    assert job.starts() == {1: 3}
    job.comes(1, 3)
    job.replacing.grow(False)
    assert job.said(3) == ([], ["1"], [0, 3, 1], {"dp": 3})
