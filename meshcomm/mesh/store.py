"""`mesh.store`: what the ranks of a job leave for each other, and calls of torch's stores that always end."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, NoReturn, TypeAlias, TypeVar, final

import torch.distributed as dist

from meshcomm.comm.diagnosis import first_line
from meshcomm.errors import MeshClosed, StoreError, StoreTimeout, UnsupportedOp

T = TypeVar("T")
Value: TypeAlias = str | bytes | bytearray

# What each kind of store does in each method, tried on torch 2.13. "one step": other ranks see all
# of it or nothing. "one by one": key after key. "two steps": what is returned is right unless
# another rank changes the key in between. A PrefixStore does what the store below it does.
_KINDS: Final = ("TCPStore", "FileStore", "HashStore")
_ONE_STEP: Final = dict.fromkeys(_KINDS, "one step")
_ONE_BY_ONE: Final = {**dict.fromkeys(_KINDS, "one by one"), "TCPStore": "one step"}
SUPPORT: Final = {
    "set": _ONE_STEP,
    "get": _ONE_STEP,
    "add": _ONE_STEP,
    "append": {**_ONE_STEP, "FileStore": "refused"},
    "compare_set": _ONE_STEP,
    "delete_key": {**_ONE_STEP, "FileStore": "two steps"},
    "has_key": _ONE_STEP,
    "check": _ONE_BY_ONE,
    "wait": _ONE_BY_ONE,
    "multi_get": _ONE_BY_ONE,
    "multi_set": _ONE_BY_ONE,
    "keys": _ONE_STEP,
    "num_keys": _ONE_STEP,
}

# What a server that is alive may need beyond the time that it was given.
GRACE_S: Final = 2.0

# Most waits are shorter; they need no second connection.
_SOON_S: Final = 0.01
_POLL_S: Final = 0.001

# No value is ever this one: comparing with it reads a key without waiting for it, in every store.
_NOBODY: Final = b"\x00meshcomm: no value\x00"
_INTEGER: Final = re.compile(rb"[+-]?[0-9]+")


def store_failed(what: str, error: BaseException, about: str = "") -> StoreError:
    """The error for a store that failed. what: opens it. about: what it was asked for."""
    return StoreError(
        what,
        given=f"{about}{first_line(error)}",
        expected="a store that lives as long as the job: in rank 0, in the launcher, or a file",
        hint="look for the first error of the process that holds the store",
    )


def prefixed(prefix: str, store: dist.Store) -> dist.Store:
    """`store` under a prefix of its own; a store that can do that itself does."""
    own = getattr(store, "prefixed", None)
    found: dist.Store = dist.PrefixStore(prefix, store) if own is None else own(prefix)
    return found


def kind_of(store: dist.Store) -> str:
    """`TCPStore`, `FileStore`, `HashStore`, or the class of somebody else's: what is below every prefix."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return type(store).__name__


def within(limit_s: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises; TimeoutError after `limit_s` seconds.

    `call` is then left alone in a thread that keeps nobody from ending the process.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="meshcomm-store", daemon=True)
    thread.start()
    thread.join(limit_s)
    if raised:
        raise raised[0]
    if not returned:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return returned[0]


def wait_for(store: Any, keys: Sequence[str], timeout_s: float) -> bool:
    """Whether all `keys` were set in time. Raises RuntimeError where the store fails.

    A TCPStore's client lets one call through at a time. A wait would keep out the thread that answers
    for this rank, and the others would take the rank for dead. So all but short waits have a client of
    their own, for as long as they last.
    """
    deadline = time.monotonic() + timeout_s
    if kind_of(store) == "TCPStore":
        soon = time.monotonic() + min(_SOON_S, timeout_s)
        while time.monotonic() < soon:
            if store.check(list(keys)):
                return True
            time.sleep(_POLL_S)
        store = store.clone()
    # torch counts whole milliseconds, and some stores take none of them for "forever".
    left_ms = max(1, math.ceil((deadline - time.monotonic()) * 1000))
    try:
        store.wait(list(keys), timedelta(milliseconds=left_ms))
    except RuntimeError as error:
        if "timeout" in str(error).lower():
            return False
        raise
    return True


