"""Every mesh trains like one process. If it does not, parity names the difference and the dim."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError
from meshcomm.testing import Pool
from meshcomm.train.parity import Difference, Record, compare, first, in_float64, record, reference, worst
from meshcomm.train.parity_job import blame, differences
from tests.train.parity_bugs import BUGS, planted
from tests.train.parity_cases import CASES, PAIRS, small
from tests.train.parity_page import PAGE, settings

pytestmark = pytest.mark.long

TOLERANCE = 1e-9

Mesh = Callable[..., list[Difference]]


def recorded(config: Config, steps: int, path: Path) -> None:
    """Record one process, for comparisons with meshes."""
    torch.set_num_threads(1)
    one = reference(config)
    with meshcomm.init(one) as mesh:
        record(mesh, one, steps).save(path)


def compared(config: Config, steps: int, path: Path, bug: str) -> list[Difference] | None:
    """This rank's differences from the record, with a mistake in its program or without."""
    torch.set_num_threads(1)
    with planted(bug, config):
        return differences(config, steps, path)


@pytest.fixture(scope="module")
def mesh(pool: Pool) -> Mesh:
    """Run a configuration's mesh and return its differences from one process, which runs once for each model."""
    known: dict[str, tuple[Path, list[str]]] = {}

    def run(config: Config, steps: int = 3, bug: str = "") -> list[Difference]:
        facts = reference(config).model_dump(mode="json", exclude_unset=True)
        key = json.dumps([facts["model"], facts["train"], facts["data"], steps])
        if key not in known:
            path = pool.folder / f"reference{len(known)}.pt"
            pool.run(recorded, config, steps, path, ranks=1)
            known[key] = path, list(Record.read(path).weights)
        path, names = known[key]
        ranks = math.prod(config.mesh.dims.values())
        found = pool.run(compared, config, steps, path, bug, ranks=ranks, timeout_s=300)
        return worst(found, names)

    return run


# -- the meshes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PAIRS)
@pytest.mark.deep_cases(
    r"\[(shard2 tp2|shard4 ep2|shard2 cp2 ulysses|shard4 ep4 capacity|pp2 tp2 sequence recompute)\]"
)
def test_three_steps_are_those_of_one_process(mesh: Mesh, case: str) -> None:
    found = mesh(load_config(PAIRS[case]), 3)
    assert {one.kind for one in found} == {"loss", "gradient norm", "weight", "gradient"}
    assert max(found, key=lambda one: one.relative).relative < TOLERANCE


@pytest.mark.parity
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_are_those_of_one_process(
    mesh: Mesh, case: str, parity_rows: list[tuple[str, Difference]], figures: Callable[[str], None]
) -> None:
    found = mesh(load_config(CASES[case]), 20)
    one = max(found, key=lambda one: one.relative)
    figures(f"parity of {case}, 20 steps: {one.relative:.1e}, {one.words}")
    parity_rows.append((case, one))
    assert len([one for one in found if one.kind == "loss"]) == 20
    assert one.relative < TOLERANCE


def test_the_page_has_every_case() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    # The rows after the two header lines: their first columns follow from the cases, and only the last one is measured.
    assert [row.split(" | ")[:3] for row in rows[2:]] == [
        [f"| {case}", *settings(CASES[case])] for case in CASES
    ]


# -- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bug", BUGS)
def test_a_mistake_is_caught_and_its_dim_named(mesh: Mesh, bug: str, figures: Callable[[str], None]) -> None:
    _, case, what, dim = BUGS[bug]
    config = load_config(CASES[case])
    ahead = first(mesh(config, 3, bug), TOLERANCE)
    assert ahead is not None and ahead.words == what
    found = blame(config, lambda part: mesh(part, 3, bug), TOLERANCE)
    figures(f"{bug.replace('_', ' ')}, on {case}: first the {ahead.words}; {found.words}")
    assert found.dims == (dim,)
    assert found.difference is not None and found.difference.relative > 1e-6


@pytest.mark.parametrize(
    ("bug", "dim"),
    [
        ("sum_after_split_inputs_missing", "tp"),
        ("replicated_parameters_counted_twice_along_tp", "tp"),
        ("last_stage_begins_one_layer_late", "pp"),
    ],
)
def test_a_mistake_is_caught_on_two_ranks(mesh: Mesh, bug: str, dim: str) -> None:
    ahead = first(mesh(load_config(small(f"{dim}=2")), 3, bug), TOLERANCE)
    assert ahead is not None and ahead.words == BUGS[bug].first


# -- comparing ------------------------------------------------------------------------------------


