"""The table of backends knows every operation and torch's devices."""

from __future__ import annotations

from torch.distributed import Backend

from meshcomm.collectives import ROWS
from tests.documents import tool


def test_the_table_of_backends_knows_every_operation_and_torch_s_devices() -> None:
    page = tool("support")
    of_torch = {(name, each) for name, devices in Backend.backend_capability.items() for each in devices}
    assert set(page.CARRIES) == {pair for pair in of_torch if pair[0] != "fake"}
    named = {name for cells in page.CARRIES.values() for names in cells.values() for name in names}
    assert named <= {"send", "recv", "*", *ROWS}
    # torch's own table: Gloo has no messages and no barrier for CUDA tensors, and MPI has no reduce_scatter.
    for operation in ("send", "recv", *ROWS):
        gloo, mpi = page.carries("gloo", "cuda", operation), page.carries("mpi", "cpu", operation)
        assert (gloo == "no") == (operation in ("send", "recv", "barrier"))
        assert (mpi == "no") == (operation == "reduce_scatter")
        assert page.carries("nccl", "cuda", operation) == page.carries("xccl", "xpu", operation) == "yes"