@final
class MeshStore:
    """The job's store under a prefix of this mesh's own. Keys are str, values are bytes.

    The full set of torch's methods, on any of torch's stores, and with the same meaning on each of
    them: see SUPPORT for what is one step and what is refused. Every value comes back as bytes, also
    one that was set as str. Timeouts are in seconds; None means `timeout`.

    Every rank of the job may use it, at any time and in any order, also one outside the mesh. It
    is for small things: the store is one server, and values pass through it one after the other. A call
    on a TCPStore costs about 0.1 ms, as a thread stands by in case that its server never answers.

    Raises: StoreTimeout naming the key, this rank and the seconds; StoreError where the store
            cannot be reached; UnsupportedOp; MeshClosed after the mesh was closed.
    """

    def __init__(
        self, store: dist.Store, label: Callable[[], str], timeout_s: float, alone: bool = False
    ) -> None:
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
        """Seconds that a call waits for a key unless told otherwise."""
        return self._timeout_s

    def set_timeout(self, timeout_s: float) -> None:
        """Change `timeout` for this mesh's store on this rank, and for nothing else."""
        self._timeout_s = self._checked(timeout_s)

    # -- one key --------------------------------------------------------------------------------

    def set(self, key: str, value: Value) -> None:
        """Set `key`, whether or not it was set."""
        data = self._value("set", key, value)
        self._run("set", [key], lambda: self._store.set(key, data))

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """The value of `key`, waited for."""
        seconds = self._seconds(timeout_s)
        deadline = time.monotonic() + seconds
        while (found := self._peek("get", key)) is None:
            # Another rank may delete the key again between the wait and the look.
            self._wait("get", [key], deadline, seconds)
        return found

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at 0, and return its new value. Counters have 64 bits.

        `add(key, 0)` reads it. A value that is no whole number raises StoreError; torch's
        TCPStore would drop the whole job's connection.
        """
        present = self._peek("add", key)
        present = b"0" if present is None else present
        if not _INTEGER.fullmatch(present):
            shown = present if len(present) <= 40 else present[:37] + b"..."
            self._refuse("add", [key], f"the value {shown!r}", "a whole number, as add makes it")
        total = int(present) + amount
        if not (-(2**63) <= amount < 2**63 and -(2**63) <= total < 2**63):
            self._refuse("add", [key], f"{amount} to {int(present)}", "a sum of 64 bits")
        return self._run("add", [key], lambda: int(self._store.add(key, amount)))

    def append(self, key: str, value: Value) -> None:
        """Put `value` behind what `key` holds, nothing if it is not set. Refused on FileStore."""
        lacks = self.kind not in SUPPORT["append"] and not self._store.has_extended_api()
        if lacks or SUPPORT["append"].get(self.kind) == "refused":
            raise UnsupportedOp(
                f"store.append on {self._label()}: not possible on a {self.kind}",
                given=f"the job's {self.kind}",
                expected="a store that appends in one step; torch's FileStore loses an append that equals what is there",
                hint='give each rank a key of its own: store.set(f"log/{rank}", ...)',
            )
        data = self._value("append", key, value)
        self._run("append", [key], lambda: self._store.append(key, data))

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Set `key` to `desired` where it holds `expected`; return what it holds then.

        A key that is not set holds nothing, b"", and stays unset where `expected` is something
        else; then `expected` is returned, as torch does.
        """
        old, new = (self._value("compare_set", key, each) for each in (expected, desired))
        return self._run("compare_set", [key], lambda: bytes(self._store.compare_set(key, old, new)))

    def delete_key(self, key: str) -> bool:
        """Delete `key`; return whether it was set."""
        there = self.kind != "FileStore" or self.has_key(key)
        return self._run("delete_key", [key], lambda: bool(self._store.delete_key(key))) and there

    def has_key(self, key: str) -> bool:
        """Whether `key` is set."""
        return self.check([key])

    # -- several keys ---------------------------------------------------------------------------

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all `keys` are set. Does not wait."""
        return self._run("check", keys, lambda: bool(self._store.check(list(keys))))

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Return when all `keys` are set."""
        seconds = self._seconds(timeout_s)
        self._wait("wait", keys, time.monotonic() + seconds, seconds)

    def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """The values of `keys`, waited for."""
        seconds = self._seconds(timeout_s)
        deadline = time.monotonic() + seconds
        self._wait("multi_get", keys, deadline, seconds)
        if SUPPORT["multi_get"].get(self.kind) == "one step":
            return self._run("multi_get", keys, lambda: [*map(bytes, self._store.multi_get(list(keys)))])
        return [self.get(name, max(deadline - time.monotonic(), 0.001)) for name in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Set several keys."""
        names = self._keys("multi_set", keys)
        if len(names) != len(values):
            self._refuse("multi_set", names, f"{len(names)} keys and {len(values)} values", "one for each")
        data = [self._value("multi_set", key, value) for key, value in zip(names, values, strict=True)]
        self._run("multi_set", names, lambda: self._store.multi_set(names, data))

    def keys(self) -> list[str]:
        """The keys that are set now, sorted: only those of this mesh's store."""
        return self._run("keys", [], lambda: sorted(map(str, self._store.list_keys())))

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
        held = self._run(call, [key], lambda: bytes(self._store.compare_set(key, _NOBODY, _NOBODY)))
        return None if held == _NOBODY else held

    def _wait(self, call: str, keys: Sequence[str], deadline: float, seconds: float) -> None:
        """Return when all `keys` are set; after the deadline say which were not within `seconds`."""
        missing = [key for key in keys if self._alone and not self.has_key(key)]
        if missing:
            raise UnsupportedOp(
                f"store.{call} on {self._label()}: only another rank could set {_listed(missing)}, and in a dry run there is none",
                given=f"{len(missing)} of {len(keys)} keys missing",
                expected="keys that this rank has set",
                hint="mesh.pretended is True in a dry run",
            )
        left_s = max(0.001, deadline - time.monotonic())

        def came() -> bool:
            if self.kind != "FileStore":
                return wait_for(self._store, keys, left_s)
            # Its own wait rounds up to whole seconds.
            while not (all_set := self._store.check(list(keys))) and time.monotonic() < deadline:
                time.sleep(0.01)
            return bool(all_set)

        if self._run(call, keys, came, left_s):
            return
        missing = [key for key in keys if self._peek(call, key) is None]
        if not missing:
            return
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise StoreTimeout(
            f"store.{call} on {self._label()}: {_listed(missing)}{more} not set within {seconds:g} s",
            given=f"{len(missing)} of {len(keys)} keys missing, {self.kind}",
            expected="another rank to set what is waited for",
            hint="look at the rank that sets it; or timeout_s=...",
        )

    def _run(self, call: str, keys: Sequence[str], act: Callable[[], T], limit_s: float | None = None) -> T:
        """What `act` returns, which is about `keys`; limit_s: seconds, `timeout` unless given."""
        self._open(call)
        names, limit_s = self._keys(call, keys), limit_s or self._timeout_s
        try:
            # torch's client waits without end for a server that was cut off or stopped.
            return within(limit_s + GRACE_S, act) if self.kind == "TCPStore" else act()
        except TimeoutError:
            raise StoreTimeout(
                f"store.{call} on {self._label()}: the job's {self.kind} has not answered for {limit_s:g} s",
                given=_named(names),
                expected="a store that answers; it lives in rank 0 or the launcher",
                hint="look at the process that holds the store, and at the network between",
            ) from None
        except (RuntimeError, ValueError) as error:
            what = f"store.{call} on {self._label()}: the job's {self.kind} failed"
            raise store_failed(what, error, f"{_named(names)}; ") from error

    def _refuse(self, call: str, keys: Sequence[str], given: str, expected: str) -> NoReturn:
        raise StoreError(f"store.{call} on {self._label()}: {_named(keys)}", given=given, expected=expected)

    def _keys(self, call: str, keys: Sequence[str]) -> list[str]:
        bad = [repr(key) for key in keys if not isinstance(key, str)]
        if isinstance(keys, str) or bad:
            given = repr(keys) if isinstance(keys, str) else ", ".join(bad)
            self._refuse(call, [], given, "a list of str")
        return list(keys)

    def _value(self, call: str, key: str, value: object) -> bytes:
        if not isinstance(value, (str, bytes, bytearray)):
            self._refuse(call, [key], f"a value of type {type(value).__name__}", "bytes or str")
        data = value.encode() if isinstance(value, str) else bytes(value)
        if data == _NOBODY:
            self._refuse(call, [key], "the one value that means no value", "any other")
        return data

    def _seconds(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else self._checked(timeout_s)

    def _checked(self, timeout_s: float) -> float:
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < 1e9:
            raise StoreError(
                f"store on {self._label()}: timeout {timeout_s!r}",
                given=repr(timeout_s),
                expected="seconds, more than 0",
                hint="has_key asks without waiting",
            )
        return float(timeout_s)

    def _open(self, call: str) -> None:
        if self._closed:
            raise MeshClosed(
                f"store.{call} on {self._label()}: the mesh {self._closed}",
                given="a call after close(), or after the with block",
                expected="an open mesh",
                hint="move the call into the with block",
            )


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(f'"{each}"' for each in keys[:8])


def _named(keys: Sequence[str]) -> str:
    return f"key {_listed(keys)}" if len(keys) == 1 else f"keys {_listed(keys)}".rstrip()
