"""Environment variables set by launchers, and those that torch's backends read when a group is created."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

from meshcomm.config.process import NetworkConfig
from meshcomm.errors import LaunchError
from meshcomm.layout import Plan
from meshcomm.layout.names import nearest_name


class _Variables(NamedTuple):
    """A launcher's variables for the rank, world size, local rank, local size and job.

    job: one or more variables; the first one that is set is used.
    """

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: str


# Most of these launchers also set Hydra's variables. Slurm and Cray set PMI_JOBID. MPICH's mpirun does not name its job.
_MPI: Final = tuple(
    _Variables._make([*names.split(), job])
    for names, job in {
        "OpenMPI OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE":
            "PMIX_NAMESPACE OMPI_MCA_ess_base_jobid",
        "jsrun JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE JSM_NAMESPACE_LOCAL_RANK JSM_NAMESPACE_LOCAL_SIZE": "PMIX_NAMESPACE",
        "Flux FLUX_TASK_RANK FLUX_JOB_SIZE FLUX_TASK_LOCAL_ID -": "FLUX_JOB_ID",
        "PALS PALS_RANKID PMI_SIZE PALS_LOCAL_RANKID PALS_LOCAL_SIZE": "PALS_APID PMI_JOBID",
        "Hydra PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS": "I_MPI_HYDRA_UUID PMI_JOBID",
        "MVAPICH MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_SIZE": "MPIRUN_ID",
    }.items()
)  # fmt: skip

# The rank variable set by each kind of MPI launcher.
MPI_RANKS: Final = tuple(each.rank for each in _MPI)

# Ports for jobs that specify none. They are below the range that systems use for outgoing connections.
_PORTS: Final = range(20_000, 32_000)
_CANDIDATES: Final = 8

# Variables that the backends of one group must read identically: otherwise they choose different algorithms or
# protocols, connect at different times, or check calls that the others do not. Variables that name parts of a host
# are not included.
SHARED: Final = (
    "GLOO_DEVICE_TRANSPORT", "TORCH_DISTRIBUTED_DEBUG", "TORCH_GLOO_LAZY_INIT", "NCCL_ALGO", "NCCL_BUFFSIZE",
    "NCCL_COLLNET_ENABLE", "NCCL_COMM_BLOCKING", "NCCL_CROSS_NIC", "NCCL_CUMEM_ENABLE", "NCCL_IB_DISABLE",
    "NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_NET", "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO", "NCCL_SHM_DISABLE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_USE_COMM_NONBLOCKING",
)  # fmt: skip

# The process that is the rank, and the variables that tell ranks of different jobs apart.
_SPEAKER: Final = "MESHCOMM_RANK_PROCESS"
_JOB: Final = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT", "WORLD_SIZE", "RANK", "SLURM_STEP_ID", "SLURM_PROCID"
)  # fmt: skip

# Every rank of a group that connects at creation holds a socket to every other rank.
EAGER_RANKS: Final = 64


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
    if "RANK" in env or "WORLD_SIZE" in env:
        return _torchrun(env)
    mpi, step = _mpi(env), "SLURM_STEP_ID" in env and "SLURM_PROCID" in env
    # Inside an allocation, mpirun starts its ranks or daemons with srun. MPI's variables then identify the ranks.
    if step and (
        mpi is None or _world(env, mpi.rank, mpi.size) == _world(env, "SLURM_PROCID", "SLURM_NTASKS")
    ):
        return _slurm(env)
    if mpi is not None:
        rank, world = _world(env, mpi.rank, mpi.size)
        local_rank = _number(env, mpi.local_rank, 0)
        local_size = world if env.get("FLUX_JOB_NNODES") == "1" else _number(env, mpi.local_size, 1)
        address = env.get("MASTER_ADDR") or ("127.0.0.1" if local_size == world else None)
        return Launch("mpi", rank, world, local_rank, local_size, address, _port(env), job=_job(env, mpi))
    if "SLURM_PROCID" in env and (tasks := _number(env, "SLURM_NTASKS", 1)) > 1:
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
    local = "LOCAL_RANK" in env
    local_rank = _number(env, "LOCAL_RANK") if local else 0
    address, job = env.get("MASTER_ADDR"), _ray_job(env)
    return Launch("given", 0, 1, local_rank, 1, address, _port(env), placed=local, job=job)


def _slurm(env: Mapping[str, str]) -> Launch:
    rank, world = _world(env, "SLURM_PROCID", "SLURM_NTASKS")
    if world == 1:
        return _SINGLE
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    one_node = "1" in (env.get("SLURM_STEP_NUM_NODES"), env.get("SLURM_NNODES"))
    # A list in node order, such as 8(x2),4.
    counts = [
        int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks) for _ in range(int(times or 1))
    ]
    node = _number(env, "SLURM_NODEID", 0)
    local_size = world if one_node else counts[node] if node < len(counts) else 1
    local_rank = _number(env, "SLURM_LOCALID", 0)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    # If all ranks share one host, no other host has to reach this address.
    host = "127.0.0.1" if local_size == world else first_host(nodes) if nodes else None
    address = env.get("MASTER_ADDR") or host
    return Launch("slurm", rank, world, local_rank, local_size, address, _port(env), job=_step(env))


def _step(env: Mapping[str, str]) -> str:
    """Return the name of a Slurm step. A requeued job keeps its number but gets a new name."""
    again = _number(env, "SLURM_RESTART_COUNT", 0)
    # Each part of a heterogeneous job has its own number.
    job = env.get("SLURM_JOB_ID_HET_GROUP_0") or env.get("SLURM_JOB_ID", "?")
    return f"Slurm step {job}.{env.get('SLURM_STEP_ID')}" + (f", requeued {again} times" if again else "")


def _mpi(env: Mapping[str, str]) -> _Variables | None:
    return next((names for names in _MPI if names.rank in env), None)


def _job(env: Mapping[str, str], names: _Variables) -> str:
    found = next((env[name] for name in names.job.split() if env.get(name)), None)
    return "" if found is None else f"{names.launcher} job {found}"


def _world(env: Mapping[str, str], rank: str, size: str) -> tuple[int, int]:
    return _number(env, rank), _number(env, size)


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


def ports_of(job: str) -> list[int]:
    """Return the ports at which a job's ranks look for the job's store, in search order. All ranks of a job get the same
    ports, and other jobs get different ones.

    >>> ports_of("Slurm step 17.0")[:3], ports_of("Slurm step 17.1")[0], ports_of("")
    ([31041, 30979, 23700], 23035, [29500])
    """
    if not job:
        return [29500]
    digest = hashlib.sha256(job.encode()).digest()
    numbers = (int.from_bytes(digest[4 * i : 4 * i + 4], "big") for i in range(_CANDIDATES))
    return [_PORTS[number % len(_PORTS)] for number in numbers]


def _torchrun(env: Mapping[str, str]) -> Launch:
    for name in ("RANK", "WORLD_SIZE"):
        if name not in env:
            raise LaunchError(
                f"the environment has only some of a launcher's variables: {name} is missing",
                given=", ".join(f"{n}={env[n]}" for n in ("RANK", "WORLD_SIZE") if n in env),
                expected="both RANK and WORLD_SIZE, or neither",
                hint="torchrun --nproc-per-node N script.py, or meshcomm run CONFIG script.py",
            )
    rank, world = _world(env, "RANK", "WORLD_SIZE")
    if not 0 <= rank < world:
        raise LaunchError(
            f"RANK={rank} is not a rank in a world of {world}",
            given=f"RANK={rank}, WORLD_SIZE={world}",
            expected=f"RANK from 0 to {world - 1}",
            hint="check what sets these variables",
        )
    # Launchers other than torchrun may not set the number of processes on a host. The number is then unknown.
    local_size = _number(env, "LOCAL_WORLD_SIZE", 1)
    # A script that exports RANK and WORLD_SIZE under Slurm or MPI need not export LOCAL_RANK.
    names = ("LOCAL_RANK", "SLURM_LOCALID", *(names.local_rank for names in _MPI))
    local = next((name for name in names if name in env), None)
    local_rank = 0 if local is None else _number(env, local)
    address, job = env.get("MASTER_ADDR"), _job_of_ranks(env, rank, world)
    return Launch(
        "torchrun", rank, world, local_rank, local_size, address, _port(env), local is not None, job
    )


def _job_of_ranks(env: Mapping[str, str], rank: int, world: int) -> str:
    """Return the job name of a process that has RANK: torchrun's run, or the launcher's job if RANK is the launcher's rank.

    If each task of a Slurm step runs torchrun, torchrun's processes are not ranks of the step.
    """
    if (run := env.get("TORCHELASTIC_RUN_ID", "none")) not in ("", "none"):
        return f"torchrun's run {run}"
    if "SLURM_STEP_ID" in env and _same(env, "SLURM_PROCID", "SLURM_NTASKS", rank, world):
        return _step(env)
    if (mpi := _mpi(env)) is not None and _same(env, mpi.rank, mpi.size, rank, world):
        return _job(env, mpi)
    return _ray_job(env)


def _ray_job(env: Mapping[str, str]) -> str:
    """Return the Ray job's name. Ray reports it, because a worker that started before its job does not have the
    environment variable.
    """
    job = env.get("RAY_JOB_ID", "")
    if job and (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
        job = ray.get_runtime_context().get_job_id()
    return f"Ray job {job}" if job.strip("f") else ""


def _same(env: Mapping[str, str], rank_name: str, size_name: str, rank: int, world: int) -> bool:
    return (env.get(rank_name), env.get(size_name)) == (str(rank), str(world))


def attempt_of(env: Mapping[str, str]) -> int:
    """Return how many times torch's agent has restarted its ranks, or 0 under other launchers."""
    text = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0


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


