"""The cost of a step over all ranks: FLOPs, their share of the devices' peak, and peak memory."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, final

import torch
from torch.distributed.tensor import DTensor

from meshcomm.config import TrainConfig
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import of_every_rank, ranks_of
from meshcomm.train.torch_private import flops_of, recomputes
from meshcomm.transport.torch_private import DispatchMode


class Memory(NamedTuple):
    """The highest peak of memory among the ranks, and the rank that had it. kind: what was measured."""

    nbytes: int
    rank: int
    kind: str


class Rates(NamedTuple):
    """FLOP/s of the model on a rank, as the mean over ranks; and its share of what the devices can do, where known."""

    model_flops_per_s: float
    mfu: float | None


@final
class Cost:
    """FLOPs, time and memory of a training step. Every rank of the mesh has a Cost, with the same results.

    FLOPs are those of the first step that was counted; peak memory is that of the last comparison.
    """

    def __init__(self, mesh: Mesh, train: TrainConfig) -> None:
        self._mesh, self._train = mesh, train
        self._counter: FlopCounter | None = None
        self._model = 0
        self._peak: float | None = None
        self.memory: Memory | None = None
        # Optimisers make their state in the first step, so the second one may need more.
        self._comparisons_due = 2

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the first step that runs inside; any other runs as it is."""
        if self._counter is not None:
            yield
            return
        self._counter = FlopCounter()
        with self._counter:
            yield

    def looked(self) -> None:
        """Before a line is reported: compare ranks at the first two. Called by: every rank."""
        if self._comparisons_due:
            self._comparisons_due -= 1
            self.compare_counts()

    def compare_counts(self) -> None:
        """Sum FLOPs up over the ranks and find the largest peak memory. Called by: every rank; one gather of objects."""
        counted = 0 if self._counter is None else self._counter.model
        peak = peak_flops(self._train, self._mesh.device)
        nbytes, kind = peak_memory(self._mesh.device)
        table = of_every_rank(self._mesh, [counted, peak, nbytes])
        model, peaks, most = zip(*table, strict=True)
        self._model = sum(model)
        self._peak = None if None in peaks else sum(peaks)
        nbytes = max(most)
        self.memory = Memory(nbytes, ranks_of(self._mesh)[most.index(nbytes)], kind)

    def rates(self, steps_per_s: float) -> Rates | None:
        """Of so many steps a second; None while nothing was counted, or where there was nothing that counts."""
        if not self._model or not steps_per_s:
            return None
        ranks = len(ranks_of(self._mesh))
        rate = self._model * steps_per_s
        return Rates(rate / ranks, None if self._peak is None else rate / self._peak)


def peak_memory(device: torch.device) -> tuple[int, str]:
    """The most bytes so far, what came before the run included, and of what: torch's on CUDA, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "allocated by torch"
    # Not on Windows.
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "resident in the process"


@final
class FlopCounter(DispatchMode):  # type: ignore[misc]
    """While it is entered: `model`, the FLOPs that this thread, and the backward passes that it starts, need.

    By the formulas of torch.utils.flop_counter: 2 m n k for a matrix product, likewise for products of groups of rows,
    convolutions and attention, whose causal mask hides nothing; anything else counts nothing. Of compiled code, what it
    calls of torch's kernels, not those that it generates. Of DTensors, a rank's own part.

    Left out is what is computed again: by activation checkpointing, in a backward pass, and the scores in the backward
    of fused attention.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.model = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a call and make it."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = flops_of(func)
        if formula is not None and not recomputes():
            flops = int(formula(*args, **kwargs, out_val=result))
            # Five products where the gradients need four.
            again = "attention" in str(func) and "backward" in str(func)
            self.model += flops * 4 // 5 if again else flops
        return result


# Dense, without sparsity, as the data sheets have it, in TFLOP/s for bfloat16, TF32 and float32; None: not in them. By a
# pattern of torch.cuda.get_device_name. The first that is found counts.
_PEAKS: Final[dict[str, tuple[float | None, ...]]] = {
    # nvidia.com/en-us/data-center: gb200-nvl72, b200, h200, h100, a100, l40s, l4, a10, a30, a40; half of what is said "with sparsity".
    r"\bGB200\b": (2500, None, None),
    r"\bB200\b": (2250, None, None),
    r"\bH[12]00 NVL\b": (835.5, 417.5, 60),
    r"\bH100 PCIe\b": (756, 378, 51),
    r"\bG?H[12]00\b": (989.4, 494.7, 66.9),
    r"\bA100\b": (312, 156, 19.5),
    r"\bL40S\b": (362, 183, 91.6),
    r"\bL4\b": (121, 60, 30.3),
    r"\bA10\b": (125, 62.5, 31.2),
    r"\bA30\b": (165, 82, 10.3),
    r"\bA40\b": (149.7, 74.8, 37.4),
    # NVIDIA's white papers of the Ada and Ampere GA102 architectures, with sums in float32.
    r"\bRTX 4090$": (165.2, 82.6, 82.6),
    r"\bRTX 3090$": (71, 35.6, 35.6),
    # amd.com/en/products/accelerators/instinct; of a MI250X one of its two devices.
    r"\bMI3(00|25)X\b": (1307.4, None, 163.4),
    r"\bMI250X\b": (191.5, None, None),
}


def peak_flops(train: TrainConfig, device: torch.device) -> float | None:
    """The most FLOP/s of this rank's device: as train.peak_flops says, or of a well-known GPU; None where nobody knows.

    Of a GPU in the type that [train] multiplies in. A part of a GPU (MIG) is none of those that are known, nor a CPU.
    """
    if train.peak_flops is not None:
        return train.peak_flops
    if device.type != "cuda":
        return None
    tf32 = (train.float32_matmul_precision or torch.get_float32_matmul_precision()) != "highest"
    return known_peak(torch.cuda.get_device_name(device), train.compute_dtype or train.dtype, tf32)


def known_peak(name: str, dtype: str, tf32: bool = False) -> float | None:
    """FLOP/s of the GPU that torch.cuda.get_device_name calls `name`; None where it or its number is not known.

    >>> known_peak("NVIDIA H100 80GB HBM3", "bfloat16"), known_peak("NVIDIA H100 PCIe", "float32", tf32=True)
    (989400000000000.0, 378000000000000.0)
    >>> known_peak("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16") is known_peak("Abacus", "float32") is None
    True
    """
    column = "tf32" if dtype == "float32" and tf32 else dtype
    found = next((peak for pattern, peak in _PEAKS.items() if re.search(pattern, name)), ())
    tera = dict(zip(("bfloat16", "tf32", "float32"), found, strict=False)).get(column)
    return None if "MIG" in name.split() or tera is None else round(tera * 1e12, -9)
