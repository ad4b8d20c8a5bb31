"""Every keyword of a call has an effect in every way to make the call, and ranks must agree on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from operator import attrgetter
from typing import Any, get_args, get_overloads, get_type_hints

import pytest
import torch

import meshcomm
from meshcomm.comm import Functional
from meshcomm.comm.handle import Handle
from meshcomm.comm.scheduled import Scheduled
from meshcomm.errors import CallMismatchError, MeshcommError, RankFailed
from meshcomm.mesh import Mesh

# Two values for each keyword of a public collective, for which the same call ends differently: with another result,
# another record of the call, or an error with one of the two.
TWO_VALUES: dict[str, tuple[Any, Any]] = {
    "axis": (0, 1),
    "dim": (0, 1),
    "split_axis": (0, 1),
    "concat_axis": (0, 1),
    "op": ("sum", "max"),
    "factor": (2.0, 3.0),
    "algorithm": ("flat", "ring"),
    "uneven": (False, True),
    "input_split_sizes": ([1, 1], [2, 0]),
    "output_split_sizes": ([1, 1], [2, 0]),
    "async_op": (False, True),
    "src": (0, 1),
    "dst": (0, 1),
    "out": (None, "out"),
    "offset": (1, 2),
}
# Arguments that a keyword also needs, for both values.
NEEDED: dict[str, dict[str, Any]] = {
    "factor": {"op": "premul_sum"},
    "output_split_sizes": {"input_split_sizes": [1, 1]},
}
PUBLIC = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
)
# The gradient rules of a functional collective, and the arguments that it needs.
RULES = {"all_reduce": ("sum", "identity"), "all_gather": ("slice", "reduce_scatter")}
FUNCTIONAL: dict[str, dict[str, Any]] = {
    "all_reduce": {"grad": "sum"},
    "all_gather": {"grad": "slice"},
    "reduce_scatter": {},
    "slice": {},
    "all_to_all": {"split_axis": 0, "concat_axis": 0},
    "shift": {},
}
# Functional collectives that send nothing, or messages.
LOCAL = ("slice", "shift")
ALGORITHMS = ("hierarchical", *get_args(Scheduled))
TWO_DIMS, MERGED = {"dp": 2, "tp": 2}, {"all": ("dp", "tp")}
# What each rank may give as it likes, or is compared by its own tests.
OWN = {"async_op", "out", "factor", "input_split_sizes", "output_split_sizes", "grad", "offset"}


def outcome(body: Callable[[Any], Any]) -> Any:
    """What each rank of two returns, or the error. A crash of a rank is no error of the package, and is raised."""
    try:
        return meshcomm.simulate(body, dims={"dp": 2}, device="cpu")
    except MeshcommError as error:
        if isinstance(error, RankFailed) and not all(
            isinstance(e, MeshcommError) for e in error.by_rank.values()
        ):
            raise
        return str(error)


def keywords_of(call: Callable[..., Any]) -> set[str]:
    return signature(call).parameters.keys() - {"self", "dims", "x"}


# The size of `out` along axis 0, if x has two rows.
OUT = {"reduce_scatter": 1, "scatter": 1, "all_to_all": 2, "all_gather": 4, "gather": 4}


def ending(name: str, given: dict[str, Any], listed: bool) -> Any:
    """How a call on two ranks ends: each rank's result and the calls that it counts, or the error.

    listed: whether x is a list of two tensors.
    """

    def body(mesh: Any) -> Any:
        # Sizes may differ only with uneven=, and must differ to show that it has an effect.
        rows = 2 + (mesh.rank if "uneven" in given else 0)
        x = torch.arange(1.0, 1 + 2 * rows).view(rows, 2) * 10**mesh.rank
        out = None
        if given.get("out") is not None:
            out = torch.zeros(OUT[name] + ("uneven" in given), 2)
        more = {**given, "out": out} if "out" in given else given
        result = getattr(mesh, name)("dp", [x, 2 * x] if listed else x, **more)
        is_handle = isinstance(result, Handle)
        if isinstance(result, Handle):
            result = result.wait()
        parts = result if listed else [result]
        values = [None if part is None else part.tolist() for part in parts]
        return is_handle, values, result is out, [row.call for row in mesh.stats().rows]

    return outcome(body)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_keyword_of_a_public_collective_has_an_effect(name: str) -> None:
    """Checked with other keywords too: some code paths of a call might drop an option silently."""
    keywords = keywords_of(getattr(Mesh, name))
    usual = {key: 0 for key in ("src", "dst") if key in keywords}
    beside: list[dict[str, Any]] = [
        {},
        *({key: TWO_VALUES[key][1]} for key in ("async_op", "out", "algorithm") if key in keywords),
    ]
    ways = [(others, False) for others in beside]
    if name in ("all_reduce", "broadcast"):
        ways.append(({}, True))
    for key in keywords:
        assert key in TWO_VALUES, f"give two values of {key}= with which {name} ends differently"
        for others, listed in ways:
            # An algorithm is refused in other ways, and along another axis the shape of `out` differs.
            alone = key == "algorithm" and (others or listed)
            if key in others or alone or (key in ("axis", "dim") and "out" in others):
                continue
            given: dict[str, Any] = {**usual, **NEEDED.get(key, {}), **others}
            one, other = (ending(name, {**given, key: value}, listed) for value in TWO_VALUES[key])
            assert one != other, f"{name}({key}=) has no effect beside {others}, x a list: {listed}"
            assert not (isinstance(one, str) and isinstance(other, str)), one


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_every_keyword_of_a_functional_collective_has_an_effect(name: str) -> None:
    """On the result. If the gradient is not refused, the call is linear, as all operators are differentiated alike."""

    def ending(given: dict[str, Any], tracked: bool) -> Any:
        def body(mesh: Mesh) -> Any:
            made = partial(getattr(mesh.functional, name), "dp", **given)
            x = (torch.arange(1.0, 17.0).view(4, 4) * 1.2345 * (1 + mesh.rank)).requires_grad_(tracked)
            y = made(x)
            if tracked:
                (y * torch.arange(1.0, 1 + y.numel()).view(y.shape) * (1 + mesh.rank)).sum().backward()
                torch.testing.assert_close(made(x.detach() * 1.7) - made(x.detach()), made(x.detach() * 0.7))
            return y.tolist(), None if x.grad is None else x.grad.tolist()

        return outcome(body)

    for key in keywords_of(getattr(Functional, name)):
        for tracked in (True,) if key == "grad" else (False, True):
            values = RULES[name] if key == "grad" else TWO_VALUES[key]
            one, other = (ending({**FUNCTIONAL[name], key: value}, tracked) for value in values)
            assert one != other, f"functional.{name}({key}=) has no effect, with gradients: {tracked}"
            assert not (isinstance(one, str) and isinstance(other, str)), one


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_does_with_every_keyword_what_the_flat_one_does(algorithm: str) -> None:
    def reduced(algorithm: str, given: dict[str, Any]) -> Any:
        def body(mesh: Any) -> Any:
            # Digits at all places, for an operation that must come after the last sum.
            x = torch.arange(1.0, 33.0) * 1.2345 * (1 + mesh.rank)
            return mesh.all_reduce(("dp", "tp"), x, algorithm=algorithm, **given)

        return meshcomm.simulate(body, dims=TWO_DIMS, merge=MERGED, device="cpu")

    for key in keywords_of(Mesh.all_reduce) - {"algorithm", "async_op"}:
        for value in TWO_VALUES[key]:
            given = {**NEEDED.get(key, {}), key: value}
            torch.testing.assert_close(reduced(algorithm, given), reduced("flat", given))


@pytest.mark.parametrize(
    ("name", "usual"),
    [
        *((name, {}) for name in PUBLIC),
        *(("all_reduce", {"algorithm": algorithm}) for algorithm in ALGORITHMS),
        *((f"functional.{name}", given) for name, given in FUNCTIONAL.items() if name not in LOCAL),
    ],
    ids=str,
)
# Several, as each level of a hierarchical call compares only the ranks of a dim.
@pytest.mark.parametrize("others", [(1,), (1, 3), (2, 3)], ids=str)
def test_ranks_must_agree_on_every_keyword(name: str, usual: dict[str, Any], others: tuple[int, ...]) -> None:
    where, _, call = name.rpartition(".")
    keywords = keywords_of(getattr(Functional if where else Mesh, call))
    # A scatter's axis is the source's.
    for key in keywords - OWN - {*usual} - ({"axis", "dim"} if name == "scatter" else set()):
        given = {**{key: 0 for key in ("src", "dst") if key in keywords}, **NEEDED.get(key, {}), **usual}

        def body(mesh: Any, key: str = key, given: Any = given) -> None:
            x = torch.arange(1.0, 17.0).view(4, 4)
            more = {**given, key: TWO_VALUES[key][mesh.rank in others]}
            attrgetter(name)(mesh)(("dp", "tp"), x, **more)

        with pytest.raises(CallMismatchError) as caught:
            meshcomm.simulate(body, dims=TWO_DIMS, merge=MERGED, device="cpu")
        # Of two and two ranks, all are named.
        assert {*others} & {*caught.value.mismatched_ranks}, (name, key)


@pytest.mark.parametrize("name", PUBLIC)
def test_type_checkers_know_every_keyword(name: str) -> None:
    call = getattr(Mesh, name)
    for each in get_overloads(call):
        more = get_type_hints(each).get("more")
        named = keywords_of(each) - {"more"} | {*(get_type_hints(get_args(more)[0]) if more else ())}
        assert named == keywords_of(call), each
    assert len(get_overloads(call)) == 2
