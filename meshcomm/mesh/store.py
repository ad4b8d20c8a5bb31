"""`mesh.store`: what the ranks of a job leave for each other, under keys that nobody else uses."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NoReturn, TypeAlias, TypeVar, final

import torch.distributed as dist

from meshcomm.errors import MeshClosed, StoreError, StoreTimeout, UnsupportedOp
from meshcomm.mesh.store_connect import kind_of, wait_for, within

T = TypeVar("T")
Value: TypeAlias = str | bytes | bytearray
Support: TypeAlias = Literal["one step", "one by one", "two steps", "refused"]

# What each kind of store does in each method, tried on torch 2.13. "one step": other ranks see all
# of it or nothing. "one by one": key after key. "two steps": what is returned is right unless
# another rank changes the key in between. A PrefixStore does what the store below it does.
_EVERYWHERE: Final[dict[str, Support]] = {
    "TCPStore": "one step",
    "FileStore": "one step",
    "HashStore": "one step",
}
SUPPORT: Final[dict[str, dict[str, Support]]] = {
    "set": _EVERYWHERE,
    "get": _EVERYWHERE,
    "add": _EVERYWHERE,
    "append": {**_EVERYWHERE, "FileStore": "refused"},
    "compare_set": _EVERYWHERE,
    "delete_key": {**_EVERYWHERE, "FileStore": "two steps"},
    "has_key": _EVERYWHERE,
    "check": {**_EVERYWHERE, "FileStore": "one by one", "HashStore": "one by one"},
    "wait": {**_EVERYWHERE, "FileStore": "one by one", "HashStore": "one by one"},
    "multi_get": {**_EVERYWHERE, "FileStore": "one by one", "HashStore": "one by one"},
    "multi_set": {**_EVERYWHERE, "FileStore": "one by one", "HashStore": "one by one"},
    "keys": _EVERYWHERE,
    "num_keys": _EVERYWHERE,
}

# What a server that is alive may need beyond the time that it was given.
GRACE_S: Final = 2.0

# No value is ever this one: comparing with it reads a key without waiting for it, in every store.
_NOBODY: Final = b"\x00meshcomm: no value\x00"
_INTEGER: Final = re.compile(rb"[+-]?[0-9]+")


@final
class MeshStore:
    """The job's store under a prefix of this mesh's own. Keys are str, values are bytes.

    The full set of torch's methods, on any of torch's stores, and with the same meaning on each of
    them: see SUPPORT for what is one step and what is refused. Every value comes back as bytes, also
    one that was set as str. Timeouts are in seconds; None means `timeout`.

    Every rank of the job may use it, at any time and in any order, also one outside the mesh. It
    is for small things: the store is one server, and values pass through it one after the other.
    A call
    on a TCPStore costs about 0.1 ms, as a thread stands by in case that its server never answers.

    Raises: StoreTimeout naming the key, this rank and the seconds; StoreError where the store
            cannot be reached; UnsupportedOp; MeshClosed after the mesh was closed.
    """

    def __init__(self, store: dist.Store, label: Callable[[], str], timeout_s: float) -> None:
        self._store: Any = store  # torch's annotations leave out half of its methods
        self._label = label
        self._closed = ""
        self._timeout_s = _checked_timeout(timeout_s, label)
        self.kind = kind_of(store)

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
        self._timeout_s = _checked_timeout(timeout_s, self._label)

    # -- one key --------------------------------------------------------------------------------

    def set(self, key: str, value: Value) -> None:
        """Set `key`, whether or not it was set."""
        data = self._value("set", key, value)
        self._run("set", key, lambda: self._store.set(key, data))

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """The value of `key`, waited for."""
        deadline = time.monotonic() + self._seconds(timeout_s)
        while (found := self._peek("get", key)) is None:
            # Another rank may delete the key again between the wait and the look.
            self._wait("get", [key], deadline, timeout_s)
        return found

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at 0, and return its new value. Counters have 64 bits.

        `add(key, 0)` reads it. A value that is no whole number raises StoreError; torch's
        TCPStore would drop the whole job's connection.
        """
        present = self._peek("add", key)
        if present is not None and not _INTEGER.fullmatch(present):
            self._refuse("add", key, f"the value {_short(present)}", "a whole number, as add makes it")
        total = int(present or b"0") + amount
        if not (-(2**63) <= amount < 2**63 and -(2**63) <= total < 2**63):
            self._refuse("add", key, f"{amount} to {int(present or b'0')}", "a sum of 64 bits")
        return self._run("add", key, lambda: int(self._store.add(key, amount)))

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
        self._run("append", key, lambda: self._store.append(key, data))

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Set `key` to `desired` where it holds `expected`; return what it holds then.

        A key that is not set holds nothing, b"", and stays unset where `expected` is something
        else; then `expected` is returned, as torch does.
        """
        old = self._value("compare_set", key, expected)
        new = self._value("compare_set", key, desired)
        return self._run("compare_set", key, lambda: bytes(self._store.compare_set(key, old, new)))

    def delete_key(self, key: str) -> bool:
        """Delete `key`; return whether it was set."""
        there = self.kind != "FileStore" or self.has_key(key)
        return self._run("delete_key", key, lambda: bool(self._store.delete_key(key))) and there

    def has_key(self, key: str) -> bool:
        """Whether `key` is set."""
        return self.check([key])

    # -- several keys ---------------------------------------------------------------------------

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all `keys` are set. Does not wait."""
        names = self._keys("check", keys)
        return self._run("check", names, lambda: bool(self._store.check(names)))

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Return when all `keys` are set."""
        names = self._keys("wait", keys)
        self._wait("wait", names, time.monotonic() + self._seconds(timeout_s), timeout_s)

    def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """The values of `keys`, waited for."""
        names = self._keys("multi_get", keys)
        deadline = time.monotonic() + self._seconds(timeout_s)
        self._wait("multi_get", names, deadline, timeout_s)
        if SUPPORT["multi_get"].get(self.kind) == "one step":
            return self._run("multi_get", names, lambda: [bytes(v) for v in self._store.multi_get(names)])
        return [self.get(name, max(deadline - time.monotonic(), 0.001)) for name in names]

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Set several keys."""
        names = self._keys("multi_set", keys)
        if len(names) != len(values):
            self._refuse("multi_set", names, f"{len(names)} keys and {len(values)} values", "one for each")
        data = [self._value("multi_set", key, value) for key, value in zip(names, values, strict=True)]
        self._run("multi_set", names, lambda: self._store.multi_set(names, data))

    def keys(self) -> list[str]:
        """The keys that are set now, sorted: only those of this mesh's store."""
        return sorted(self._run("keys", [], lambda: [str(key) for key in self._store.list_keys()]))

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
        self._keys(call, [key])
        held = self._run(call, key, lambda: bytes(self._store.compare_set(key, _NOBODY, _NOBODY)))
        return None if held == _NOBODY else held

    def _wait(self, call: str, keys: list[str], deadline: float, timeout_s: float | None) -> None:
        if self._came(call, keys, deadline):
            return
        missing = [key for key in keys if self._peek(call, key) is None]
        if not missing:
            return
        seconds = self._seconds(timeout_s)
        named = ", ".join(f'"{key}"' for key in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise StoreTimeout(
            f"store.{call} on {self._label()}: {named}{more} not set within {seconds:g} s",
            given=f"{len(missing)} of {len(keys)} keys missing, {self.kind}",
            expected="another rank to set what is waited for",
            hint="look at the rank that sets it; or timeout_s=...",
        )

    def _came(self, call: str, keys: list[str], deadline: float) -> bool:
        """Whether all `keys` were set before the deadline."""
        self._open(call)
        if self.kind == "FileStore":  # its own wait rounds up to whole seconds
            while not self.check(keys):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.01)
            return True
        left_s = max(0.001, deadline - time.monotonic())
        try:
            return self._answered(call, keys, left_s, lambda: wait_for(self._store, keys, left_s))
        except RuntimeError as error:
            raise self._failure(call, keys, error) from error

    def _run(self, call: str, key: str | list[str], act: Callable[[], T]) -> T:
        self._open(call)
        self._keys(call, [key] if not isinstance(key, list) else key)
        try:
            return self._answered(call, key, self._timeout_s, act)
        except (RuntimeError, ValueError) as error:
            raise self._failure(call, key, error) from error

    def _answered(self, call: str, key: str | list[str], limit_s: float, act: Callable[[], T]) -> T:
        """What `act` returns. torch's client waits without end for a server that was cut off or stopped."""
        if self.kind != "TCPStore":
            return act()
        try:
            return within(limit_s + GRACE_S, act)
        except TimeoutError:
            raise StoreTimeout(
                f"store.{call} on {self._label()}: the job's {self.kind} has not answered for {limit_s:g} s",
                given=_named(key),
                expected="a store that answers; it lives in rank 0 or the launcher",
                hint="look at the process that holds the store, and at the network between",
            ) from None

    def _failure(self, call: str, key: str | list[str], error: Exception) -> StoreError:
        text = str(error).strip().splitlines()
        return StoreError(
            f"store.{call} on {self._label()}: the job's {self.kind} failed",
            given=f"{_named(key)}; {text[0] if text else type(error).__name__}",
            expected="a store that answers; it lives in rank 0, the launcher, or a file",
            hint="look for the first error of the process that holds the store",
        )

    def _refuse(self, call: str, key: str | list[str], given: str, expected: str) -> NoReturn:
        raise StoreError(f"store.{call} on {self._label()}: {_named(key)}", given=given, expected=expected)

    def _keys(self, call: str, keys: Sequence[str]) -> list[str]:
        bad = [repr(key) for key in keys if not isinstance(key, str)]
        if isinstance(keys, str) or bad:
            given = repr(keys) if isinstance(keys, str) else ", ".join(bad)
            self._refuse(call, [], given, "a list of str")
        return list(keys)

    def _value(self, call: str, key: str, value: object) -> bytes:
        if not isinstance(value, (str, bytes, bytearray)):
            self._refuse(call, key, f"a value of type {type(value).__name__}", "bytes or str")
        data = value.encode() if isinstance(value, str) else bytes(value)
        if data == _NOBODY:
            self._refuse(call, key, "the one value that means no value", "any other")
        return data

    def _seconds(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else _checked_timeout(timeout_s, self._label)

    def _open(self, call: str) -> None:
        if self._closed:
            raise MeshClosed(
                f"store.{call} on {self._label()}: the mesh {self._closed}",
                given="a call after close(), or after the with block",
                expected="an open mesh",
                hint="move the call into the with block",
            )


def _checked_timeout(timeout_s: float, label: Callable[[], str]) -> float:
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < 1e9:
        raise StoreError(
            f"store on {label()}: timeout {timeout_s!r}",
            given=repr(timeout_s),
            expected="seconds, more than 0",
            hint="has_key asks without waiting",
        )
    return float(timeout_s)


def _named(key: str | list[str]) -> str:
    keys = [key] if isinstance(key, str) else key
    shown = ", ".join(f'"{each}"' for each in keys[:8])
    return f"key {shown}" if len(keys) == 1 else f"keys {shown}" if keys else "keys"


def _short(data: bytes) -> str:
    return repr(data if len(data) <= 40 else data[:37] + b"...")