def attempt_prefix(env: Mapping[str, str]) -> str:
    """Return a prefix that separates the keys of this attempt from the keys of earlier ones; "" for the first attempt.

    torch's agents keep their store when they restart the ranks. A single agent has one restart count for all ranks.
    Several agents each count only their own failures, and only the world size is the same for all ranks.

    >>> attempt_prefix({"GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "2", "WORLD_SIZE": "4"})
    'attempt2'
    >>> attempt_prefix({"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "2", "WORLD_SIZE": "4"})
    'world4'
    """
    if env.get("GROUP_WORLD_SIZE", "1") != "1":
        return f"world{env.get('WORLD_SIZE', '')}"
    count = attempt_of(env)
    return f"attempt{count}" if count else ""


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list.

    >>> first_host("gpu[007-012,20],login1"), first_host("a1,a2"), first_host("r[1-2]n[3-4].x")
    ('gpu007', 'a1', 'r1n3.x')
    """
    head = re.match(r"(\[[^\]]*\]|[^,\[])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", head[0] if head else "")


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


def how_many_ranks(command: str) -> LaunchError:
    """Return the error for a script whose number of ranks is given neither by a config nor by the user."""
    return LaunchError(
        "how many ranks?",
        given="a script without CONFIG, and no --world-size",
        expected="--world-size, or a CONFIG whose dims determine it",
        hint=f"meshcomm {command} --world-size 8 SCRIPT",
    )


def set_env(variables: Mapping[str, str | None]) -> None:
    """Set environment variables. A value of None removes the variable."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def with_variables(variables: Mapping[str, str], *, keep: bool = False) -> Iterator[None]:
    """Set `variables` inside the block, and restore the old values afterwards. With `keep`, set only unset variables."""
    before = {name: os.environ.get(name) for name in variables if not (keep and name in os.environ)}
    os.environ.update({name: variables[name] for name in before})
    try:
        yield
    finally:
        set_env(before)


