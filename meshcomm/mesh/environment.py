"""Environment variables: what a launcher says in them, and what torch's backends read while groups are made."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from meshcomm.config.process import NetworkConfig
from meshcomm.errors import LaunchError
from meshcomm.layout import Plan
from meshcomm.layout.names import nearest_name

_MPI: Final = (
    # Open MPI, then MPICH and Intel MPI (Hydra), then MVAPICH.
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
)  # fmt: skip

# What the backends of one group must read alike: else they choose different algorithms or protocols,
# connect at different times, or check calls that the others do not check. What names a host's own
# parts may differ and is left out: NCCL_SOCKET_IFNAME, NCCL_IB_HCA, files, what is logged.
SHARED: Final = [
    "GLOO_DEVICE_TRANSPORT",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_GLOO_LAZY_INIT",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_COMM_BLOCKING",
    "NCCL_CROSS_NIC",
    "NCCL_CUMEM_ENABLE",
    "NCCL_IB_DISABLE",
    "NCCL_MAX_CTAS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NET",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_USE_COMM_NONBLOCKING",
]

# Every rank of a group that connects while it is made holds a socket to every other rank.
EAGER_RANKS: Final = 64


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher says.

    kind: "torchrun" (any launcher that sets RANK and WORLD_SIZE), "slurm", "mpi" or "single".
    local_rank: number of this process on its host. local_size: processes on this host.
    address, port: where rank 0 can be met; None where nothing says so.
    placed: the launcher has said the local rank.
    """

    kind: str
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    address: str | None = None
    port: int | None = None
    placed: bool = True

    @property
    def one_host(self) -> bool:
        """Whether all processes are on this host."""
        return self.local_size == self.world_size


def find_launch(env: Mapping[str, str]) -> Launch:
    """Read the launcher's variables out of `env`. Raises LaunchError for half a set of them.

    torchrun's come first: under Slurm or MPI, torchrun may have been started by either.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        return _torchrun(env)
    host: str | None = None
    if "SLURM_PROCID" in env and _number(env, "SLURM_NTASKS", 1) > 1:
        kind, world, rank = "slurm", _number(env, "SLURM_NTASKS"), _number(env, "SLURM_PROCID")
        tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
        one_node = _number(env, "SLURM_NNODES", 0) == 1
        local_size = world if one_node else int(match[0]) if (match := re.match(r"\d+", tasks)) else 1
        local_rank = _number(env, "SLURM_LOCALID", 0)
        # A port that all tasks of a job compute alike and two jobs of a host rarely share.
        port = 20000 + _number(env, "SLURM_JOB_ID", 0) % 20000
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
        host = first_host(nodes) if nodes else None
    elif names := next((names for names in _MPI if names[0] in env), None):
        kind, port = "mpi", 29500
        rank, world = _number(env, names[0]), _number(env, names[1])
        local_rank, local_size = _number(env, names[2], 0), _number(env, names[3], 1)
    else:
        return Launch("single", rank=0, world_size=1, local_rank=0, local_size=1)
    # On one host nobody else need reach it.
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if local_size == world else host)
    return Launch(kind, rank, world, local_rank, local_size, address, _number(env, "MASTER_PORT", port))


def _torchrun(env: Mapping[str, str]) -> Launch:
    for name in ("RANK", "WORLD_SIZE"):
        if name not in env:
            raise LaunchError(
                f"the environment has half of a launcher's variables: {name} is missing",
                given=", ".join(f"{n}={env[n]}" for n in ("RANK", "WORLD_SIZE") if n in env),
                expected="both RANK and WORLD_SIZE, or neither",
                hint="torchrun --nproc-per-node N script.py, or meshcomm run CONFIG script.py",
            )
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise LaunchError(
            f"RANK={rank} is not a rank of a world of {world}",
            given=f"RANK={rank}, WORLD_SIZE={world}",
            expected=f"RANK from 0 to {world - 1}",
            hint="look at what sets these variables",
        )
    # Launchers other than torchrun may not say how many processes a host has; then claim nothing.
    local_size = _number(env, "LOCAL_WORLD_SIZE", 1)
    port = _number(env, "MASTER_PORT") if "MASTER_PORT" in env else None
    # A script that exports RANK and WORLD_SIZE under Slurm or MPI need not export this.
    names = ("LOCAL_RANK", "SLURM_LOCALID", *(names[2] for names in _MPI))
    local = next((name for name in names if name in env), None)
    local_rank = 0 if local is None else _number(env, local)
    address = env.get("MASTER_ADDR")
    return Launch("torchrun", rank, world, local_rank, local_size, address, port, placed=local is not None)


def attempt_of(env: Mapping[str, str]) -> int:
    """How often torch's agent has started its ranks again; 0 under other launchers."""
    text = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0


