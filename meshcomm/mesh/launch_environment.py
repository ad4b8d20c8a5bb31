"""Which launcher started this process, and what did it say about rank and world?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshcomm.errors import LaunchError

_MPI = (
    # Open MPI, then MPICH and Intel MPI (Hydra), then MVAPICH.
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher says.

    kind: "torchrun" (any launcher that sets RANK and WORLD_SIZE), "slurm", "mpi" or "single".
    local_rank: number of this process on its host. local_size: processes on this host.
    address, port: where rank 0 can be met; None where nothing says so.
    """

    kind: str
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    address: str | None = None
    port: int | None = None

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
    if "SLURM_PROCID" in env and _number(env, "SLURM_NTASKS", 1) > 1:
        return _slurm(env)
    for rank, size, local_rank, local_size in _MPI:
        if rank in env:
            return _mpi(env, rank, size, local_rank, local_size)
    return Launch("single", rank=0, world_size=1, local_rank=0, local_size=1)


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
    local_size = _number(env, "LOCAL_WORLD_SIZE", 1 if world > 1 else world)
    port = _number(env, "MASTER_PORT") if "MASTER_PORT" in env else None
    return Launch(
        "torchrun", rank, world, _number(env, "LOCAL_RANK", 0), local_size, env.get("MASTER_ADDR"), port
    )


def _slurm(env: Mapping[str, str]) -> Launch:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    # A port that all tasks of a job compute alike and two jobs of a host rarely share.
    port = _number(env, "MASTER_PORT", 20000 + _number(env, "SLURM_JOB_ID", 0) % 20000)
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    world = _number(env, "SLURM_NTASKS")
    one_node = _number(env, "SLURM_NNODES", 0) == 1
    local_size = world if one_node else int(match[0]) if (match := re.match(r"\d+", tasks)) else 1
    # On one node nobody else need reach it.
    alone = "127.0.0.1" if local_size == world else None
    address = env.get("MASTER_ADDR") or alone or (first_host(nodes) if nodes else None)
    return Launch(
        "slurm",
        rank=_number(env, "SLURM_PROCID"),
        world_size=world,
        local_rank=_number(env, "SLURM_LOCALID", 0),
        local_size=local_size,
        address=address,
        port=port,
    )


def _mpi(env: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str) -> Launch:
    world, local = _number(env, size), _number(env, local_size, 1)
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if local == world else None)
    port = _number(env, "MASTER_PORT", 29500)
    return Launch("mpi", _number(env, rank), world, _number(env, local_rank, 0), local, address, port)


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list.

    >>> first_host("gpu[007-012,20],login1"), first_host("a1,a2"), first_host("r[1-2]n[3-4].x")
    ('gpu007', 'a1', 'r1n3.x')
    """
    inside = False
    head = ""
    for char in nodes:
        if char == "," and not inside:
            break
        inside = (inside or char == "[") and char != "]"
        head += char
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", head)


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
