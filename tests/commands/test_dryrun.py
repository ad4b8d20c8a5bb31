"""`meshcomm dryrun`: planted bugs in programs of 16,384 ranks, each named in one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshcomm.commands import dryrun
from meshcomm.config import load_config
from meshcomm.dryrun.script import Script
from meshcomm.errors import MeshcommError
from meshcomm.show.page import as_text
from meshcomm.train.data import load

pytestmark = pytest.mark.long

HEAD = """
import torch
import meshcomm

with meshcomm.init(dims={"pp": 16, "dp": 64, "cp": 2, "tp": 8}, device="cuda") as mesh:
    x = torch.ones(64, 64, device=mesh.device)
    first, last = mesh.coord("pp") == 0, mesh.coord("pp") == 15
    for step in range(3):
        mesh.all_reduce("tp", x)
        if not first:
            mesh.recv("pp", x, src=mesh.coord("pp") - 1)
        if not last:
            mesh.send("pp", x, mesh.coord("pp") + 1)
"""
TAIL = """
        mesh.all_reduce("dp", x)
        mesh.step()
"""
# A planted bug, and the line that reports it.
PLANTED = {
    "a call under a branch": (
        'if last: mesh.all_reduce("pp", x)',
        r"rank 15,360 \(pp=15 .*\) along pp: 2 calls more than others make, starting with all_reduce",
    ),
    "a loop of its own length": (
        'for _ in range(1 + (mesh.coord("tp") == 7)): mesh.all_gather("tp", x)',
        r"rank [\d,]+ \(.*tp=7\) along tp: all_gather .*which others do not make",
    ),
    "another shape on the last stage": (
        'mesh.all_reduce("dp", x[:32] if last and mesh.coord("dp") == 63 else x)',
        r"rank [\d,]+ \(pp=15 dp=63 .*\) along dp: all_reduce sum \(32, 64\) float32 .*, where others make all_reduce sum \(64, 64\)",
    ),
    "a message without partner": (
        'if first: mesh.send("pp", x, 15)',
        r"message 1 from rank 0 .* to rank 15,360 .* along pp is sent and never received",
    ),
    "a message of another length": (
        'if first: mesh.send("pp", x, 15)\n        if last: mesh.recv("pp", x[:3], src=0)',
        r"rank 0 \(pp=0 .*\) sends send \(64, 64\) float32 to rank 15,360 .* along pp, which receives recv \(3, 64\)",
    ),
    "crossed dims": (
        'for dim in ["dp", "cp"][:: 1 - 2 * ((mesh.coord("dp") + mesh.coord("cp")) % 2)]: mesh.all_gather(dim, x)',
        r"ranks [\d, ]+ wait for each other in a cycle: rank .* in all_gather",
    ),
    "an uneven microbatch": (
        'mesh.all_reduce("cp", x[: 64 - (mesh.coord("cp") == 1)])',
        r"ranks 0 8 along cp do not agree; rank 0 \(.*\): all_reduce sum \(64, 64\) float32 .*, where others make all_reduce sum \(63, 64\)",
    ),
    "a list in another order": (
        'mesh.all_reduce("cp", [x[:32], x] if mesh.coord("cp") else [x, x[:32]])',
        r"ranks 0 8 along cp do not agree; .*: all_reduce sum \(64, 64\) \(32, 64\) float32 .*, where others make all_reduce sum \(32, 64\) \(64, 64\)",
    ),
    "another root": (
        'mesh.broadcast("dp", x, src=mesh.coord("dp") % 2)',
        r"along dp: broadcast root [01] .*, where others make broadcast root [01]",
    ),
    "all send first": (
        'mesh.send("cp", x, 1 - mesh.coord("cp")); mesh.recv("cp", x, src=1 - mesh.coord("cp"))',
        r"ranks [\d, ]+ wait for each other in a cycle: .* in send",
    ),
}


def told(script: Path, ranks: tuple[int, ...] = ()) -> dict[str, Any]:
    return dryrun.dry_run(None, 16384, Script(script), ranks, 2)


def test_a_program_that_is_right_is_found_right(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + TAIL)
    facts = told(script)
    assert facts["findings"] == [] and facts["unlike"] == []
    assert facts["dims"] == {"pp": 16, "dp": 64, "cp": 2, "tp": 8} and facts["pipeline"] == "pp"
    assert {each["dim"]: sum(call["calls"] for call in each["calls"]) for each in facts["calls"]} == {
        "tp": 1,
        "pp": 2,
        "dp": 1,
    }
    assert facts["part"] == "one step"
    shown = as_text(dryrun.view(facts), 120)
    # Without [topology], calls have no time, which differs from no exposed time.
    assert "all calls match" in shown and "no times: " in shown and "exposed" not in shown
    assert re.search(
        r" tensors take 16.4 kB, between passes in aten.* at \S*train\.py:\d+; ", " ".join(shown.split())
    ), shown
    assert {each["exposed_s"] for each in facts["calls"]} == {None}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_named_in_one_line(tmp_path: Path, name: str) -> None:
    script = tmp_path / "train.py"
    planted, said = PLANTED[name]
    script.write_text(HEAD + f"        {planted}" + TAIL)
    facts = told(script)
    lines = [each["what"] for each in facts["findings"]]
    assert lines and all("\n" not in line for line in lines)
    assert any(re.search(said, line) for line in lines), lines
    shown = as_text(dryrun.view(facts), 160)
    assert "would go wrong" in shown and "train.py:" in shown


def test_ranks_that_are_asked_for_are_run_and_others_of_their_groups_beside_them(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + '        if mesh.rank != 12287: mesh.all_gather("tp", x)' + TAIL)
    assert 12287 not in told(script)["ran"]
    facts = told(script, ranks=(12287,))
    (finding,) = facts["findings"]
    assert finding["ranks"] == (12287,) and re.search(
        r"rank 12,287 .*: no all_gather .*, which others make", finding["what"]
    )
    assert any("rank 12,287" in text and "along tp" in text for text in facts["unlike"])


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshcomm", "dryrun", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


CONFIG = """
[mesh]
dims = { pp = 4, fs = -1, tp = 2 }
device = "cuda"
[topology]
ranks_per_node = 8
memory_gbytes = 1e-3
tflops = 0.01
[parallel]
pipeline = "pp"
shard = "fs"
tensor = "tp"
[model]
num_layers = 8
hidden_size = 64
num_heads = 4
num_kv_heads = 4
intermediate_size = 128
[data]
seq_len = 64
[train]
steps = 1
global_batch_size = 32
micro_batch_size = 1
peak_flops = 989e12
"""


def test_calls_memory_and_time_of_a_training(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(CONFIG)
    facts = dryrun.dry_run(load_config(tmp_path / "train.toml"), 32, None, (), 1)
    assert facts["findings"] == [] and facts["memory"]["fits"] is False
    stages = facts["memory"]["stages"]
    assert [each["stage"] for each in stages] == [0, 1, 2, 3]
    # With 1F1B, the first stage has the most microbatches in flight.
    assert stages[0]["parts"]["activations"] > stages[3]["parts"]["activations"]
    assert all(sum(each["parts"].values()) == each["peak_bytes"] for each in stages)
    assert facts["memory"]["most"] == "activations"
    assert facts["memory"]["less_by"].startswith("train.activation_checkpointing, ")
    assert {each["dim"]: each["link"] for each in facts["calls"]} == {
        "pp": "network",
        "fs": "node",
        "tp": "node",
    }
    step = facts["step"]
    parts = step["compute_s"] + sum(step["exposed_s"].values()) + sum(step["late_s"].values())
    assert step["seconds"] == pytest.approx(parts) and 0 < step["share_of_peak"] < 1
    assert step["tokens_s"] == pytest.approx(32 * 64 / step["seconds"])
    shown = as_text(dryrun.view(facts), 120)
    # The report names no line of this package, because the user cannot change it.
    assert "does NOT fit in" in shown and ".py" not in shown
    assert "assumed: compute at 0.01 TFLOP/s; links" in shown
    # The table of memory has a single unit and fits into a terminal of 80 columns, even for a large world.
    stages[1] |= {"stage": 12, "rank": 131_071}
    stages[2:] = [{**stages[1], "stage": 13}, {**stages[1], "stage": 14}]
    narrow = as_text(dryrun.view(facts), 80)
    assert re.search(r"^peak memory in [kMGT]B, .*\nstage +rank .* activations .*$", narrow, re.M), narrow
    assert re.search(r"^12-14  131,071 ", narrow, re.M) and max(map(len, narrow.splitlines())) <= 80, narrow
    # The report names assumed figures.
    facts["step"] |= {"assumed": ["tflops"], "device": "cpu"}
    shown = " ".join(as_text(dryrun.view(facts), 80).split())
    assert "(of an H100, not of mesh.device cpu, as topology.tflops is not set); links" in shown


def test_data_files_must_exist_and_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(CONFIG)
    (tmp_path / "a.bin").write_bytes(b"")
    sizes = (
        "mesh.dims={ fs = 1 }",
        "parallel={ shard = 'fs' }",
        "model.num_layers=1",
        "train.global_batch_size=1",
    )
    missing = load_config(tmp_path / "train.toml", [*sizes, "data.tokens=['b.bin']"])
    with pytest.raises(MeshcommError) as caught:
        dryrun.dry_run(missing, 1)
    assert missing.data is not None
    with pytest.raises(MeshcommError) as same:
        load(missing.data)
    assert str(caught.value) == str(same.value) and str(same.value).startswith("no training data matches")
    facts = dryrun.dry_run(load_config(tmp_path / "train.toml", [*sizes, "data.tokens=['*.bin']"]), 1)
    assert facts["unread"] == {"data.tokens": 1}
    assert "\ncontent not read: 1 file of data.tokens\n" in as_text(dryrun.view(facts), 120)


@pytest.mark.deep
def test_what_a_user_does_wrong_is_told_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text("print('no mesh')\n")
    (tmp_path / "fails.py").write_text(
        "import meshcomm\nwith meshcomm.init(dims={'dp': -1}) as mesh:\n    1 / (mesh.rank - 5)\n"
    )
    (tmp_path / "exits.py").write_text(
        "import sys, meshcomm\nwith meshcomm.init(dims={'dp': -1}) as mesh:\n    sys.exit(3)\n"
    )
    done = run("--world-size", "8", "fails.py", folder=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert re.search(r"rank 5 \(dp=5\) failed: ZeroDivisionError: .*\n.*fails.py:3", done.stderr), done.stderr
    for name, world, ranks, said in (
        ("nothing.py", 8, (), "nothing.py creates no mesh"),
        ("exits.py", 8, (), "ended with exit code 3"),
        ("fails.py", None, (), "world"),
        ("fails.py", 64, (64,), "rank 64 is not in the mesh"),
    ):
        with pytest.raises(MeshcommError, match=said) as caught:
            dryrun.dry_run(None, world, Script(tmp_path / name), ranks, 0)
        assert "given:" in str(caught.value)


TRAINER = """
import torch
from torch import nn

