"""The cost of a step over all ranks: FLOPs, utilization of the devices' peak, and peak memory."""

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
    """The highest peak memory on any rank, and the rank where it was measured. kind: the kind of memory that was measured."""

    nbytes: int
    rank: int
    kind: str


class Rates(NamedTuple):
    """The model's FLOP/s per rank, averaged over ranks, and the fraction of the devices' peak, if it is known."""

    model_flops_per_s: float
    mfu: float | None


@final
class Cost:
    """The FLOPs, time and memory of a training step. Every rank of the mesh has a Cost, with the same results.

    FLOPs are counted only in the first step inside `counting`. `memory` is the result of the most recent comparison.
    """

    def __init__(self, mesh: Mesh, train: TrainConfig) -> None:
        self._mesh, self._train = mesh, train
        self._counter: FlopCounter | None = None
        self._model = 0
        self._peak: float | None = None
        self.memory: Memory | None = None
        # Optimizers allocate their state in the first step, so the second step may need more memory.
        self._comparisons_due = 2

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the FLOPs of the first step that runs inside the context. Later steps are not counted."""
        if self._counter is not None:
            yield
            return
        self._counter = FlopCounter()
        with self._counter:
            yield

    def looked(self) -> None:
        """Compare the ranks before each of the first two reported lines. Called by: every rank."""
        if self._comparisons_due:
            self._comparisons_due -= 1
            self.compare_counts()

    def compare_counts(self) -> None:
        """Sum the FLOPs over all ranks and find the highest peak memory. Called by: every rank. Gathers objects once."""
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
        """Return the rates at the given number of steps per second.

        Return None if no step was counted, or if the counted step has no FLOPs.
        """
        if not self._model or not steps_per_s:
            return None
        ranks = len(ranks_of(self._mesh))
        rate = self._model * steps_per_s
        return Rates(rate / ranks, None if self._peak is None else rate / self._peak)


def peak_memory(device: torch.device) -> tuple[int, str]:
    """Return the peak memory in bytes since the process started, and its kind. On CUDA, this is the memory that torch has
    allocated; otherwise, the process's resident memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "allocated by torch"
    # This module does not exist on Windows.
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "resident in the process"


@final
class FlopCounter(DispatchMode):  # type: ignore[misc]
    """A context manager that counts a model's FLOPs in this thread and in the backward passes that this thread starts.

    The formulas are the same as in torch.utils.flop_counter: 2 m n k for a matrix product, and corresponding formulas for
    grouped matrix products, convolutions and attention. The causal mask of attention is ignored. Other operators count as 0. In
    compiled code, calls to torch's kernels are counted, but generated kernels are not. For DTensors, only this rank's part
    is counted.

    Recomputation by activation checkpointing is not counted, nor is that of the scores in fused attention's backward pass.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.model = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled code compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a call and run it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = flops_of(func)
        if formula is not None and not recomputes():
            flops = int(formula(*args, **kwargs, out_val=result))
            # The backward pass computes five products, of which the gradients need four.
            again = "attention" in str(func) and "backward" in str(func)
            self.model += flops * 4 // 5 if again else flops
        return result


# Dense, without sparsity, as in the data sheets, in TFLOP/s for bfloat16, TF32 and float32; None if not given. Keys are
# patterns of torch.cuda.get_device_name. The first matching pattern is used.
_PEAKS: Final[dict[str, tuple[float | None, ...]]] = {
    # nvidia.com/en-us/data-center: gb200-nvl72, b200, h200, h100, a100, l40s, l4, a10, a30, a40; half of the figures "with sparsity".
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
    # NVIDIA's white papers on the Ada and Ampere GA102 architectures, with float32 accumulation.
    r"\bRTX 4090$": (165.2, 82.6, 82.6),
    r"\bRTX 3090$": (71, 35.6, 35.6),
    # amd.com/en/products/accelerators/instinct; for an MI250X, one of its two devices.
    r"\bMI3(00|25)X\b": (1307.4, None, 163.4),
    r"\bMI250X\b": (191.5, None, None),
}


def peak_flops(train: TrainConfig, device: torch.device) -> float | None:
    """Return the peak FLOP/s of this rank's device: train.peak_flops, or the data sheet's figure for a well-known GPU. None
    if it is unknown.

    A GPU's figure depends on the dtype that [train] sets for matrix products. The peak of a CPU or a MIG slice is unknown.
    """
    if train.peak_flops is not None:
        return train.peak_flops
    if device.type != "cuda":
        return None
    tf32 = (train.float32_matmul_precision or torch.get_float32_matmul_precision()) != "highest"
    return known_peak(torch.cuda.get_device_name(device), train.compute_dtype or train.dtype, tf32)


def known_peak(name: str, dtype: str, tf32: bool = False) -> float | None:
    """Return the peak FLOP/s of the GPU for which torch.cuda.get_device_name returns `name`. None if the GPU or its peak is
    unknown.

    >>> known_peak("NVIDIA H100 80GB HBM3", "bfloat16"), known_peak("NVIDIA H100 PCIe", "float32", tf32=True)
    (989400000000000.0, 378000000000000.0)
    >>> known_peak("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16") is known_peak("Abacus", "float32") is None
    True
    """
    column = {"float16": "bfloat16", "float32": "tf32" if tf32 else "float32"}.get(dtype, dtype)
    peaks = next((peak for pattern, peak in _PEAKS.items() if re.search(pattern, name)), ())
    tera = dict(zip(("bfloat16", "tf32", "float32"), peaks, strict=False)).get(column)
    return None if "MIG" in name.split() or tera is None else round(tera * 1e12, -9)