def one_record(**changes: Any) -> Record:
    facts: dict[str, Any] = {
        "losses": (5.0, 4.0),
        "norms": (1.0, 2.0),
        "weights": {"a": torch.tensor([1.0, -400.0]), "b": torch.ones(2, 2)},
        "gradients": {"a": torch.tensor([0.5, 0.25]), "b": torch.zeros(2, 2)},
    }
    return Record(**{**facts, **changes})


def test_equal_records_differ_by_nothing(tmp_path: Path) -> None:
    one_record().save(tmp_path / "record.pt")
    found = compare(Record.read(tmp_path / "record.pt"), one_record())
    steps = ["loss of step 1", "gradient norm of step 1", "loss of step 2", "gradient norm of step 2"]
    assert [one.words for one in found] == [
        *steps,
        *("weight of a", "gradient of a", "weight of b", "gradient of b"),
    ]
    assert {one.absolute for one in found} == {one.relative for one in found} == {0.0}
    assert first(found, 0.0) is None


def test_differences_are_relative_to_what_is_large() -> None:
    ours = one_record(
        losses=(5.0, 4.5),
        weights={"a": torch.tensor([1.0, -402.0]), "b": torch.ones(2, 2)},
        gradients={"a": torch.tensor([0.5, 0.5]), "b": torch.zeros(2, 2)},
    )
    found = {one.words: one for one in compare(ours, one_record(), rank=3) if one.absolute}
    assert found == {
        "loss of step 2": Difference("loss", "step 2", 0.5, 0.125, 3),
        "weight of a": Difference("weight", "a", 2.0, 0.005, 3),
        "gradient of a": Difference("gradient", "a", 0.25, 0.25, 3),
    }
    ahead = first(found.values(), 1e-9)
    assert ahead is not None and ahead.words == "loss of step 2"
    # If no step differs, `first` returns the worst parameter; if no difference exceeds the tolerance, None.
    del found["loss of step 2"]
    ahead = first(found.values(), 1e-9)
    assert ahead is not None and ahead.words == "gradient of a"
    assert first(found.values(), 0.25) is None


@pytest.mark.parametrize(
    ("changes", "words", "note"),
    [
        ({"losses": (5.0, float("nan"))}, "loss of step 2", "not finite"),
        ({"losses": (5.0,)}, "loss of step 2", "on one side only"),
        ({"weights": {"a": torch.ones(2), "c": torch.ones(1)}}, "weight of c", "on one side only"),
        ({"weights": {"b": torch.ones(4)}}, "weight of b", "shape (4,), on one process (2, 2)"),
    ],
)
def test_incomparable_values_differ_infinitely(changes: dict[str, Any], words: str, note: str) -> None:
    (one,) = [one for one in compare(one_record(**changes), one_record()) if one.words == words]
    assert one.relative == one.absolute == float("inf") and one.note == note
    assert first([one], 1e300) is one


def test_the_worst_rank_counts_and_what_no_rank_has_is_missing() -> None:
    ours = [
        compare(one_record(weights={"a": torch.tensor([1.0, value])}), one_record(), rank)
        for rank, value in enumerate((-400.0, -404.0, -404.0))
    ]
    found = {one.words: one for one in worst(ours, ["a", "b"])}
    assert found["weight of a"] == Difference("weight", "a", 4.0, 0.01, 1)
    assert found["weight of b"].note == "on one side only"
    assert len(found) == 8


def test_float32_and_bf16_are_put_aside_and_said() -> None:
    narrow = {"dtype": "float32", "compute_dtype": "bfloat16", "float32_matmul_precision": "high"}
    train = {**CASES["shard8"]["train"], **narrow}
    parallel = {**CASES["shard8"]["parallel"], "options": {"reduce_dtype": "bfloat16"}}
    config, said = in_float64(load_config({**CASES["shard8"], "train": train, "parallel": parallel}))
    assert config.train is not None and config.parallel is not None
    assert (config.train.dtype, config.train.compute_dtype) == ("float64", None)
    assert (config.parallel.options.reduce_dtype, config.train.float32_matmul_precision) == (None, None)
    assert said == (
        'train.compute_dtype left out, was "bfloat16"',
        'parallel.options.reduce_dtype left out, was "bfloat16"',
        'train.float32_matmul_precision left out, was "high"',
        'train.dtype = "float64", was "float32"',
    )
    assert in_float64(config) == (config, ())


def test_no_training_is_refused() -> None:
    mesh_alone = load_config({"mesh": {"dims": {"dp": 2}}})
    for function in (in_float64, reference):
        with pytest.raises(ConfigError, match="describes no training"):
            function(mesh_alone)
