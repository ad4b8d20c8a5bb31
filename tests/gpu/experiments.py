"""The experiments on a GPU, each in separate processes with a time limit, and the report of their results."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

import meshcomm
from tests.watching.test_timer import CAUSES

ROOT = Path(__file__).parents[2]
FAULT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Experiment:
    """program: a function of tests/gpu/ranks.py, or "train". ranks: how many it needs. limit_s: its time limit.

    alone: it measures speed, so nothing else runs at the same time. replace: how many lost ranks the launcher replaces.
    """

    name: str
    question: str
    program: str
    ranks: int
    limit_s: float
    fault: str = ""
    alone: bool = False
    replace: int = 0


EXPERIMENTS = (
    Experiment("collectives_4", "1: every collective, created and permuted groups", "collectives", 4, 90),
    Experiment("messages", "2: messages, a DeviceMesh, two backends", "messages", 4, 90),
    *(
        Experiment(f"fault_{fault}", f"3: rank 3 {fault} after 70 calls", "fault", 4, 60, fault)
        for fault in CAUSES
    ),
    Experiment("one", "4: every method and dtype with one rank, and the order of streams", "one", 1, 60),
    Experiment("syncs", "5: calls in steady state during which the host waits", "syncs", 4, 60),
    Experiment("queue", "4: the backend's record of unfinished calls", "queue", 2, 60),
    Experiment("graphs", "6: CUDA graphs of calls", "graphs", 4, 60),
    Experiment("graph_alive", "6: a mesh closes before a graph of its calls", "graph_alive", 2, 50),
    Experiment("gloo", "7: Gloo with tensors on the device", "gloo", 4, 60),
    Experiment("steps", "5: the host does not wait in training steps that log nothing", "steps", 4, 120),
    Experiment("compiled", "8: mesh.functional under torch.compile, fullgraph", "compiled", 2, 100),
    Experiment("steps_compiled", "8: training steps of compiled blocks", "steps_compiled", 2, 120),
    Experiment("train", "9: meshcomm train, one process", "train", 1, 60, alone=True),
    Experiment("speed", "9: a 1B-parameter step compared with plain PyTorch", "speed", 1, 90, alone=True),
    Experiment("checkpoint", "9: a checkpoint from pinned memory", "checkpoint", 1, 60, alone=True),
    Experiment("attention_1", "9: attention of one process", "attention", 1, 60, alone=True),
    Experiment("attention_4", "9: ring attention compared with torch's own", "attention", 4, 60, alone=True),
    *(
        Experiment(
            f"lost_{word}", f"10: a rank dies while others wait: {word}", "lost", 4, 60, word, replace=1
        )
        for word in ("value", "message", "handle", "barrier", "objects", "first")
    ),
    *(
        Experiment(f"trains_{way}", "10: two ranks die in a training", "trains", 4, 100, way, replace=2)
        for way in ("dp_fsdp", "pp_dp", "copies")
    ),
    Experiment(
        "families", "11: families of transformers, compared with one process on CPU", "families", 4, 120
    ),
    Experiment("watched", "12: calls of torch's groups are compared", "watched", 4, 60),
    Experiment(
        "transfers", "13: tensors and weights between two meshes, cast and staged", "transfers", 4, 90
    ),
    Experiment("transfer_killed", "13: a rank of the target is killed", "transfer_killed", 4, 60, "killed"),
    Experiment("collectives_8", "1: every collective, created and permuted groups", "collectives", 8, 120),
)
# The others run on a CPU with the emulated backend.
ON_DEVICE_ALONE = ("gloo",)


@dataclass(frozen=True)
class Setting:
    """share: how ranks get their GPUs: "own" is one each; several share one by NCCL_HOSTID, by NCCL's switch, or not at all."""

    backend: str = "nccl"
    device: str = "cuda"
    share: Literal["own", "hostid", "multi", "none"] = "own"


