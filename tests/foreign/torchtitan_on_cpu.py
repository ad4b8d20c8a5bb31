"""torchtitan 0.3 on a CPU and Gloo: its uses of CUDA and NCCL are replaced, and its code is unchanged.

To be run in the environment `torchtitan`, which has older packages than meshcomm's tests, in a folder that `assets` has written:

    meshcomm run --world-size 4 tests/foreign/torchtitan_on_cpu.py --module llama3 --config llama3_debugmodel ...

For the arguments, see `TITAN` in tests/foreign/programs.py. FAULT=sleep, skip, raise or kill makes rank 2 do this in its fourth
step.
"""

from __future__ import annotations

import inspect
import json
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import torch

from tests.foreign.planted import act


def assets(folder: Path) -> None:
    """Write a tokenizer of 500 words and 1,200 texts, where torchtitan's debug models look for them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    for name in ("tokenizer", "c4_test"):
        (folder / "tests" / "assets" / name).mkdir(parents=True)
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    words = [f"w{number}" for number in range(500)]
    made: Any = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(["<unk>", begin, end, *words])}, "<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([begin, end])
    made.save(str(folder / "tests/assets/tokenizer/tokenizer.json"))
    said = json.dumps({"bos_token": begin, "eos_token": end})
    (folder / "tests/assets/tokenizer/tokenizer_config.json").write_text(said)
    texts = [" ".join(words[(n * 7 + k * k) % 500] for k in range(150)) for n in range(1200)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "tests/assets/c4_test/data.json").write_text(lines)


class _Cpu:
    """torch.cpu, with the functions that torchtitan calls on a device module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name, lambda *_, **__: None)

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def get_device_properties(self, *_: Any) -> Any:
        return types.SimpleNamespace(total_memory=1 << 34)

    def memory_stats(self, *_: Any) -> dict[str, int]:
        return {}

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1


def _causal(q: Any, k: Any, v: Any, *, scale: Any = None, enable_gqa: bool = False, **_: Any) -> Any:
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None


def on_cpu() -> None:
    """Replace the device, flex attention (no backward on a CPU), and reductions to a mean (not supported by Gloo)."""
    import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
    import torchtitan.tools.utils as utils  # type: ignore[import-not-found]

    utils.device_type, utils.device_module = "cpu", _Cpu()
    from torchtitan.models.common.attention import FlexAttention  # type: ignore[import-not-found]

    # A dry run calls this once for each rank of a process.
    before = vars(FlexAttention).get("before") or FlexAttention.__init__
    FlexAttention.before = before

    def made(self: Any, *args: Any, **given: Any) -> None:
        before(self, *args, **given)
        FlexAttention._compiled_flex_attn = staticmethod(_causal)

    FlexAttention.__init__ = made
    factors: Any = vars(collectives).setdefault("before", collectives._get_gradient_divide_factors)
    names = list(inspect.signature(factors).parameters)

    def summed(*args: Any, **given: Any) -> Any:
        return factors(
            **{**dict(zip(names, args, strict=False)), **given, "force_sum_reduction_for_comms": True}
        )

    collectives._get_gradient_divide_factors = summed


def plant(fault: str) -> None:
    """Plant the fault in this process's rank."""
    import torchtitan.trainer as trainer  # type: ignore[import-not-found]

    step, made = trainer.Trainer.train_step, [0]

    def train_step(self: Any, *args: Any, **given: Any) -> Any:
        made[0] += 1
        if made[0] == 4:
            act(fault)
            if fault == "skip":
                return None
        return step(self, *args, **given)

    trainer.Trainer.train_step = train_step


if __name__ == "__main__":
    on_cpu()
    if os.environ.get("RANK") == "2" and "FAULT" in os.environ:
        plant(os.environ["FAULT"])
    sys.argv[0] = "torchtitan"
    runpy.run_module("torchtitan.train", run_name="__main__")
