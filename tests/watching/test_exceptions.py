"""Which errors are a backend's, and what NCCL's errors say."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from meshcomm.errors import CollectiveTimeout
from meshcomm.watching.exceptions import Reason, backend_error, reason_of


def test_which_error_is_a_backends() -> None:
    lost = RuntimeError("[pair.cc:5] Connection closed by peer")
    assert backend_error(lost) is lost
    wrapped = KeyError("mine")
    wrapped.__cause__ = lost
    assert backend_error(wrapped) is lost
    explained = CollectiveTimeout("did not end in time")
    explained.__cause__ = lost
    assert backend_error(explained) is None
    while_handled = ValueError("mine")
    while_handled.__context__ = lost
    assert backend_error(while_handled) is None
    left = SystemExit(3)
    left.__context__ = lost
    assert backend_error(left) is lost
    assert backend_error(RuntimeError("shapes do not match")) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=8, "
            "NumelOut=8, Timeout(ms)=10000) ran for 10031 milliseconds before timing out.",
            Reason.TIMEOUT,
        ),
        (
            "NCCL error in: ProcessGroupNCCL.cpp:2090, remote process exited or there was a network error, NCCL "
            "version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting.",
            Reason.CLOSED,
        ),
        ("NCCL communicator was aborted on rank 1.", Reason.CLOSED),
        (
            "NCCL error in: NCCLUtils.cpp:94, invalid usage, NCCL version 2.27.5\nncclInvalidUsage: This usually "
            "reflects invalid usage of NCCL library.",
            Reason.DATA,
        ),
        ("ncclUnhandledCudaError: Call to CUDA function failed.", Reason.OTHER),
    ],
)
def test_what_nccl_says_is_understood(text: str, reason: Reason) -> None:
    assert reason_of(dist.DistBackendError(text)) == reason