def refuse_conflict(variables: Mapping[str, str]) -> None:
    """Raise LaunchError if the user has set one of the config's `variables` to a different value."""
    for name, value in variables.items():
        given = os.environ.get(name)
        if given not in (None, value):
            raise LaunchError(
                f"{name} is set twice, to different values",
                given=f"{name}={given} in the environment, {value} by the config",
                expected="one value",
                hint=f"unset {name}, or remove it from [network]",
            )


def check_interfaces(plan: Plan, network: NetworkConfig) -> None:
    """Raise LaunchError if `[network]` or GLOO_SOCKET_IFNAME names a missing interface.

    The variables of `[network]` must already be set.
    """
    source = "[network] interfaces" if network.interfaces else "GLOO_SOCKET_IFNAME"
    reads = ["gloo", *["nccl"] * bool(network.interfaces)]
    backends = {plan.defaults.backend, *(family.options.backend for family in plan.families)}
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    if not names or not any(word in backend for backend in backends for word in reads):
        return
    present = [name for _, name in socket.if_nameindex()]
    for name in names.split(","):
        if name not in present:
            raise no_interface(name, source, present)


def no_interface(name: str, source: str, present: Sequence[str]) -> LaunchError:
    """Return the error for a network interface that this host lacks.

    source: the setting or variable that names the interface.
    """
    near = nearest_name(name, present)
    return LaunchError(
        f"this host has no interface {name}",
        given=f"{name} in {source}",
        expected="one of " + ", ".join(present),
        hint=f'did you mean "{near}"?' if near else f"remove it from {source}",
    )


