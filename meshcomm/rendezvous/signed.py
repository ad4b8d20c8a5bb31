"""Signs the values that a job's processes exchange through its store: torch's store takes values from any local program."""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, final

import torch.distributed as dist

from meshcomm.errors import StoreError

SECRET_VARIABLE: Final = "MESHCOMM_SECRET"
"""Set by meshcomm's launchers for the processes of one job. On Linux, only the same user and root can read a process's
environment.
"""

# A base class that is not torch's to mypy, because torch types Store's methods with overloads.
_Store: Any = dist.Store

# A signature, the value's length in hex, and a line break precede each value. A key holds several after `append`.
_HEAD: Final = re.compile(rb"[0-9a-f]{32}([0-9a-f]+)\n")


def signed(store: Any, where: str = "", env: Mapping[str, str] = os.environ) -> Any:
    """Return `store` with signed values if a launcher has given this process a secret, otherwise `store` itself.

    where: tells apart places in the store whose keys have the same names.
    """
    secret, run = env.get(SECRET_VARIABLE, ""), env.get("TORCHELASTIC_RUN_ID", "")
    # A rank may itself start a job with torchrun. The secret then belongs to the rank's own job.
    ours = Path(env.get("MESHCOMM_JOB", "")).name == run
    return SignedStore(store, secret, where and f"{where}: ") if secret and ours else store


def unsigned(store: Any) -> Any:
    """Return torch's own store with the same keys, for values that meshcomm does not write, or that only count."""
    return store.torch_store if isinstance(store, SignedStore) else store


@final
class SignedStore(_Store):  # type: ignore[misc]
    """A torch store whose values are signed for their key, including its prefixes.

    Reading a value, or finding or awaiting its key, raises StoreError unless a process with the secret has written the value
    under this key. Counters (`add`) are not signed. A program that reaches the store can still delete keys and change
    counters, so it can delay a job or end it with an error.

    Torch's C++ code may use it as long as Python refers to it, from threads that no destructor waits for: each call needs the
    interpreter.
    """

    def __init__(self, store: Any, secret: str, path: str = "") -> None:
        super().__init__()
        self.torch_store = store
        self._secret, self._path = secret, path

    @property
    def timeout(self) -> timedelta:
        timeout: timedelta = self.torch_store.timeout
        return timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self.torch_store.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        return bool(self.torch_store.has_extended_api())

    def prefixed(self, prefix: str) -> SignedStore:
        """Return this store under a prefix."""
        return SignedStore(dist.PrefixStore(prefix, self.torch_store), self._secret, f"{self._path}{prefix}/")

    def clone(self) -> SignedStore:
        """Return this store with a connection of its own."""
        return SignedStore(self.torch_store.clone(), self._secret, self._path)

    def set(self, key: str, value: str | bytes) -> None:
        self.torch_store.set(key, self._sign(key, value))

    def add(self, key: str, amount: int) -> int:
        return int(self.torch_store.add(key, amount))

    def delete_key(self, key: str) -> bool:
        return bool(self.torch_store.delete_key(key))

    # The name under which torch calls it when a PrefixStore deletes a key.
    deleteKey = delete_key

    def append(self, key: str, value: str | bytes) -> None:
        self.torch_store.append(key, self._sign(key, value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        # Equal values have equal signatures. An unset key counts as an empty value.
        before = self._sign(key, expected) if expected else expected
        return self._read(key, self.torch_store.compare_set(key, before, self._sign(key, desired)))

    def get(self, key: str) -> bytes:
        return self._read(key, self.torch_store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values = self.torch_store.multi_get(list(keys))
        return [self._read(key, value) for key, value in zip(keys, values, strict=True)]

    def check(self, keys: Sequence[str]) -> bool:
        if not self.torch_store.check(list(keys)):
            return False
        self._verify(keys)
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.torch_store.wait(list(keys), timeout or self.timeout)
        self._verify(keys)

    def _verify(self, keys: Sequence[str]) -> None:
        if self.has_extended_api():
            self.multi_get(keys)
        else:
            for key in keys:
                self.get(key)

    def _sign(self, key: str, value: str | bytes) -> bytes:
        data = value.encode() if isinstance(value, str) else bytes(value)
        # The length of the key keeps `key + value` from having two meanings.
        name = f"{self._path}{key}".encode()
        text = b"%d\n%b%b" % (len(name), name, data)
        signature = hmac.digest(self._secret.encode(), text, "sha256").hex()[:32]
        return b"%b%x\n%b" % (signature.encode(), len(data), data)

    def _read(self, key: str, content: bytes) -> bytes:
        values: list[bytes] = []
        place = 0
        while place < len(content) or not values:
            head = _HEAD.match(content, place)
            end = place if head is None else head.end() + int(head[1], 16)
            value = b"" if head is None else content[head.end() : end]
            if head is None or not hmac.compare_digest(self._sign(key, value), content[place:end]):
                raise StoreError(
                    f'refused the value of "{self._path}{key}" in the job\'s store: no process of this job has written it',
                    given=f"{content[place : place + 60]!r}, without a signature for this key",
                    expected="a value signed with the secret that the launcher gave to the job's processes",
                    hint="another program on this host writes to the store: find it, for example by ss -tnp, and start the job "
                    "again",
                )
            values.append(value)
            place = end
        return b"".join(values)
