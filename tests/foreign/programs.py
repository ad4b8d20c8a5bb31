"""Third-party programs, how they start, and planted faults: `python -m tests.foreign.programs [NAME ...]` prints the table."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

import tests
from tests.foreign import picotron_on_cpu, torchtitan_on_cpu
from tests.foreign.environments import python_of, source_of

ACCELERATE = """
import sys, torch, torch.nn as nn
from datetime import timedelta
from accelerate import Accelerator, InitProcessGroupKwargs
from tests.foreign.planted import act
limit = InitProcessGroupKwargs(timeout=timedelta(seconds=8))
accelerator = Accelerator(cpu=True, kwargs_handlers=[limit])
rows = torch.utils.data.TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
net, optimizer, data = accelerator.prepare(
    net, torch.optim.SGD(net.parameters(), lr=0.1), torch.utils.data.DataLoader(rows, batch_size=4)
)
for number, (x, y) in enumerate(data):
    if accelerator.process_index == 1 and number == 6:
        if sys.argv[1] != "none": act(sys.argv[1])
        if sys.argv[1] == "leave": break
    loss = (net(x) - y).square().mean()
    accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()
accelerator.gather(loss.detach())
accelerator.print("trained")
accelerator.end_training()
"""
TRAINER = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
from tests.foreign.planted import act
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
class Fault(TrainerCallback):
    def on_train_begin(self, *_, **__):
        limit = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        limit(timedelta(seconds=8), dist.group.WORLD)
    def on_step_begin(self, args, state, control, **_):
        if os.environ["RANK"] == "1" and state.global_step == 5 and sys.argv[1] != "none": act(sys.argv[1])
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
rows = [{"input_ids": t, "labels": t} for t in torch.randint(0, 64, (64, 16))]
args = TrainingArguments(output_dir="trained", use_cpu=True, max_steps=8, per_device_train_batch_size=2, report_to=[],
                         ddp_backend="gloo", save_strategy="no", disable_tqdm=True)
Trainer(model, args, train_dataset=rows, callbacks=[Fault()]).train()
if os.environ["RANK"] == "0": print("trained")
"""
# Runs under Lightning's own launcher, which starts the script again for the other ranks.
LIGHTNING = """
import meshcomm; meshcomm.watch()
import os, sys, torch, torch.distributed as dist, lightning as L
from datetime import timedelta
from tests.foreign.planted import act
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)
    def training_step(self, batch, number):
        x, y = batch
        return (self.net(x) - y).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
class Fault(L.Callback):
    def on_train_start(self, trainer, module):
        limit = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        limit(timedelta(seconds=8), dist.group.WORLD)
    def on_train_batch_start(self, trainer, module, batch, number):
        if trainer.global_rank == 1 and number == 4 and sys.argv[1] != "none":
            act(sys.argv[1])
            if sys.argv[1] == "leave":
                trainer.should_stop = True
                return -1
    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        if trainer.is_global_zero: print("loss", repr(outputs["loss"].item()), flush=True)
L.seed_everything(1, verbose=False)
rows = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = L.Trainer(devices=2, accelerator="cpu", strategy="ddp", max_epochs=1, callbacks=[Fault()], **quiet)
trainer.fit(Net(), torch.utils.data.DataLoader(rows, batch_size=4))
if trainer.is_global_zero: print("trained")
"""
SCRIPTS: Final = {"accelerate": ACCELERATE, "transformers": TRAINER, "lightning": LIGHTNING}
TITAN: Final = (
    *("--module", "llama3", "--config", "llama3_debugmodel", "--training.steps", "5"),
    *("--training.seq_len", "32", "--training.local_batch_size", "2", "--training.disable_cuda_graphs"),
    *("--debug.seed", "1", "--debug.deterministic", "--comm.train_timeout_seconds", "8"),
)
_HERE: Final = Path(__file__).parent
_ROOT: Final = str(Path(tests.__file__).parent.parent)
_RUN: Final = ("-m", "meshcomm", "run", "--world-size")
_TORCHRUN: Final = ("-m", "torch.distributed.run", "--nproc-per-node")


class Ended(NamedTuple):
    """seconds: from the fault, or without one from the start, to the end of the job. who: the report of the fault."""

    code: int
    out: str
    err: str
    seconds: float

    def who(self, said: str) -> str:
        """The part of the job's errors that matches. Raises AssertionError if none does."""
        found = re.search(said, self.err)
        assert found, self.err[-6000:]
        return re.sub(r"/\S*/", "", found.group())


