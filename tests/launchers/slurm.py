"""Slurm from Debian's packages, on two hosts in network namespaces of this machine: python -m tests.launchers.slurm"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

from tests.launchers.checks import Case, Checks, Job, install, named, program, summed, version
from tests.two_hosts.hosts import Host, Link, two_hosts

# Processes that run on a host when no job does.
_DAEMONS: Final = ("munged", "slurmctld", "slurmd", "slurmscriptd")
_CONF: Final = """
ClusterName=check
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdLogFile={folder}/%n.log
SlurmctldLogFile={folder}/slurmctld.log
KillWait=30
NodeName=node[0-1] CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""
_TRAINING: Final = """
[mesh]
dims = { dp = 2, tp = 2 }
device = "cpu"

[parallel]
data = "dp"
tensor = "tp"

[model]
num_layers = 2
hidden_size = 64
num_heads = 4
num_kv_heads = 4
intermediate_size = 128

[data]
seq_len = 64

[train]
steps = 150
global_batch_size = 8
micro_batch_size = 4
checkpoint_every = 10
out = "run"
"""
_FOUR: Final = ("--nodes", "2", "--ntasks-per-node", "2")
_LOST: Final = r"rank 2 does not answer: its process has ended"


@final
class Cluster:
    """Two hosts with Slurm's daemons. folder: for the jobs and the daemons."""

    def __init__(self, hosts: tuple[Host, Host], folder: Path) -> None:
        self.hosts, self.folder, self.conf = hosts, folder, folder / "slurm.conf"
        self.env = {
            **os.environ,
            "SLURM_CONF": str(self.conf),
            "RES_OPTIONS": "timeout:1 attempts:1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons, and wait until both nodes are idle."""
        self.conf.write_text(_CONF.format(folder=self.folder))
        (self.folder / "state").mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        files = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        munged = [f"--{option}={self.folder}/munge.{ending}" for option, ending in files.items()]
        self._daemon(self.hosts[0], "munged", "--foreground", "--force", *munged)
        self.wait("munge", (self.folder / "munge.socket").exists)
        self._daemon(self.hosts[0], "slurmctld", "-D")
        for host in self.hosts:
            self._daemon(host, "slurmd", "-D")
        self.wait("idle nodes", lambda: self.ask("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * 2)

    def ask(self, *words: str) -> str:
        """The output and errors of a Slurm command on the first host."""
        command = self.hosts[0].command(words, self.folder)
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def busy(self) -> list[str]:
        """Jobs in the queue, and processes on the hosts other than Slurm's daemons."""
        found = [f"{host.name}: {words}" for host in self.hosts for words in host.processes()]
        running = [each for each in found if not any(name in each for name in _DAEMONS)]
        return [*self.ask("squeue", "-h").splitlines(), *running]

    def batch(self, case: Case, text: str, *options: str) -> tuple[Job, str]:
        """Submit a script. Return its output file as a Job that ends with it, and its number."""
        script, out = self.folder / "batch.sh", self.folder / f"batch-{time.monotonic_ns()}.out"
        out.touch()
        script.write_text(f"#!/bin/sh\n{text}\n")
        words = ["sbatch", "--parsable", "--open-mode=append", f"--output={out}", *options, str(script)]
        waits = 'number=$("$@"); echo number $number; tail -n +1 -f $OUT & while squeue -h -j $number 2>/dev/null | grep -q .; do sleep 0.2; done; sleep 0.5; kill $!'
        command = self.hosts[0].command(["sh", "-c", waits, "sh", *words], self.folder)
        job = case.start(command, {"OUT": str(out)})
        job.await_line("number ")
        return job, job.text.split("number ")[1].split()[0]

    def end(self) -> None:
        """End the daemons."""
        for daemon in reversed(self.daemons):
            daemon.kill()
            daemon.wait(30)

    def _daemon(self, host: Host, *words: str) -> None:
        log = self.folder / f"{words[0]}-{host.name}.out"
        self.daemons.append(host.start(words, self.folder, log, self.env))

    def wait(self, what: str, come: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Wait until `come()` is true. Raises AssertionError with the daemons' logs if it stays false."""
        deadline = time.monotonic() + limit_s
        while not come():
            logs = {
                path.name: path.read_text(errors="replace")[-2000:]
                for path in self.folder.glob("*.[lo]*[gt]")
            }
            assert time.monotonic() < deadline, f"no {what} after {limit_s:g} s: {logs}"
            time.sleep(0.2)


def named_dim(job: Job) -> str:
    """The warning that names the dim."""
    text = "tp crosses nodes, because the ranks of a node are not consecutive"
    assert job.text.count(text) == 1, job.text
    return f"one warning: {text}"


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Slurm on two hosts; no part of it is left at the end of the block."""
    with tempfile.TemporaryDirectory() as name, two_hosts(Path(name), Link()) as hosts:
        found = Cluster(hosts, Path(name))
        try:
            found.start()
            yield found
        finally:
            found.end()


def main() -> int:
    """Run all checks. Return 0 if they passed."""
    install("slurm-wlm", "munge", "iproute2")
    with cluster() as slurm:
        checks = Checks(
            f"Slurm {version(*slurm.hosts[0].command(['env', f'SLURM_CONF={slurm.conf}', 'srun', '-V'], slurm.folder))}",
            slurm.env,
        )

        def srun(*words: str) -> list[str]:
            return slurm.hosts[0].command(["srun", *words], slurm.folder)

        with checks.case("srun script.py, 2 nodes", slurm.busy) as case:
            case.said = summed(case.start(srun(*_FOUR, *program())).end())
        with checks.case("sbatch with srun", slurm.busy) as case:
            case.said = summed(slurm.batch(case, f"srun {' '.join(program())}", *_FOUR)[0].end())
        with checks.case("sbatch without srun", slurm.busy) as case:
            job, _ = slurm.batch(case, " ".join(program()), *_FOUR)
            job.await_line("put srun in front")
            job.end()
            case.said = next(line for _, line in job.lines if "put srun in front" in line).strip()
        with checks.case("srun -m cyclic script.py", slurm.busy) as case:
            job = case.start(srun("-m", "cyclic", *_FOUR, *program(show=1))).end()
            summed(job)
            links = {row[0]: row[-1] for _, line in job.lines if (row := line.split())[1:2] == ["dim"]}
            assert links == {"dp": "node", "tp": "network"}, job.text
            assert "mesh.rank_order = [0, 2, 1, 3]" in job.text, job.text
            case.said = f"links {links}, and {named_dim(job)}"
        with checks.case("srun -m cyclic meshcomm doctor", slurm.busy) as case:
            (slurm.folder / "mesh.toml").write_text("[mesh]\ndims = { dp = 2, tp = 2 }\ndevice = 'cpu'\n")
            doctor = [sys.executable, "-m", "meshcomm", "doctor", "mesh.toml"]
            case.said = named_dim(case.start(srun("-m", "cyclic", *_FOUR, *doctor)).end())
        with checks.case("rank 2 killed", slurm.busy) as case:
            case.said = named(case.start(srun(*_FOUR, *program(dies=2))).end(), _LOST, "another rank")
        with checks.case("two steps of one job at once", slurm.busy) as case:
            steps = "\n".join(f"srun --overlap {' '.join(program(tag=tag, calls=300))} &" for tag in (1, 10))
            case.said = summed(slurm.batch(case, f"{steps}\nwait", *_FOUR)[0].end(), 1, 10)
        with checks.case("scancel", slurm.busy) as case:
            job, number = slurm.batch(case, f"srun {' '.join(program(calls=10**6))}", *_FOUR)
            job.await_line("of 4 on", 4)
            time.sleep(1.0)
            began = time.monotonic()
            slurm.ask("scancel", number)
            job.end()
            case.said = f"{time.monotonic() - began:.1f} s until the queue was empty"
        with checks.case("training, --requeue", slurm.busy) as case:
            (slurm.folder / "train.toml").write_text(_TRAINING)
            train = f"{sys.executable} -m meshcomm train train.toml"
            job, number = slurm.batch(case, f"srun {train}", "--requeue", *_FOUR)
            slurm.wait("checkpoint", (slurm.folder / "run/checkpoints/step-000020").exists)
            slurm.ask("scontrol", "requeue", number)
            # A requeued job waits for two minutes.
            slurm.wait("pending job", lambda: slurm.ask("squeue", "-h", "-o", "%T").strip() == "PENDING")
            slurm.ask("scontrol", "update", f"JobId={number}", "StartTime=now")
            job.await_line("restart 1: resumed after step")
            job.await_line("training finished")
            job.end()
            resumed = next(line for _, line in job.lines if "restart 1: resumed" in line)
            last = [line for _, line in job.lines if "150/150" in line]
            case.said = f"{resumed.split(' from ')[0]}, then {' '.join(last).split('  loss')[0]}"
    return checks.code()


if __name__ == "__main__":
    raise SystemExit(main())
