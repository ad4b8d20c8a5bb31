"""`mesh.store`, the job's torch store for small values shared between ranks, and store calls with a time limit."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, final

import torch.distributed as dist

from meshcomm.comm.checks import seconds_of
from meshcomm.errors import MeshClosed, MeshcommError, StoreError, StoreTimeout, UnsupportedOp
from meshcomm.rendezvous.signed import unsigned
from meshcomm.transport.torch_private import await_at_exit
from meshcomm.watching.exceptions import first_line

T = TypeVar("T")
Value: TypeAlias = str | bytes | bytearray

# The extra time that a live server may need after the given timeout.
GRACE_S: Final = 2.0

# Waits up to this long use no second connection. Most waits are shorter.
_SOON_S: Final = 0.01
_POLL_S: Final = 0.001
SLICE_S: Final = 0.25

# Whether to end a wait for keys because the rank that would set them may be lost. Checked four times a second.
interrupted: list[Callable[[], bool]] = []


class Interrupted(RuntimeError):
    """A wait for keys ended early because ranks were lost."""


# No key ever holds this value, so a compare_set with it reads a key without waiting, in every store.
_NOBODY: Final = b"\x00meshcomm: no value\x00"


@final
class MeshStore:
    """The job's store with the methods of a torch store, under a prefix for this mesh.

    `torch_store` provides the methods that this class lacks. Keys are str. Every value is returned as bytes,
    even if it was set as str. `timeout_s` is the number of seconds to wait for a key. The
    default is the mesh's timeout.

    Any rank of the job may use the store at any time and in any order, including ranks outside the mesh. Keep
    values small, because the store is a single server that handles one value at a time.

    Raises: StoreTimeout with the key, this rank and the timeout; StoreError if the store cannot be
            reached; UnsupportedOp; MeshClosed after the mesh was closed.
    """

    def __init__(
        self,
        store: dist.Store,
        label: str,
        timeout_s: float,
        alone: bool = False,
        lost: Callable[[BaseException], MeshcommError | None] = lambda error: None,
    ) -> None:
        """alone: no other rank exists, as in a dry run, so waiting for an unset key is refused.
        lost: returns the error if a call failed because ranks were lost and replaced.
        """
        self._lost = lost
        self._store: Any = store  # torch's annotations lack half of its methods
        self._alone = alone
        self._label = label
        self._timeout_s = timeout_s
        self._closed = ""
        self._kind = kind_of(store)

    @property
    def torch_store(self) -> dist.Store:
        """A torch store with the same keys, the job's timeout and torch's errors."""
        self._open("torch_store")
        store: dist.Store = self._store
        return store

    def set(self, key: str, value: Value) -> None:
        """Set `key`, overwriting any value."""
        self._ask("set", [key], key, self._bytes("set", key, value))

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """Wait for `key`, and return its value."""
        seconds, deadline = self._until("get", timeout_s)
        while (value := self._peek("get", key)) is None:
            # Another rank may delete the key between the wait and the read.
            self._wait("get", [key], seconds, deadline)
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a 64-bit counter, which starts at 0, and return the new value. `add(key, 0)` reads the counter.

        Raises StoreError if the key does not hold an integer. In that case, torch's TCPStore would drop the job's
        connections.
        """
        if not hasattr(amount, "__index__"):
            raise self._refused("add", [key], f"an amount of type {type(amount).__name__}", "int")
        held = self._peek("add", key)
        if held is not None and not re.fullmatch(rb"[+-]?[0-9]+", held):
            raise self._refused("add", [key], f"the value {held[:40]!r}", "an integer, as add stores it")
        total = int(held or 0) + amount
        if not (-(2**63) <= amount < 2**63 and -(2**63) <= total < 2**63):
            raise self._refused("add", [key], f"{amount} to {int(held or 0)}", "a sum of 64 bits")
        return int(self._ask("add", [key], key, amount))

    def append(self, key: str, value: Value) -> None:
        """Append `value` to the value of `key`.

        Raises UnsupportedOp on a FileStore, which drops an appended value that equals the current value.
        """
        self._open("append")
        if self._kind == "FileStore" or not self._store.has_extended_api():
            raise UnsupportedOp(
                f"store.append on {self._label}: not possible on a {self._kind}",
                given=f"the job's {self._kind}",
                expected="a store that appends in one step; torch's FileStore loses an append equal to the current value",
                hint='give each rank its own key: store.set(f"log/{rank}", ...)',
            )
        self._ask("append", [key], key, self._bytes("append", key, value))

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Set `key` to `desired` if it holds `expected`. Return the key's value after the call.

        An unset key counts as b"". If `expected` is anything else, an unset key stays unset and `expected` is
        returned, as in torch.
        """
        values = [self._bytes("compare_set", key, value) for value in (expected, desired)]
        return bytes(self._ask("compare_set", [key], key, *values))

    def delete_key(self, key: str) -> bool:
        """Delete `key` and return whether it was set."""
        # torch's FileStore returns True for a key that was not set.
        was_there = self._kind != "FileStore" or self.check([key])
        return bool(self._ask("delete_key", [key], key)) and was_there

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` are set. Does not wait."""
        return bool(self._ask("check", keys, list(keys)))

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Block until all `keys` are set."""
        self._wait("wait", keys, *self._until("wait", timeout_s))

    def close(self, why: str = "is closed") -> None:
        """Refuse all further calls. `why` completes the error "the mesh ...". Other ranks can still use the keys."""
        self._closed = why
        self._lost = lambda error: None
        del self._store  # also closes the connection unless it is used elsewhere

    def __repr__(self) -> str:
        return f"MeshStore({self._kind}; {'closed' if self._closed else f'timeout {self._timeout_s:g} s'})"

    # -- inside ---------------------------------------------------------------------------------

    def _peek(self, call: str, key: str) -> bytes | None:
        self._open(call)
        held = bytes(self._guarded(call, [key], partial(self._store.compare_set, key, _NOBODY, _NOBODY)))
        return None if held == _NOBODY else held

    def _until(self, call: str, timeout_s: float | None) -> tuple[float, float]:
        """Return the number of seconds to wait, and the deadline."""
        seconds = self._timeout_s
        if timeout_s is not None:
            seconds = seconds_of(timeout_s, lambda: f"store.{call} on {self._label}")
        return seconds, time.monotonic() + seconds

    def _wait(self, call: str, keys: Sequence[str], seconds: float, deadline: float) -> None:
        """Block until all `keys` are set. After the deadline, raise an error with the keys that were not set within
        `seconds`.
        """
        missing = [key for key in keys if self._alone and not self.check([key])]
        if missing:
            raise UnsupportedOp(
                f"store.{call} on {self._label}: only another rank could set {_listed(missing)}, and a dry run has no other ranks",
                given=f"{len(missing)} of {len(keys)} keys missing",
                expected="keys that this rank has set",
                hint="mesh.is_fake is True in a dry run",
            )
        left_s = max(0.001, deadline - time.monotonic())
        if self._guarded(call, keys, lambda: wait_for(self._store, keys, left_s), left_s):
            return
        missing = [key for key in keys if self._peek(call, key) is None]
        if missing:
            raise StoreTimeout(
                f"store.{call} on {self._label}: {_listed(missing)} not set within {seconds:g} s",
                given=f"{len(missing)} of {len(keys)} keys missing, {self._kind}",
                expected="another rank to set the key",
                hint="check the rank that sets it; or set timeout_s=...",
            )

    def _ask(self, method: str, keys: Sequence[str], *arguments: object) -> Any:
        """Call `method` of torch's store for `keys`."""
        self._open(method)
        return self._guarded(method, keys, partial(getattr(self._store, method), *arguments))

    def _guarded(self, call: str, keys: Sequence[str], act: Callable[[], T], limit_s: float = 0.0) -> T:
        """Return the result of `act`. `limit_s` is the time limit in seconds, or 0 for the mesh's timeout."""
        self._open(call)
        if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
            raise self._refused(call, [], repr(keys), "a list of str")
        limit_s = limit_s or self._timeout_s
        try:
            # torch's client waits forever for a server that was cut off or stopped.
            return within(limit_s + GRACE_S, act) if self._kind == "TCPStore" else act()
        except Unanswered as error:
            waited_s = min(limit_s, error.limit_s)
            raise StoreTimeout(
                f"store.{call} on {self._label}: the job's {self._kind} has not answered for {waited_s:g} s",
                given=_named(keys),
                expected="a store that answers; it is in rank 0 or the launcher",
                hint="check the process that holds the store, and the network in between",
            ) from None
        except (RuntimeError, ValueError) as error:
            if (lost := self._lost(error)) is not None:
                raise lost from error
            what = f"store.{call} on {self._label}: the job's {self._kind} failed"
            raise store_failed(what, error, f"{_named(keys)}; ") from error

    def _refused(self, call: str, keys: Sequence[str], given: str, expected: str) -> StoreError:
        return StoreError(f"store.{call} on {self._label}: {_named(keys)}", given=given, expected=expected)

    def _bytes(self, call: str, key: str, value: object) -> bytes:
        if not isinstance(value, (str, bytes, bytearray)):
            raise self._refused(call, [key], f"a value of type {type(value).__name__}", "bytes or str")
        return value.encode() if isinstance(value, str) else bytes(value)

    def _open(self, call: str) -> None:
        if self._closed:
            raise MeshClosed(
                f"store.{call} on {self._label}: the mesh {self._closed}",
                given="a call after close(), or after the with block",
                expected="an open mesh",
                hint="move the call into the with block",
            )


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(f'"{key}"' for key in keys[:8]) + f" and {len(keys) - 8} more" * (len(keys) > 8)


