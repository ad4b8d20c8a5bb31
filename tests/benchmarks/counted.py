"""One step of Llama 3 8B and 70B on one of 64 and 512 ranks, with meshcomm and with torchtitan 0.3. Shows calls and bytes by kind,
FLOPs, peak memory, and operators that the host launches. Nothing is computed, sent or held.

    python -m tests.benchmarks.counted [CASE ...]                      # meshcomm; cases: fsdp, fsdp+tp, pp+fsdp+tp, cp, cp ring
    PYTHONPATH=. PYTHON -m tests.benchmarks.counted --torchtitan ...   # a Python that has torchtitan, and torch as here

Both run on torch's fake backend with the CPU's operators and the same meter. Both differ from a run on GPUs in the same ways.
Attention is one operator of torch, which replaces torchtitan's flex or varlen attention. Norms consist of several operators.
The gradient norm uses the foreach kernels of GPUs. The second step is counted.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshcomm.config import Config, load_config
from meshcomm.dryrun.hollow import Hollow
from meshcomm.dryrun.ledger import Ledger
from meshcomm.dryrun.rank import Passes, alone, pretended_world
from meshcomm.mesh.opening import init
from meshcomm.models import model_of
from meshcomm.parallel import norm, torch_private
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.splits import sections
from meshcomm.parallel.torch_private import FakeTensor
from meshcomm.transport.torch_private import DispatchMode

_LLAMA: Final = {"vocab_size": 128_256, "num_kv_heads": 8}
SHAPES: Final[dict[str, dict[str, int]]] = {
    "8B": {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14_336, "num_layers": 32, "num_heads": 32},
    "70B": {**_LLAMA, "hidden_size": 8192, "intermediate_size": 28_672, "num_layers": 80, "num_heads": 64},
}


class Case(NamedTuple):
    """samples: the samples of a rank in a step, one per microbatch."""

    model: str
    dims: dict[str, int]
    parallel: dict[str, Any]
    samples: int = 1
    tokens: int = 8192


_SPLIT: Final = {"shard": "fsdp", "tensor": "tp", "options": {"sequence_parallel": True}}
CASES: Final = {
    "fsdp": Case("8B", {"fsdp": 64}, {"shard": "fsdp"}),
    "fsdp+tp": Case("8B", {"fsdp": 8, "tp": 8}, _SPLIT),
    "pp+fsdp+tp": Case("70B", {"pp": 8, "fsdp": 8, "tp": 8}, {**_SPLIT, "pipeline": "pp"}, samples=8),
    "cp": Case(
        "8B",
        {"fsdp": 8, "cp": 8},
        {"shard": "fsdp", "context": "cp", "options": {"attention": "ulysses"}},
        tokens=65_536,
    ),
    "cp ring": Case(
        "8B",
        {"fsdp": 8, "cp": 8},
        {"shard": "fsdp", "context": "cp", "options": {"attention": "ring"}},
        tokens=65_536,
    ),
}

_CALLS: Final = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "meshcomm", "cplib")
_NO_CALLS: Final = ("wait_tensor", "_wrap_tensor_autograd", "recv_")


class Meter(DispatchMode):  # type: ignore[misc]
    """Counts operators that are not views, and calls with the bytes of their larger side."""

    def __init__(self) -> None:
        super().__init__()
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self.operators = 0
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchDispatchMode."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        if any(issubclass(each, FakeTensor) for each in types):
            return made
        name = func._schema.name.split("::")[1]
        if func.namespace in _CALLS and not name.endswith(_NO_CALLS):
            kind = name.strip("_").replace("_base", "").replace("allgather", "all_gather")
            kind = kind.replace("allreduce", "all_reduce").removeprefix("flex_cp_")
            self.calls[kind] += 1
            sides = [[each.nbytes for each in _tensors(side)] for side in (args, made)]
            # c10d operators take their outputs as arguments; other operators return them.
            each = max if func.namespace == "c10d" else sum
            self.nbytes[kind] += max(each(side) for side in sides if side)
        elif not func.is_view and func.namespace != "profiler":
            self.operators += 1
        return made


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value if isinstance(value, list | tuple) else ()
    return [each for part in parts for each in _tensors(part)]


def counted(case: Case, prepare: Callable[[Case], Callable[[], Any]]) -> dict[str, Any]:
    """The costs of a step after the first, on the first rank. prepare: returns a function that returns the step."""
    world = 1
    for size in case.dims.values():
        world *= size
    passes = Passes()
    ledger: Ledger = passes.ledger(True)
    with pretended_world(0, world):
        enter = prepare(case)
        meter = Meter()
        with Hollow(ledger, passes), meter:
            step = enter()
            step()
            ledger.restart()
            passes.restart()
            meter.restart()
            step()
    return {
        "operators": meter.operators,
        "flops": ledger.flops,
        "peak": ledger.peak().nbytes,
        "calls": dict(meter.calls),
        "bytes": dict(meter.nbytes),
    }


# -- meshcomm ---------------------------------------------------------------------------------------


def ours(case: Case) -> Callable[[], Any]:
    """Return a function that builds the built-in transformer with Llama's shapes and returns its step."""
    copies = case.dims["fsdp"]
    config = load_config(
        {
            "mesh": {"dims": case.dims, "device": "cpu"},
            "parallel": case.parallel,
            "model": SHAPES[case.model],
            "data": {"seq_len": case.tokens},
            "train": {
                "steps": 2,
                "global_batch_size": copies * case.samples,
                "micro_batch_size": 1,
                "clip_norm": 1.0,
                "compute_dtype": "bfloat16",
            },
        }
    )
    norm._norms = _norms_of_a_gpu
    settings = alone(config)
    assert isinstance(settings, Config)
    mesh = init(settings)

    def enter() -> Callable[[], None]:
        known = sections(mesh, config)
        assert known.model is not None and known.data is not None
        engine = Engine(mesh, config, model_of(known.model, known.data, known.train), filled=False)
        engine.checked_steps = 0
        tokens = torch.zeros((case.samples, case.tokens), dtype=torch.int64)
        return lambda: engine.step(tokens, tokens, 1e-3)

    return enter


def _norms_of_a_gpu(gradients: Sequence[Tensor], order: float = 2.0) -> Tensor:
    kinds = norm._by_kind(gradients)
    each = [
        torch.stack(list(torch_private.norms([gradients[at] for at in places], torch.float32, order)))
        for places in kinds.values()
    ]
    return torch.cat(each).double()


def main(arguments: list[str]) -> None:
    """Print a line of JSON for each case."""
    program = "torchtitan" if "--torchtitan" in arguments else "meshcomm"
    names = [each for each in arguments if each != "--torchtitan"] or list(CASES)
    torch.set_num_threads(1)
    prepare: Callable[[Case], Callable[[], Any]] = ours
    if program == "torchtitan":
        from tests.benchmarks.torchtitan import theirs

        prepare = theirs
    for name in names:
        found = counted(CASES[name], prepare)
        print(json.dumps({"program": program, "case": name, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
