"""How does this process meet the others? The store, the device, the default process group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from meshcomm.config import Config, ProcessConfig
from meshcomm.errors import LaunchError
from meshcomm.mesh.exposure import exposed_file, exposed_store, is_loopback, serve_on_loopback, warn
from meshcomm.mesh.launcher import Launch


@dataclass(frozen=True, slots=True)
class Meeting:
    """This process among the others, before any group exists.

    pretended: the other ranks do not exist; torch's fake backend plays them.
    """

    store: dist.Store
    rank: int
    world_size: int
    launch: Launch
    pretended: bool = False


def meet(
    process: ProcessConfig,
    launch: Launch,
    timeout_s: float,
    *,
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Meeting:
    """Find the other processes: by an explicit store, by `[process]`, or by the launcher.

    Raises LaunchError where nothing says who this process is, or nobody is met within the timeout.
    Rank 0 warns with ExposedRendezvous where others could come too: see `exposure`.
    """
    rank = _given(rank, process.rank, launch.rank)
    world_size = _given(world_size, process.world_size, launch.world_size)
    if not 0 <= rank < world_size:
        raise LaunchError(
            f"rank {rank} is not in a world of {world_size}",
            given=f"rank={rank}, world_size={world_size}",
            expected=f"a rank from 0 to {world_size - 1}",
            hint="give both rank and world_size, or let a launcher set them",
        )
    if store is None:
        store = _find_store(process, launch, rank, world_size, timedelta(seconds=timeout_s))
    return Meeting(store, rank, world_size, launch)


def _given(argument: int | None, config: int | None, launcher: int) -> int:
    return next(value for value in (argument, config, launcher) if value is not None)


def _find_store(
    process: ProcessConfig, launch: Launch, rank: int, world_size: int, timeout: timedelta
) -> dist.Store:
    if process.init == "file":
        if rank == 0:
            warn(exposed_file(str(process.path)))
        return dist.FileStore(str(process.path), world_size)
    if process.init == "tcp":
        url = f"tcp://{process.address}"
    elif launch.kind == "torchrun":
        url = "env://" if launch.address else ""
    elif world_size == 1:
        return dist.HashStore()
    else:
        host = f"[{launch.address}]" if launch.address and ":" in launch.address else launch.address
        url = f"tcp://{host}:{launch.port}" if host else ""
    if not url or (url == "env://" and launch.port is None):
        raise LaunchError(
            f"rank {rank} of {world_size} has no address at which to meet the others",
            given=f"launcher {launch.kind}, no MASTER_ADDR and MASTER_PORT",
            expected="MASTER_ADDR and MASTER_PORT in the environment, or [process] init and address",
            hint='[process] init = "tcp", address = "HOST:PORT" of rank 0; or start with torchrun',
        )
    host, port = _split(f"{launch.address}:{launch.port}" if url == "env://" else url.removeprefix("tcp://"))
    # Under torchrun its agent hosts the store, and no rank does.
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        # What is made here is found by the next line, by its port.
        server = serve_on_loopback(host, port, timeout) if hosts else None
        store, _, _ = next(dist.rendezvous(url, rank, world_size, timeout=timeout))
        del server
    except (dist.DistError, OSError, ValueError, RuntimeError) as error:
        raise LaunchError(
            f"rank {rank} of {world_size} could not meet the others at "
            f"{url if url != 'env://' else f'{launch.address}:{launch.port}'}",
            given=str(error).splitlines()[0] if str(error) else type(error).__name__,
            expected=f"the store of rank 0 to answer within {timeout.total_seconds():g} s",
            hint="look whether rank 0 is running, and whether the port is free on its host",
        ) from error
    if rank == 0 and launch.local_size == world_size and (hosts or not is_loopback(host)):
        setting = (
            f'process.address = "127.0.0.1:{port}"' if process.init == "tcp" else "MASTER_ADDR=127.0.0.1"
        )
        warn(exposed_store(host, port, setting, world_size))
    found: dist.Store = store
    return found


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def choose_device(wanted: str, launch: Launch) -> torch.device:
    """The device of this process: cuda where there is one, numbered by local rank; else cpu."""
    kind = wanted
    if wanted == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    present = torch.get_device_module(kind).device_count() if _known(kind) else 0
    if present == 0:
        raise LaunchError(
            f"this host has no {kind} device",
            given=f'device = "{wanted}"',
            expected=f"a {kind} device, and a torch built for it",
            hint='mesh.device = "cpu", or "auto"',
        )
    return torch.device(kind, launch.local_rank % present)


def _known(kind: str) -> bool:
    try:
        torch.get_device_module(kind)
    except RuntimeError:
        return False
    return True


def choose_backend(device: torch.device) -> str:
    """What "auto" means on this device: torch's own default for it, NCCL for cuda, Gloo for cpu."""
    return str(dist.get_default_backend_for_device(device.type))


def check_devices(settings: Config, device: torch.device, backend: str, launch: Launch) -> None:
    """Refuse what the device that was found cannot do. Raises LaunchError.

    A config that leaves the device to "auto" may say things that only make sense on cuda; and NCCL
    cannot run two ranks on one device.
    """
    if device.type == "cpu":
        useless = {
            "process.device_id = true": settings.process.device_id is True,
            "network.nccl_debug": settings.network.nccl_debug is not None and "nccl" not in backend,
        }
        for setting, given in useless.items():
            if given:
                raise LaunchError(
                    f"{setting} has no effect: this host has no accelerator",
                    given=f"{setting}, device auto = cpu, backend {backend}",
                    expected="a cuda device, or the setting left out",
                    hint=f"take {setting} out",
                )
    if "nccl" not in backend or device.type != "cuda":
        return
    present = torch.cuda.device_count()
    if launch.local_rank >= present or launch.local_size > present:
        raise LaunchError(
            f"{max(launch.local_size, launch.local_rank + 1)} ranks on a host with {present} cuda device(s)",
            given=f"local rank {launch.local_rank} of {launch.local_size}, backend {backend}",
            expected="one device for each rank: NCCL refuses two ranks on one device",
            hint=f'--nproc-per-node {present}, or mesh.device = "cpu"',
        )


def start_default_group(
    meeting: Meeting, store: dist.Store, backend: str, device: torch.device, timeout_s: float, bind: bool
) -> bool:
    """Give torch.distributed its default group unless it has one; returns whether it was made here."""
    if dist.is_initialized():
        return False
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=store,
        rank=meeting.rank,
        world_size=meeting.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if bind and device.type != "cpu" else None,
    )
    return True
