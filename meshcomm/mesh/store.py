"""`mesh.store`: the job's torch store, for small values that ranks leave for each other."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, TypeVar, final

import torch.distributed as dist

from meshcomm.errors import MeshClosed, StoreError, StoreTimeout, UnsupportedOp
from meshcomm.mesh.torch_store import GRACE_S, kind_of, store_failed, wait_for, within

T = TypeVar("T")
Value: TypeAlias = str | bytes | bytearray

# No key ever holds this value: comparing with it reads a key without waiting for it, in every store.
_NOBODY: Final = b"\x00meshcomm: no value\x00"


@final
class MeshStore:
    """The job's store under a prefix for this mesh: torch's methods, with keys as str, values as bytes.

    Every value comes back as bytes, also one that was set as str. Timeouts are in seconds; None means
    `timeout`. Every rank of the job may use it, at any time and in any order, also one outside the mesh.
    It is for small things: the store is one server, and values pass through it one after the other.

    Raises: StoreTimeout naming the key, this rank and the seconds; StoreError where the store
            cannot be reached; UnsupportedOp; MeshClosed after the mesh was closed.
    """

    def __init__(self, store: dist.Store, label: str, timeout_s: float, alone: bool = False) -> None:
        """alone: no other rank exists, as in a dry run; waiting for a key that is not set is then refused."""
        self._store: Any = store  # torch's annotations leave out half of its methods
        self._alone = alone
        self._label = label
        self._closed = ""
        self.kind = kind_of(store)
        self.set_timeout(timeout_s)

    @property
    def torch_store(self) -> dist.Store:
        """The same keys as a torch store, for what wants one. Its timeout is the job's."""
        self._open("torch_store")
        store: dist.Store = self._store
        return store

    @property
    def timeout(self) -> float:
        """Seconds that a call waits for a key unless it is given others."""
        return self._timeout_s

    def set_timeout(self, timeout_s: float) -> None:
        """Change `timeout` for this mesh's store on this rank, and for nothing else."""
        self._timeout_s = self._seconds(timeout_s)

    def set(self, key: str, value: Value) -> None:
        """Set `key`, whether or not it was set."""
        self._ask("set", [key], key, self._bytes("set", key, value))

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """The value of `key`, waited for."""
        seconds, deadline = self._until(timeout_s)
        while (found := self._peek("get", key)) is None:
            # Another rank may delete the key again between the wait and the look.
            self._wait("get", [key], seconds, deadline)
        return found

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at 0, and return its new value. Counters have 64 bits.

        `add(key, 0)` reads it. Where the key holds no integer, StoreError is raised; torch's TCPStore would
        drop the connections of the job.
        """
        held = self._peek("add", key)
        if held is not None and not re.fullmatch(rb"[+-]?[0-9]+", held):
            raise self._refused("add", [key], f"the value {held[:40]!r}", "an integer, as add makes it")
        total = int(held or 0) + amount
        if not (-(2**63) <= amount < 2**63 and -(2**63) <= total < 2**63):
            raise self._refused("add", [key], f"{amount} to {int(held or 0)}", "a sum of 64 bits")
        return int(self._ask("add", [key], key, amount))

    def append(self, key: str, value: Value) -> None:
        """Append `value` to the value of `key`. Refused on FileStore, which drops an append that equals the value."""
        self._open("append")
        if self.kind == "FileStore" or not self._store.has_extended_api():
            raise UnsupportedOp(
                f"store.append on {self._label}: not possible on a {self.kind}",
                given=f"the job's {self.kind}",
                expected="a store that appends in one step; torch's FileStore loses an append that equals what is there",
                hint='give each rank a key of its own: store.set(f"log/{rank}", ...)',
            )
        self._ask("append", [key], key, self._bytes("append", key, value))

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Set `key` to `desired` where it holds `expected`; return what it holds then.

        A key that is not set holds nothing, b"", and stays unset where `expected` is something
        else; then `expected` is returned, as torch does.
        """
        values = [self._bytes("compare_set", key, value) for value in (expected, desired)]
        return bytes(self._ask("compare_set", [key], key, *values))

    def delete_key(self, key: str) -> bool:
        """Delete `key`; return whether it was set."""
        # torch's FileStore says True for a key that was not set.
        there = self.kind != "FileStore" or self.has_key(key)
        return bool(self._ask("delete_key", [key], key)) and there

    def has_key(self, key: str) -> bool:
        """Whether `key` is set."""
        return self.check([key])

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all `keys` are set. Does not wait."""
        return bool(self._ask("check", keys, list(keys)))

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Return when all `keys` are set."""
        self._wait("wait", keys, *self._until(timeout_s))

    def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """The values of `keys`, waited for."""
        seconds, deadline = self._until(timeout_s)
        self._wait("multi_get", keys, seconds, deadline)
        if self.kind == "TCPStore":
            return [*map(bytes, self._ask("multi_get", keys, list(keys)))]
        return [self.get(key, max(deadline - time.monotonic(), 0.001)) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Set several keys."""
        if len(keys) != len(values):
            raise self._refused(
                "multi_set", keys, f"{len(keys)} keys and {len(values)} values", "one for each"
            )
        data = [self._bytes("multi_set", key, value) for key, value in zip(keys, values, strict=True)]
        self._ask("multi_set", keys, list(keys), data)

    def keys(self) -> list[str]:
        """The keys of this mesh's store, sorted."""
        return sorted(map(str, self._ask("list_keys", [], call="keys")))

    def num_keys(self) -> int:
        """How many keys are set now. torch's own counts the whole job's."""
        return len(self.keys())

    def close(self, why: str = "is closed") -> None:
        """Refuse every further call: the mesh `why`. The keys stay for the other ranks."""
        self._closed = why
        del self._store  # and with it the connection, where nobody else uses it

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"timeout {self._timeout_s:g} s"
        return f"MeshStore({self.kind}; {state})"

    # -- inside ---------------------------------------------------------------------------------

    def _peek(self, call: str, key: str) -> bytes | None:
        held = bytes(self._ask("compare_set", [key], key, _NOBODY, _NOBODY, call=call))
        return None if held == _NOBODY else held

    def _until(self, timeout_s: float | None) -> tuple[float, float]:
        """Seconds to wait, and the deadline."""
        seconds = self._timeout_s if timeout_s is None else self._seconds(timeout_s)
        return seconds, time.monotonic() + seconds

    def _wait(self, call: str, keys: Sequence[str], seconds: float, deadline: float) -> None:
        """Return when all `keys` are set; after the deadline say which were not within `seconds`."""
        missing = [key for key in keys if self._alone and not self.has_key(key)]
        if missing:
            raise UnsupportedOp(
                f"store.{call} on {self._label}: only another rank could set {_listed(missing)}, and in a dry run there is none",
                given=f"{len(missing)} of {len(keys)} keys missing",
                expected="keys that this rank has set",
                hint="mesh.pretended is True in a dry run",
            )
        left_s = max(0.001, deadline - time.monotonic())
        if self._guarded(call, keys, lambda: wait_for(self._store, keys, left_s), left_s):
            return
        missing = [key for key in keys if self._peek(call, key) is None]
        if missing:
            raise StoreTimeout(
                f"store.{call} on {self._label}: {_listed(missing)} not set within {seconds:g} s",
                given=f"{len(missing)} of {len(keys)} keys missing, {self.kind}",
                expected="another rank to set what is waited for",
                hint="look at the rank that sets it; or timeout_s=...",
            )

    def _ask(self, method: str, keys: Sequence[str], *given: object, call: str = "") -> Any:
        """The answer of torch's store to `method`. call: of this store, where it has another name."""
        return self._guarded(call or method, keys, lambda: getattr(self._store, method)(*given))

    def _guarded(self, call: str, keys: Sequence[str], act: Callable[[], T], limit_s: float = 0.0) -> T:
        """The result of `act`, which is about `keys`. limit_s: seconds; 0: `timeout`."""
        self._open(call)
        if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
            raise self._refused(call, [], repr(keys), "a list of str")
        limit_s = limit_s or self._timeout_s
        try:
            # torch's client waits without end for a server that was cut off or stopped.
            return within(limit_s + GRACE_S, act) if self.kind == "TCPStore" else act()
        except TimeoutError:
            raise StoreTimeout(
                f"store.{call} on {self._label}: the job's {self.kind} has not answered for {limit_s:g} s",
                given=_named(keys),
                expected="a store that answers; it lives in rank 0 or the launcher",
                hint="look at the process that holds the store, and at the network between",
            ) from None
        except (RuntimeError, ValueError) as error:
            what = f"store.{call} on {self._label}: the job's {self.kind} failed"
            raise store_failed(what, error, f"{_named(keys)}; ") from error

    def _refused(self, call: str, keys: Sequence[str], given: str, expected: str) -> StoreError:
        return StoreError(f"store.{call} on {self._label}: {_named(keys)}", given=given, expected=expected)

    def _bytes(self, call: str, key: str, value: object) -> bytes:
        if not isinstance(value, (str, bytes, bytearray)):
            raise self._refused(call, [key], f"a value of type {type(value).__name__}", "bytes or str")
        return value.encode() if isinstance(value, str) else bytes(value)

    def _seconds(self, timeout_s: float) -> float:
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < 1e9:
            raise self._refused("set_timeout", [], f"timeout {timeout_s!r}", "seconds, more than 0")
        return float(timeout_s)

    def _open(self, call: str) -> None:
        if self._closed:
            raise MeshClosed(
                f"store.{call} on {self._label}: the mesh {self._closed}",
                given="a call after close(), or after the with block",
                expected="an open mesh",
                hint="move the call into the with block",
            )


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(f'"{each}"' for each in keys[:8]) + f" and {len(keys) - 8} more" * (len(keys) > 8)


def _named(keys: Sequence[str]) -> str:
    return f"key {_listed(keys)}" if len(keys) == 1 else f"keys {_listed(keys)}".rstrip()
