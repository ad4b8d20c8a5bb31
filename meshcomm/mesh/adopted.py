"""Lets groups that a program creates with torch share communicators, as a mesh's groups do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, final
from weakref import ref

import torch.distributed as dist

from meshcomm.errors import CommunicationError
from meshcomm.layout.sizes import fold
from meshcomm.transport.torch_private import (
    SoloGroup,
    backend_of,
    default_group,
    group_named,
    groups_by_name,
    instead_of_new_group,
)


def adopt() -> Adopted:
    """Let equal groups from `dist.new_group` and DeviceMesh share a single group. Groups of one rank only copy data.

        meshcomm.adopt()
        mesh = init_device_mesh("cuda", (2, 1, 4), mesh_dim_names=("dp", "cp", "tp"))     # and nothing else changes

    Two groups are equal if they have the same backend, timeout, device and ranks in the same order, and neither has
    `pg_options`. Sharing saves the memory and startup time of the extra communicators. Calls in groups that share
    a communicator run in the order in which they are made. Groups that NCCL splits off the default group
    (`device_id` given) are created as usual.

    Called by: every process of the job, at the same point of the program.
    Raises:    CommunicationError, in a later call, if the program requests a group again after destroying it.
    """
    return Adopted()


@final
class Adopted:
    """The effect of `meshcomm.adopt`, which lasts until `close`, with counts of this rank's groups.

    asked, made, shared, solo: counts of the requested, created, shared and single-rank groups.
    """

    def __init__(self) -> None:
        self.asked = self.made = self.shared = self.solo = 0
        # Weak references, so that this object keeps neither the default group nor any other group alive.
        self._world: Callable[[], Any] = lambda: None
        self._names: dict[tuple[Any, ...], str | None] = {}
        self._end = instead_of_new_group(self._new_group)

    def __repr__(self) -> str:
        return (
            f"{self.asked} groups requested: {self.made} made, {self.shared} shared, {self.solo} of one rank"
        )

    def close(self) -> None:
        """Let torch create groups as before. Existing groups remain. Further calls have no effect."""
        self._end()

    def _new_group(
        self,
        make: Callable[..., Any],
        ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        options: object | None = None,
        tag: str | None = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        device_id: Any = None,
        sort_ranks: bool = True,
        **others: Any,
    ) -> Any:
        """Like torch's `_new_group_with_tag`. Every rank takes the same branch, because all ranks pass the same arguments."""
        world = default_group()
        if world is not self._world():
            self._world, self._names = ref(world), {}
        listed = list(range(world.size()) if ranks is None else map(int, ranks))
        order = sorted(listed) if sort_ranks else listed
        inside = dist.get_rank() in order
        given = {} if sort_ranks else {"sort_ranks": False}
        self.asked += inside
        # All ranks count group names. A group with a single rank must not use one of these names.
        backed = str(backend or backend_of(world)).lower()
        key = tuple(order), timeout, backed, use_local_synchronization, str(device_id)
        if len(order) == 1 and 0 <= order[0] < world.size():
            if not inside:
                return dist.GroupMember.NON_GROUP_MEMBER
            self.solo += 1
            return SoloGroup(f"adopted/{group_desc or 'solo'}/{self.asked}/{order[0]}", order[0])
        equal = options is None and tag is None and not others
        if equal and key in self._names:
            name = self._names[key]
            if name is None:
                return dist.GroupMember.NON_GROUP_MEMBER
            if name not in groups_by_name():
                raise CommunicationError(
                    f"rank {dist.get_rank()} requested a group again that it had destroyed",
                    given=f"ranks {fold(order)}, {group_desc or 'no description'}",
                    expected="groups that live as long as the default group, after meshcomm.adopt()",
                    hint="remove its destroy_process_group, or meshcomm.adopt()",
                )
            self.shared += 1
            return group_named(name)
        made = make(
            ranks,
            timeout,
            backend,
            options,
            tag,
            use_local_synchronization=use_local_synchronization,
            group_desc=group_desc,
            device_id=device_id,
            **given,
            **others,
        )
        self.made += inside
        if equal:
            self._names[key] = str(made.group_name) if inside else None
        return made