class Program(NamedTuple):
    """A program and its environment; "": this interpreter's. sizes: of a mesh of four ranks."""

    name: str
    environment: str
    sizes: tuple[tuple[str, int], ...] = ()

    def prepared(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        """Write the program's inputs into `folder`. Return its script with arguments, and its variables."""
        sizes = dict(self.sizes)
        env = {
            "PYTHONPATH": _ROOT,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        env |= {"HF_HOME": str(folder / "hf"), "WANDB_MODE": "disabled", "TORCH_COMPILE_DISABLE": "1"}
        if self.name == "torchtitan":
            torchtitan_on_cpu.assets(folder)
            given = [f"--parallelism.{dim}_degree={size}" for dim, size in sizes.items()]
            return [str(_HERE / "torchtitan_on_cpu.py"), *TITAN, *given], env
        if self.name == "picotron":
            source = source_of("picotron")
            picotron_on_cpu.assets(folder, source, **sizes)
            env |= {"MESHCOMM_PICOTRON": str(source), "HF_DATASETS_OFFLINE": "1"}
            return [str(_HERE / "picotron_on_cpu.py"), "--config", "picotron.json"], env
        (folder / "train.py").write_text(SCRIPTS[self.name])
        return [str(folder / "train.py")], env

    def ended(
        self, folder: Path, fault: str = "none", *, watched: bool = True, counts: Path | None = None
    ) -> Ended:
        """Run the program. counts: the folder where each rank writes its calls."""
        folder.mkdir(exist_ok=True)
        script, env = self.prepared(folder)
        if self.sizes:
            env |= {} if fault == "none" else {"FAULT": fault}
        else:
            script.append(fault)
        if counts is not None:
            script = [str(_HERE / "counted.py"), str(counts), *script]
        ranks = "4" if self.sizes else "2"
        starts = [*(_RUN if watched else _TORCHRUN), ranks]
        if self.name == "lightning":
            starts = []
        return ran([*starts, *script], folder, self.python(), env)

    def python(self) -> Path:
        return python_of(self.environment) if self.environment else Path(sys.executable)


def ran(
    arguments: list[str], folder: Path, python: Path, env: dict[str, str], within_s: float = 280
) -> Ended:
    """Run `python ARGUMENTS`, and end all processes that it leaves."""
    out, err, began = folder / "out", folder / "err", time.time()
    with out.open("w") as stdout, err.open("w") as stderr:
        job = subprocess.Popen(
            [python, *arguments],
            cwd=folder,
            env=os.environ | env,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            code = job.wait(within_s)
        finally:
            ended = time.time()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    told = err.read_text(errors="replace")
    planted = re.search(r"planted ([\d.]+)", told)
    return Ended(
        code, out.read_text(errors="replace"), told, ended - (float(planted[1]) if planted else began)
    )


PROGRAMS: Final = {
    "torchtitan, dp_shard2 tp2": Program(
        "torchtitan", "torchtitan", (("data_parallel_shard", 2), ("tensor_parallel", 2))
    ),
    "torchtitan, pp2 dp_shard2": Program(
        "torchtitan", "torchtitan", (("pipeline_parallel", 2), ("data_parallel_shard", 2))
    ),
    "picotron, pp2 tp2": Program("picotron", "picotron", (("pp", 2), ("tp", 2))),
    "picotron, dp2 tp2": Program("picotron", "picotron", (("dp", 2), ("tp", 2))),
    "accelerate": Program("accelerate", ""),
    "transformers": Program("transformers", ""),
    "lightning": Program("lightning", "lightning"),
}
_ASLEEP: Final = r"rank {0} has not arrived: it is at \S+ in \w+"
_RAISED: Final = (
    r"rank {0} (failed: ValueError: planted|has not arrived: .* when it raised ValueError: planted)"
)
_KILLED: Final = r"rank {0} was ended by SIGKILL"
_LEFT: Final = r"rank {0} (failed: CallMismatchError|ended with exit code 0 while rank \d|has not arrived: it has ended, or left .*)"
_SAID: Final = {"sleep": _ASLEEP, "raise": _RAISED, "kill": _KILLED}
# (program, fault) -> the expected report.
FAULTS: Final = {
    (name, fault): _SAID.get(fault, _LEFT).format(2 if "2" in name else 1)
    for name, faults in {
        "torchtitan, dp_shard2 tp2": ("sleep", "skip", "raise", "kill"),
        "picotron, pp2 tp2": ("sleep", "raise", "kill"),
        "accelerate": ("sleep", "raise", "leave"),
        "transformers": ("sleep", "raise", "exit"),
        "lightning": ("sleep", "raise", "leave"),
    }.items()
    for fault in faults
}

if __name__ == "__main__":
    print("| program | injected fault | reported | job ended after |\n|---|---|---|---|")
    for (name, fault), said in FAULTS.items():
        if sys.argv[1:] and not any(name.startswith(each) for each in sys.argv[1:]):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = PROGRAMS[name].ended(Path(folder), fault)
        assert found.code, found.out
        print(f"| {name} | {fault} | {found.who(said)} | {found.seconds:.1f} s |", flush=True)
