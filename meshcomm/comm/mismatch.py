"""Do all ranks of a group make the same call? Compared before the data of the first calls moves."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch

from meshcomm.collectives import ALL_GATHER, Call
from meshcomm.comm.callsite import caller
from meshcomm.errors import CallMismatchError
from meshcomm.layout.sizes import ranks_text
from meshcomm.transport import Transport

_BYTES: Final = 512
_FACTS: Final = 240
_SITE: Final = 200


@final
class CallCheck:
    """Compares the first calls on one group between its ranks.

    Ranks that call different operations on a group, or the same with another shape, dtype, reduce
    operation or root, get wrong numbers or hang on most backends. Here the ranks first exchange the facts of their
    calls, in one small all_gather.

    transport: of the group, asked for at each call. limit: how many calls are compared, equal on all ranks; None: all.
    """

    def __init__(self, transport: Callable[[], Transport], ranks: Sequence[int], limit: int | None) -> None:
        self._transport = transport
        self._ranks = list(ranks)
        self._left = limit
        self._number = 0

    @property
    def active(self) -> bool:
        """Whether the next call will be compared."""
        return (self._left is None or self._left > 0) and len(self._ranks) > 1

    def compare(self, name: str, call: str, facts: dict[str, Any], past: bool = False) -> bool:
        """Return when all ranks are about to make the same call on the dim `name`; whether an exchange was needed.

        past: the call is made past the mesh, and only some of its facts are known.

        Raises CallMismatchError on every rank of the group, before any data has moved.
        """
        transport = self._transport()
        if not self.active or transport.announce_call(name, call, facts):
            return False
        if self._left is not None:
            self._left -= 1
        self._number += 1
        padded = bytearray(_message(call, facts, past).ljust(_BYTES, b"\0"))
        mine = torch.frombuffer(padded, dtype=torch.uint8).to(transport.device)
        everyone = mine.new_empty(transport.size * _BYTES)
        work = transport.start(Call(ALL_GATHER, mine, everyone))
        if work is not None:
            work.wait()
        texts = [row.numpy().tobytes().rstrip(b"\0") for row in everyone.cpu().view(-1, _BYTES)]
        if len(set(texts)) > 1:
            calls = [json.loads(text) for text in texts]
            if not all(_is_same(call, calls[0]) for call in calls):
                raise mismatch(name, self._number, self._ranks, [each[:3] for each in calls])
        return True


def _is_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two calls, as (call, facts, site, past), are one operation."""
    mine, theirs = one[1], other[1]
    known = mine.keys() & theirs.keys() if one[3] or other[3] else mine.keys() | theirs.keys()
    return bool(one[0] == other[0]) and all(mine.get(key) == theirs.get(key) for key in known)


def majority(signs: Mapping[int, Any]) -> tuple[list[int], list[int]]:
    """The ranks that have the most common sign, of equally common ones the first; and all others.

    >>> majority({0: "a", 1: "b", 2: "b"}), majority({3: "a", 4: "b"})
    (([1, 2], [0]), ([3], [4]))
    """
    usual = Counter(signs.values()).most_common(1)[0][0]
    ranks = [rank for rank, sign in signs.items() if sign == usual]
    return ranks, [rank for rank in signs if signs[rank] != usual]


def mismatch(
    name: str, number: int, ranks: Sequence[int], calls: Sequence[Sequence[Any]]
) -> CallMismatchError:
    """The error for ranks of a group whose calls, each as (call, facts, site), differ.

    ranks: global, in the order of `calls`. The mismatched ones are those that differ from the majority.
    """
    by_rank = dict(zip(ranks, calls, strict=True))
    signs = {rank: json.dumps([call, facts]) for rank, (call, facts, _) in by_rank.items()}
    usual, mismatched = majority(signs)
    lines = []
    for sign in dict.fromkeys(signs[rank] for rank in mismatched):
        same = [rank for rank in mismatched if signs[rank] == sign]
        lines.append(f"{ranks_text(same)}: {_call_text(by_rank[same[0]])}")
    return CallMismatchError(
        f'ranks differ in call {number} along "{name}": {ranks_text(mismatched)} '
        f"{'is' if len(mismatched) == 1 else 'are'} mismatched; nothing was sent",
        given="\n".join(lines),
        expected=f"as {ranks_text(usual)}: {_call_text(by_rank[usual[0]])}",
        hint="make the ranks of a group call the same in the same order; "
        "look for a branch that depends on the rank",
        mismatched_ranks=tuple(mismatched),
    )


def _message(call: str, facts: dict[str, Any], past: bool) -> bytes:
    """The call as at most 512 bytes; equal facts give equal texts, whatever the site."""
    whole = json.dumps(facts)
    if len(whole) > _FACTS:
        # A shape of very many axes: a digest of all facts and their beginning.
        digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
        facts = {"facts": whole[: _FACTS // 2], "digest": digest}
    site = caller()[-_SITE:]
    while len(text := json.dumps([call, facts, site, past]).encode()) > _BYTES:
        site = site[20:]
    return text


def _call_text(call: Sequence[Any]) -> str:
    name, facts, site = call
    listed = ", ".join(f"{key} {_plain(value)}" for key, value in facts.items() if value is not None)
    return f"{name}({listed}) at {site}"


def _plain(value: Any) -> str:
    return f"({', '.join(map(str, value))})" if isinstance(value, list) else str(value)
