"""Programs that nobody here wrote, unchanged: accelerate and transformers' Trainer. torchtitan: `torchtitan_on_cpu.py`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshcomm.dryrun.script import Script
from meshcomm.jobs.dryrun import dryrun
from meshcomm.testing import Pool
from tests.forked_jobs import Job
from tests.group_hooks import needs_group_hooks

pytestmark = [needs_group_hooks, pytest.mark.faults, pytest.mark.filterwarnings("ignore::UserWarning")]

ACCELERATE = """
import sys, time, torch, torch.nn as nn
from datetime import timedelta
from accelerate import Accelerator, InitProcessGroupKwargs
limit = InitProcessGroupKwargs(timeout=timedelta(seconds=8))
accelerator = Accelerator(cpu=True, kwargs_handlers=[limit])
rows = torch.utils.data.TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
net, optimizer, data = accelerator.prepare(
    net, torch.optim.SGD(net.parameters(), lr=0.1), torch.utils.data.DataLoader(rows, batch_size=4)
)
for number, (x, y) in enumerate(data):
    if accelerator.process_index == 1 and number == 6:
        if sys.argv[1] == "sleep": time.sleep(60)
        if sys.argv[1] == "raise": raise ValueError("planted")
        if sys.argv[1] == "break": break
    loss = (net(x) - y).square().mean()
    accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()
accelerator.gather(loss.detach())
accelerator.print("trained")
accelerator.end_training()
"""
TRAINER = """
import os, sys, time, torch, torch.distributed as dist
from datetime import timedelta
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
class Fault(TrainerCallback):
    def on_train_begin(self, *_, **__):
        limit = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        limit(timedelta(seconds=8), dist.group.WORLD)
    def on_step_begin(self, args, state, control, **_):
        if os.environ["RANK"] == "1" and state.global_step == 5:
            if sys.argv[1] == "sleep": time.sleep(60)
            if sys.argv[1] == "raise": raise ValueError("planted")
            if sys.argv[1] == "break": os._exit(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
rows = [{"input_ids": t, "labels": t} for t in torch.randint(0, 64, (64, 16))]
args = TrainingArguments(output_dir="trained", use_cpu=True, max_steps=8, per_device_train_batch_size=2, report_to=[],
                         ddp_backend="gloo", save_strategy="no", disable_tqdm=True)
Trainer(model, args, train_dataset=rows, callbacks=[Fault()]).train()
if os.environ["RANK"] == "0": print("trained")
"""
PROGRAMS = {"accelerate": ACCELERATE, "transformers": TRAINER}


def started(pool: Pool, folder: Path, name: str, fault: str) -> tuple[int, str, str]:
    pytest.importorskip(name)
    (folder / "train.py").write_text(PROGRAMS[name])
    return Job(pool, folder, "-m", "meshcomm", "run", "--world-size", "2", "train.py", fault).finish()


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("sleep", "waited for rank 1"),
        ("raise", "rank 1 failed: ValueError: planted"),
        ("break", "rank 1 failed: CallMismatchError|rank 1 ended with exit code 0 while rank 0"),
    ],
)
def test_a_fault_is_named(pool: Pool, tmp_path: Path, name: str, fault: str, said: str) -> None:
    code, _, err = started(pool, tmp_path, name, fault)
    last = [line for line in err.splitlines() if line.startswith("meshcomm: ")]
    assert code != 0 and re.search(said, "\n".join(last)), err


@pytest.mark.parametrize("name", PROGRAMS)
def test_without_a_fault_nothing_is_said(pool: Pool, tmp_path: Path, name: str) -> None:
    code, out, err = started(pool, tmp_path, name, "none")
    assert code == 0 and "trained" in out and "meshcomm: " not in err, err


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_dry_run_of_many_ranks(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name)
    path = tmp_path / "train.py"
    path.write_text(PROGRAMS[name])
    facts = dryrun(None, (), 1024, Script(path, ("none",)))
    assert not facts["findings"] and {row["dim"] for row in facts["calls"]} == {"default group"}
