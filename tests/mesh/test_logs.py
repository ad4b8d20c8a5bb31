"""Log lines say which rank and coords they come from, and come only from the ranks that are asked for."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from meshcomm.errors import MeshcommError
from meshcomm.layout import Layout
from meshcomm.mesh import Mesh, logs
from meshcomm.mesh.logs import CoordsFilter, CoordsFormatter, prefix
from meshcomm.mesh.where import Where

LAYOUT = Layout(
    {"pp": 2, "dp": 3, "tp": 2},
    merge={"model": ("pp", "tp")},
    views={"expert": {"pp": 2, "edp": 1, "ep": 6}},
)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("tp==0 and dp==0", lambda r, pp, dp, tp: tp == 0 and dp == 0),
        ("tp == 0 or dp == 0 and pp == 1", lambda r, pp, dp, tp: tp == 0 or (dp == 0 and pp == 1)),
        ("(tp == 0 or dp == 0) and pp == 1", lambda r, pp, dp, tp: (tp == 0 or dp == 0) and pp == 1),
        ("not tp == 0 and dp == 0", lambda r, pp, dp, tp: tp != 0 and dp == 0),
        ("not (tp == 0 and dp == 0)", lambda r, pp, dp, tp: not (tp == 0 and dp == 0)),
        ("not not tp == 0", lambda r, pp, dp, tp: tp == 0),
        ("dp in (0, 2)", lambda r, pp, dp, tp: dp in (0, 2)),
        ("dp in [1,]", lambda r, pp, dp, tp: dp == 1),
        ("dp not in (0,)", lambda r, pp, dp, tp: dp != 0),
        ("1 <= dp < 3", lambda r, pp, dp, tp: 1 <= dp < 3),
        ("0 < dp != 2", lambda r, pp, dp, tp: 0 < dp != 2),
        ("2 > dp >= 1", lambda r, pp, dp, tp: 2 > dp >= 1),
        ("pp == tp", lambda r, pp, dp, tp: pp == tp),
        ("rank in (0, 7, 99)", lambda r, pp, dp, tp: r in (0, 7)),
        ("rank > 5", lambda r, pp, dp, tp: r > 5),
        ("model == 3", lambda r, pp, dp, tp: pp == 1 and tp == 1),
        ("ep == 5", lambda r, pp, dp, tp: dp * 2 + tp == 5),
        ("(((edp==0)))", lambda r, pp, dp, tp: True),
    ],
)
def test_a_condition_means_what_python_means(text: str, same: object) -> None:
    assert callable(same)
    where = Where(text, LAYOUT)
    for rank in range(12):
        pp, dp, tp = rank // 6, rank // 2 % 3, rank % 2
        assert where.holds(rank) == same(rank, pp, dp, tp), rank


REST = "expected: comparisons of dims and rank with whole numbers, joined by and, or, not"


@pytest.mark.parametrize(
    ("text", "message", "given"),
    [
        ("", "the condition does not read: ", "'', at character "),
        ("  ", "the condition does not read: ", "'  ', at character "),
        ("tp", "the condition does not read: tp is no comparison", "'tp', at character 1"),
        ("tp=0", "the condition does not read: ", "'tp=0', at character "),
        ("tp==0 & dp==0", "the condition does not read: 0 & dp is neither a name nor a whole number", "'tp==0 & dp==0', at character 5"),
        ("tp==-1", "the condition does not read: -1 is neither a name nor a whole number", "'tp==-1', at character 5"),
        ("tp==1.0", "the condition does not read: 1.0 is neither a name nor a whole number", "'tp==1.0', at character 5"),
        ("tp==", "the condition does not read: ", "'tp==', at character "),
        ("tp==and", "the condition does not read: ", "'tp==and', at character "),
        ("(tp==0", "the condition does not read: ", "'(tp==0', at character "),
        ("tp==0)", "the condition does not read: ", "'tp==0)', at character "),
        ("tp==0 dp==0", "the condition does not read: ", "'tp==0 dp==0', at character "),
        ("dp in 0", "the condition does not read: in needs numbers in parentheses, as in (0, 1) or (0,)", "'dp in 0', at character 7"),
        ("dp in (0 1)", "the condition does not read: ", "'dp in (0 1)', at character "),
        ("dp in ()", "the condition does not read: in needs numbers in parentheses, as in (0, 1) or (0,)", "'dp in ()', at character 7"),
        ("dp in (tp,)", "the condition does not read: tp is not a number", "'dp in (tp,)', at character 8"),
        ("dp is 0", "the condition does not read: dp is 0 is no comparison", "'dp is 0', at character 1"),
        ("__import__('os')==0", "the condition does not read: __import__('os') is neither a name nor a whole number", "at character 1"),
        ("__import__==0", "the mesh has no dim __import__", "'__import__==0', at character 1"),
        ("tpp==0", "the mesh has no dim tpp", "'tpp==0', at character 1\n  expected: one of pp, dp, tp, edp, ep, model, rank\n  try:      did you mean \"tp\"?"),
        ("rnk==0", "the mesh has no dim rnk", "'rnk==0', at character 1\n  expected: one of pp, dp, tp, edp, ep, model, rank\n  try:      did you mean \"rank\"?"),
        ("tp==2", "no rank has tp 2", "'tp==2', at character 5, tp of size 2\n  expected: a coord from 0 to 1\n  try:      tp==1 is the last"),
        ("3==dp", "no rank has dp 3", "'3==dp', at character 1, dp of size 3"),
        ("edp in (0, 1)", "no rank has edp 1", "'edp in (0, 1)', at character 12, edp of size 1\n  expected: 0\n"),
    ],
)  # fmt: skip
def test_a_condition_that_cannot_be_meant_is_refused(text: str, message: str, given: str) -> None:
    with pytest.raises(MeshcommError) as caught:
        Where(text, LAYOUT)
    shown = str(caught.value)
    # What Python's parser says differs between its versions.
    first = shown.splitlines()[0]
    assert first == message or (message.endswith(": ") and first.startswith(message))
    assert given in shown
    if "does not read" in message:
        assert shown.splitlines()[2:] == [
            f"  {REST}",
            "  try:      as in tp==0 and (dp in (0, 1) or not rank < 4)",
        ]


def test_a_rank_outside_the_mesh_has_no_coords() -> None:
    part = Layout({"dp": 2}, rank_order=(4, 6))
    assert [Where("dp==1", part).holds(rank) for rank in range(8)] == [rank == 6 for rank in range(8)]
    assert [Where("not dp==1", part).holds(rank) for rank in range(8)] == [rank == 4 for rank in range(8)]
    assert [Where("rank < 5", part).holds(rank) for rank in range(8)] == [rank < 5 for rank in range(8)]
    assert (prefix(part, 6), prefix(part, 5)) == ("[r6 dp1]", "[r5]")


def test_every_line_has_the_prefix() -> None:
    formatter = CoordsFormatter(LAYOUT, 9)
    record = logging.LogRecord("mine", logging.WARNING, "f.py", 1, "one\n\nthree %d", (3,), None)
    assert formatter.format(record) == (
        "[r9 pp1 dp1 tp1] WARNING mine: one\n[r9 pp1 dp1 tp1]\n[r9 pp1 dp1 tp1] three 3"
    )
    try:
        raise ValueError("bad")
    except ValueError:
        record = logging.LogRecord("mine", logging.ERROR, "f.py", 1, "failed", None, sys.exc_info())
    shown = formatter.format(record).splitlines()
    assert shown[-1] == "[r9 pp1 dp1 tp1] ValueError: bad"
    assert all(line.startswith("[r9 pp1 dp1 tp1] ") for line in shown)
    assert len(shown) > 3
    assert prefix(Layout({"d2": 2}), 1) == "[r1 d2=1]"


def test_the_filter_is_one_of_loggings_own() -> None:
    record = logging.LogRecord("mine", logging.WARNING, "f.py", 1, "text", None, None)
    assert CoordsFilter(LAYOUT, 0, "tp==0").filter(record)
    assert not CoordsFilter(LAYOUT, 1, "tp==0").filter(record)


@pytest.mark.mesh(dp=2, tp=2, via="gloo")
def test_only_the_ranks_that_are_asked_for_write(mesh: Mesh) -> None:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    line = f"[r{mesh.rank} dp{mesh.coord('dp')} tp{mesh.coord('tp')}] WARNING of.a.user: step 7\n"
    for where, ranks in ((None, (0, 1, 2, 3)), ("tp==0 or dp==0", (0, 1, 2))):
        stream = io.StringIO()
        handler = logs.attach(mesh, where=where, stream=stream)
        logging.getLogger("of.a.user").warning("step %d", 7)
        root.removeHandler(handler)
        logging.getLogger("of.a.user").debug("after")
        assert (root.handlers, root.level) == before
        assert stream.getvalue() == (line if mesh.rank in ranks else "")
    with pytest.raises(MeshcommError, match="the mesh has no dim tpp\n"):
        logs.attach(mesh, where="tpp==0")
