"""Every experiment of `python -m tests.gpu` as a test, and checks on one or eight GPUs; skipped by name without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import meshcomm
from tests.gpu.__main__ import main
from tests.gpu.experiments import EXPERIMENTS, Experiment, Setting, machine, run, shared, write_report
from tests.gpu.ranks import basics
from tests.ranks import on_ranks

GPUS = torch.cuda.device_count()
needs_one = pytest.mark.skipif(GPUS < 1, reason="needs a GPU; this host has none")
needs_eight = pytest.mark.skipif(GPUS < 8, reason=f"needs 8 GPUs; this host has {GPUS}")


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return shared(Setting(), tmp_path_factory.mktemp("sharing"))[0]


@pytest.mark.gpu
@needs_one
@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda each: each.name)
def test_an_experiment(experiment: Experiment, setting: Setting, tmp_path: Path) -> None:
    outcome = run(experiment, setting, tmp_path)
    if outcome.ended == "skipped":
        pytest.skip(outcome.said)
    wrong = [case for case in outcome.cases if not case["right"]]
    assert outcome.ended == "right", f"{wrong}\n{outcome.facts}\n{outcome.said}"


@pytest.mark.gpu
@needs_one
@on_ranks(1)
def test_world_size_one_on_one_gpu() -> None:
    with meshcomm.init(dims={"dp": 1, "tp": 1}, timeout_s=60) as mesh:
        x = torch.arange(6.0, device=mesh.device).view(2, 3)
        assert mesh.device.type == "cuda" and mesh.plan.defaults.backend == "nccl"
        assert mesh.plan.for_rank(0).creations == 0
        for dims in ("dp", "tp", ("dp", "tp")):
            assert torch.equal(mesh.all_reduce(dims, x.clone()), x)
            assert torch.equal(mesh.all_gather(dims, x, 1), x)
            assert torch.equal(mesh.reduce_scatter(dims, x, 1), x)
            assert torch.equal(mesh.all_to_all(dims, x, 0, 1), x)
            assert torch.equal(mesh.rearrange(x, "a b -> a (tp b)"), x)
            y = x.clone().requires_grad_()
            mesh.functional.all_reduce("tp", y, grad="sum").sum().backward()
            assert torch.equal(y.grad, torch.ones_like(x))


@pytest.mark.gpu
@needs_one
@on_ranks(GPUS + 1)
def test_more_ranks_than_devices_are_refused() -> None:
    told = rf"share one cuda device|{GPUS + 1} ranks on a host with {GPUS} cuda device\(s\)"
    with pytest.raises(meshcomm.MeshcommError, match=told):
        meshcomm.init(dims={"dp": GPUS + 1}, timeout_s=30)


@pytest.mark.gpu
@needs_eight
@on_ranks(8)
def test_eight_gpus() -> None:
    dims, merge = {"pp": 2, "dp": 2, "tp": 2}, {"model": ("pp", "tp"), "data": ("tp", "dp")}
    for order in (None, [6, 3, 1, 4, 0, 7, 5, 2]):
        with meshcomm.init(dims=dims, merge=merge, rank_order=order, device="cuda", timeout_s=60) as mesh:
            torch.set_default_device(mesh.device)
            try:
                basics(mesh)
            finally:
                torch.set_default_device(None)


# -- the harness itself, without a GPU ------------------------------------------------------------------


@pytest.mark.faults
def test_the_harness_reports_what_went_right_and_on_for_too_long(tmp_path: Path) -> None:
    emulated = Setting("emulated_nccl", "cpu")
    closed = run(Experiment("closed", "?", "graph_alive", 2, 100), emulated, tmp_path)
    assert closed.ended == "right", closed
    right = run(Experiment("right", "?", "graphs", 2, 100), emulated, tmp_path)
    assert right.ended == "right", right
    assert [case["right"] for case in right.cases] == [True] * 6
    skipped = run(Experiment("skipped", "?", "gloo", 4, 60), emulated, tmp_path)
    assert skipped.ended == "skipped" and skipped.said == "needs a GPU"
    late = run(Experiment("late", "?", "graphs", 2, 0.5), emulated, tmp_path)
    assert late.ended == "out of time" and late.code is None and late.seconds < 8
    over = run(Experiment("over", "?", "graphs", 2, 60), emulated, tmp_path, left_s=3)
    assert over.ended == "not started"
    write_report(tmp_path, machine(), [right, skipped, late, over])
    told = json.loads((tmp_path / "report.json").read_text())["experiments"]
    assert [each["ended"] for each in told] == ["right", "skipped", "out of time", "not started"]
    assert "| right | ? | 2 | right |" in (tmp_path / "report.md").read_text()


@pytest.mark.skipif(GPUS > 0, reason="this host has a GPU")
def test_without_a_gpu_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tests.gpu", "--out", str(tmp_path / "out")])
    assert main() == 2
    assert "needs a GPU; this host has none" in capsys.readouterr().err
