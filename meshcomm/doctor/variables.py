"""Which environment variables matter to a job, and which of their values must not be shown?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from meshcomm.doctor.finding import Finding

HIDDEN: Final = "(hidden)"
_PREFIXES: Final = (
    "CUDA_", "GLOO_", "LOCAL_", "MASTER_", "MESHCOMM_", "MPI_LOCAL", "MV2_COMM_", "NCCL_", "OMPI_COMM_",
    "PMI_", "PYTORCH_", "SLURM_", "TORCH", "UCC_", "UCX_",
)  # fmt: skip
_NAMES: Final = frozenset((
    "RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "RES_OPTIONS", "USE_LIBUV",
))  # fmt: skip
_SECRET_NAME: Final = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|PRIVATE|COOKIE|CERT|SIGNATURE")
# user:password@ in an address, whatever the variable is called.
_SECRET_VALUE: Final = re.compile(r"://[^/\s@]*:[^/\s@]*@")


def matter(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that torch, its backends, launchers and meshcomm read; secrets as `(hidden)`.

    >>> matter({"RANK": "0", "HOME": "/", "NCCL_TOKEN": "x", "MASTER_ADDR": "a"})
    {'MASTER_ADDR': 'a', 'NCCL_TOKEN': '(hidden)', 'RANK': '0'}
    """
    return {
        name: HIDDEN if _SECRET_NAME.search(name.upper()) or _SECRET_VALUE.search(value) else value
        for name, value in sorted(env.items())
        if name in _NAMES or name.startswith(_PREFIXES)
    }


def variable_findings(env: Mapping[str, str]) -> Iterator[Finding]:
    """Settings that people forget in their shell."""
    if env.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield Finding(
            "warn",
            "TORCH_DISTRIBUTED_DEBUG makes torch check every collective by a second one",
            given=f"TORCH_DISTRIBUTED_DEBUG={env['TORCH_DISTRIBUTED_DEBUG']}",
            expected="it unset, OFF or INFO where speed counts",
            hint="unset TORCH_DISTRIBUTED_DEBUG",
        )
    if env.get("NCCL_SOCKET_IFNAME", "").startswith("lo") and "GLOO_SOCKET_IFNAME" not in env:
        yield Finding(
            "warn",
            "NCCL is told the loopback interface, Gloo is not",
            given=f"NCCL_SOCKET_IFNAME={env['NCCL_SOCKET_IFNAME']}",
            expected="the same interface for both",
            hint="[network] interfaces, and unset NCCL_SOCKET_IFNAME",
        )
