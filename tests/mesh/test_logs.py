"""Log lines name the rank and the coords that they come from."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from meshcomm.layout import Layout
from meshcomm.mesh import Mesh, logs
from meshcomm.mesh.logs import CoordsFormatter, prefix

LAYOUT = Layout({"pp": 2, "dp": 3, "tp": 2})


def test_a_rank_outside_the_mesh_has_no_coords() -> None:
    part = Layout({"dp": 2}, rank_order=(4, 6))
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


@pytest.mark.mesh(dp=2, tp=2, via="gloo")
def test_log_lines_of_every_rank(mesh: Mesh) -> None:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    handler = logs.attach(mesh)
    handler.setStream(stream := io.StringIO())
    logging.getLogger("of.a.user").warning("step %d", 7)
    root.removeHandler(handler)
    assert (root.handlers, root.level) == before
    line = f"[r{mesh.rank} dp{mesh.coord('dp')} tp{mesh.coord('tp')}] WARNING of.a.user: step 7\n"
    assert stream.getvalue() == line
