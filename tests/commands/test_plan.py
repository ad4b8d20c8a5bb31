"""`meshcomm plan`: errors, the plan's id, and the backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshcomm.config import load_config
from meshcomm.layout import Layout, Plan
from tests.commands.test_app import meshcomm
from tests.show.shown import GPT, MESH, ROOT, run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [GPT, "--world-size", "96"],
            ["mesh.dims: ", "world is 96", "96 % 64 = 32", "dp = -1, tp = 6 }, or", "64 processes"],
        ),
        ([GPT], ["dp = -1 open", "try:      --world-size 128, or --set mesh.dims.dp=2"]),
        (
            [MESH, "--rank", "8"],
            ["given:    rank 8\n  expected: 0 to 7\n  try:      the mesh has 2*2*2 = 8 ranks"],
        ),
        ([MESH, "--rank", "-1"], ["given:    rank -1\n  expected: 0 to 7"]),
        ([GPT, "--world-size", "0"], ["given:    a world of 0\n  expected: 1 to 16777216"]),
        (
            [MESH, "--set", "mesh.backend=[gloo", "--set", "mesh.dimz=1"],
            [": 2 problems", "close every quote and bracket", "remove mesh.dimz: mesh.dims is set"],
        ),
        (["configs/mash.toml"], ["no such file", "try:      did you mean configs/mesh.toml?"]),
        ([MESH, "--ranks", "3"], ["No such option: --ranks", "--rank)"]),
        ([MESH, "--diff", MESH, "--grid"], ["--diff only compares"]),
        ([MESH, "--diff", "nothing.toml"], ["nothing.toml: cannot be read"]),
        ([MESH, "--diff", GPT, "--world-size", "64"], ["world"]),
        (
            ["nothing.toml", "--export", "topo.png"],
            ["the extension .png", ".svg", "--export topo.svg"],
        ),
        ([MESH, "--export", "none/topo.svg"], ["none/topo.svg: cannot be written", "mkdir -p none"]),
        ([MESH, "--export", "topo.svg", "--json"], ["leave out --json"]),
        ([MESH, "--diff", MESH, "--by", "dp", "--grid"], ["leave out --grid and --by"]),
        ([MESH, "--export", "topo.svg", "--schedule"], ["--json and --schedule"]),
        ([MESH, "--rank", "pp=1,tp=0"], ["given:    pp=1, tp=0", "try:      add dp"]),
    ],
)
def test_what_is_wrong_is_said_on_stderr_with_exit_code_2(words: list[str], said: list[str]) -> None:
    shown = run("plan", *words)
    assert (shown.code, shown.out) == (2, "")
    for part in said:
        assert part in shown.err or part in " ".join(shown.err.split())
    assert not (ROOT / "topo.svg").exists()


def test_a_config_has_one_plan_id_whatever_device_a_process_finds() -> None:
    for device in ("auto", "cpu", "cuda"):
        plan = load_config({"mesh": {"dims": {"dp": 2, "tp": 2}, "device": device}}).plan(4)
        on_cpu, on_cuda = plan.on("cpu", "gloo"), plan.on("cuda", "nccl")
        assert plan.fingerprint == on_cpu.fingerprint == on_cuda.fingerprint
        assert on_cpu.facts() != on_cuda.facts()
    assert Plan(Layout({"dp": 2})).fingerprint != Plan(Layout({"dp": 4})).fingerprint


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl"), ("auto", "auto")])
def test_plan_says_the_backend_that_the_device_gives(tmp_path: Path, device: str, backend: str) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(f'[mesh]\ndims = {{ dp = 2 }}\ndevice = "{device}"\n')
    head, _, row = meshcomm("plan", str(path)).stdout.splitlines()[1:4]
    assert dict(zip(head.split(), row.split(), strict=False))["backend"] == backend