def attempt_prefix(env: Mapping[str, str]) -> str:
    """What parts this attempt's keys in a store from those of earlier attempts; "" for the first.

    torch's agents keep their store, and what is in it, when they start the ranks again. One agent's
    count is the same for all its ranks. Of several agents each counts the failures of its own ranks
    alone; there only the size of the world is the same for all.

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
    """The first host of a Slurm node list.

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
            expected="a whole number, set by the launcher",
            hint="start with torchrun, srun, mpirun, or meshcomm run",
        ) from None


def how_many_ranks(command: str) -> LaunchError:
    """The error where neither a config nor the user says how many ranks a script has."""
    return LaunchError(
        "how many ranks?",
        given="a script without CONFIG, and no --world",
        expected="--world, or a CONFIG whose dims say it",
        hint=f"meshcomm {command} --world 8 SCRIPT",
    )


def put(variables: Mapping[str, str | None]) -> None:
    """Set `variables`; those that are None are taken away."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def with_variables(variables: Mapping[str, str], *, keep: bool = False) -> Iterator[None]:
    """Inside of the block `variables` are set, with `keep` those that are not set yet; after it they are as before."""
    before = {name: os.environ.get(name) for name in variables if not (keep and name in os.environ)}
    os.environ.update({name: variables[name] for name in before})
    try:
        yield
    finally:
        put(before)


def refuse_conflict(variables: Mapping[str, str]) -> None:
    """Raise LaunchError where the user has set one of `variables`, which a config says, to something else."""
    for name, value in variables.items():
        given = os.environ.get(name)
        if given not in (None, value):
            raise LaunchError(
                f"{name} is set twice, differently",
                given=f"{name}={given} in the environment, {value} by the config",
                expected="one value",
                hint=f"unset {name}, or take it out of [network]",
            )


def check_interfaces(plan: Plan, network: NetworkConfig) -> None:
    """Raise LaunchError where `[network]` or GLOO_SOCKET_IFNAME names an interface that this host lacks.

    Called while the variables of `[network]` are set. Backends without sockets, as torch's fake one, need none.
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
    """The error for a network interface that this host lacks. source: the setting or the variable that names it."""
    near = nearest_name(name, present)
    return LaunchError(
        f"this host has no interface {name}",
        given=f"{name} in {source}",
        expected="one of " + ", ".join(present),
        hint=f'did you mean "{near}"?' if near else f"take it out of {source}",
    )


def network_variables(network: NetworkConfig) -> dict[str, str]:
    """What `[network]` means to Gloo and NCCL."""
    listed = ",".join(network.interfaces)
    variables = {
        "GLOO_SOCKET_IFNAME": listed,
        # NCCL takes names as prefixes unless they are marked as exact.
        "NCCL_SOCKET_IFNAME": listed and f"={listed}",
        "NCCL_DEBUG": network.nccl_debug,
        "NCCL_DEBUG_SUBSYS": ",".join(network.nccl_debug_subsys),
        "NCCL_SOCKET_NTHREADS": network.nccl_socket_nthreads,
        "NCCL_NSOCKS_PERTHREAD": network.nccl_nsocks_perthread,
    }
    return {name: str(value) for name, value in variables.items() if value not in (None, "")}


def nccl_defaults(world_size: int) -> dict[str, str]:
    """How often each rank's NCCL watchdog asks the store whether another one has failed, unless the user says it.

    Once a second by torch's own default; in large worlds so that the store sees 1,000 of them a second.
    """
    return {"TORCH_NCCL_COORD_CHECK_MILSEC": str(max(1_000, world_size))}


def gloo_defaults(one_host: bool, ranks: int | None = None) -> dict[str, str]:
    """How the ranks of a Gloo group connect unless the user says otherwise.

    All with all while the group is made, as Gloo then ends every call at its timeout; a group of more than
    64 ranks, and the default group (ranks: None), when two ranks first talk. On one host Gloo stays on the
    loopback interface, which needs no host name that resolves and no open port.
    """
    lazy = ranks is None or ranks > EAGER_RANKS
    variables = {"TORCH_GLOO_LAZY_INIT": "1" if lazy else "0"}
    names = [name for _, name in socket.if_nameindex()] if one_host else []
    if loopback := next((name for name in ("lo", "lo0") if name in names), None):
        variables["GLOO_SOCKET_IFNAME"] = loopback
    return variables
