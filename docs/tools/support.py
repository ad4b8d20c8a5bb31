"""docs/reference/support.md from the table that refuses calls: `python docs/tools/support.py` writes it.

The table of torch's versions in it is kept, which docs/tools/torch_versions.py fills, and that of launchers, which is written
by hand from what `python -m tests.launchers.slurm` and its like print.
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


# Which device's tensors a backend carries, and what it lacks there. Of gloo, mpi, nccl and xccl as torch's documentation
# has it (torch.distributed, "Backends"), where "?" is what depends on how MPI was built; of ucc, which that table leaves
# out, as its ProcessGroupUCC implements them. A collective that is not named is there.
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
    """ "yes", "no", "?" (MPI, built for CUDA or not) or "list" (only torch's call on a list of tensors, which meshcomm
    does not make): whether `backend` carries out `operation`, a collective's name, "send" or "recv", on `device`.
    """
    known = CARRIES.get((backend, device))
    if known is None:
        return "no"
    return next((say for say, names in known.items() if operation in names or "*" in names), "yes")


def page() -> str:
    """Markdown, made from the table that the checks use."""
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    versions, launchers = (
        before.partition(first)[2].partition(last)[0] for first, last in (_VERSIONS, _LAUNCHERS)
    )
    lines = [
        "# Versions of torch, backends, and what each of them reduces",
        "",
        "Which versions of torch the tests were run on, and which backend reduces which dtype by which operation.",
        "",
        "## Versions of torch",
        "",
        "torch 2.11 or newer; `constraints.txt` pins the version that every commit is tested with. The tests of this repository on a machine without GPUs,",
        "by `python docs/tools/torch_versions.py`. Hooks on process groups came with torch 2.14; tests that need them are skipped",
        "on older ones.",
        "",
        f"{_VERSIONS[0]}{versions}{_VERSIONS[1]}",
        "Tried on two cores beside other work. What failed passed when it was run alone on the same version after its mend: on 2.11 and 2.12 three tests for want of setuptools 77, one for the path in which",
        "Gloo was built, on 2.11 one for the strides of a pipeline's input; two of a compiled `mesh.rearrange`, which compiles there since. On 2.12 and 2.13 one that the load had kept waiting passed as it was; on 2.14 one had counted what another test left behind, which it collects now.",
        "",
        "## Launchers",
        "",
        "Started for real in November 2026, four ranks on two cores, MPI and Slurm beside other work (Debian 12, torch 2.15), by `python -m tests.launchers.mpi`, `.slurm`, `.ray` and `.agents`.",
        "Each runs a script, kills a rank by SIGKILL, and looks for processes that are left: there were none.",
        "",
        f"{_LAUNCHERS[0]}{launchers}{_LAUNCHERS[1]}",
        "`accelerate launch --cpu --num_processes 4` starts one process, which `meshcomm.init` refuses for a mesh of four.",
        "",
        *_backends(),
        "## What each backend reduces",
        "",
        "Made by `python docs/tools/support.py` from the table that refuses calls before a byte moves; a test",
        "compares them. Data is only moved, never reduced, by broadcast, gathers, scatter, all_to_all and messages: these take every dtype.",
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
        f"Exact by a wider dtype and back: {widened}. Complex numbers add as pairs of floats. premul_sum scales, then sums.",
        "Every other backend is asked itself.",
    ]
    return "\n".join(lines) + "\n"


def _backends() -> list[str]:
    """Which operation is there on which backend for which device's tensors, and the rule which backend to take."""
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
        "Source: PyTorch's documentation of [torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html), section",
        '"Backends", read in November 2026; ucc, which its table leaves out and calls experimental, by the operations that torch\'s ProcessGroupUCC',
        "implements. ?: where MPI was built for the device, and torch from source with that MPI. lists: torch's call on a list of",
        "tensors only; meshcomm calls the form of one tensor, so this fails there. cuda is ROCm too, xpu is Intel's GPUs. A backend of a third party",
        "(`Backend.register_backend`) is taken by its name and asked itself. The tests run on gloo, and on a CPU backend that",
        "[behaves as nccl does](../design/emulated_nccl.md). nccl was tried by [`python -m tests.gpu`](../benchmarks.md#on-one-gpu)",
        "on one GPU; mpi, ucc and xccl are handed the calls and were not tried. A Gloo dim takes host memory whatever the mesh's device is.",
        "",
        'Which one, by the same documentation; `backend = "auto"` is nccl on cuda and gloo on cpu, another is named:',
        "",
        "| hosts | take |",
        "|---|---|",
        "| GPUs, whatever joins them | nccl (Intel: xccl); it is the only one with InfiniBand and GPUDirect. gloo where nccl makes trouble, which is slower |",
        "| CPUs, Ethernet | gloo |",
        '| CPUs, InfiniBand with IP over IB | gloo on that interface, as in `network.interfaces = ["ib0"]` |',
        "| CPUs, InfiniBand without IP over IB | mpi, in a torch that was built with it |",
        "",
    ]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
