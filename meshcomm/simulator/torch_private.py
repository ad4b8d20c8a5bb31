"""Private torch APIs that let each thread of this process be a rank of torch.distributed. Tested on torch 2.15."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeAlias
from unittest.mock import patch

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from meshcomm.transport.torch_private import OPTIONS_KEY, bindings, forget_device_meshes, register_group

_World: Any = c10d._World
# The registries that torch's world reads from global variables. Those of a rank are its own.
_REGISTRIES: Final = (
    "pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag",
)  # fmt: skip
# The backend options of a group whose members do not wait for each other when they create it: all create it in the same order.
LAZY: Final = object()

# Creates a rank's part of a group, given the group's name, its global ranks, its timeout and its description.
Create: TypeAlias = Callable[[str, tuple[int, ...], timedelta, str], Any]


class _RankWorld(_World):  # type: ignore[misc]
    """torch's record of the process groups of one rank."""

    group_count = 0
    pg_map = pg_names = pg_group_ranks = pg_backend_config = tags_to_pg = pg_to_tag = None

    def __init__(self) -> None:
        super().__init__()
        for name in _REGISTRIES:
            setattr(self, name, {})


class _Worlds:
    """Stands for torch's world in every context: that of a rank sees the rank's world, any other one the usual world."""

    def __init__(self, usual: Any, is_rank: Callable[[], bool]) -> None:
        self.__dict__.update(_usual=usual, _is_rank=is_rank, _of_context=ContextVar("meshcomm_torch_world"))

    def _world(self) -> Any:
        if not self._is_rank():
            return self._usual
        if self._of_context.get(None) is None:
            self._of_context.set(_RankWorld())
        return self._of_context.get()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._world(), name, value)


@contextmanager
def ranks_in_threads(
    number_of: Callable[[], int | None], create: Create, meet: Callable[[], tuple[dist.Store, int, int]]
) -> Iterator[None]:
    """While this context is active, each thread of a rank creates process groups of its own, whatever backend it names.

    number_of: returns a number that no other rank of this process has had, or None if the calling thread is no rank. meet:
    returns the store, the rank and the world size of the calling thread, as a rendezvous would.
    """
    helper: Any = c10d._new_process_group_helper
    rendezvous, update, barrier = c10d.rendezvous, c10d._update_default_pg, c10d._is_barrier_after_init
    made: Any = DeviceMesh.__init__
    start = threading.Thread.start

    def is_rank() -> bool:
        return number_of() is not None

    def group_of(
        size: int,
        rank: int | None,
        ranks: Sequence[int],
        backend: Any,
        store: Any,
        group_name: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not is_rank():
            return helper(size, rank, ranks, backend, store, group_name, *args, **kwargs)
        if group_name in c10d._world.pg_names.values():
            raise ValueError(f"The group name {group_name} exists already")
        if rank is None:
            return dist.GroupMember.NON_GROUP_MEMBER, None
        described = kwargs.get("group_desc")
        described = "undefined" if described is None else described
        made = create(str(group_name), tuple(ranks or range(size)), kwargs["timeout"], described)
        config = c10d.BackendConfig(dist.Backend(backend))
        made.serve(config.get_device_backend_map(), store)
        made._set_group_desc(described)
        register_group(made, group_name, str(backend), store, str(config))
        if kwargs.get(OPTIONS_KEY) is not LAZY:
            made.meet()
        return made, store

    def met(*args: Any, **kwargs: Any) -> Any:
        return iter([meet()]) if is_rank() else rendezvous(*args, **kwargs)

    def update_default_group(group: Any) -> None:
        # torch also sets the rank that C++ knows, which is that of the process.
        if is_rank():
            c10d._world.default_pg = group
        else:
            update(group)

    def start_thread(thread: threading.Thread) -> None:
        if is_rank():
            # It belongs to the rank, whose groups it sees.
            setattr(thread, "run", partial(copy_context().run, thread.run))  # noqa: B010
        start(thread)

    def device_mesh(mesh: Any, *args: Any, **kwargs: Any) -> None:
        made(mesh, *args, **kwargs)
        # DTensor's caches keep what depends on a rank's coordinates by the DeviceMesh, and compare DeviceMeshes by this number.
        mesh._thread_id, mesh._hash = number_of(), None

    inside = isinstance(c10d._world, _Worlds)
    bindings._set_thread_isolation_mode(True)
    try:
        with (
            patch.object(c10d, "_world", _Worlds(c10d._world, is_rank)),
            patch.object(c10d, "_new_process_group_helper", group_of),
            patch.object(c10d, "rendezvous", met),
            patch.object(c10d, "_update_default_pg", update_default_group),
            # Whether torch waits after a group is created: the scheduler knows who has not come.
            patch.object(c10d, "_is_barrier_after_init", lambda: 0 if is_rank() else barrier()),
            patch.object(DeviceMesh, "__init__", device_mesh),
            patch.object(threading.Thread, "start", start_thread),
            # init_process_group replaces it on every rank.
            patch.object(sys, "excepthook", sys.excepthook),
        ):
            yield
    finally:
        # A rank may run a simulation of its own.
        bindings._set_thread_isolation_mode(inside)
        # DTensor's caches keep every DeviceMesh that they have seen.
        forget_device_meshes(())


def start_default_group(rank: int, size: int, backend: str, store: dist.Store) -> Any:
    """Return a new default group of the calling rank. init_process_group does the same in three times as long."""
    create: Any = c10d._new_process_group_helper
    group, _ = create(
        size, rank, [], backend, store, c10d._process_group_name([], use_hashed_name=False),
        timeout=c10d.default_pg_timeout, group_desc="default_pg", **{OPTIONS_KEY: LAZY},
    )  # fmt: skip
    c10d._update_default_pg(group)
    c10d._world.pg_group_ranks[group] = dict(enumerate(range(size)))
    return group


def name_group(group: Any, name: str, described: str) -> None:
    """Give a group its name and its description."""
    group._set_group_name(name)
    group._set_group_desc(described)


def leave_groups() -> None:
    """Remove the calling thread's groups from torch's registries, unless the simulation is over already."""
    if not isinstance(c10d._world, _Worlds):
        # Without isolation, these would be the groups of the process.
        return
    bindings._unregister_all_process_groups()
    c10d._world.__dict__["_of_context"].set(_RankWorld())


def has_loss_parallel() -> bool:
    """Return whether torch's loss_parallel is active. Its handlers of DTensor's operations belong to the process."""
    loss: Any = sys.modules.get("torch.distributed.tensor.parallel.loss")
    return loss is not None and not loss.customized_loss_ops.keys().isdisjoint(
        loss.DTensor._op_dispatcher._custom_op_handlers
    )


def set_loss_parallel(active: bool) -> None:
    """Activate or deactivate torch's loss_parallel."""
    loss: Any = sys.modules["torch.distributed.tensor.parallel.loss"]
    (loss._enable_custom_loss_ops if active else loss._disable_custom_loss_ops)()


def reduction_of(options: Any) -> tuple[str, Any]:
    """Return the name of a call's reduction in lower case, and its factor or None."""
    kind, factor = options.reduceOp.__getstate__()
    return str(kind.name).lower(), factor
