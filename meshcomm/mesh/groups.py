"""Creates this rank's groups, in plan order."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from meshcomm.config.write import toml
from meshcomm.errors import CommunicationError, PeerLost, UnsupportedOp
from meshcomm.layout import Group, GroupOptions, Plan
from meshcomm.transport import ProcessGroupTransport, SoloTransport, Transport
from meshcomm.transport.process_group import MARGIN_S
from meshcomm.transport.support import STREAM_ORDERED, backend_on
from meshcomm.transport.torch_private import (
    backend_of,
    bound_device,
    create_group,
    default_group,
    split_color,
)
from meshcomm.watching.exceptions import Reason, first_line, reason_of
from meshcomm.watching.words import INTERFACES


def create_transports(
    plan: Plan,
    rank: int,
    device: torch.device,
    whole_world: bool,
    create: Callable[[Group, bool], Transport],
    existing: Mapping[str, dist.ProcessGroup],
) -> dict[str, Transport]:
    """Return one transport for every name in the plan, in plan order.

    Called by: every rank of the plan's layout.
    create: creates one group. The second argument of `create` is whether NCCL may split the group from the world.
    existing: maps names, the same on all ranks, to groups to use instead of new ones.
    Raises CommunicationError with the group's name.
    """
    mine = {group.name: group for group in plan.for_rank(rank).groups}
    transports: dict[str, Transport] = {}
    for family in plan.families:
        name, group = family.name, mine.get(family.name)
        if group is None:
            transports[name] = SoloTransport(device, family.options.backend)
        elif name in existing:
            handle = existing[name]
            transports[name] = ProcessGroupTransport(handle, backend_of(handle), device, owned=False)
        elif family.shares is not None:
            transports[name] = transports[family.shares]
        else:
            transports[name] = create(group, whole_world and _can_split(plan, group))
    return transports


# Gloo's error text if a rank of the group has not stored its address.
_AWAITED: Final = re.compile(r"wait timeout after .*, keys: \S*/(\d+)\s*$", re.MULTILINE)


def open_group(
    group: Group, rank: int, store: dist.Store, prefix: str, device: torch.device, split: bool
) -> ProcessGroupTransport:
    """Create one group of the plan. Called by the group's ranks."""
    options = group.options
    backend = backend_on(options.backend, device)
    ordered = backend in STREAM_ORDERED
    try:
        handle = create_group(
            name=f"{prefix}/{group.name}/{group.index}",
            ranks=group.ranks,
            coord=group.ranks.index(rank),
            backend=options.backend,
            # The backend's own timeout, which ends the process, must expire after meshcomm's diagnosis.
            timeout=timedelta(seconds=options.timeout_s + (MARGIN_S if ordered else 0.0)),
            store=store,
            options=_backend_options(options, split),
            label=group.label,
            split=split,
        )
    except (RuntimeError, ValueError, AssertionError) as error:
        awaited = _AWAITED.search(str(error))
        if awaited is not None and int(awaited[1]) < len(group.ranks):
            missing = group.ranks[int(awaited[1])]
            raise PeerLost(
                f"rank {rank} could not create the group {group.label}: rank {missing} has not joined it",
                given=f"{options.backend} on ranks {list(group.ranks)}: {first_line(error)}",
                expected=f"every rank of the group to create it within {options.timeout_s:g} s",
                hint=f"look at the first error on rank {missing}",
                missing=(missing,),
            ) from error
        raise CommunicationError(
            f"rank {rank} could not create the group {group.label}",
            given=f"{options.backend}: {first_line(error)}",
            expected=f"ranks {list(group.ranks)} to create it within {options.timeout_s:g} s",
            hint=INTERFACES
            if reason_of(error) is Reason.UNREACHABLE
            else "look at the first error on the other ranks; check backend and network",
        ) from error
    return ProcessGroupTransport(handle, options.backend, device, owned=True, timeout_s=options.timeout_s)


def _can_split(plan: Plan, group: Group) -> bool:
    """Return whether NCCL may split the world's communicator. Torch identifies the new groups by hashes, which must differ."""
    if (
        "nccl" not in group.options.backend
        or "nccl" not in backend_of(default_group())
        or bound_device() is None
    ):
        return False
    groups = plan.layout.groups(group.name)
    return len({split_color(ranks) for ranks in groups.tolist()}) == len(groups)


def _backend_options(options: GroupOptions, split: bool) -> Any:
    """Return torch's options for the group's backend, such as NCCL's `ncclConfig_t`, or None if no option is set. split:
    whether NCCL splits the group from the world.
    """
    if not options.extra:
        return None
    extra = dict(options.extra)
    if "nccl" not in options.backend or not hasattr(dist, "ProcessGroupNCCL"):
        raise UnsupportedOp(
            f"{' and '.join(extra)} has no effect on {options.backend}",
            given=f"{', '.join(f'{name} = {toml(value)}' for name, value in extra.items())}, backend {options.backend}",
            expected="an NCCL group, and a torch build with NCCL",
            hint=f'remove {", ".join(extra)}, or set backend = "nccl"',
        )
    if extra.get("split_share") and not split:
        raise UnsupportedOp(
            "split_share has no effect: the group has its own communicator",
            given="split_share = true, and a default group that NCCL does not split for this group",
            expected="an NCCL default group with a bound device",
            hint="process.device_id = true, or remove split_share",
        )
    made: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=bool(extra.pop("high_priority", False)))
    for name, value in extra.items():
        if not hasattr(made.config, name):
            raise UnsupportedOp(
                f"torch {torch.__version__} was built with an NCCL version that lacks {name}",
                given=f"{name} = {toml(value)}",
                expected="NCCL 2.17 or newer",
                hint=f"remove {name}",
            )
        setattr(made.config, name, int(value))
    return made
