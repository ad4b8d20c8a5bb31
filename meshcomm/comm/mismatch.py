"""Checks that all ranks of a group make the same calls: before the data of the first calls moves, and at each step."""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from types import CodeType
from typing import Any, Final, NamedTuple, Protocol, final
from zlib import crc32

import torch

from meshcomm.collectives import ALL_GATHER, ALL_REDUCE, Call
from meshcomm.comm.callsite import caller, line_of
from meshcomm.comm.counters import Entry
from meshcomm.comm.facts import balanced, facts_match, parts_of, shortened
from meshcomm.errors import CallMismatchError
from meshcomm.layout.sizes import rank_text, ranks_text
from meshcomm.transport import Transport, Work
from meshcomm.transport.torch_changes import wait_until
from meshcomm.transport.torch_private import unprofiled

_BYTES: Final = 1024
_SITE: Final = 200
# The number of runs of equal steps whose calls are kept.
RUNS: Final = 64
# The number of calls that a rank remembers until it knows that the others have made them too.
_UNSETTLED: Final = 64
# How many calls later the store forgets a call that was compared through it.
_BEHIND: Final = 1024
# What becomes of a group in which ranks have made different calls that are under way.
_OUT_OF_STEP: Final = "this group cannot be used any more"
# The sizes of an asynchronous all_to_all are compared in groups of at most this many ranks, as each rank reads those of all.
_PAIRED: Final = 64
# How long, in seconds, a rank looks for a published difference after a comparison that was not equal. The ranks may have made
# the same call in two ways, of which different facts are known.
_LOOKS_S: Final = 10.0
# What is told in place of a call when the ranks are known to have made different ones.
_APART: Final = "[]"
# What an error expects if no majority tells which ranks are wrong.
_SAME: Final = "the same calls on every rank of the group"
# Facts that an error shows only if nothing else differs.
_UNSEEN: Final = ("sent as",)
# The number of callsites of one rank's step that an error shows.
_SHOWN: Final = 6


