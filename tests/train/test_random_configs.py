"""Configurations from a seed are either refused with a reason, or train like one process."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import meshcomm
from meshcomm.config import Config, ParallelOptions, load_config
from meshcomm.config.parse import parse_toml
from meshcomm.config.problems import Problem
from meshcomm.config.read import apply
from meshcomm.config.section import check
from meshcomm.config.write import whole_toml
from meshcomm.errors import ConfigError
from meshcomm.testing import Pool
from meshcomm.train.parity import Difference, Record, compare, record, reference, worst
from meshcomm.train.parity_job import differences
from tests.sizes import model_of, train_of
from tests.train.parity_cases import small
from tests.train.random_configs import PARTS, SIMULATED, changed, right
from tests.train.runs import parallel_of

pytestmark = pytest.mark.long

TOLERANCE = 1e-9


def alone(config: Config) -> Record:
    one = reference(config)
    (found,) = meshcomm.simulate(record, one, world_size=1, args=(one, _steps(config)))
    return found


def simulated(raw: dict[str, Any]) -> Difference:
    """The largest difference between simulated ranks and one process."""
    config = load_config(raw)
    known = alone(config)

    def rank(mesh: meshcomm.Mesh) -> list[Difference]:
        return compare(record(mesh, config, _steps(config)), known, mesh.rank)

    found = worst(meshcomm.simulate(rank, config), known.weights)
    return max(found, key=lambda one: one.relative)


def of_rank(config: Config, path: Path) -> list[Difference] | None:
    torch.set_num_threads(1)
    return differences(config, _steps(config), path)


def on_processes(pool: Pool, raw: dict[str, Any]) -> Difference:
    """Like `simulated`, but on processes: for pipelines and shards, which need torch's groups."""
    config = load_config(raw)
    known = alone(config)
    path = pool.folder / "random.pt"
    known.save(path)
    ranks = math.prod(config.mesh.dims.values())
    found = worst(pool.run(of_rank, config, path, ranks=ranks, timeout_s=120), known.weights)
    return max(found, key=lambda one: one.relative)


def _steps(config: Config) -> int:
    assert config.train is not None
    return config.train.steps


# -- what trains ----------------------------------------------------------------------------------


# Experts along context; context and data with a rank order; tensor, data and sequence_parallel with experts.
@pytest.mark.parametrize("seed", [2, 3, 35])
def test_simulated_ranks_train_what_one_process_trains(seed: int) -> None:
    one = simulated(right(seed, SIMULATED, most=4))
    assert one.relative < TOLERANCE, one


@pytest.mark.parametrize(
    "raw",
    [
        small("cp=2 tp=2", sequence_parallel=True),
        small("dp=2 tp=2", "edp=1 ep=2 tp=2"),
    ],
    ids=["cp2 tp2 sequence", "ep2 tp2"],
)
def test_pairs_of_parts(raw: dict[str, Any]) -> None:
    one = simulated(raw)
    assert one.relative < TOLERANCE, one


@pytest.mark.parity
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("must", [[], ["pipeline"], ["shard"], ["pipeline", "shard"]], ids=" ".join)
def test_many_configurations(pool: Pool, must: list[str], figures: Any) -> None:
    if must:
        found = [(on_processes(pool, right(seed, PARTS, must=must)), seed) for seed in range(30)]
    else:
        found = [(simulated(right(seed, SIMULATED)), seed) for seed in range(200)]
    largest, seed = max(found, key=lambda each: each[0].relative)
    figures(
        f"{len(found)} random configurations {must}: {largest.relative:.1e}, {largest.words}, seed {seed}"
    )
    assert largest.relative < TOLERANCE, seed


def smaller(dims: str, **parallel: Any) -> dict[str, Any]:
    return {
        "mesh": {"dims": parse_toml(f"dims = {{ {dims} }}", "")["dims"], "device": "cpu", "reports": ""},
        "parallel": parallel_of(**parallel),
        "model": model_of(4, 8, 2, 2, 6),
        "data": {"seq_len": 8, "max_bytes": 20_000},
        "train": train_of(2, 8, 1, dtype="float64", clip_norm=0.5),
    }


@pytest.mark.parity
def test_shards_where_a_backward_pass_runs_in_halves(pool: Pool) -> None:
    raw = smaller("pp = 2, fsdp = 2", pipeline="pp", shard="fsdp", schedule="zero_bubble", stages_per_rank=2)
    one = on_processes(pool, raw)
    assert one.relative < TOLERANCE, one


@pytest.mark.parametrize(
    ("dims", "data", "merge"),
    [
        # One of the mesh's own names already covers the dims of the sum, or equals the name of a new one.
        ("dp = 2, cp = 2", "dp", {"merged": ["dp", "cp"]}),
        ("one = 2, cp = 2, one_cp = 1", "one", {}),
        ('"größe" = 2, cp = 2', "größe", {}),
    ],
    ids=["merged already", "name taken", "letters"],
)
def test_gradients_are_summed_along_two_dims(dims: str, data: str, merge: dict[str, list[str]]) -> None:
    raw = smaller(dims, data=data, context="cp")
    raw["model"] |= {"hidden_size": 4}  # heads of two elements around a ring
    raw["mesh"]["merge"] = merge
    one = simulated(raw)
    assert one.relative < TOLERANCE, one


