"""What a launcher tells each process of its job, in environment variables."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from meshcomm.errors import LaunchError


class _Variables(NamedTuple):
    """The names of a launcher's variables. job: the launcher's name for the job is in the first one that is set."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str = ""
    job: tuple[str, ...] = ()


_TORCHRUN: Final = _Variables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SLURM: Final = _Variables("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
# Most of these launchers also set Hydra's variables. Slurm and Cray set PMI_JOBID. MPICH's mpirun does not name its job.
_MPI: Final = (
    _Variables("OpenMPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
    _Variables("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE",
        job=("PMIX_NAMESPACE",)),
    _Variables("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", job=("FLUX_JOB_ID",)),
    _Variables("PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", job=("PALS_APID", "PMI_JOBID")),
    _Variables("Hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", job=("I_MPI_HYDRA_UUID", "PMI_JOBID")),
    _Variables("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE", job=("MPIRUN_ID",)),
)  # fmt: skip

# The rank variable set by each kind of MPI launcher.
MPI_RANKS: Final = tuple(each.rank for each in _MPI)

# The process that is the rank, and the variables that tell ranks of different jobs apart.
_SPEAKER: Final = "MESHCOMM_RANK_PROCESS"
_JOB: Final = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT", "WORLD_SIZE", "RANK", "SLURM_STEP_ID", "SLURM_PROCID"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """Information from the launcher about this process.

    kind: "torchrun" (any launcher that sets RANK and WORLD_SIZE), "slurm", "mpi", "torch" (from torch's default group),
        "given" (by the program only) or "single".
    local_rank: index of this process on its host.
    local_size: number of processes on this host.
    address, port: where to reach rank 0; None if unknown. An unknown port is derived from the job's name.
    placed: whether the launcher has set the local rank.
    job: the launcher's name for the job, the same on all of its ranks and unique to the job; "" if unknown.
    """

    kind: str
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    address: str | None = None
    port: int | None = None
    placed: bool = True
    job: str = ""

    @property
    def one_host(self) -> bool:
        """Whether all processes are on this host."""
        return self.local_size == self.world_size


_SINGLE: Final = Launch("single", rank=0, world_size=1, local_rank=0, local_size=1)


def find_launch(env: Mapping[str, str]) -> Launch:
    """Read the launcher's variables, torchrun's first, because Slurm or MPI may start torchrun.

    Raises: LaunchError if some variables are missing.
    """
    if _TORCHRUN.rank in env or _TORCHRUN.size in env:
        return _torchrun(env)
    mpi, step = _mpi(env), "SLURM_STEP_ID" in env and _SLURM.rank in env
    # Inside an allocation, mpirun starts its ranks or daemons with srun. MPI's variables then identify the ranks.
    if step and (mpi is None or _world(env, mpi) == _world(env, _SLURM)):
        return _slurm(env)
    if mpi is not None:
        rank, world = _world(env, mpi)
        local_size = world if env.get("FLUX_JOB_NNODES") == "1" else _number(env, mpi.local_size, 1)
        address = env.get("MASTER_ADDR") or ("127.0.0.1" if local_size == world else None)
        local_rank = _number(env, mpi.local_rank, 0)
        return Launch("mpi", rank, world, local_rank, local_size, address, _port(env), job=_mpi_job(env, mpi))
    if _SLURM.rank in env and (tasks := _number(env, _SLURM.size, 1)) > 1:
        raise LaunchError(
            f"this is the batch script of Slurm job {env.get('SLURM_JOB_ID', '?')}, not one of its {tasks} tasks",
            given=f"SLURM_NTASKS={tasks} and no SLURM_STEP_ID: sbatch starts a script once, without srun",
            expected=f"{tasks} tasks, each a process that srun starts",
            hint="put srun in front: srun python script.py; for one process, #SBATCH --ntasks=1",
        )
    return _SINGLE


def launch_of_command(env: Mapping[str, str]) -> Launch:
    """Return the launch of a command that starts ranks, or runs as one. A process that a rank has started is not a rank."""
    return _SINGLE if is_helper(env) else find_launch(env)


def launch_by_arguments(env: Mapping[str, str]) -> Launch:
    """Return the launch of a process that Ray or multiprocessing started, and whose program passes its rank and world size
    to `meet`.
    """
    local_rank, placed = _number(env, "LOCAL_RANK", 0), "LOCAL_RANK" in env
    return Launch("given", 0, 1, local_rank, 1, env.get("MASTER_ADDR"), _port(env), placed, _ray_job(env))


def _torchrun(env: Mapping[str, str]) -> Launch:
    for name in (_TORCHRUN.rank, _TORCHRUN.size):
        if name not in env:
            raise LaunchError(
                f"the environment has only some of a launcher's variables: {name} is missing",
                given=", ".join(f"{n}={env[n]}" for n in ("RANK", "WORLD_SIZE") if n in env),
                expected="both RANK and WORLD_SIZE, or neither",
                hint="torchrun --nproc-per-node N script.py, or meshcomm run CONFIG script.py",
            )
    rank, world = _world(env, _TORCHRUN)
    if world < 1:
        raise LaunchError(
            f"WORLD_SIZE={world} is not a number of ranks",
            given=f"RANK={rank}, WORLD_SIZE={world}",
            expected="WORLD_SIZE of 1 or more, the same on all ranks",
            hint="check what sets these variables",
        )
    if not 0 <= rank < world:
        raise LaunchError(
            f"RANK={rank} is not a rank in a world of {world}",
            given=f"RANK={rank}, WORLD_SIZE={world}",
            expected=f"RANK from 0 to {world - 1}",
            hint="check what sets these variables",
        )
    # Launchers other than torchrun may not set the number of processes on a host. The number is then unknown.
    local_size = _number(env, _TORCHRUN.local_size, 1)
    # A script that exports RANK and WORLD_SIZE under Slurm or MPI need not export LOCAL_RANK.
    names = [launcher.local_rank for launcher in (_TORCHRUN, _SLURM, *_MPI) if launcher.local_rank in env]
    local_rank = _number(env, names[0]) if names else 0
    address, job = env.get("MASTER_ADDR"), _torchrun_job(env)
    return Launch("torchrun", rank, world, local_rank, local_size, address, _port(env), bool(names), job)


def _slurm(env: Mapping[str, str]) -> Launch:
    rank, world = _world(env, _SLURM)
    if world == 1:
        return _SINGLE
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    # A list in node order, such as 8(x2),4.
    counts = [
        int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks) for _ in range(int(times or 1))
    ]
    node = _number(env, "SLURM_NODEID", 0)
    if "1" in (env.get("SLURM_STEP_NUM_NODES"), env.get("SLURM_NNODES")):
        local_size = world
    else:
        local_size = counts[node] if node < len(counts) else 1
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    # If all ranks share one host, no other host has to reach this address.
    host = "127.0.0.1" if local_size == world else first_host(nodes) if nodes else None
    address, local_rank = env.get("MASTER_ADDR") or host, _number(env, _SLURM.local_rank, 0)
    return Launch("slurm", rank, world, local_rank, local_size, address, _port(env), job=_step(env))


def _mpi(env: Mapping[str, str]) -> _Variables | None:
    return next((names for names in _MPI if names.rank in env), None)


def _world(env: Mapping[str, str], names: _Variables) -> tuple[int, int]:
    return _number(env, names.rank), _number(env, names.size)


def _port(env: Mapping[str, str]) -> int | None:
    if "MASTER_PORT" not in env:
        return None
    port = _number(env, "MASTER_PORT")
    if not 0 <= port <= 65535:
        raise LaunchError(
            f"MASTER_PORT={port} is not a port",
            given=f"MASTER_PORT={port}",
            expected="a port from 1 to 65535, the same on all ranks",
            hint="MASTER_PORT=29500",
        )
    return port


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise LaunchError(
            f"{name} is not a number" if text is not None else f"{name} is not set",
            given=f"{name}={text!r}",
            expected="an integer, set by the launcher",
            hint="start with torchrun, srun, mpirun, or meshcomm run",
        ) from None


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list.

    >>> first_host("gpu[007-012,20],login1"), first_host("a1,a2"), first_host("r[1-2]n[3-4].x")
    ('gpu007', 'a1', 'r1n3.x')
    """
    head = re.match(r"(\[[^\]]*\]|[^,\[])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", head[0] if head else "")


def how_many_ranks(command: str) -> LaunchError:
    """Return the error for a script whose number of ranks is given neither by a config nor by the user."""
    return LaunchError(
        "how many ranks?",
        given="a script without CONFIG, and no --world-size",
        expected="--world-size, or a CONFIG whose dims determine it",
        hint=f"meshcomm {command} --world-size 8 SCRIPT",
    )


# -- the launcher's name for the job -------------------------------------------------------------------------


def run_of(env: Mapping[str, str]) -> str:
    """Return the name of torchrun's run, or of the job of meshcomm's own launcher; "" if it has none."""
    run = env.get("TORCHELASTIC_RUN_ID", "")
    return "" if run == "none" else run


def _torchrun_job(env: Mapping[str, str]) -> str:
    """Return the job name of a process that has RANK: torchrun's run, or the launcher's job if RANK is the launcher's rank.

    If each task of a Slurm step runs torchrun, torchrun's processes are not ranks of the step.
    """
    if run := run_of(env):
        return f"torchrun's run {run}"
    if "SLURM_STEP_ID" in env and _is_rank_of(_SLURM, env):
        return _step(env)
    mpi = _mpi(env)
    return _mpi_job(env, mpi) if mpi is not None and _is_rank_of(mpi, env) else _ray_job(env)


def _is_rank_of(names: _Variables, env: Mapping[str, str]) -> bool:
    place = (env[_TORCHRUN.rank], env[_TORCHRUN.size])
    return place == (env.get(names.rank), env.get(names.size))


def _step(env: Mapping[str, str]) -> str:
    """Return the name of a Slurm step. A requeued job keeps its number but gets a new name."""
    again = _number(env, "SLURM_RESTART_COUNT", 0)
    # Each part of a heterogeneous job has its own number.
    job = env.get("SLURM_JOB_ID_HET_GROUP_0") or env.get("SLURM_JOB_ID", "?")
    return f"Slurm step {job}.{env.get('SLURM_STEP_ID')}" + (f", requeued {again} times" if again else "")


def _mpi_job(env: Mapping[str, str], names: _Variables) -> str:
    return next((f"{names.launcher} job {env[name]}" for name in names.job if env.get(name)), "")


def _ray_job(env: Mapping[str, str]) -> str:
    """Return the Ray job's name. Ray reports it, because a worker that started before its job does not have the
    environment variable.
    """
    job = env.get("RAY_JOB_ID", "")
    if job and (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
        job = ray.get_runtime_context().get_job_id()
    return f"Ray job {job}" if job.strip("f") else ""


# -- attempts, and processes that ranks start ----------------------------------------------------------------


def attempt_of(env: Mapping[str, str]) -> int:
    """Return how many times torch's agent has restarted its ranks, or 0 under other launchers."""
    text = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0


def several_agents(env: Mapping[str, str]) -> bool:
    """Return whether the job has several agents of torchrun. Each counts only the failures of its own ranks."""
    return env.get("GROUP_WORLD_SIZE", "1") != "1"


def attempt_prefix(env: Mapping[str, str]) -> str:
    """Return a prefix that separates the keys of this attempt from the keys of earlier ones; "" for the first attempt.

    torch's agents keep their store when they restart the ranks. A single agent has one restart count for all ranks. If there
    are several agents, only the world size is the same for all ranks.

    >>> attempt_prefix({"GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "2", "WORLD_SIZE": "4"})
    'attempt2'
    >>> attempt_prefix({"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "2", "WORLD_SIZE": "4"})
    'world4'
    """
    if several_agents(env):
        return f"world{env.get('WORLD_SIZE', '')}"
    count = attempt_of(env)
    return f"attempt{count}" if count else ""


def speak_for_rank(env: MutableMapping[str, str]) -> None:
    """Record in `env`, this process's own, that this process is the rank. Processes that it starts inherit the record."""
    env[_SPEAKER] = f"{os.getpid()} {_rank_in_job(env)}"


def is_helper(env: Mapping[str, str]) -> bool:
    """Return whether a rank started this process and passed on its own variables, as to a fork or a subprocess.

    A helper is not the rank. A rank of another job, which a rank started, has variables of its own.
    """
    process, _, job = env.get(_SPEAKER, "").partition(" ")
    return bool(process) and process != str(os.getpid()) and job == _rank_in_job(env)


def _rank_in_job(env: Mapping[str, str]) -> str:
    return " ".join(env.get(name, "-") for name in (*_JOB, *MPI_RANKS))