@dataclass
class Outcome:
    """ended: "right", "wrong", "out of time", "not started", or "skipped". said: the last lines of its output."""

    name: str
    question: str
    ended: str
    ranks: int = 0
    seconds: float = 0.0
    code: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    cases: list[dict[str, Any]] = field(default_factory=list)
    said: str = ""


def run(experiment: Experiment, setting: Setting, folder: Path, left_s: float = 600.0) -> Outcome:
    """Run one experiment in its folder, limited by `limit_s` and by the time that is left for all experiments."""
    outcome = Outcome(experiment.name, experiment.question, "skipped")
    if setting.device == "cpu" and experiment.program in ON_DEVICE_ALONE:
        outcome.said = "needs a GPU"
        return outcome
    outcome.ranks = 1 if setting.share == "none" else experiment.ranks
    if (experiment.fault or experiment.replace) and outcome.ranks < 4:
        outcome.said = "needs four ranks, and NCCL refuses to let them share the device"
        return outcome
    if left_s < 15:
        outcome.ended, outcome.said = "not started", "the time limit of all experiments had passed"
        return outcome
    folder = folder / experiment.name
    folder.mkdir(parents=True)
    here = Path(__file__).parent
    words = ["run", *(["--replace", str(experiment.replace)] if experiment.replace else [])]
    words += ["--world-size", str(outcome.ranks), str(here / "ranks.py"), experiment.program]
    if experiment.program == "train":
        changed = {"mesh.device": f'"{setting.device}"', "train.out": f'"{folder / "run"}"'}
        if setting.device == "cpu":
            changed |= {
                "model.num_layers": 2,
                "model.hidden_size": 64,
                "model.intermediate_size": 128,
                "data.seq_len": 64,
            }
        words = [
            "train",
            str(here / "train.toml"),
            *(f"--set={key}={value}" for key, value in changed.items()),
        ]
    files = folder / "out", folder / "err"
    began = time.time()
    with files[0].open("wb") as out, files[1].open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "meshcomm", *words],
            stdout=out,
            stderr=err,
            cwd=folder,
            env=_environment(experiment, setting, folder),
            start_new_session=True,
        )
        try:
            outcome.code = process.wait(min(experiment.limit_s, left_s))
        except subprocess.TimeoutExpired:
            _end(process)
            outcome.ended = "out of time"
    outcome.seconds = round(time.time() - began, 1)
    stdout, stderr = (file.read_text(errors="replace") for file in files)
    for file in sorted(folder.glob("*.jsonl"), key=lambda file: int(file.stem)):
        outcome.cases += [json.loads(line) for line in file.read_text().splitlines()]
    if experiment.program in ("fault", "transfer_killed"):
        right = _judge_fault(experiment.fault, stdout, stderr, began, outcome)
    elif experiment.program == "train":
        right = outcome.code == 0 and _speed(folder, outcome)
    else:
        right = outcome.code == 0 and bool(outcome.cases) and all(row["right"] for row in outcome.cases)
    if outcome.ended != "out of time":
        outcome.ended = "right" if right else "wrong"
    if not right or experiment.fault:
        outcome.said = "\n".join((stderr.strip() or stdout.strip()).splitlines()[-25:])
    return outcome


def shared(setting: Setting, folder: Path) -> tuple[Setting, list[Outcome]]:
    """How ranks can share the GPUs of this host; tried with four ranks that use only torch."""
    if setting.device == "cpu":
        return setting, []
    if torch.cuda.device_count() >= 8:
        return setting, []
    tried = []
    for share in ("hostid", "multi"):
        probe = Experiment(f"sharing_{share}", "can several NCCL ranks share one GPU?", "probe", 4, 60)
        found = replace(setting, share=share)
        tried.append(run(probe, found, folder))
        if tried[-1].ended == "right":
            return found, tried
    return replace(setting, share="none"), tried