# -- what is refused ------------------------------------------------------------------------------


def problems(raw: dict[str, Any]) -> list[Problem]:
    return check(Config, copy.deepcopy(raw))[1]


def same(one: Problem) -> tuple[str, str]:
    """The identity of a problem, without its numbers."""
    return one.key, re.sub(r"\d+", "#", one.what)


def as_overrides(way: str) -> list[str] | None:
    """A way out in the form of `--set`; None if it is advice in words."""
    removed = re.fullmatch(r'remove ([\w."]+)(:.*)?', way, re.DOTALL)
    if removed is not None:
        return [f"{removed.group(1)}="]
    parts = re.split(r" and (?=(?:train|model|mesh|parallel|data)\.)", way)
    pairs = [re.fullmatch(r'((?:train|model|mesh|parallel|data)\.[\w."]+) = (.*)', part) for part in parts]
    return [f"{pair.group(1)}={pair.group(2)}" for pair in pairs if pair] if all(pairs) else None


def check_ways_out(seeds: Sequence[int]) -> tuple[int, int]:
    """Apply each way out of each problem: it can be applied, and it removes the problem.

    Returns how many configurations were refused and how many ways out were applied.
    """
    refused = applied = 0
    for seed in seeds:
        raw = changed(seed)
        found = problems(raw)
        refused += bool(found)
        for problem in found:
            for way in (problem.hint or "").split(", or\n"):
                overrides = as_overrides(way)
                if overrides is None:
                    continue
                mended = copy.deepcopy(raw)
                assert apply(mended, overrides) == [], (seed, way, str(problem))
                left = problems(mended)
                assert same(problem) not in [same(one) for one in left], (seed, way, str(problem))
                applied += 1
    return refused, applied


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [120, pytest.param(4000, marks=pytest.mark.parity)])
def test_each_way_out_removes_its_problem(figures: Any, count: int) -> None:
    refused, applied = check_ways_out(range(count))
    figures(f"{count} random configurations: {refused} refused, {applied} ways out applied")
    assert refused > count / 2 and applied > 1.25 * count


WEIRD: tuple[Any, ...] = (
    *(0, -1, 2**31, 2**64, 10**30, 1.5, 1e308, float("inf"), float("nan"), True, False),
    *("", " ", "x" * 500, "größe", "\x00", "a\nb", "1", [], [[]], [1], ["a"], {}, {"a": 1}, {"": 2}, None),
)


def settings_of(section: str) -> list[str]:
    if section == "options":
        return [*ParallelOptions.model_fields, "größe", ""]
    kind = Config.model_fields[section].annotation
    model = next(arg for arg in get_args(kind) or (kind,) if arg is not type(None))
    return [*model.model_fields, "größe", ""]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("share", [0.1, pytest.param(1.0, marks=pytest.mark.parity)])
def test_any_value_anywhere_is_taken_or_refused(share: float) -> None:
    sections = ("mesh", "process", "network", "topology", "parallel", "options", "model", "data", "train")
    every = [
        (section, field, value) for section in sections for field in settings_of(section) for value in WEIRD
    ]
    refused = 0
    for section, field, value in random.Random(1).sample(every, round(share * len(every))):
        raw = right(5)
        holder = raw["parallel"] if section == "options" else raw
        holder.setdefault(section, {})[field] = value
        with contextlib.suppress(ConfigError):
            load_config(raw)
            continue
        refused += 1
    assert refused > 1000 * share


@pytest.mark.parametrize(
    ("value", "what", "way"),
    [
        ('"alwasy"', '"alwasy" is not an integer, or "always"', '"always"'),
        ("-1", "-1 is out of range", "0"),
        ("[]", '[] is not an integer, or "always"', "64"),
    ],
)
def test_a_number_or_a_word(value: str, what: str, way: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"mesh": {"dims": {"dp": 2}}}, [f"mesh.validate_calls={value}"])
    said, given, expected, tries = str(caught.value).splitlines()[1:]
    assert said == f"  mesh.validate_calls: {what}" and given == f"    given:    validate_calls = {value}"
    assert expected.endswith(', or "always"') and tries == f"    try:      mesh.validate_calls = {way}"


def test_names_beyond_ascii_are_written_as_toml_reads_them() -> None:
    raw = smaller('"größe" = 2, pp = 2, data = 1, model = 1, one_two = 1, abcdefgh = 1', tensor="größe")
    with pytest.raises(ConfigError) as caught:
        load_config(raw, ['parallel.data="δ"', 'parallel.pipeline="pp"'])
    (way, _) = re.findall(r"(?:try: +| {14})(.+?)(?:, or)?$", str(caught.value), re.MULTILINE)
    overrides = as_overrides(way.strip())
    assert overrides is not None
    settings = load_config(raw, ['parallel.data="δ"', 'parallel.pipeline="pp"', *overrides])
    assert list(settings.mesh.dims)[:2] == ["δ", "größe"]
    assert whole_toml(settings.mesh.dims) in way
    # --set takes a quoted key, as a file does.
    assert load_config(settings, ['mesh.dims."größe" = 1']).mesh.dims["größe"] == 1
