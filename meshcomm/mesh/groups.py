"""Creates torch's default group, and this rank's groups in plan order."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import torch
import torch.distributed as dist

from meshcomm.config.write import toml
from meshcomm.errors import CommunicationError, PeerLost, UnsupportedOp
from meshcomm.layout import Group, GroupOptions, Plan, RankPlan
from meshcomm.layout.names import merged_name
from meshcomm.mesh.runtime import World
from meshcomm.mesh.source import Settings
from meshcomm.mesh.state import Held
from meshcomm.rendezvous import keys
from meshcomm.rendezvous.generation import FOREVER
from meshcomm.rendezvous.meeting import Meeting
from meshcomm.rendezvous.signed import signed, unsigned
from meshcomm.transport import ProcessGroupTransport, SoloTransport, Transport
from meshcomm.transport.process_group import MARGIN_S
from meshcomm.transport.support import STREAM_ORDERED, backend_on
from meshcomm.transport.torch_private import (
    abort,
    backend_of,
    bound_device,
    create_group,
    default_group,
    default_store,
    give_back,
    split_color,
)
from meshcomm.transport.variables import NCCL_RECOVERS, gloo_defaults, nccl_defaults, with_variables
from meshcomm.watching.exceptions import Reason, first_line, hint_about, reason_of
from meshcomm.watching.words import INTERFACES

if TYPE_CHECKING:
    from meshcomm.mesh.mesh import Mesh


@final
@dataclass(frozen=True, slots=True)
class GroupMaker:
    """Creates this rank's groups of one mesh, while the mesh opens and later.

    prefix: begins the groups' names. of_job: whether the ranks are those of the job, and not those of a link between two jobs.
    """

    meeting: Meeting
    device: torch.device
    prefix: str
    world: World | None
    held: Held
    of_job: bool = True
    # Clients of the store, by whether they are separate ones.
    clients: dict[bool, Any] = field(default_factory=dict)

    def start_default_group(self, backend: str, settings: Settings) -> None:
        """Start torch's default group, unless the program has started it. Raises CommunicationError."""
        meeting, device = self.meeting, self.device
        if self.world is not None:
            self.world.start(meeting.rank, meeting.world_size, backend, self.held.resources)
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if dist.is_initialized():
            return
        # Binding a device would connect all ranks with each other, although only the dims' groups need connections.
        bind = settings.process.device_id is True and device.type != "cpu"
        ordered = backend_on(backend, device) in STREAM_ORDERED
        variables = {**gloo_defaults(meeting.launch.one_host), **nccl_defaults(meeting.world_size)}
        try:
            with self._recovering(), with_variables(variables, keep=True):
                dist.init_process_group(
                    backend,
                    store=dist.PrefixStore("world", unsigned(self._client(ordered))),
                    rank=meeting.rank,
                    world_size=meeting.world_size,
                    timeout=timedelta(seconds=settings.mesh.timeout_s),
                    device_id=device if bind else None,
                )
            self.held.resources.callback(give_back, default_group())
            if ordered:
                self.held.aborts.append(partial(abort, default_group()))
            signed(default_store(), "default group").set(keys.PREFIX, self.prefix)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {meeting.rank} could not start torch's default group",
                given=first_line(error),
                expected=f"backend {backend} to start, and a store that answers",
                hint=INTERFACES
                if reason_of(error) is Reason.UNREACHABLE
                else "look for the first error reported by the process that hosts the store",
            ) from error

    def transports(
        self, plan: Plan, mine: RankPlan, existing: Mapping[str, dist.ProcessGroup]
    ) -> dict[str, Transport]:
        """Return one transport for every name in the plan, in plan order.

        Called by: every rank of the plan's layout. mine: this rank's part of the plan.
        existing: maps names, the same on all ranks, to groups to use instead of new ones.
        Raises CommunicationError with the group's name.
        """
        groups = {group.name: group for group in mine.groups}
        whole_world = self.world is None and plan.layout.world_size == self.meeting.world_size
        transports: dict[str, Transport] = {}
        for family in plan.families:
            name, group = family.name, groups.get(family.name)
            if group is None:
                transports[name] = SoloTransport(self.device, family.options.backend)
            elif name in existing:
                transports[name] = self.over(existing[name])
            elif family.shares is not None:
                transports[name] = transports[family.shares]
            else:
                # NCCL may split it from the world.
                transports[name] = self.open(group, whole_world and _can_split(plan, group))
        return transports

    def over(self, group: dist.ProcessGroup) -> Transport:
        """Return the transport of a group that the program has created."""
        if self.world is not None:
            return self.world.over(group)
        return ProcessGroupTransport(group, backend_of(group), self.device, owned=False)

    def open_later(self, group: Group, split: bool) -> Transport:
        """Create an additional group for an open mesh."""
        connections = self.held.connections
        if connections is None:
            return self.open(group, split)
        with connections.making():
            # Use a connection that is cut if a rank is lost in the meantime.
            self.clients.update(dict.fromkeys((False, True), connections.own(self.held.store.clone)))
            return self.open(group, split)

    def open(self, group: Group, split: bool) -> Transport:
        """Create one group of the plan. split: whether NCCL may split it from the world."""
        if self.world is not None:
            return self.world.open(group, self.prefix)
        is_queued = backend_on(group.options.backend, self.device) in STREAM_ORDERED
        variables = gloo_defaults(self.meeting.launch.one_host, len(group.ranks))
        client, rank = self._client(is_queued), self.meeting.rank
        # A backend that uses the store after this call may wait for it in a thread that its destructor joins.
        if is_queued or {**variables, **os.environ}["TORCH_GLOO_LAZY_INIT"] == "1":
            client = unsigned(client)
        store = dist.PrefixStore("groups", client)
        with self._recovering(), with_variables(variables, keep=True):
            transport = open_group(
                group, rank, store, self.prefix, self.device, is_queued, split, of_job=self.of_job
            )
        self.held.resources.callback(transport.close)
        if is_queued:
            self.held.aborts.append(transport.abort)
            if self.held.connections is not None:
                meets = dist.PrefixStore(f"meets/{group.name}/{group.index}", store)
                transport.meet = partial(_meet, meets, group, rank)
        return transport

    def _recovering(self) -> AbstractContextManager[None]:
        """If lost ranks are replaced, errors in groups created inside the block do not terminate this process."""
        return nullcontext() if self.held.connections is None else with_variables(NCCL_RECOVERS)

    def _client(self, is_queued: bool) -> Any:
        """Return the mesh's store client, or a separate one for groups that connect at their first call.

        Connecting blocks a client, but the threads that answer for this rank need an idle client. If a rank is lost in
        the meantime, only closing this separate connection ends the blocked call.
        """
        if not is_queued:
            return self.clients.get(is_queued, self.held.store)
        if is_queued not in self.clients:
            clone, connections = self.held.store.clone, self.held.connections
            self.clients[is_queued] = clone() if connections is None else connections.own(clone)
        return self.clients[is_queued]


