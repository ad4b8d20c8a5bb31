"""What one rank computes when both sides agree on weights, without other processes: `python -m tests.benchmarks.agreement`.

The functions are those that `link.weights` calls. What the other ranks would send is known, and takes the place of each collective.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from meshcomm.comm.codec import encode
from meshcomm.comm.objects import Objects
from meshcomm.layout import Layout
from meshcomm.mesh import Mesh
from meshcomm.show.units import seconds_text
from meshcomm.transfer.agree import Agreement, Choice, Row, agree_on_weights, head_of
from meshcomm.transfer.placement import Placement
from meshcomm.transfer.plan import Ends, Plan, located
from meshcomm.transfer.run import Room, Run, Schedule
from meshcomm.transfer.sides import LINK, SideName, Sides
from meshcomm.transfer.tensors import Region
from tests.benchmarks.table import markdown
from tests.transfer.models import FSDP_TP, LLAMA_405B, TP, llama, side

_CHOICE: Final = Choice([None, None], [(), ()], None)
_SIDES: Final[tuple[SideName, SideName]] = ("source", "target")
# How many ranks there are for each rank of tensor parallelism and stage on the source, and how many copies of the target.
GROUPS: Final = (8, 32, 128)


class Case(NamedTuple):
    """Both layouts, and by side the different manifests, and the number of the manifest of each position."""

    layouts: tuple[Layout, Layout]
    manifests: tuple[list[list[Row]], list[list[Row]]]
    numbers: tuple[list[int], list[int]]


def llama_405b(groups: int) -> Case:
    """With 128 groups, from 16,384 ranks to 1,024. A stage has tensors of its own, and the ranks of a stage have the same."""
    stages = 16
    source = side(0, pp=stages, fsdp=groups, tp=8)
    target = side(source.world_size, copy=groups, tp=8)
    of_stage: list[list[Row]] = [[] for _ in range(stages)]
    wanted = []
    for entry in llama(LLAMA_405B, FSDP_TP, TP, stages):
        ((_, (stage,)),) = entry.source.at
        of_stage[stage].append(_row(entry.name, Placement(entry.source.axes)))
        wanted.append(_row(entry.name, entry.target))
    return Case(
        (source, target),
        (of_stage, [wanted]),
        ([at // (8 * groups) for at in range(source.world_size)], [0] * target.world_size),
    )


def _row(name: str, placement: Placement) -> Row:
    return Row(name, torch.bfloat16, placement.facts(), name)


# -- a link whose other ranks are known -------------------------------------------------------------------


class Everyone:
    """A link's mesh on one rank. records: what each rank brings to an `all_gather` of objects. manifests: by the rank that sends it.

    It counts the bytes that the rank receives, and the processor time of the objects.
    """

    def __init__(self, records: Sequence[Tensor], manifests: dict[int, Tensor], me: int) -> None:
        self.objects, self._records, self._manifests, self._me = self, records, manifests, me
        self.device, self.rank = torch.device("cpu"), me
        self.received: dict[str, int] = dict.fromkeys(("calls", "hashes", "manifests"), 0)
        self.seconds = 0.0

    def size(self, dim: str) -> int:
        return len(self._records)

    def coord(self, dim: str) -> int:
        return self._me

    def all_reduce(self, dim: str, x: Tensor, op: str) -> Tensor:
        self.received["calls"] += x.nbytes
        return x

    def broadcast(self, dim: str, x: Tensor, src: int) -> Tensor:
        data = self._manifests[src]
        assert x.shape == data.shape
        self.received["manifests"] += data.nbytes
        return data

    def all_gather(self, dim: str, mine: Any) -> list[Any]:
        began, group = time.process_time(), _Group(self._records, self._me)
        objects = Objects(cast(Any, group), self.device).all_gather(dim, mine)
        self.seconds += time.process_time() - began
        self.received["hashes"] += group.received
        return objects


class _Group:
    """The communicator of one call of `Objects`: the ranks exchange their sizes, then their bytes."""

    def __init__(self, records: Sequence[Tensor], me: int) -> None:
        self._records, self.size, self.coord, self.received = records, len(records), me, 0
        self.transport = SimpleNamespace(kinds=("cpu",), name="gloo")
        self._is_first = True

    def along(self, dims: str) -> _Group:
        return self

    def where(self, call: str) -> str:
        return call

    def confirm(self, call: str) -> None:
        pass

    @contextmanager
    def named(self, *_: Any) -> Iterator[tuple[Any, Callable[[int], None]]]:
        yield self, lambda nbytes: None

    def collective(self, row: Any, x: Tensor, **_: Any) -> Tensor:
        if self._is_first:
            self._is_first = False
            call, _, *rest = json.loads(x.numpy().tobytes())
            sizes = {len(record) for record in self._records}
            texts = {size: json.dumps([call, size, *rest]).encode().ljust(len(x)) for size in sizes}
            gathered = b"".join(texts[len(record)] for record in self._records)
        else:
            gathered = b"".join(record.numpy().tobytes().ljust(len(x), b"\0") for record in self._records)
        self.received += len(gathered)
        return torch.frombuffer(bytearray(gathered), dtype=torch.uint8)


class Figures(NamedTuple):
    """Of one rank. seconds: of processor, for the hashes, for all else of the agreement, and for the plan and the rank's messages.

    received: bytes of the agreement by step. peak: bytes of the process in the end.
    """

    side: SideName
    ranks: int
    tensors: int
    manifests: int
    seconds: list[float]
    received: dict[str, int]
    peak: int


def _memory(sides: Sides, own: SideName, agreement: Agreement) -> dict[int, Room]:
    """Return regions of this rank's parts, without memory."""
    position = sides.position(own)
    rooms = {}
    for number, (entry, dtype) in enumerate(zip(*agreement, strict=True)):
        where = located(entry.source if own == "source" else entry.target, sides.layout(own))
        if position is not None and where.holds(position):
            boxes = where.boxes(position)
            held = [Region(box, torch.empty(box.shape, dtype=dtype, device="meta")) for box in boxes]
            rooms[number] = Room(held, dtype)
    return rooms


