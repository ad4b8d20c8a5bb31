"""Compares calls in torch's groups outside the mesh: the default group, and groups from `dist.new_group`."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final, final
from weakref import ref
from zlib import crc32

import torch
import torch.distributed as dist

from meshcomm.mesh.runtime import WORLD, Watching
from meshcomm.transport import ProcessGroupTransport
from meshcomm.transport.support import STREAM_ORDERED, backend_on
from meshcomm.transport.torch_changes import on_new_groups
from meshcomm.transport.torch_private import (
    GroupHooks,
    backend_of,
    default_group,
    group_named,
    groups_by_name,
    has_hooks,
    ranks_of,
    timeout_of,
)
from meshcomm.watching.compare import CallCheck
from meshcomm.watching.hooks import hooked
from meshcomm.watching.recorder import FlightRecorder

# The name prefix of the groups that a mesh creates.
OWN: Final = "meshcomm"
# The prefix of a DeviceMesh's description of the groups along a dim.
OF_A_DIM: Final = "mesh_"


@final
class OutsideGroups:
    """Watches torch's other groups while a mesh is open, including groups created in the meantime.

    A group is watched if all its ranks are in the mesh. The group is referenced by name and released when torch releases
    it. A mesh that is never closed compares calls until the default group ends, because its ranks collect garbage at
    different times.

    watch: held weakly.
    who: this rank with its coords.
    limit: how many calls in each group are compared; if None, all.
    """

    def __init__(
        self, watch: Watching, ranks: Collection[int], device: torch.device, who: str, limit: int | None
    ) -> None:
        # The mesh may be dropped while its groups are still compared.
        self._watch, self._shared = ref(watch), watch.shared
        self._world: dist.ProcessGroup | None = default_group()
        self._ranks, self._device, self._who, self._limit = frozenset(ranks), device, who, limit
        self._hooks: dict[str, GroupHooks] = {}
        # How many groups of this name there have been, which is the same on all ranks of the group.
        self._named: Counter[str] = Counter()
        # Created at the first call in a group, when the group's ranks are known. None if the group is not watched.
        self._recorders: dict[str, FlightRecorder | None] = {}
        watch.outside = lambda name: self._recorder(name) if name in self._hooks else None
        self._ended = on_new_groups(self._see)
        for group in groups_by_name().values():
            self._see(group)

    def _see(self, group: Any) -> None:
        if WORLD.get() is not None:
            # A group of a simulated rank.
            return
        if not dist.is_initialized() or default_group() is not self._world:
            self.close()
            return
        live = groups_by_name()
        for gone in [name for name, hooks in self._hooks.items() if live.get(name) is not hooks.group]:
            self._let_go(gone)
        name = str(group.group_name)
        if not name.startswith(OWN) and not has_hooks(group):
            self._named[name] += 1
            self._hooks[name] = hooked(group, partial(self._recorder, name), _label(group), self._who)

    def _recorder(self, name: str) -> FlightRecorder | None:
        if name not in self._recorders:
            self._recorders[name] = self._made(group_named(name))
        return self._recorders[name]

    def _made(self, group: Any) -> FlightRecorder | None:
        ranks, backend = ranks_of(group), backend_of(group)
        # The host reads the result of the comparison.
        device = torch.device("cpu")
        if backend_on(backend, device) != "gloo":
            # The program may have set its device in the meantime.
            chosen = self._device.type == "cuda" and torch.cuda.is_initialized()
            device = torch.device("cuda", torch.cuda.current_device()) if chosen else self._device
        if not len(ranks) > 1 or not self._ranks.issuperset(ranks):
            return None
        if backend_on(backend, device) not in ("gloo", *STREAM_ORDERED):
            return None

        def transport(group: Any) -> ProcessGroupTransport:
            return ProcessGroupTransport(group, backend, device, owned=False)

        name, label, watch = str(group.group_name), _label(group), self._watch()
        if watch is None:
            recorder = FlightRecorder(label, ranks)
        else:
            recorder = watch.record(label, ranks, transport(group))
            # The program may change the timeout. Do not keep a reference to the group.
            recorder.timeout_s = partial(_timeout_s, name, device, recorder.timeout_s)
        key = f"{name} {self._named[name]} {crc32(array('q', ranks).tobytes())}"
        check = CallCheck(lambda: transport(group_named(name)), ranks, self._limit, label, key, self._shared)
        recorder.compares(check)
        return recorder

    def _let_go(self, name: str) -> None:
        self._hooks.pop(name).remove()
        recorder, watch = self._recorders.pop(name, None), self._watch()
        if recorder is not None and watch is not None:
            watch.forget(recorder)

    @property
    def recorders(self) -> list[FlightRecorder]:
        """The recorders of groups with calls, oldest first."""
        return [recorder for recorder in self._recorders.values() if recorder is not None]

    def close(self) -> None:
        """Release all groups. Further calls have no effect."""
        self._ended()
        # A closed mesh that an error's traceback keeps alive must not keep the sockets open.
        self._world = self._shared = None
        for name in list(self._hooks):
            self._let_go(name)


def _timeout_s(name: str, device: torch.device, default: Callable[[], float]) -> float:
    group = groups_by_name().get(name)
    return (0.0 if group is None else timeout_of(group, device)) or default()


def _label(group: Any) -> str:
    """Return the group's name for error messages, which is the same on all ranks of the group."""
    if group is default_group():
        return "default group"
    described = str(group.group_desc)
    if described.startswith(OF_A_DIM):
        # Two DeviceMeshes may both have a dim of this name.
        return f"{described.removeprefix(OF_A_DIM)} of a DeviceMesh, group {str(group.group_name)[:8]}"
    return f"group {group.group_name}" + (f", {described}" if described not in ("", "undefined") else "")
