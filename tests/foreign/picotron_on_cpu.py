"""picotron on a CPU and Gloo: its uses of CUDA are replaced, and its code is unchanged.

To be run in the environment `picotron`, in a folder that `assets` has written, with picotron's source in MESHCOMM_PICOTRON:

    meshcomm run --world-size 4 tests/foreign/picotron_on_cpu.py --config picotron.json

Two things are replaced. The first is the three functions of flash_attn that it imports and does not call on a CPU
(`FLASH_ATTEN` is 0). The second is its calls of CUDA that it also makes on a CPU: `torch.cuda.synchronize`, and
`device="cuda"` where it counts its parameters. Losses are printed with all their digits as well.

FAULT=sleep, raise or kill makes rank 2 do this as it takes its fifth batch.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.foreign.planted import act

VOCABULARY, HIDDEN, INNER, HEADS, LAYERS = 512, 64, 128, 4, 4


def assets(folder: Path, source: Path, *, dp: int = 1, pp: int = 1, tp: int = 1) -> None:
    """Write a tokenizer, texts, a small Llama, whose weights picotron draws anew, and picotron's settings for these sizes."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    for name in ("tiny", "hf_model/tiny", "hf_model_safetensors", "texts"):
        (folder / name).mkdir(parents=True)
    words = [f"w{number}" for number in range(VOCABULARY - 1)]
    made: Any = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["<unk>", *words])}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tiny/tokenizer.json"))
    said = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"})
    (folder / "tiny/tokenizer_config.json").write_text(said)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "rms_norm_eps": 1e-5,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
    }
    for name in ("tiny", "hf_model/tiny"):
        (folder / name / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    square, into, back, norm = (HIDDEN, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER), (HIDDEN,)
    layer = {
        **{f"self_attn.{name}_proj": square for name in "qkvo"},
        "mlp.gate_proj": into,
        "mlp.up_proj": into,
        "mlp.down_proj": back,
        "input_layernorm": norm,
        "post_attention_layernorm": norm,
    }
    shapes = {f"layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in layer.items()}
    shapes |= {"embed_tokens": (VOCABULARY, HIDDEN), "norm": norm}
    weights = {f"model.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    save_file(weights, folder / "hf_model_safetensors/model.safetensors")
    texts = [" ".join(words[(n * 7 + k * k) % 500] for k in range(150)) for n in range(200)]
    (folder / "texts/train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = json.loads((source / "template/base_config.json").read_text())
    settings["distributed"] |= {"tp_size": tp, "pp_size": pp, "dp_size": dp, "use_cpu": True}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    settings["model"] |= {"name": "tiny", "num_hidden_layers": LAYERS, **heads, "use_fused_adam": False}
    settings["training"] |= {"total_train_steps": 4, "seq_length": 32, "micro_batch_size": 2}
    settings["training"] |= {"gradient_accumulation_steps": 2, "num_samples": 100}
    settings["dataset"] |= {"name": "texts"}
    settings["environment"] |= {"FLASH_ATTEN": "0", "HF_TOKEN": "none"}
    (folder / "picotron.json").write_text(json.dumps(settings))


class _OnCpu:
    """torch, but `tensor` creates tensors on the CPU where CUDA is requested."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, value: Any, **given: Any) -> torch.Tensor:
        return torch.tensor(value, **{**given, "device": "cpu"})


def on_cpu() -> None:
    for name, imported in (
        ("flash_attn_interface", "flash_attn_func"),
        ("layers.rotary", "apply_rotary_emb"),
        ("ops.triton.layer_norm", "layer_norm_fn"),
    ):
        module = f"flash_attn.{name}"
        for end in [n for n, letter in enumerate(module) if letter == "."]:
            sys.modules.setdefault(module[:end], types.ModuleType(module[:end]))
        sys.modules[module] = types.ModuleType(module)
        setattr(sys.modules[module], imported, None)
    torch.cuda.synchronize = lambda *_: None
    import picotron.utils as utils  # type: ignore[import-not-found]

    utils.torch = _OnCpu()
    average = vars(utils).setdefault("average_before", utils.average_loss_across_dp_cp_ranks)

    def told(*args: Any) -> Any:
        loss = average(*args)
        # One write, so that lines of several ranks are not mixed.
        sys.stdout.write(f"rank {os.environ['RANK']} loss {loss!r}\n")
        sys.stdout.flush()
        return loss

    utils.average_loss_across_dp_cp_ranks = told


def plant(fault: str) -> None:
    """Plant the fault on rank 2. Every rank sets the timeout of its groups to 8 s; picotron's is 3 minutes."""
    import picotron.data as data  # type: ignore[import-not-found]

    following, taken = data.MicroBatchDataLoader.__next__, [0]
    limit = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout

    def following_or_fault(self: Any) -> Any:
        taken[0] += 1
        if taken[0] == 1:
            for group in dist.distributed_c10d._world.pg_map:
                limit(timedelta(seconds=8), group)
        if taken[0] == 5 and os.environ["RANK"] == "2":
            act(fault)
        return following(self)

    data.MicroBatchDataLoader.__next__ = following_or_fault


if __name__ == "__main__":
    sys.path.insert(0, os.environ["MESHCOMM_PICOTRON"])
    on_cpu()
    if "FAULT" in os.environ:
        plant(os.environ["FAULT"])
    sys.argv[0] = os.path.join(os.environ["MESHCOMM_PICOTRON"], "train.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