def _meet(store: dist.Store, group: Group, rank: int, coords: tuple[int, ...]) -> None:
    """Block until the ranks at `coords` of a group are about to connect. If `coords` is empty, wait for the whole group.

    NCCL cannot be interrupted while it connects ranks, and a lost rank never arrives. This wait ends when the store
    connection is cut.
    """
    name = "-".join(map(str, coords))
    store.set(f"{name}/{group.ranks.index(rank)}", "")
    store.wait([f"{name}/{coord}" for coord in coords or range(len(group.ranks))], FOREVER)


# Gloo's error text if a rank of the group has not stored its address.
_AWAITED: Final = re.compile(r"wait timeout after .*, keys: \S*/(\d+)\s*$", re.MULTILINE)


def open_group(
    group: Group,
    rank: int,
    store: dist.Store,
    prefix: str,
    device: torch.device,
    ordered: bool,
    split: bool,
    *,
    of_job: bool = True,
) -> ProcessGroupTransport:
    """Create one group of the plan. Called by the group's ranks. ordered: whether its backend on `device` queues calls."""
    options = group.options
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
            of_job=of_job,
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
            else hint_about(
                str(error), "look at the first error on the other ranks; check backend and network"
            ),
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


def merged(mesh: Mesh, dims: tuple[str, ...]) -> str:
    """Return the name of the merged dim that covers `dims`. If the mesh was opened without this dim, its group is created.

    Called by: every rank of the mesh, in the same program order.
    """
    if len(dims) == 1:
        return dims[0]
    if dims not in mesh.layout.merge.values():
        mesh.create_group(merged_name(dims, {*mesh.layout.names, *mesh.layout.views}), dims)
    return next(name for name, parts in mesh.layout.merge.items() if parts == dims)