def network_variables(network: NetworkConfig) -> dict[str, str]:
    """Return the Gloo and NCCL environment variables for `[network]`."""
    listed = ",".join(network.interfaces)
    variables = {
        "GLOO_SOCKET_IFNAME": listed,
        # NCCL treats names as prefixes unless they are marked as exact.
        "NCCL_SOCKET_IFNAME": listed and f"={listed}",
        "NCCL_DEBUG": network.nccl_debug,
        "NCCL_DEBUG_SUBSYS": ",".join(network.nccl_debug_subsys),
        "NCCL_SOCKET_NTHREADS": network.nccl_socket_nthreads,
        "NCCL_NSOCKS_PERTHREAD": network.nccl_nsocks_perthread,
    }
    return {name: str(value) for name, value in variables.items() if value not in (None, "")}


# Settings of torch's NCCL watchdog for the loss of a rank, which NCCL detects on other hosts: the watchdog neither ends
# this process nor waits a minute for the dumps of other ranks. torchrun sets the first variable to 1.
NCCL_RECOVERS: Final[Mapping[str, str]] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
}


def nccl_defaults(world_size: int) -> dict[str, str]:
    """Return the setting for how often each rank's NCCL watchdog polls the store: every second, or less often if all ranks
    together would exceed 1,000 polls per second.
    """
    return {"TORCH_NCCL_COORD_CHECK_MILSEC": str(max(1_000, world_size))}


def gloo_defaults(one_host: bool, ranks: int | None = None) -> dict[str, str]:
    """Return the default connection settings of a Gloo group. On one host, Gloo uses the loopback interface.

    All ranks connect when the group is created, because Gloo then ends every call at its timeout. In a group of more than
    64 ranks, and in the default group (`ranks` is None), two ranks connect when they send their first message.
    """
    lazy = ranks is None or ranks > EAGER_RANKS
    variables = {"TORCH_GLOO_LAZY_INIT": "1" if lazy else "0"}
    names = [name for _, name in socket.if_nameindex()] if one_host else []
    if loopback := next((name for name in ("lo", "lo0") if name in names), None):
        variables["GLOO_SOCKET_IFNAME"] = loopback
    return variables