import meshcomm
from meshcomm.parallel import tensor_parallel
from meshcomm.train import Trainer

with meshcomm.init() as mesh:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    tensor_parallel(net, mesh, "tp", {"0": "column", "2": "row"})
    trainer = Trainer(mesh, model=net, loss=nn.functional.mse_loss)
    trainer.run(lambda step: (torch.randn(2, 8), torch.randn(2, 1)))
    raise AssertionError("it is left after two steps")
"""


def test_a_script_with_a_trainer_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parts = '[parallel]\ndata = "dp"\ntensor = "tp"\n[train]\nsteps = 30\nglobal_batch_size = 128\nmicro_batch_size = 1\n'
    config, script = tmp_path / "mine.toml", tmp_path / "mine.py"
    config.write_text(f'[mesh]\ndims = {{ dp = -1, tp = 2 }}\ndevice = "cuda"\n{parts}')
    script.write_text(TRAINER)
    facts = dryrun.dry_run(load_config(config), 128, Script(script, config=config), (), 1)
    assert facts["findings"] == [] and facts["unlike"] == []
    moved = {each["dim"]: {call["call"]: call["calls"] for call in each["calls"]} for each in facts["calls"]}
    assert moved["tp"]["all_reduce"] >= 2 and moved["dp"]["all_reduce"] >= 1
    # Of 8 * 64 + 64 + 64 + 1 elements, all but the last are split in halves.
    assert facts["memory"]["stages"][0]["parameters"] == (8 * 64 + 64 + 64) // 2 + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.py", "mine.toml"]
