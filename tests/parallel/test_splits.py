"""A configuration is the one of the open mesh."""

from __future__ import annotations

import pytest

import meshcomm
from meshcomm.config import load_config
from meshcomm.errors import LayoutError
from meshcomm.parallel.splits import sections
from meshcomm.testing import Pool


def other_dims() -> None:
    config = load_config(
        {
            "mesh": {"dims": {"dp": -1, "tp": 2}, "device": "cpu"},
            "parallel": {"data": "dp", "tensor": "tp"},
            "model": {
                "num_layers": 1,
                "hidden_size": 8,
                "num_heads": 2,
                "num_kv_heads": 2,
                "intermediate_size": 8,
            },
            "data": {"seq_len": 8},
            "train": {"steps": 1, "global_batch_size": 4, "micro_batch_size": 1},
        }
    )
    with meshcomm.init(config) as mesh:
        assert sections(mesh, config).model.hidden_size == 8
        with pytest.raises(LayoutError) as caught:
            sections(mesh, load_config(config, ["mesh.dims={ dp = 4, tp = 1 }"]))
        assert str(caught.value) == (
            "the open mesh and this configuration have different dims\n"
            "  given:    an open mesh of { dp = 2, tp = 2 }, mesh.dims = { dp = 4, tp = 1 }\n"
            "  expected: the configuration that the mesh was opened with\n"
            "  try:      meshcomm.config.load_config(config, ['mesh.dims={ dp = 2, tp = 2 }'])"
        )
        with pytest.raises(meshcomm.MeshcommError, match="describes a mesh but no training"):
            sections(mesh, load_config({"mesh": {"dims": {"dp": 2, "tp": 2}}}))
        with pytest.raises(meshcomm.MeshcommError, match="not divisible by dp: 5 % 2 = 1"):
            sections(mesh, load_config(config, ["train.global_batch_size=5"]))


def test_the_configuration_must_be_the_one_of_the_open_mesh(pool: Pool) -> None:
    pool.run(other_dims, ranks=4)