def measured(groups: int, own: SideName) -> Figures:
    """Return the figures of the first rank of a side, which sends a manifest."""
    case = llama_405b(groups)
    ends = Ends.of(*case.layouts)
    me = 0 if own == "source" else ends.source.world_size
    records, encoded = [], {}
    for name, first, manifests, numbers in zip(
        _SIDES, (0, ends.source.world_size), case.manifests, case.numbers, strict=True
    ):
        data = [encode([[*row] for row in rows]) for rows in manifests]
        heads = [
            encode([{name: tuple(head_of(rows, sent))}, [[], []]])
            for rows, sent in zip(manifests, data, strict=True)
        ]
        records += [heads[number] for number in numbers]
        encoded.update({first + numbers.index(number): sent for number, sent in enumerate(data)})
    everyone = Everyone(records, encoded, me)
    mesh = cast(Mesh, everyone)
    sides = Sides(mesh, ends, mesh if own == "source" else None, mesh if own == "target" else None, LINK)
    mine = {own: case.manifests[_SIDES.index(own)][0]}
    times = [time.process_time()]
    agreement = agree_on_weights(sides, mine, _CHOICE, [row.name for row in mine[own]])
    times.append(time.process_time())
    schedule = Schedule(Plan(ends, agreement.entries), sides)
    everyone.device = torch.device("meta")
    Run(schedule, *(_memory(sides, of, agreement) for of in _SIDES))
    times.append(time.process_time())
    agreed, planned = times[1] - times[0], times[2] - times[1]
    return Figures(
        own,
        len(records),
        len(agreement.entries),
        len(encoded),
        [everyone.seconds, agreed - everyone.seconds, planned],
        everyone.received,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def apart(groups: int, own: SideName) -> Figures:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, str(groups), own]
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return Figures(*json.loads(text))


def main() -> None:
    """Print the table."""
    columns: dict[str, Callable[[Figures], str]] = {
        "first rank of the": lambda row: row.side,
        "ranks": lambda row: f"{row.ranks:,}",
        "tensors": lambda row: f"{row.tensors:,}",
        "manifests": lambda row: f"{row.manifests:,}",
        "hashes": lambda row: seconds_text(row.seconds[0]),
        "manifests compared": lambda row: seconds_text(row.seconds[1]),
        "plan, own messages": lambda row: seconds_text(row.seconds[2]),
        "MB received: hashes": lambda row: f"{row.received['hashes'] / 1e6:.3g}",
        "manifests ": lambda row: f"{row.received['manifests'] / 1e6:.3g}",
        "peak memory": lambda row: f"{row.peak / 1e6:.0f} MB",
    }
    print(markdown(columns, [apart(groups, own) for groups in GROUPS for own in _SIDES]))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measured(int(sys.argv[1]), cast(SideName, sys.argv[2]))))
    else:
        main()
