"""The marker `mesh`: wrong arguments are refused by name."""

from __future__ import annotations

import pytest

# pytester forgets the imports of a suite, and torch cannot be imported twice.
from meshcomm.errors import MeshTestError
from meshcomm.testing.marker import read, vias


@pytest.mark.parametrize(
    ("args", "keywords", "what"),
    [
        (({"dp": 2}, 3), {}, "takes its dims by name"),
        ((), {"dp": "two"}, "unknown keyword 'dp'"),
        ((), {"dp": True}, "unknown keyword 'dp'"),
        ((), {"dp": 2, "rank_odrer": 3}, "unknown keyword 'rank_odrer'"),
        (({"dp": 2},), {"dp": 2}, "names dim 'dp' twice"),
        ((), {"dp": 2, "timeout_s": 0}, "timeout_s=0"),
        ((), {"dp": 2, "timeout_s": "long"}, "timeout_s='long'"),
        ((), {"dp": 2, "not_via": "gloo"}, "not_via='gloo'"),
        ((), {"dp": 2, "not_via": {"nccl": "why"}}, "not_via="),
        ((), {"dp": 2, "via": "gloo", "not_via": {"gloo": "why"}}, "not_via="),
        ((), {}, "has no mesh marker"),
    ],
)
def test_wrong_markers(args: tuple[object, ...], keywords: dict[str, object], what: str) -> None:
    with pytest.raises(MeshTestError, match=what):
        read(args, keywords, "gloo")
    good = read(({"timeout": 2},), {"dp": 2, "timeout_s": 20, "merge": {"all": ("timeout", "dp")}}, "gloo")
    assert (good.world_size, good.timeout_s, good.layout.label(3)) == (4, 20.0, "rank 3 (timeout=1 dp=1)")
    assert read((), {"dp": -1, "tp": 2, "world_size": 6}, "gloo").layout.dims == {"dp": 3, "tp": 2}
    assert read((), {"dp": 2, "not_via": {"gloo": "why"}}, "gloo").skip == "why"
    queued = read((), {"dp": 2, "not_via": {"gloo": "why"}}, "emulated_nccl")
    assert (queued.skip, queued.config["mesh"]["backend"]) == ("", "emulated_nccl")
    assert read((), {"tp": 2, "ranks": (1, 3)}, "gloo").layout.label(2) == "rank 2 (not in the mesh)"


def test_via() -> None:
    assert vias(None, None) == ("simulator",)
    assert vias(("simulator", "gloo"), None) == ("simulator", "gloo")
    assert vias(("simulator", "gloo"), "gloo") == ("gloo",)
    for wrong in ("nccl", (), ("gloo", "gloo"), 3):
        with pytest.raises(MeshTestError, match="the mesh marker has via="):
            vias(wrong, None)