def _named(keys: Sequence[str]) -> str:
    return f"key {_listed(keys)}" if len(keys) == 1 else f"keys {_listed(keys)}".rstrip()


# -- torch's stores, for the mesh itself ----------------------------------------------------------------


def store_failed(what: str, error: BaseException, about: str = "") -> StoreError:
    """Return the error for a store that failed.

    what: the error's first line.
    about: the keys, for the second line.
    """
    return StoreError(
        what,
        given=f"{about}{first_line(error)}",
        expected="a store that exists as long as the job: in rank 0, in the launcher, or in a file",
        hint="look for the first error reported by the process that hosts the store",
    )


def prefixed(prefix: str, store: Any) -> Any:
    """Return `store` under a prefix. A store that has a `prefixed` method creates the result itself."""
    own_prefixed = getattr(store, "prefixed", None)
    return dist.PrefixStore(prefix, store) if own_prefixed is None else own_prefixed(prefix)


def kind_of(store: Any) -> str:
    """Return the class of the store below all prefixes: `TCPStore`, `FileStore`, `HashStore`, or another class."""
    return type(_below(store)).__name__


def _below(store: Any) -> Any:
    """Return the store below all prefixes and signatures."""
    store = unsigned(store)
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


# How long a call to a store that has let another call wait in vain may take, and any call.
_SILENT_S: Final = 5.0
_LEAST_S: Final = 0.1


