"""Parameters say how they are split."""

from __future__ import annotations

import meshcomm
from meshcomm.mesh import Mesh
from meshcomm.parallel import TensorSplit
from meshcomm.parallel.tensor.parameters import split_dims


def test_parameters_say_how_they_are_split() -> None:
    def program(mesh: Mesh) -> list[tuple[str, ...]]:
        splits = [TensorSplit(mesh, dim) for dim in ("tp", "one", None)]
        made = [split.parameter(4, 6, axis=axis) for split in splits for axis in (0, 1, None)]
        return [split_dims(parameter) for parameter in made]

    found = meshcomm.simulate(program, dims={"dp": 2, "tp": 2, "one": 1})
    assert found == [[("tp",), ("tp",), (), (), (), (), (), (), ()]] * 4