class Shared(Protocol):
    """What a rank can ask of the other ranks without their taking part: in the job's store, or of their watchdogs.

    rank: this rank. look_s: time in seconds between two looks at what was published, for a rank that waits.
    """

    rank: int
    look_s: float

    def first(self, key: str, told: str) -> str:
        """Return what the first rank told under `key`, which is `told` if that is this rank."""
        ...

    def lines(self, key: str, told: str) -> list[str]:
        """Add a line under `key`, and return all lines. Returns [] if the store has no such operation."""
        ...

    def delete(self, key: str) -> None:
        """Forget what was told under `key`."""
        ...

    def made(self, label: str, number: int, ranks: Sequence[int]) -> dict[int, Sequence[Any]]:
        """Return the compared call `number` of each rank that has made it, as CallCheck tells it. Waits for a short time."""
        ...

    def publish(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the difference that the first rank made and published under `key`. May wait for seconds."""
        ...

    def published(self, key: str) -> dict[str, Any] | None:
        """Return what was published under `key`; None if nothing was."""
        ...


@final
class CallCheck:
    """Compares the first calls in one group between its ranks, and makes no call wait that the backend would not.

    On Gloo, every rank posts an all_reduce of 24 bytes before each call. A call that waits for all ranks anyway waits for
    it first: if calls differ, nothing is sent, the ranks exchange the calls in one all_gather, and the group is as good as
    before. Any other call (asynchronous, rooted, or on a backend whose calls the host does not wait for) is compared with
    the first rank's call through the job's store before it is issued, so only equal calls ever meet. If such calls differ,
    some of them are under way and never complete, and every later call on the group raises the published difference.

    transport: returns the group's transport. limit: how many calls to compare, equal on all ranks; None to compare all.
    label: the group's name in statuses. key: its name in the store, which no later group has. shared: None if there are no
    other processes.

    raised: whether the program has been told that the ranks made different calls, some of which are under way.
    announced: whether a compared call is about to be issued. guarded: whether it does not wait for the other ranks.
    made: the calls that may differ on another rank:
    number, the recorder's number, name and facts.
    """

    def __init__(
        self,
        transport: Callable[[], Transport],
        ranks: Sequence[int],
        limit: int | None,
        label: str = "",
        key: str = "",
        shared: Shared | None = None,
    ) -> None:
        self._transport = transport
        self._ranks = list(ranks)
        self._left = limit
        self._number = 0
        self._label, self._key, self._shared = label, key, shared
        self.announced = self.guarded = False
        self.made: deque[tuple[int, int, str, dict[str, Any]]] = deque(maxlen=_UNSETTLED)
        # Posted comparisons that no call waits for: the call's number, the Work, and the compared tensor.
        self._posted: deque[tuple[int, Work, torch.Tensor]] = deque()
        # The difference between the ranks, once it is known here.
        self._difference: dict[str, Any] | None = None
        # Until when a difference that another rank may have published is looked for.
        self._suspects = 0.0
        self.raised = False
        self._due = 0.0

    @property
    def active(self) -> bool:
        """Whether the next call will be compared."""
        return (self._left is None or self._left > 0) and len(self._ranks) > 1

    @property
    def coord(self) -> int:
        """This rank's place in the group."""
        return self._transport().coord

    def settled(self) -> bool:
        """Return whether every call so far is known to be that of the other ranks, as far as the backend tells."""
        now = time.monotonic()
        while self._posted and self._posted[0][1].is_completed():
            number, _, signs = self._posted.popleft()
            if signs[0] != -signs[1]:
                self._suspects = max(self._suspects, now + _LOOKS_S)
            while now >= self._suspects and self.made and self.made[0][0] <= number:
                self.made.popleft()
        return not self._posted and now >= self._suspects

    def refuse(self) -> None:
        """Raise CallMismatchError if the ranks are known to have made different calls that are under way."""
        self.announced = self.guarded = False
        self.settled()
        if time.monotonic() < self._suspects:
            self.difference()
        if self._difference is not None:
            self.raised = True
            raise error_of(self._difference)

    def announce_call(self, name: str, call: str, facts: dict[str, Any], waits: bool, recorded: int) -> bool:
        """Return when this rank may make a call on `name`. Return whether it was compared.

        waits: whether the call waits for all ranks of the group. If not, this method does not wait for any.
        recorded: the call's number in the recorder.

        Raises CallMismatchError, on every rank of the group, or as soon as this rank's call is known to differ.
        """
        transport, shared = self._transport(), self._shared
        if transport.announce_call(name, call, facts):
            return False
        self.refuse()
        waits = waits or shared is None
        number = self._number + 1
        sign = _sign(call, facts)
        try:
            self._number = number
            if self._left is not None:
                self._left -= 1
            self.made.append((number, recorded, call, facts))
            if waits or not transport.ordered:
                signs = torch.tensor([sign, -sign, int(not waits)], device=transport.device)
                compare = partial(transport.start, Call(ALL_REDUCE, signs, op="max"))
                # Not waited for at once, so it may outlive a profiler.
                work = compare() if transport.ordered else unprofiled(compare)
                if not waits and work is not None:
                    self._posted.append((number, work, signs))
                elif self._agrees(transport, name, work, signs, _told(call, facts, caller())):
                    self.announced = True
                    return True
            if shared is not None:
                parts = parts_of(facts, transport.size)
                self._meet(shared, name, number, _told(call, facts, caller()), parts)
            self.announced = self.guarded = True
        except Exception:
            raise
        except BaseException as error:
            self.leave(name, call, type(error).__name__)
            raise
        finally:
            # A stored error keeps this frame alive; it must not keep the group.
            del transport
            work = None
        return True

    def leave(self, name: str, call: str, raised: str) -> None:
        """Record that this rank leaves the call under way before it is issued, although the call has been compared.

        raised: the type of the exception that interrupts it.
        """
        who = "this rank" if self._shared is None else f"rank {self._shared.rank}"
        left = CallMismatchError(
            f'{who} left call {self._number} along "{name}" before it sent its part; {_OUT_OF_STEP}',
            given=f"{raised} in {call} at {caller()}",
            expected=_SAME,
            hint="end the program, or go on with a new group",
            mismatched_ranks=() if self._shared is None else (self._shared.rank,),
        )
        self._difference = _as_data(left)
        if self._shared is not None:
            with suppress(RuntimeError, TimeoutError):
                self._difference = self._shared.publish(self._key, lambda: _as_data(left))
        self.raised = True

    def difference(self) -> CallMismatchError | None:
        """Return the error if the ranks of the group have made different calls, some of which are under way."""
        if self._difference is None and self._shared is not None and self._number:
            with suppress(RuntimeError, TimeoutError):
                self._difference = self._shared.published(self._key)
        return None if self._difference is None else error_of(self._difference)

    def is_apart(self) -> bool:
        """Return whether the ranks have made different calls, some of which are under way and may never complete."""
        return self._difference is not None or (not self.settled() and self.difference() is not None)

    def ended(self, over: bool) -> CallMismatchError | None:
        """Return `difference` for a call that waits, or whose wait is `over`. While it waits, looks no more often than a
        watchdog does.
        """
        now = time.monotonic()
        if self._shared is None or (self._difference is None and now < self._due and not over):
            return None
        self._due = now + self._shared.look_s
        error = self.difference()
        self.raised |= error is not None
        return error

    def _agrees(
        self, transport: Transport, name: str, work: Work | None, signs: torch.Tensor, mine: list[Any]
    ) -> bool:
        """Wait for the comparison. Return whether the calls are equal, or False if a rank has not waited for it."""
        if work is not None and self._shared is not None:
            wait_until(work, self.ended)
        elif work is not None:
            work.wait()
        highest, lowest, guarded = signs.tolist()
        if highest == -lowest:
            self.made.clear()
            return True
        if guarded:
            return False
        self._exchange(transport, name, mine)
        self.made.clear()
        return True

    def _exchange(self, transport: Transport, name: str, mine: list[Any]) -> None:
        """Exchange the calls themselves, because the digests differ."""
        own = torch.frombuffer(bytearray(_message(mine).ljust(_BYTES, b"\0")), dtype=torch.uint8).to(
            transport.device
        )
        everyone = own.new_empty(transport.size * _BYTES)
        work = transport.start(Call(ALL_GATHER, own, everyone))
        if work is not None:
            work.wait()
        rows = everyone.cpu().view(-1, _BYTES)
        calls = [json.loads(row.numpy().tobytes().rstrip(b"\0")) for row in rows]
        if not _are_same(calls):
            self.made.clear()
            raise mismatch(name, self._number, self._ranks, [each[:3] for each in calls])

    def _meet(
        self,
        shared: Shared,
        name: str,
        number: int,
        mine: list[Any],
        parts: tuple[list[int], list[int]] | None,
    ) -> None:
        """Compare this rank's call with the call of the rank that came first. Does not wait for any rank.

        parts: what this rank sends to each coord and expects from each, in an all_to_all. It is compared with all ranks that
        have come.
        """
        own = json.dumps([*mine, shared.rank])
        told = shared.first(f"{self._key}/{number}", own)
        if told == own and number > _BEHIND:
            # The call of a rank that is so far behind is not compared.
            for key in (f"{number - _BEHIND}", f"{number - _BEHIND}/parts"):
                shared.delete(f"{self._key}/{key}")
        first = json.loads(told)
        known: dict[int, Sequence[Any]] = {shared.rank: mine}
        if told != _APART:
            if not _is_same(mine, first):
                known[first[-1]] = first[:-1]
            elif parts is None or self._fit(shared, f"{self._key}/{number}/parts", *parts):
                return
        self._difference = shared.publish(self._key, partial(self._differ, shared, name, number, known))
        # A rank that makes its next call through the store finds the difference there.
        later = (f"{self._key}/{after}" for after in count(number + 1))
        next(key for key in later if shared.first(key, _APART) == _APART)
        self.refuse()

    def _fit(self, shared: Shared, key: str, sends: list[int], expects: list[int]) -> bool:
        """Return whether this rank and each rank that has come expect what the other sends."""
        coord = self._ranks.index(shared.rank)
        if len(self._ranks) > _PAIRED:
            return True
        # Of two ranks, at least the one that adds its line last reads both.
        lines = shared.lines(key, json.dumps([coord, sends, expects]))
        return all(
            theirs[coord] == expects[other] and wanted[coord] == sends[other]
            for other, theirs, wanted in map(json.loads, lines)
        )

    def _differ(
        self, shared: Shared, name: str, number: int, known: dict[int, Sequence[Any]]
    ) -> dict[str, Any]:
        others = [rank for rank in self._ranks if rank not in known]
        calls = {**shared.made(self._label, number, others), **known}
        ranks = [rank for rank in self._ranks if rank in calls]
        error = mismatch(name, number, ranks, [calls[rank][:3] for rank in ranks], _OUT_OF_STEP)
        if absent := [rank for rank in self._ranks if rank not in calls]:
            error.given = f"{error.given}\n{ranks_text(absent)}: not known yet"
        return _as_data(error)


def _sign(call: str, facts: dict[str, Any]) -> int:
    """Return a 63-bit number that is the same for equal calls in every process."""
    text = json.dumps([call, facts]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _is_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two ranks' calls, each given as (call, facts, ...), can belong to one call of their group."""
    return bool(one[0] == other[0]) and facts_match([one[1], other[1]])


def _are_same(calls: Sequence[Sequence[Any]]) -> bool:
    """Return whether the calls of all ranks of a group, in coord order, are one call."""
    facts = [each[1] for each in calls]
    return len({each[0] for each in calls}) == 1 and facts_match(facts) and balanced(facts)


def majority(signs: Mapping[int, Any]) -> tuple[list[int], list[int]]:
    """Return the ranks with the most common sign, and all other ranks. In a tie, no rank is in the majority, because any of
    two ranks that differ may be wrong.

    >>> majority({0: "a", 1: "b", 2: "b"}), majority({3: "a", 4: "b"}), majority({3: "a", 4: "a"})
    (([1, 2], [0]), ([], [3, 4]), ([3, 4], []))
    """
    (usual, times), *others = Counter(signs.values()).most_common(2)
    if others and others[0][1] == times:
        return [], list(signs)
    ranks = [rank for rank, sign in signs.items() if sign == usual]
    return ranks, [rank for rank in signs if signs[rank] != usual]


def blamed(mismatched: Sequence[int], tie: bool, of: int | None = None) -> str:
    """Return text that names the ranks of the second list of `majority`. tie: whether the first list is empty. of: the
    number of all ranks.

    >>> blamed([0], tie=False), blamed([0, 1], tie=False, of=5), blamed([3, 4], tie=True)
    ('rank 0 is mismatched', 'ranks 0 1 of 5 are mismatched', 'ranks 3 4 do not agree')
    """
    if tie:
        return f"{ranks_text(mismatched)} do not agree"
    who = f"{ranks_text(mismatched)} of {of}" if of else ranks_text(mismatched)
    return f"{who} {'is' if len(mismatched) == 1 else 'are'} mismatched"


def alike(ranks: Sequence[int], signs: Mapping[int, Any]) -> list[list[int]]:
    """Return the ranks as lists of equal sign.

    >>> alike([0, 1, 2], {0: "a", 1: "b", 2: "a"})
    [[0, 2], [1]]
    """
    lists: dict[Any, list[int]] = {}
    for rank in ranks:
        lists.setdefault(signs[rank], []).append(rank)
    return list(lists.values())


def mismatch(
    name: str,
    number: int,
    ranks: Sequence[int],
    calls: Sequence[Sequence[Any]],
    sent: str = "nothing was sent",
) -> CallMismatchError:
    """Return the error for a group in which calls, each given as (call, facts, site), differ between ranks.

    ranks: global ranks, in the order of `calls`. Ranks that differ from the majority are mismatched. sent: what became of
    the calls.
    """
    by_rank = dict(zip(ranks, calls, strict=True))
    signs: dict[int, Any] = {}
    for rank, call in by_rank.items():
        same = (signs[each] for each in signs if _is_same(by_rank[each], call))
        signs[rank] = next(same, rank)
    usual, mismatched = majority(signs)
    expected = f"as {ranks_text(usual)}: " if usual else _SAME
    if not mismatched:
        # Every two calls can belong together, but not all: an all_to_all whose sizes do not fit.
        usual, mismatched, signs = [], list(ranks), {rank: rank for rank in ranks}
        expected = "each rank to expect from every other what that rank sends to it"
    seen = [{key: value for key, value in facts.items() if key not in _UNSEEN} for _, facts, _ in calls]
    shown = _UNSEEN if facts_match(seen) else ()
    lines = [
        f"{ranks_text(same)}: {_call_text(by_rank[same[0]], shown)}" for same in alike(mismatched, signs)
    ]
    expected += _call_text(by_rank[usual[0]], shown) if usual else ""
    return CallMismatchError(
        f'ranks differ in call {number} along "{name}": {blamed(mismatched, not usual)}; {sent}',
        given="\n".join(lines),
        expected=expected,
        hint="make the same calls in the same order on every rank of the group; "
        "look for a branch that depends on the rank",
        mismatched_ranks=tuple(mismatched),
    )


def _told(call: str, facts: dict[str, Any], site: str) -> list[Any]:
    """Return the call as other ranks are told of it: (call, facts, site)."""
    return [call, shortened(facts), site[-_SITE:]]


def _message(told: list[Any]) -> bytes:
    """Encode a call in at most a kilobyte. Equal facts give equal texts at any callsite."""
    call, facts, site = told
    while len(text := json.dumps([call, facts, site]).encode()) > _BYTES and site:
        site = site[20:]
    return text


def _as_data(error: CallMismatchError) -> dict[str, Any]:
    """Return an error as plain data for `error_of`."""
    facts = {key: getattr(error, key) for key in ("what", "given", "expected", "hint", "step")}
    return {**facts, "mismatched": list(error.mismatched_ranks)}


def _call_text(call: Sequence[Any], shown: Collection[str]) -> str:
    name, facts, site = call
    hidden = {"balance", *_UNSEEN} - {*shown} | ({"elements"} if "shape" in facts else set())
    listed = (
        f"{key} {_plain(value)}" for key, value in facts.items() if value is not None and key not in hidden
    )
    return f"{name}({', '.join(listed)}) at {site}"


def _plain(value: Any) -> str:
    return f"({', '.join(map(_plain, value))})" if isinstance(value, list) else str(value)


# -- step by step ------------------------------------------------------------------------------------


class _Run(NamedTuple):
    """Consecutive steps in which a rank made the same calls on the group, as plain data.

    first: the first step, by this rank's count. number: the program's number for that step. calls, nbytes: per step.
    digest: a digest of the operations and bytes. operations: each with its source line and count.
    ended_at: the line that called `mesh.step` after the first step.
    """

    first: int
    number: int
    calls: int
    digest: int
    nbytes: int
    operations: Sequence[str]
    ended_at: str


@final
class StepHistory:
    """One rank's calls in one group, step by step. Written by `mesh.step`; other threads read it too.

    step: the last recorded step. sums: for each step, a checksum of all calls up to its end. Two ranks with equal sums
    have made the same calls so far. The sum of a step divisible by 2**k is kept for 4 * 2**k steps, so that two ranks
    that are 2**k steps apart have a step in common.
    """

    def __init__(self) -> None:
        self.step = 0
        self.sums: dict[int, int] = {}
        self._sum = 0
        self._runs: deque[_Run] = deque(maxlen=RUNS)

    def note(
        self, step: int, number: int, calls: int, entries: Sequence[Entry], ended_at: tuple[CodeType, int]
    ) -> None:
        """Record that step `step`, which the program numbers `number`, has ended after `calls` calls.

        entries: the calls to compare.
        """
        facts = [fact for entry in entries for fact in (entry[0].sign, entry[1] * entry[0].alike)]
        digest, nbytes = crc32(array("q", facts).tobytes()) if facts else 0, sum(facts[1::2])
        last = self._runs[-1] if self._runs else None
        if last is None or last[2:4] != (calls, digest) or last.number - last.first != number - step:
            counts = Counter((entry[0].call, line_of(entry[2], entry[3])) for entry in entries)
            operations = [
                f"{call}{f' {times} times' if times > 1 else ''} at {line}"
                for (call, line), times in counts.items()
            ]
            self._runs.append(_Run(step, number, calls, digest, nbytes, operations, line_of(*ended_at)))
        self.sums[step] = self._sum = crc32(b"%d %d %d" % (number, calls, digest), self._sum)
        self.sums.pop(step - 4 * (step & -step), None)
        # Set last, because readers in other threads start from it.
        self.step = step

    def data(self) -> dict[str, Any] | None:
        """Return the history as plain data; None before the first step.

        sums: (step, sum). runs: as _Run. cut: whether older runs have been dropped.
        """
        if not self.step:
            return None
        runs = [list(run) for run in tuple(self._runs)]
        return {"sums": list(self.sums.items()), "cut": len(runs) == RUNS, "runs": runs}


def last_common(*sums: Mapping[int, int]) -> int:
    """Return the last step for which all ranks have a sum; 0 if there is none."""
    return max(set.intersection(*map(set, sums)), default=0) if sums else 0


def find_desync(
    label: str, histories: Mapping[int, Any], coords: Mapping[int, Mapping[str, int]]
) -> dict[str, Any] | None:
    """Return the first step in which ranks of a group differ, as plain data for `error_of`; None if none is known.

    histories: `StepHistory.data` by rank, in coord order; coords: those ranks' coords, by rank.
    """
    known = {rank: history for rank, history in histories.items() if history is not None}
    sums = {rank: dict(history["sums"]) for rank, history in known.items()}
    last = last_common(*sums.values())
    if len({of_rank.get(last) for of_rank in sums.values()}) < 2:
        return None
    # Start at the oldest step that all histories still contain. The first difference may be even earlier.
    oldest = max(history["runs"][0][0] for history in known.values())
    cut = any(history["cut"] for history in known.values())
    starts = {run[0] for history in known.values() for run in history["runs"]}
    for start in sorted(start for start in starts if oldest <= start <= last):
        steps = {rank: _run_at(history["runs"], start) for rank, history in known.items()}
        # If step numbers differ, a rank has skipped a step, although calls may be equal until the last step.
        numbers = {rank: step.number for rank, step in steps.items()}
        calls = {rank: (step.calls, step.digest) for rank, step in steps.items()}
        signs: Mapping[int, Any] = numbers if len(set(numbers.values())) > 1 else calls
        if len(set(signs.values())) > 1:
            if cut and start == oldest:
                break
            return _difference(label, signs, steps, coords, forgotten=False)
    steps = {rank: _run_at(history["runs"], oldest) for rank, history in known.items()}
    signs = {rank: of_rank[last] for rank, of_rank in sums.items()}
    return _difference(label, signs, steps, coords, forgotten=True)


def error_of(difference: Mapping[str, Any]) -> CallMismatchError:
    """Return the error for a result of `find_desync`."""
    facts = {key: difference[key] for key in ("given", "expected", "hint", "step")}
    return CallMismatchError(difference["what"], **facts, mismatched_ranks=tuple(difference["mismatched"]))


def _run_at(runs: Sequence[Sequence[Any]], step: int) -> _Run:
    """Return the run that contains step `step`, cut to start at that step."""
    run = next(_Run(*run) for run in reversed(runs) if run[0] <= step)
    return run._replace(first=step, number=run.number + step - run.first)


def _difference(
    label: str,
    signs: Mapping[int, Any],
    steps: Mapping[int, _Run],
    coords: Mapping[int, Mapping[str, int]],
    forgotten: bool,
) -> dict[str, Any]:
    """Return the difference as plain data.

    signs: equal for equal calls. forgotten: whether the first difference may be in an earlier step.
    """
    usual, mismatched = majority(signs)
    shown = [(ranks, steps[ranks[0]]) for ranks in alike(mismatched, signs)]
    # In a tie, the error compares the first two signs.
    first, model = shown[0][1], steps[usual[0]] if usual else shown[1][1]
    apart = not forgotten and model.number != first.number
    number = max(step.number for step in steps.values())
    if apart:
        number = model.number if usual else min(model.number, first.number)
    which = f"step {number}{' or an earlier one' if forgotten else ''}"
    who = ", ".join(rank_text(rank, coords[rank]) for rank in mismatched[:4])
    who += f" and {len(mismatched) - 4} more" if len(mismatched) > 4 else ""
    if forgotten:
        made = "other calls"
        given = "the calls of that step are no longer recorded"
        expected = f"the same calls in every step, as {ranks_text(usual)} made them"
    elif apart:
        made = f"step {first.number} instead"
        given = "\n".join(
            f"step {step.number} of {ranks_text(ranks)} ended at {step.ended_at}" for ranks, step in shown
        )
        expected = f"as {ranks_text(usual)}: step {number}, which ended at {model.ended_at}"
    else:
        more = first.calls - model.calls if len(mismatched) == 1 else 0
        made = f"{_collectives(abs(more))} {'more' if more > 0 else 'fewer'}" if more else "other calls"
        lines = [
            f"{ranks_text(ranks)} on {label}: {_calls(step, first if step is model else model)}"
            for ranks, step in shown
        ]
        given = "\n".join([*lines, f"step {number} ended at {first.ended_at}"])
        expected = f"as {ranks_text(usual)}: {_calls(model, first)}"
    did = f"made {made}" if usual else "do not agree"
    return {
        "what": f'ranks differ in {which} along "{label.partition("[")[0]}": {who} {did}',
        "given": given,
        "expected": expected if usual else _SAME,
        "hint": f"look for a {'step that only some ranks make' if apart else 'branch that only some ranks take'}; results of "
        f"{which} and later mix calls that do not belong together: resume from a checkpoint before it",
        "mismatched": mismatched,
        "step": number,
    }


def _calls(step: _Run, other: _Run) -> str:
    """Return text with the number of calls, and the lines whose calls `other` has not made as often."""
    text = _collectives(step.calls)
    if step.nbytes != other.nbytes and step.calls == other.calls:
        text += f" of {step.nbytes:,} bytes"
    lines = [line for line in step.operations if line not in other.operations] or list(step.operations)
    if len(lines) > _SHOWN + 1:
        lines = [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more callsites"]
    return f"{text}: {', '.join(lines)}" if lines else text


def _collectives(count: int) -> str:
    return f"{count} collective{'' if count == 1 else 's'}"