@dataclass
class _Call:
    """A call that a store, the one below all prefixes, has not answered. in_vain: whether nobody waits for the answer any more."""

    store: object
    began: float
    in_vain: bool = False


_UNANSWERED: Final[dict[int, _Call]] = {}


class Unanswered(TimeoutError):
    """A call has not ended within a limit."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"no answer within {limit_s:g} s")
        self.limit_s = limit_s


def within(limit_s: float, call: Callable[[], T]) -> T:
    """Return the result of `call` or raise its error. Raises Unanswered, a TimeoutError, after `limit_s` seconds.

    `call` then continues in a daemon thread, for which Python waits at exit; see `await_at_exit`.

    If `call` is a method of a store, or a partial of one, the seconds count from the oldest of its calls that the store has not
    answered, and are at most five after one of them was given up. So waits for a store that has stopped do not add up: a client
    processes one call at a time.
    """
    returned: list[T] = []
    raised: list[BaseException] = []
    mine = _Call(getattr(getattr(call, "func", call), "__self__", None), time.monotonic())
    since = mine.began
    if isinstance(mine.store, dist.Store):
        mine.store = _below(mine.store)
        earlier = [each for each in [*_UNANSWERED.values()] if each.store is mine.store]
        since = min([each.began for each in earlier], default=since)
        if any(each.in_vain for each in earlier):
            limit_s = min(limit_s, _SILENT_S)
        _UNANSWERED[id(mine)] = mine

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)
        finally:
            _UNANSWERED.pop(id(mine), None)

    thread = threading.Thread(target=run, name="meshcomm-store", daemon=True)
    thread.start()
    thread.join(max(limit_s - (mine.began - since), min(limit_s, _LEAST_S)))
    if raised:
        raise raised[0]
    if not returned:
        mine.in_vain = True
        await_at_exit(thread)
        raise Unanswered(limit_s)
    return returned[0]


@final
class Limited:
    """A torch store whose calls raise RuntimeError if they are not answered: torch's client waits forever for a server that has
    stopped.

    limit_s: returns the seconds that a call may take.
    """

    def __init__(self, store: Any, limit_s: Callable[[], float]) -> None:
        self._store, self._limit_s = store, limit_s

    def prefixed(self, prefix: str) -> Limited:
        """Return this store under a prefix."""
        return Limited(prefixed(prefix, self._store), self._limit_s)

    def wait_for(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Return whether all `keys` were set in time."""
        return self._answered(partial(wait_for, self._store, keys, timeout_s), timeout_s + GRACE_S)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)
        return lambda *args: self._answered(partial(method, *args), self._limit_s())

    def _answered(self, call: Callable[[], T], limit_s: float) -> T:
        try:
            return within(limit_s, call)
        except TimeoutError as error:
            raise RuntimeError(f"the store does not answer: {error}") from None


def wait_for(store: Any, keys: Sequence[str], timeout_s: float) -> bool:
    """Return whether all `keys` were set in time. Raises RuntimeError if the store fails.

    A TCPStore's client processes one call at a time. A wait would block the thread that answers for this rank, and the
    other ranks would consider this rank dead. Therefore all but short waits use a separate client. A FileStore is polled,
    because its own wait has a resolution of one second.
    """
    kind, started = kind_of(store), time.monotonic()
    waited_s = 0.0
    while kind == "FileStore" or (kind == "TCPStore" and waited_s < _SOON_S):
        if store.check(list(keys)):
            return True
        time.sleep(_POLL_S if waited_s < _SOON_S else 10 * _POLL_S)
        waited_s = time.monotonic() - started
        if waited_s >= timeout_s:
            return False
    if kind == "TCPStore":
        store = store.clone()
    while True:
        left_s = started + timeout_s - time.monotonic()
        slice_s = min(left_s, SLICE_S) if interrupted else left_s
        try:
            # torch counts whole milliseconds.
            store.wait(list(keys), timedelta(milliseconds=max(1, math.ceil(slice_s * 1000))))
            return True
        except RuntimeError as error:
            if "timeout" not in str(error).lower():
                raise
        if any(is_interrupted() for is_interrupted in interrupted):
            raise Interrupted("a wait on the store ended because ranks were lost")
        if slice_s == left_s:
            return False
