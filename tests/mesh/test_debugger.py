"""mesh.debug.breakpoint stops one rank in the debugger while the others wait; stepping continues in the user's code."""

from __future__ import annotations

import contextlib
import io
import sys

import pytest
import torch

import meshcomm
from meshcomm.mesh import Mesh


def stopped(mesh: Mesh, typed: str, **arguments: int) -> str:
    """Return the debugger's output on the rank that stops, and nothing on the others."""
    shown = io.StringIO()
    before, sys.stdin = sys.stdin, io.StringIO(typed)
    try:
        with contextlib.redirect_stdout(shown):
            secret = 6 * 7  # noqa: F841 (looked at in the debugger)
            mesh.debug.breakpoint(**arguments)
            assert not arguments.get("dp") or mesh.store.check(["looked"]), "the others did not wait"
            after = mesh.all_reduce("dp", torch.ones(1)).item()
            assert after == 2
            sys.settrace(None)
    finally:
        sys.stdin = before
    return shown.getvalue()


@pytest.mark.mesh(dp=2, tp=1, via="gloo")
def test_one_rank_stops_and_the_others_wait(mesh: Mesh) -> None:
    second = stopped(mesh, "p secret\nmesh.store.set('looked', '')\nc\n", dp=1)
    first = stopped(mesh, "n\nn\nn\np after\nc\n")
    assert stopped(mesh, "", skip=3) == ""
    with pytest.raises(meshcomm.MeshcommError, match="the mesh has no dim 'pp'"):
        stopped(mesh, "", pp=1)
    if mesh.rank == 1:
        line = "rank 1 (dp=1 tp=0) stopped; the others wait until it continues. c: continue, n: step, q: end"
        assert second.startswith(f"{line}\n")
        assert "mesh.debug.breakpoint(**arguments)" in second  # the debugger shows the user's line
        assert "(Pdb) 42\n" in second and first == ""
    else:
        assert second == ""
        assert "-> assert not arguments.get" in first  # n: the next line of the user's code
        assert "(Pdb) 2.0\n" in first


def quits(mesh: Mesh) -> None:
    stopped(mesh, "q\n")


def test_quitting_ends_the_rank_and_those_that_wait() -> None:
    with pytest.raises(meshcomm.errors.MeshcommError, match=r"rank 0.*BdbQuit"):
        meshcomm.simulate(quits, dims={"dp": 2})
