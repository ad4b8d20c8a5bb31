"""The order of mesh dims in a pattern."""

from __future__ import annotations

from meshcomm.layout import Layout
from meshcomm.pattern.roles import mesh_dims
from tests.pattern.test_apply import DIMS, MERGE, VIEWS


def test_dims_of_the_mesh_are_ordered_by_distance() -> None:
    layout = Layout(DIMS, merge=MERGE, views=VIEWS)
    assert mesh_dims(layout) == {"pp": 2, "model": 4, "dp": 2, "ep": 4, "data": 4, "tp": 2}
    assert list(mesh_dims(layout)) == ["pp", "model", "dp", "ep", "data", "tp"]
