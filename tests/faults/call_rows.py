"""Programs that differ between ranks: a different call, a skipped call, a different order, an exception."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

from meshcomm.mesh import Mesh
from tests.faults.death_rows import peers
from tests.faults.row import (
    DIFFERS_S,
    TIMEOUT_S,
    Program,
    Rank,
    Row,
    check,
    everyone,
    opened,
    row,
    struck,
    without,
)

_ODD: Final = 2
_LINE: Final = {"dp": 4}
_CUBE: Final = {"pp": 2, "dp": 2, "tp": 2}

Call = Callable[[Mesh, bool], object]


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def _reduced(mesh: Mesh) -> None:
    check(mesh.all_reduce("dp", _x(3)), 4.0)


def differs(
    cells: str,
    call: Call,
    quick: bool = False,
    dim: str = "dp",
    first: Callable[[Mesh], object] = _reduced,
    times: int = 1,
    late: float = 0.0,
    keys: Mapping[str, Any] = {},
) -> Row:
    """Rank 2 of four makes another call than the others; after the error all ranks make the same call again.

    times: how often all make `first` before. late: seconds by which the odd rank is late. keys: keywords of its mesh.
    """

    def program(me: Rank, mesh: Mesh) -> None:
        for _ in range(times):
            first(mesh)
        odd = me.number == _ODD
        if odd:
            time.sleep(late)
        me.strike()
        try:
            call(mesh, odd)
        finally:
            # Nothing was sent, so the group can still be used.
            _reduced(mesh)

    expected = everyone("CallMismatchError")
    return row(
        f"{cells} | {dim}", opened(program, **keys), expected, (_ODD,), DIFFERS_S, dims=_LINE, quick=quick
    )


_GRADIENTS: Final[Call] = lambda m, odd: m.functional.all_reduce(  # noqa: E731
    "dp", _x(4, 2 if odd else 3).requires_grad_(), grad="sum"
)


def _two_calls(mesh: Mesh, odd: bool) -> None:
    """An all_reduce, then a broadcast; the odd rank makes them in the other order."""
    calls = [lambda: mesh.all_reduce("dp", _x(4)), lambda: mesh.broadcast("dp", _x(4), 0)]
    for call in reversed(calls) if odd else calls:
        call()


def _skips(mesh: Mesh, odd: bool) -> None:
    if not odd:
        mesh.all_reduce("dp", _x(4))
    mesh.all_gather("dp", _x(4))


def _on(dim: str, victim: int, act: Callable[[Rank, Mesh], object], **keys: Any) -> Program:
    """Three rounds of calls along `dim`; then `victim` does something else."""

    def program(me: Rank, mesh: Mesh) -> None:
        for _ in range(3):
            check(mesh.all_reduce(dim, _x(5)), float(mesh.size(dim)))
        if me.number == victim:
            me.strike()
            act(me, mesh)
        else:
            check(mesh.all_reduce(dim, _x(5)), float(mesh.size(dim)))

    return opened(program, **keys)


def _goes_elsewhere(me: Rank, mesh: Mesh) -> None:
    """The rank does other work, and closes its mesh after the others have raised."""
    time.sleep(TIMEOUT_S + 2)


def _raises(me: Rank, mesh: Mesh) -> None:
    raise ValueError("the loss is not finite")


def _skipped(name: str, dims: dict[str, int], dim: str, victim: int, **keys: Any) -> Row:
    cells = f"{name} | skipped call{', calls not compared' if keys else ''} | between calls | {dim}"
    expected = {**peers(dims, dim, victim, "CollectiveTimeout"), victim: ""}
    return row(cells, _on(dim, victim, _goes_elsewhere, **keys), expected, (victim,), dims=dims)


def _leaves(
    name: str, fault: str, act: Callable[[Rank, Mesh], object], error: str, dim: str, **more: Any
) -> Row:
    expected = {**peers(_CUBE, dim, 5, "PeerLost"), 5: error}
    return row(
        f"{name} | {fault} | between calls | {dim}", _on(dim, 5, act), expected, (5,), dims=_CUBE, **more
    )


def _first_call(stays_s: float, me: Rank, mesh: Mesh) -> None:
    """The first call on a group: rank 0 makes it, rank 1 does not, and ends after `stays_s`."""
    mesh.debug.monitored_barrier(timeout_s=TIMEOUT_S)
    if me.number == 0:
        me.strike()
        mesh.all_reduce("tp", _x(4))
    time.sleep(stays_s)


def _another_dim(me: Rank, mesh: Mesh) -> None:
    """Rank 3 calls along dp while the others call along tp, so no circle of waiting ranks closes."""
    check(mesh.all_reduce("dp" if me.number == 3 else "tp", _x(4)), 2.0)
    time.sleep(TIMEOUT_S + 2)


def _crossed(me: Rank, mesh: Mesh) -> None:
    """Two calls along two dims; ranks 1 and 2 make them in the other order."""
    for dim in ("dp", "tp") if me.number in (1, 2) else ("tp", "dp"):
        mesh.all_reduce(dim, _x(4))


def _asynchronous(me: Rank, mesh: Mesh) -> None:
    if me.number == 1:
        time.sleep(TIMEOUT_S + 2)
    else:
        check(mesh.all_reduce("dp", _x(4), async_op=True).wait(), 2.0)


def _store_barrier(me: Rank, mesh: Mesh) -> None:
    me.strike()
    if me.number == 1:
        time.sleep(TIMEOUT_S)
    else:
        mesh.debug.monitored_barrier(timeout_s=1.0)


def _hierarchical(me: Rank, mesh: Mesh) -> None:
    if me.number == 5:
        time.sleep(TIMEOUT_S + 2)
    else:
        mesh.all_reduce(("pp", "dp", "tp"), _x(4), algorithm="hierarchical")


def _object_dies(me: Rank, mesh: Mesh) -> None:
    check(torch.tensor(mesh.objects.all_gather("dp", me.number)), torch.arange(4.0))
    if me.number == _ODD:
        me.end("SIGKILL")
    mesh.objects.all_gather("dp", {"step": 3})


def _unpicklable_object(me: Rank, mesh: Mesh) -> None:
    me.strike()
    mesh.objects.all_gather("dp", object() if me.number == _ODD else me.number)


_TRAINING: Final[dict[str, Any]] = {
    "mesh": {"dims": _LINE, "device": "cpu", "timeout_s": TIMEOUT_S},
    "parallel": {"data": "dp"},
    "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 16},
    "data": {"seq_len": 32, "max_bytes": 20_000},
    "train": {"steps": 2, "global_batch_size": 4, "micro_batch_size": 1, "warmup_steps": 1},
}


def _training(odd: str, me: Rank, mesh: Mesh) -> None:
    """Rank 2 has different settings in the part of the config that all ranks must share."""
    # Imported here, because few rows need it and importing it takes seconds.
    from meshcomm.config import load_config
    from meshcomm.train.agree import agree

    own = [odd] if me.number == _ODD else []
    settings = load_config(_TRAINING, [f'train.out="{me.folder / "run"}"', *own])
    me.strike()
    agree(mesh, settings)


def _shapes(mesh: Mesh, odd: bool) -> object:
    return mesh.all_reduce("dp", _x(6 if odd else 4))


_WORDS: Final = (("compared", 64), ("not compared", 0))

ROWS = [
    differs("other-shape | other shape | in all_reduce", _shapes, quick=True),
    differs("other-shape-late | other shape, half a second late | in all_reduce", _shapes, late=0.5),
    differs(
        'other-shape-call-71 | other shape, validate_calls = "always" | in call 71',
        _shapes,
        times=70,
        keys={"validate_calls": "always"},
    ),
    differs(
        "other-dtype | other dtype | in all_reduce",
        lambda m, odd: m.all_reduce("dp", _x(4, dtype=torch.float64 if odd else torch.float32)),
    ),
    differs(
        "other-reduce-op | other reduce op | in all_reduce",
        lambda m, odd: m.all_reduce("dp", _x(4), "max" if odd else "sum"),
    ),
    differs("other-root | other root | in broadcast", lambda m, odd: m.broadcast("dp", _x(4), int(odd))),
    differs("other-root-scatter | other root | in scatter", lambda m, odd: m.scatter("dp", _x(4), 2 * odd)),
    differs(
        "other-axis | other axis | in all_gather",
        lambda m, odd: m.all_gather("dp", _x(4, 4), axis=1 if odd else 0),
    ),
    differs(
        "other-operation | other operation | in reduce_scatter",
        lambda m, odd: m.all_to_all("dp", _x(4)) if odd else m.reduce_scatter("dp", _x(4)),
        quick=True,
    ),
    differs("other-shape-gradients | other shape | in functional.all_reduce", _GRADIENTS),
    differs("swapped-calls | swapped order of two calls | same dim", _two_calls),
    differs("skipped-then-another | skipped call, the next one differs | same dim", _skips),
    _skipped("skipped-tp", _CUBE, "tp", 6),
    _skipped("skipped-pp", _CUBE, "pp", 6, validate_calls=0),
    _skipped("skipped-dp4", _LINE, "dp", 1, validate_calls=0),
    _leaves("returns-early", "one rank is done and closes its mesh", lambda *_: None, "", "tp"),
    _leaves("exception-tp", "exception on one rank", _raises, "ValueError", "tp", quick=True),
    _leaves("exception-dp", "exception on one rank", _raises, "ValueError", "dp"),
    *(
        row(
            f"skipped-first-call-{word} | skipped call; its rank ends {word} the timeout | first call on a group | tp",
            *(opened(partial(_first_call, stays_s)), everyone("", r0="CollectiveTimeout|PeerLost"), (1,)),
        )
        for word, stays_s in (("before", 1.0), ("after", TIMEOUT_S + 2))
    ),
    *(
        row(
            f"call-on-another-dim-{word.replace(' ', '-')} | call on another dim, calls {word} | between calls | dp, tp",
            struck(_another_dim, validate_calls=validate),
            everyone("", r2="CollectiveTimeout", r3="CollectiveTimeout"),
            {2: (3,), 3: (1,)},
        )
        for word, validate in _WORDS
    ),
    *(
        row(
            f"crossed-{word.replace(' ', '-')} | swapped order of two calls, calls {word} | two dims | dp, tp",
            *(
                struck(_crossed, validate_calls=validate),
                everyone("CollectiveTimeout"),
                {0: (1,), 1: (3,), 2: (0,), 3: (2,)},
            ),
        )
        for word, validate in _WORDS
    ),
    row(
        "asynchronous | skipped call | in wait() of an asynchronous all_reduce | dp",
        *(struck(_asynchronous, validate_calls=0), everyone("", r3="CollectiveTimeout"), (1,)),
    ),
    row(
        "store-barrier | skipped barrier | in debug.monitored_barrier | all",
        *(opened(_store_barrier), everyone("BarrierTimeout", r1=""), (1,), 3.0),
    ),
    row(
        "hierarchical | skipped call | in a hierarchical all_reduce | pp, dp, tp",
        *(
            struck(_hierarchical),
            everyone("CollectiveTimeout|PeerLost", 8, r5=""),
            dict.fromkeys((1, 4, 7), (5,)),
        ),
        dims=_CUBE,
    ),
    row(
        "sigkill-objects | SIGKILL | in objects.all_gather | dp",
        *(opened(_object_dies), without(everyone("PeerLost"), _ODD), (_ODD,)),
        dims=_LINE,
    ),
    row(
        "unpicklable-object | an object that cannot cross on one rank | in objects.all_gather | dp",
        *(opened(_unpicklable_object), everyone("ObjectError"), (_ODD,), DIFFERS_S),
        dims=_LINE,
    ),
    *(
        row(
            f"other-{name} | other {setting} | before the first step | dp",
            *(opened(partial(_training, setting)), everyone("TrainingError"), (_ODD,), DIFFERS_S),
            dims=_LINE,
        )
        for name, setting in (
            ("learning-rate", "train.lr=0.1"),
            ("model", "model.hidden_size=32"),
            ("data", "data.max_bytes=19_000"),
        )
    ),
]
