"""Measured training: all ways train the same model, each part of a step counts once, and mistakes are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshcomm
from meshcomm.commands.measure import machine_facts
from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError
from meshcomm.predict.passes import Costs, orders, timeline
from meshcomm.testing import Pool
from meshcomm.watching.spans import Span
from tests.benchmarks.breakdown import Bubble, bubble_of, expected_exposure, exposed, parts_of_a_step
from tests.benchmarks.training import measured, trained, training_text, ways

pytestmark = pytest.mark.long

MODEL = "model={ num_layers = 2, hidden_size = 32, num_heads = 4, num_kv_heads = 2, intermediate_size = 64, vocab_size = 64 }"


def config_of(dims: str, parallel: str, world: int) -> Config:
    mesh = {"mesh": {"dims": {"one": 1}, "device": "cpu", "timeout_s": 60.0}}
    base = load_config(mesh, [f"mesh.dims={dims}", f"parallel={parallel}"])
    return load_config(trained(base, world), [MODEL, "data.seq_len=16", 'train.dtype="float64"'])


def steps(config: Config) -> tuple[list[str], list[float], list[float], dict[str, Any]]:
    """The names of the ways, the mean losses of two steps on the mesh and with torch, and all facts."""
    with meshcomm.init(config) as mesh:
        found, without, engine = ways(mesh, config)
        for way in (found[0], *found[3:]):
            way.step()
            way.step()
        ours, theirs = list(found[0].losses), list(found[3].losses)
        if theirs:
            mine = torch.tensor(theirs, dtype=torch.float64)
            for dim in engine.sections.parallel.gradient_dims:
                mine = mesh.all_reduce(dim, mine, "avg")
            theirs = mine.tolist()
        facts: dict[str, Any] = {
            "mesh": dict(mesh.dims),
            "model": "m",
            "machine": machine_facts(mesh),
            **measured(mesh, found, 1, 1),
        }
        parts = parts_of_a_step(mesh, found[0].step, engine, 2)
        facts["step"], facts["lanes"], facts["late"] = parts.seconds, parts.lanes, parts.late
        facts["predicted"] = parts.predicted | expected_exposure(mesh, config, 1)
        facts["without"] = [each._asdict() for each in without]
        return [way.name for way in found], ours, theirs, facts


@pytest.mark.parametrize(
    ("dims", "parallel", "torchs", "predicted"),
    [
        ("dp = 2, tp = 2", 'data = "dp", tensor = "tp"', "parallelize_module + fully_shard", {"dp", "tp"}),
        ("tp = 2", 'tensor = "tp", options = { sequence_parallel = true }', "parallelize_module", {"tp"}),
        ("dp = 2, fs = 2", 'data = "dp", shard = "fs"', "fully_shard", set()),
        (
            "pp = 2, tp = 2",
            'pipeline = "pp", tensor = "tp"',
            "parallelize_module + pipelining, 1F1B",
            {"bubble", "tp"},
        ),
        ("dp = 2, cp = 2", 'data = "dp", context = "cp"', "keys and values gathered + DDP", {"dp_cp"}),
        (
            "cp = 2, tp = 2",
            'context = "cp", tensor = "tp", options = { attention = "ulysses" }',
            "keys and values gathered + parallelize_module + fully_shard",
            {"cp", "tp"},
        ),
    ],
)
@pytest.mark.parity
def test_torch_trains_the_same_model_on_the_same_samples(
    pool: Pool, dims: str, parallel: str, torchs: str, predicted: set[str]
) -> None:
    world = 2 if dims == "tp = 2" else 4
    for names, ours, theirs, facts in pool.run(
        steps, config_of(f"{{ {dims} }}", f"{{ {parallel} }}", world), ranks=world, timeout_s=240.0
    ):
        assert names[0] == "meshcomm"
        assert names[3] == f"torch: {torchs}"
        if theirs:
            assert theirs == pytest.approx(ours, rel=1e-9)
        assert facts["ways"][0]["ratio"] == 1.0
        assert all(each["tokens_s"] > 0 for each in facts["ways"])
        assert set(facts["lanes"]) < set(facts["step"])
        assert all(0 <= late <= facts["step"][dim] for dim, late in facts["late"].items())
        assert set(facts["predicted"]) == predicted
        assert predicted <= set(facts["step"])
        assert f"{facts['ways'][0]['tokens_s']:,.0f}" in training_text(facts)


def test_what_stands_still_is_counted_once_and_where_it_is() -> None:
    def span(began: float, left: float, *waits: tuple[float, float], lane: str = "tp") -> Span:
        return Span(
            "g" if lane != "passes" else "", lane, "all_reduce", "here", began, left=left, waits=list(waits)
        )

    inside, outside = exposed(
        [
            span(1.0, 2.0, (1.5, 2.0)),  # waits inside the call
            span(3.0, 3.1, (5.0, 6.0)),  # starts in the pass, waits after it
            span(0.0, 4.0, lane="passes"),
            span(7.0, 7.5, lane="dp"),
        ],
        [(0.0, 4.0)],
    )
    assert inside == pytest.approx({"tp": 1.1})
    assert outside == pytest.approx({"tp": 1.0, "dp": 0.5})


def test_a_stretch_between_passes_is_the_bubble_s() -> None:
    call = Span("g", "pp", "recv", "here", 3.0, left=7.0)
    inside, outside = exposed([call], [(0.0, 4.0), (6.0, 9.0)], [(4.0, 6.0)])
    assert (inside, outside) == ({}, {"pp": 2.0})


def bubble(mesh: meshcomm.Mesh) -> Bubble:
    """A bubble over two steps. Passes take their time in `order`, and messages take 0.25."""
    order = orders("1f1b", 2, 1, 4)
    costs = [Costs(1.0, 2.0, 0.0), Costs(2.0, 3.0, 0.0)]
    spans = []
    for began in (10.0, 100.0):
        for slot in timeline(order, costs).ranks[mesh.coord("pp")]:
            name = {"F": "forward", "B": "backward"}[slot.work.kind]
            late = 0.25 * mesh.coord("pp")
            call = f"{name} {slot.work.microbatch} of stage {slot.work.stage}"
            spans.append(
                Span("", "passes", call, "here", began + slot.start + late, left=began + slot.end + late)
            )
    return bubble_of(mesh, "pp", order, spans, 2, 0.0)


def test_a_bubble_is_measured_and_predicted() -> None:
    first, last = meshcomm.simulate(bubble, dims={"pp": 2})
    # From the first pass's start to the last one's end: 1 + 4 * (2 + 3) + 2 = 23. Passes take 4 * 3 and 4 * 5 of it.
    assert (first.predicted, last.predicted) == (2 * (23 - 12), 2 * (23 - 20))
    assert (first.measured, last.measured) == (first.predicted, last.predicted)
    assert last.gaps[0] == (10.0, 11.25) and last.gaps[-1][1] == 100 + 23


def test_what_cannot_be_trained_is_refused() -> None:
    mesh, role = {"mesh": {"dims": {"dp": 2}, "device": "cpu"}}, 'parallel={ data = "dp" }'
    train = "train={ steps = 1, global_batch_size = 8, micro_batch_size = 4 }"
    for sets in ((), (role, "mesh.ranks=[0, 1]"), (role, train)):
        with pytest.raises(ConfigError, match="cannot be measured"):
            trained(load_config(mesh, sets), 2)