def _environment(experiment: Experiment, setting: Setting, folder: Path) -> dict[str, str]:
    given = {**asdict(setting), "folder": str(folder), "fault": experiment.fault}
    given["messages"] = experiment.program != "gloo" or setting.device == "cpu"
    paths = os.pathsep.join((str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    own = {"TESTS_GPU": json.dumps(given), "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    if setting.device == "cuda":
        own |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": str(folder / "nccl.%p")}
    if setting.share in ("hostid", "multi"):
        own |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "0"}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the launcher to end its ranks, then kill the rest of its process group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _judge_fault(fault: str, out: str, err: str, began: float, outcome: Outcome) -> bool:
    at = re.findall(r"fault at (\S+)", out)
    after = round(began + outcome.seconds - float(at[0]), 1) if at else None
    named = bool(re.search(CAUSES[fault], err))
    outcome.facts = {"exit code": outcome.code, "s from fault to end": after, "the cause is named": named}
    return bool(outcome.code) and named and after is not None and after < FAULT_TIMEOUT_S + 10


def _speed(folder: Path, outcome: Outcome) -> bool:
    lines = [json.loads(line) for line in next(folder.rglob("metrics.jsonl")).read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    speeds = [line["tokens_per_s"] for line in lines if "tokens_per_s" in line][len(lines) // 2 :]
    outcome.facts["tokens/s, median of the second half"] = round(statistics.median(speeds))
    outcome.facts["loss, first and last"] = f"{losses[0]:.3f}, {losses[-1]:.3f}"
    return losses[-1] < losses[0]


# -- the report -----------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """The machine, and the versions of the software."""
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "versions": f"Python {platform.python_version()}, meshcomm {meshcomm.__version__}, "
        f"torch {torch.__version__} of CUDA {torch.version.cuda}",
    }
    if torch.cuda.is_available():
        facts["GPU"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            asked = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
            facts["driver"] = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.strip()
    return facts


def write_report(folder: Path, facts: dict[str, str], outcomes: list[Outcome]) -> None:
    """Write report.json and report.md after each experiment, so that an interrupted run keeps its results."""
    whole = {"machine": facts, "experiments": [asdict(each) for each in outcomes]}
    (folder / "report.json").write_text(json.dumps(whole, indent=1) + "\n")
    head = "experiment", "question", "ranks", "ended", "s", "cases right"
    lines = ["# Experiments on a GPU", "", *_table(("", ""), list(facts.items()))]
    lines += _table(head, [(o.name, o.question, o.ranks, o.ended, o.seconds, _count(o)) for o in outcomes])
    plain = ("case", "rank", "right", "said")
    for each in outcomes:
        lines += [f"## {each.name}", "", f"{each.question}: {each.ended}", ""]
        lines += [f"- {key}: {value}" for key, value in each.facts.items()] + [""] * bool(each.facts)
        rows = []
        # All cases of rank 0, and the failed cases of other ranks.
        for row in (row for row in each.cases if row["rank"] == 0 or not row["right"]):
            figures = ", ".join(f"{key} {value}" for key, value in row.items() if key not in plain)
            said = row.get("said", "")[:600]
            rows.append((row["case"], row["rank"], "yes" if row["right"] else "**no**", figures, said))
        lines += _table(("case", "rank", "right", "figures", "said"), rows) if rows else []
        lines += ["```text", each.said.replace("```", "'''"), "```", ""] if each.said else []
    (folder / "report.md").write_text("\n".join(lines))


def _count(outcome: Outcome) -> str:
    return f"{sum(row['right'] for row in outcome.cases)} of {len(outcome.cases)}" if outcome.cases else ""


def _table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> list[str]:
    def line(cells: Sequence[object]) -> str:
        return f"| {' | '.join(str(cell).replace('|', '/').replace(chr(10), '<br>') for cell in cells)} |"

    return [line(head), line(["---"] * len(head)), *map(line, rows), ""]
