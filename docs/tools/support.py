"""Generate docs/reference/support.md from the table that checks calls: `python docs/tools/support.py`.

It keeps two tables of the page. docs/tools/torch_versions.py fills the table of torch versions. The table of launchers is
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


# The devices that each backend supports, and the operations that it does not support on them. Operations that are not
# listed are supported. The entries for gloo, mpi, nccl and xccl follow torch's documentation (torch.distributed,
# "Backends"), and the entries for ucc follow torch's ProcessGroupUCC. "?" depends on how MPI was built.
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
    """Whether `backend` supports `operation` on `device`. `operation` is the name of a collective, "send" or "recv".

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
        "This page lists the torch versions that the tests ran on, the launchers that were tested, and the dtypes and operations that each backend supports.",
        "",
        "## Versions of torch",
        "",
        "meshcomm requires torch 2.11 or newer. `constraints.txt` pins the version that every commit is tested with.",
        "The table shows the results of this repository's tests on a machine without GPUs, as run by `python docs/tools/torch_versions.py`.",
        "Hooks on process groups were added in torch 2.14. On older versions, tests that need these hooks are skipped.",
        "",
        f"{_VERSIONS[0]}{versions}{_VERSIONS[1]}",
        "The tests ran on two cores that were shared with other jobs. Unless noted otherwise, each failed test was fixed and then passed alone on the same version:",
        "",
        "- torch 2.11 and 2.12: three tests required setuptools 77. One test depended on the path in which Gloo had been built.",
        "- torch 2.11: one test checked the strides of a pipeline's input. Two tests compiled `mesh.rearrange`, which now compiles on this version.",
        "- torch 2.11: torch.compile lost the gradient of the rotary embedding, a `torch.autograd.Function`, in every training with `train.compile` and meshcomm's\n"
        "  own transformer. Compiled blocks no longer use this function. The gradients of compiled and eager blocks were then compared on torch 2.11 in float64, with\n"
        "  data, shard, tensor, context and pipeline parallelism, experts, dropout and activation checkpointing: the largest difference was 1.2e-15.",
        "- torch 2.12 and 2.13: one test timed out under load and passed without a change.",
        "- torch 2.14: one test counted objects that another test had left behind. It now runs the garbage collector first.",
        "",
        "## Launchers",
        "",
        "The launchers were tested in November 2026 with four ranks on two cores, by `python -m tests.launchers.mpi`, `.slurm`, `.ray` and `.agents` (Debian 12, torch 2.15).",
        "Other jobs used the machine during the MPI and Slurm runs. Each run starts a script, kills a rank with SIGKILL, and checks for leftover processes. None were found.",
        "",
        f"{_LAUNCHERS[0]}{launchers}{_LAUNCHERS[1]}",
        "`accelerate launch --cpu --num_processes 4` starts only one process, so `meshcomm.init` raises an error for a mesh of four.",
        "",
        *_backends(),
        "## What each backend reduces",
        "",
        "`python docs/tools/support.py` generates these tables from the rules that meshcomm uses to check each call before any data is sent. A test compares the two.",
        "broadcast, gather, all_gather, scatter, all_to_all and messages only move data, so they accept every dtype.",
        "The rules are for calls of the mesh. A call of torch.distributed also reduces bool with sum (any) and product (all). On gloo it has no premul_sum and carries",
        "none of the dtypes that the mesh widens, nor uint64 and one-byte floats, except in messages; the simulator refuses what gloo refuses.",
        "",
    ]
    for backend, dtypes in REDUCED.items():
        lines += [f"### {backend}", "", "| dtype | " + " | ".join(REDUCTIONS) + " |"]
        lines += ["|---" * (len(REDUCTIONS) + 1) + "|"]
        for dtype in sorted(dtypes, key=name_of):
            cells = ["yes" if reduce_refusal(backend, op, dtype) is None else "-" for op in REDUCTIONS]
            lines.append(f"| {name_of(dtype)} | {' | '.join(cells)} |")
        lacking = ", ".join(sorted(op for op, row in REDUCTIONS.items() if backend in row.wire.lacking))
        lines += ["", *([f"{backend} does not support {lacking}.", ""] if lacking else [])]
    widened = ", ".join(f"{name_of(a)} as {name_of(b)}" for a, b in WIDENED.items())
    lines += [
        f"These dtypes are reduced exactly in a wider dtype and converted back: {widened}.",
        "Complex numbers are added as pairs of floats. Every other backend decides which dtypes it accepts.",
        "[`mesh.all_reduce`](api/mesh.md#meshcomm.Mesh.all_reduce) explains each operation.",
    ]
    return "\n".join(lines) + "\n"


def _backends() -> list[str]:
    """The section that lists the operations of each backend by device, and how to choose a backend."""
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
        'The table follows the section "Backends" in PyTorch\'s documentation of [torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html), as of November 2026.',
        "PyTorch's table omits ucc, which PyTorch describes as experimental. The columns for ucc show the operations that torch's ProcessGroupUCC implements.",
        "",
        "- `?`: available if MPI was built for the device, and torch was built from source with that MPI.",
        "- `lists`: torch supports only the form of the call that takes a list of tensors. meshcomm uses the single-tensor form, so the call fails on this backend.",
        "- `cuda` includes ROCm. `xpu` means Intel GPUs.",
        "- A third-party backend (`Backend.register_backend`) is selected by its name. meshcomm passes each call to the backend, which accepts or refuses it.",
        "",
        "The tests run on gloo, and on a CPU backend that [behaves like nccl](../design/emulated_nccl.md). nccl was tested with [`python -m tests.gpu`](../benchmarks.md#on-one-gpu) on one GPU.",
        "meshcomm passes calls to mpi, ucc and xccl, but these backends were not tested. A Gloo dim accepts tensors in host memory, whatever the mesh's device is.",
        "",
        'PyTorch\'s documentation recommends the backends in the next table. `backend = "auto"` selects nccl on cuda and gloo on cpu. Set any other backend explicitly.',
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
