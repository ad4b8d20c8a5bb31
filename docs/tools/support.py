"""Generates docs/reference/support.md from the table that refuses calls: `python docs/tools/support.py`.

Two tables in it are kept. docs/tools/torch_versions.py fills the table of torch's versions. The table of launchers is
written by hand from the output of `python -m tests.launchers.slurm` and similar commands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from meshcomm.collectives import ROWS
from meshcomm.reductions import REDUCTIONS
from meshcomm.transport.support import REDUCED, WIDENED, name_of, reduce_refusal

PAGE: Final = Path(__file__).parents[1] / "reference" / "support.md"
_VERSIONS: Final = ("<!-- torch versions -->\n", "<!-- end of torch versions -->\n")
_LAUNCHERS: Final = ("<!-- launchers tried -->\n", "<!-- end of launchers tried -->\n")


# The devices that a backend supports, and the operations that it lacks there. For gloo, mpi, nccl and xccl from torch's
# documentation (torch.distributed, "Backends"); "?" depends on how MPI was built. That table omits ucc, which follows
# torch's ProcessGroupUCC. Collectives that are not named are supported.
_MESSAGES: Final = frozenset(("send", "recv"))
CARRIES: Final[dict[tuple[str, str], dict[str, frozenset[str]]]] = {
    ("gloo", "cpu"): {},
    ("gloo", "cuda"): {"no": _MESSAGES | {"barrier"}},
    ("mpi", "cpu"): {"no": frozenset(("reduce_scatter",))},
    ("mpi", "cuda"): {"no": frozenset(("reduce_scatter",)), "?": frozenset(("*",))},
    ("nccl", "cuda"): {},
    ("ucc", "cpu"): {"list": frozenset(("reduce_scatter",))},
    ("ucc", "cuda"): {"list": frozenset(("reduce_scatter",))},
    ("xccl", "xpu"): {},
}


def carries(backend: str, device: str, operation: str) -> str:
    """Whether `backend` supports `operation`, a collective's name, "send" or "recv", on `device`.

    "yes", "no", "?" (depends on how MPI was built) or "list" (only torch's call on a list of tensors, which meshcomm
    does not use).
    """
    known = CARRIES.get((backend, device))
    if known is None:
        return "no"
    return next((say for say, names in known.items() if operation in names or "*" in names), "yes")


def page() -> str:
    """The page in Markdown, generated from the table that the checks use."""
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    versions, launchers = (
        before.partition(first)[2].partition(last)[0] for first, last in (_VERSIONS, _LAUNCHERS)
    )
    lines = [
        "# Versions of torch, backends, and what each of them reduces",
        "",
        "This page lists the versions of torch that the tests ran on, the launchers that were tested, and the dtypes and operations of each backend.",
        "",
        "## Versions of torch",
        "",
        "meshcomm requires torch 2.11 or newer. `constraints.txt` pins the version that every commit is tested with.",
        "The table shows the tests of this repository on a machine without GPUs, run by `python docs/tools/torch_versions.py`.",
        "Hooks on process groups were added in torch 2.14. Tests that need them are skipped on older versions.",
        "",
        f"{_VERSIONS[0]}{versions}{_VERSIONS[1]}",
        "The tests ran on two cores that other jobs also used. After a fix, unless noted, each failed test passed when it was run alone on the same version:",
        "",
        "- torch 2.11 and 2.12: three tests required setuptools 77. One test depended on the path in which Gloo was built.",
        "- torch 2.11: one test checked the strides of a pipeline's input. Two used a compiled `mesh.rearrange`, which now compiles on this version.",
        "- torch 2.11: torch.compile lost the gradient of the rotary embedding, a `torch.autograd.Function`, in every training with `train.compile` and meshcomm's\n"
        "  own transformer. Compiled blocks no longer use this function. Gradients of compiled and eager blocks were then compared on torch 2.11 in float64, with\n"
        "  data, shard, tensor, context and pipeline parallelism, experts, dropout and activation checkpointing: the largest difference was 1.2e-15.",
        "- torch 2.12 and 2.13: one test timed out under load and passed without a change.",
        "- torch 2.14: one test counted objects that another test had left; it now collects them first.",
        "",
        "## Launchers",
        "",
        "These launchers were run in November 2026 with four ranks on two cores, by `python -m tests.launchers.mpi`, `.slurm`, `.ray` and `.agents` (Debian 12, torch 2.15).",
        "Other jobs used the machine during the MPI and Slurm runs. Each run starts a script, kills a rank by SIGKILL, and looks for leftover processes. There were none.",
        "",
        f"{_LAUNCHERS[0]}{launchers}{_LAUNCHERS[1]}",
        "`accelerate launch --cpu --num_processes 4` starts one process, which `meshcomm.init` refuses for a mesh of four.",
        "",
        *_backends(),
        "## What each backend reduces",
        "",
        "`python docs/tools/support.py` generates these tables from the table that refuses calls before any data is sent. A test compares the two.",
        "Broadcast, gathers, scatter, all_to_all and messages only move data, so they take every dtype.",
        "",
    ]
    for backend, dtypes in REDUCED.items():
        lines += [f"### {backend}", "", "| dtype | " + " | ".join(REDUCTIONS) + " |"]
        lines += ["|---" * (len(REDUCTIONS) + 1) + "|"]
        for dtype in sorted(dtypes, key=name_of):
            cells = ["yes" if reduce_refusal(backend, op, dtype) is None else "-" for op in REDUCTIONS]
            lines.append(f"| {name_of(dtype)} | {' | '.join(cells)} |")
        lacking = ", ".join(sorted(op for op, row in REDUCTIONS.items() if backend in row.wire.lacking))
        lines += ["", *([f"{backend} itself lacks {lacking}.", ""] if lacking else [])]
    widened = ", ".join(f"{name_of(a)} as {name_of(b)}" for a, b in WIDENED.items())
    lines += [
        f"These dtypes are reduced exactly in a wider dtype and converted back: {widened}.",
        "Complex numbers are added as pairs of floats. premul_sum scales, then sums. Every other backend decides by itself which dtypes it accepts.",
    ]
    return "\n".join(lines) + "\n"


def _backends() -> list[str]:
    """The operations of each backend by device, and how to choose a backend."""
    lines = [
        "## Backends",
        "",
        "| | " + " | ".join(f"{backend}, {device}" for backend, device in CARRIES) + " |",
        "|---" * (len(CARRIES) + 1) + "|",
    ]
    for operation in ("send", "recv", *ROWS):
        cells = {"yes": "yes", "no": "-", "?": "?", "list": "lists"}
        row = [cells[carries(backend, device, operation)] for backend, device in CARRIES]
        lines.append(f"| {operation} | {' | '.join(row)} |")
    return [
        *lines,
        "",
        'Source: PyTorch\'s documentation of [torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html), section "Backends", read in November 2026.',
        "Its table omits ucc, which it calls experimental; the columns for ucc follow the operations that torch's ProcessGroupUCC implements.",
        "",
        "- `?`: available if MPI was built for the device, and torch was built from source with that MPI.",
        "- `lists`: torch supports the call on a list of tensors only. meshcomm uses the single-tensor form, so the call fails on this backend.",
        "- cuda includes ROCm; xpu is Intel's GPUs.",
        "- A third-party backend (`Backend.register_backend`) is selected by its name. meshcomm passes the calls on, and the backend accepts or refuses them.",
        "",
        "The tests run on gloo, and on a CPU backend that [behaves as nccl does](../design/emulated_nccl.md). nccl was run by [`python -m tests.gpu`](../benchmarks.md#on-one-gpu) on one GPU.",
        "Calls are passed to mpi, ucc and xccl, but these backends were not tested. A Gloo dim accepts host memory, whatever the mesh's device is.",
        "",
        'The same documentation recommends the backends below. `backend = "auto"` selects nccl on cuda and gloo on cpu; name any other backend explicitly.',
        "",
        "| hosts | backend |",
        "|---|---|",
        "| GPUs, any network | nccl (Intel: xccl), the only backend with InfiniBand and GPUDirect. If nccl causes problems, use gloo, which is slower |",
        "| CPUs, Ethernet | gloo |",
        '| CPUs, InfiniBand with IP over IB | gloo on that interface, as in `network.interfaces = ["ib0"]` |',
        "| CPUs, InfiniBand without IP over IB | mpi, in a torch build with MPI support |",
        "",
    ]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
