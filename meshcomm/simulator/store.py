"""The job's store in one process; the scheduler knows which rank waits for which key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, final

import torch.distributed as dist

from meshcomm.simulator.scheduler import Actor, Scheduler


@dataclass
class InMemoryStore:
    """What all ranks share. writers: the ranks that wrote a key. waits: who waits, by a key that is missing."""

    values: dict[str, bytes] = field(default_factory=dict)
    writers: dict[str, list[int]] = field(default_factory=dict)
    waits: dict[str, list[StoreWait]] = field(default_factory=dict)

    def missing(self, keys: Sequence[str]) -> str | None:
        """One of `keys` that is not set, or None."""
        return next((key for key in keys if key not in self.values), None)

    def await_(self, wait: StoreWait) -> bool:
        """Keep `wait` under a key that it lacks; False where it lacks none."""
        key = self.missing(wait.keys)
        if key is not None:
            self.waits.setdefault(key, []).append(wait)
        return key is not None

    def expire(self, scheduler: Scheduler, under_s: float) -> bool:
        """End the shortest wait of less than `under_s`, as time would; whether there was one.

        Called when no rank can run: then only time can pass.
        """
        live = [
            (wait.timeout_s, wait)
            for waits in self.waits.values()
            for wait in waits
            if wait.actor.wait is wait
        ]
        timeout_s, first = min(live, key=lambda each: each[0], default=(under_s, None))
        if first is None or timeout_s >= under_s:
            return False
        for waits in self.waits.values():
            if first in waits:
                waits.remove(first)
        first.expired = True
        scheduler.wake(first.actor)
        return True


@final
class StoreWait:
    """A rank that waits for keys. timeout_s: how long it would wait in a real store."""

    __slots__ = ("actor", "expired", "keys", "timeout_s")

    def __init__(self, actor: Actor, keys: list[str], timeout_s: float) -> None:
        self.actor = actor
        self.keys = keys
        self.timeout_s = timeout_s
        self.expired = False


# torch's stubs lack half of the methods.
_Store: Any = dist.Store


@final
class SimulatedStore(_Store):  # type: ignore[misc]
    """One rank's view of the shared values, under a prefix. A torch store; PrefixStore works over it."""

    def __init__(self, scheduler: Scheduler, actor: Actor, shared: InMemoryStore, prefix: str = "") -> None:
        super().__init__()
        self._scheduler = scheduler
        self._actor = actor
        self._shared = shared
        self._prefix = prefix
        self._timeout = timedelta(days=1)

    def prefixed(self, prefix: str) -> SimulatedStore:
        """The same store, keys under `prefix`."""
        return SimulatedStore(self._scheduler, self._actor, self._shared, f"{self._prefix}{prefix}/")

    @property
    def timeout(self) -> timedelta:
        """How long a wait would last."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._touch()
        self._write(key, _bytes(value))

    def get(self, key: str) -> bytes:
        self._await([key], self._timeout)
        return self._shared.values[self._prefix + key]

    def add(self, key: str, amount: int) -> int:
        self._touch()
        total = int(self._shared.values.get(self._prefix + key, b"0")) + amount
        self._write(key, str(total).encode())
        return total

    def append(self, key: str, value: str | bytes) -> None:
        self._touch()
        self._write(key, self._shared.values.get(self._prefix + key, b"") + _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        self._touch()
        held = self._shared.values.get(self._prefix + key)
        if held is None and _bytes(expected):
            # Reading by comparing is how the mesh's store looks at a key.
            self._ask([key])
            return _bytes(expected)
        if held is not None and held != _bytes(expected):
            return held
        self._write(key, _bytes(desired))
        return _bytes(desired)

    def check(self, keys: Sequence[str]) -> bool:
        self._touch()
        there = self._there(keys)
        if not there:
            self._ask(keys)
        return there

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(keys, self._timeout if timeout is None else timeout)

    def delete_key(self, key: str) -> bool:
        self._touch()
        return self._shared.values.pop(self._prefix + key, None) is not None

    # What torch calls when a PrefixStore deletes.
    deleteKey = delete_key

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._await(keys, self._timeout)
        return [self._shared.values[self._prefix + key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def list_keys(self) -> list[str]:
        self._touch()
        found = [key for key in self._shared.values if key.startswith(self._prefix)]
        return [key.removeprefix(self._prefix) for key in found]

    def num_keys(self) -> int:
        return len(self.list_keys())

    getNumKeys = num_keys

    def has_extended_api(self) -> bool:
        return True

    # -- inside ---------------------------------------------------------------------------------

    def _touch(self) -> None:
        self._scheduler.check_thread(self._actor)
        self._scheduler.maybe_pause(self._actor)

    def _there(self, keys: Sequence[str]) -> bool:
        return self._shared.missing([self._prefix + key for key in keys]) is None

    def _write(self, key: str, value: bytes) -> None:
        self._scheduler.check()
        whole = self._prefix + key
        self._shared.values[whole] = value
        self._shared.writers.setdefault(whole, []).append(self._actor.rank)
        for wait in self._shared.waits.pop(whole, ()):
            # A rank that was refused the wait does not wait.
            if wait.actor.wait is wait and not self._shared.await_(wait):
                self._scheduler.wake(wait.actor)

    def _ask(self, keys: Sequence[str]) -> None:
        wait = self._wait_for(keys, timedelta.max)
        self._scheduler.poll(self._actor, wait)

    def _await(self, keys: Sequence[str], timeout: timedelta) -> None:
        self._touch()
        wait = self._wait_for(keys, timeout)
        if not self._shared.await_(wait):
            return
        self._scheduler.wait(self._actor, wait)
        if wait.expired:
            raise dist.DistStoreError(
                f"wait timeout after {timeout.total_seconds() * 1000:g}ms, keys: {keys}"
            )

    def _wait_for(self, keys: Sequence[str], timeout: timedelta) -> StoreWait:
        return StoreWait(self._actor, [self._prefix + key for key in keys], timeout.total_seconds())


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
