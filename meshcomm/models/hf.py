"""Creates and initializes causal language models of the transformers library, and makes them use the mesh's attention."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    masking_utils,
)
from transformers.utils import logging

from meshcomm.config.pretrained import understood
from meshcomm.errors import ConfigError, UnsupportedOp
from meshcomm.models.family_code import WHOLE_SAMPLES, family_code
from meshcomm.models.spec import Attend
from meshcomm.models.tiny import tiny
from meshcomm.models.torch_private import draw
from meshcomm.parallel.become import become
from meshcomm.parallel.context.block import seen_keys
from meshcomm.parallel.context.documents import current_documents
from meshcomm.parallel.loss import IGNORED
from meshcomm.parallel.memory import on_meta
from meshcomm.predict.estimate import Counts

ATTENTION: Final = "meshcomm"
# Arguments of an attention layer that do not affect its result.
_UNUSED: Final = ("cache_position", "output_attentions", "past_key_values", "position_ids", "use_cache")


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: q, k and v (batch, heads, s, head) -> (batch, s, heads, head).

    If there are arguments that change the result, such as a soft cap or sinks, the family's own function computes
    attention over full sequences. Raises UnsupportedOp if the family has no such function.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    others = {
        "dropout": more.pop("dropout", None) or None,
        "attention_mask": attention_mask,
        **{name: x for name, x in more.items() if name not in _UNUSED and x is not False},
    }
    present = [name for name, x in others.items() if x is not None]
    by = None
    if present:
        own = _function_of(module)
        if own is None or {"dropout", "attention_mask"} & set(present):
            raise UnsupportedOp(
                f"the attention of a {type(module).__name__} has arguments that context parallelism does not support",
                given=", ".join(present),
                expected="causal attention with a scale and a sliding window, or a family's eager_attention_forward",
                hint="remove parallel.context; or use ModelSpec.attention, with attention code for this model",
            )
        named = {name: others[name] for name in present} | {
            "scaling": scaling,
            "sliding_window": sliding_window,
        }
        by = partial(_by_family, own, module, query.shape[1], causal, {**named, "dropout": 0.0})
    width = value.shape[-1]
    if width < query.shape[-1]:
        # In latent attention, values are narrower than keys.
        value = nn.functional.pad(value, [0, query.shape[-1] - width])
    attend: Attend = module.config.meshcomm_attend
    attended = attend(query, key, value, causal=causal, scale=scaling, window=sliding_window, by=by)
    return attended[..., :width].transpose(1, 2).contiguous(), None


def _function_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return the attention function in a module's own source file that computes all scores, or None."""
    files = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
    return next(
        (function for file in files if (function := getattr(file, "eager_attention_forward", None))), None
    )


class _SomeHeads:
    """An attention layer with only some of its heads. Its tensors with one entry per head are limited to those heads."""

    def __init__(self, module: nn.Module, count: int, heads: slice, groups: int) -> None:
        self._module, self._count, self._heads = module, count, heads
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return _of_heads(getattr(self._module, name), self._count, self._heads)


def _of_heads(value: Any, count: int, heads: slice) -> Any:
    return value[heads] if isinstance(value, Tensor) and value.shape[:1] == (count,) else value


def _by_family(
    own: Callable[..., Any],
    module: nn.Module,
    count: int,
    causal: bool,
    named: Mapping[str, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: slice,
) -> Tensor:
    """Compute attention over full sequences with `own`, the family's function, for some of the `count` heads."""
    mask = None
    if causal:
        every = slice(0, q.shape[2])
        window = every.stop if named["sliding_window"] is None else named["sliding_window"]
        seen = seen_keys(every, every, window, current_documents(), q.device)
        mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
        mask = mask.masked_fill(~seen, torch.finfo(q.dtype).min).view(-1, 1, every.stop, every.stop)
    mine = {name: _of_heads(value, count, heads) for name, value in named.items()}
    attended: Tensor = own(_SomeHeads(module, count, heads, q.shape[1] // k.shape[1]), q, k, v, mask, **mine)[
        0
    ]
    return attended.transpose(1, 2)


AttentionInterface.register(ATTENTION, _attention)


_borders = masking_utils.find_packed_sequence_indices


def _borders_of_packed_samples(position_ids: Tensor) -> Tensor | None:
    """Run transformers' search for packed samples, except for samples that are known not to be packed."""
    return None if WHOLE_SAMPLES.get() else _borders(position_ids)


masking_utils.find_packed_sequence_indices = _borders_of_packed_samples


class _Logits:
    """A causal language model that returns only what a loss needs."""

    def forward(self, input_ids: Tensor, **named: Any) -> Any:
        """(batch, tokens) int64 -> logits (batch, tokens, vocabulary). With an auxiliary loss of the routers: both. With
        labels: the family's own loss.
        """
        outputs = super().forward(input_ids, **named)  # type: ignore[misc]
        if "labels" in named:
            return outputs.loss
        auxiliary = getattr(outputs, "aux_loss", None)
        return (outputs.logits, auxiliary) if isinstance(auxiliary, Tensor) else outputs.logits


def loss_with(coefficient: float, outputs: Any, targets: Tensor) -> Any:
    """Return the cross-entropy of a microbatch and the routers' auxiliary loss, as transformers adds them.

    The auxiliary loss is not linear in the tokens. Each microbatch has its own, which counts by the microbatch's targets, so
    ranks along data change nothing.
    """
    logits, auxiliary = outputs if isinstance(outputs, tuple) else (outputs, outputs.new_zeros(()))
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    total = nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    count = (targets != IGNORED).sum()
    return {
        "loss": (total + coefficient * auxiliary * count, count),
        "aux_loss": (auxiliary.detach() * count, count),
    }


def make(config: PreTrainedConfig, exact: bool = False) -> nn.Module:
    """Return the model of a configuration. exact: compute the experts in float64, one by one, because torch has no
    grouped matmul for float64.

    Raises ConfigError if transformers cannot create it.
    """
    options = {"experts_implementation": "eager"} if exact else {}
    try:
        # The configuration is copied because `attended` sets attributes that belong to one model.
        module: nn.Module = AutoModelForCausalLM.from_config(deepcopy(config), **options)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise not_made(config.name_or_path or "a configuration", error) from error
    # transformers finds a model's source by its class's module.
    become(module, _Logits, home=type(module).__module__)
    return module


def not_made(folder: Path | str, error: Exception) -> ConfigError:
    """Return the error for a config.json that transformers rejects."""
    return ConfigError(
        "transformers cannot create the model that a config.json describes",
        given=f"{type(error).__name__}: {error}".strip() + f"\nof {folder}",
        expected="a config.json that AutoModelForCausalLM.from_config accepts",
        hint="repair config.json; or pip install -U transformers, for a folder from a later version",
    )


def unmodified(folder: Path, weights: Mapping[str, Tensor] | None) -> nn.Module:
    """Return the original transformers model in float64, without any of meshcomm's replacements.

    weights: tensors by their names in a folder of safetensors. If None, the weights in `folder` are read.
    """
    with without_bars():
        options: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}
        if weights is None:
            return AutoModelForCausalLM.from_pretrained(folder, **options)
        config = AutoConfig.from_pretrained(folder)
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return kind.from_pretrained(None, config=config, state_dict=dict(weights), **options)  # type: ignore[no-any-return]


@contextmanager
def without_bars() -> Iterator[None]:
    """In this context, transformers shows no progress bars."""
    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shows:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def attended(module: nn.Module, attend: Attend) -> None:
    """Make every attention layer of `module` call `attend`. Masks are not used; `attend` receives the windows."""
    for part in module.modules():
        config = getattr(part, "config", None)
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = ATTENTION
            config.meshcomm_attend = attend


def _numbered(numbers: dict[str, int], name: str, *_: Any) -> None:
    numbers.setdefault(name, len(numbers))


@final
class Whole:
    """The full model of a configuration. It is created on first use, without allocating memory."""

    def __init__(self, config: PreTrainedConfig, exact: bool = False) -> None:
        self.config, self.exact = config, exact

    @cached_property
    def module(self) -> Any:
        """The module. Raises ConfigError if transformers cannot create it."""
        with on_meta():
            return make(self.config, self.exact)

    @cached_property
    def calls(self) -> dict[str, int]:
        """The parts that a forward pass calls, by name, numbered in the order of their first calls. A small model without values
        runs up to the first operation that needs values.
        """
        numbers: dict[str, int] = {}
        with suppress(Exception), torch.device("meta"), torch.no_grad(), family_code(torch.float32):
            small = make(tiny(self.config), self.exact)
            for name, part in small.named_modules():
                part.register_forward_pre_hook(partial(_numbered, numbers, name))
            small(torch.zeros(1, 2, dtype=torch.int64))
        return numbers

    def initialise(self, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the full parameter, initialized by its family's rules. It depends only on seed and name, not on the mesh."""
        owner, _, key = name.rpartition(".")
        part = self.module.get_submodule(owner)
        parameters = dict(part._parameters)
        drawn = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8]) >> 1
        try:
            for key_of_parameter, parameter in parameters.items():
                if parameter is not None:
                    part._parameters[key_of_parameter] = nn.Parameter(torch.zeros(parameter.shape))
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.default_generator.manual_seed(drawn)
                draw(self.module, part)
            value: Tensor = part._parameters[key].detach()
            return value
        finally:
            part._parameters.update(parameters)


def counts_of(folder: str | Path) -> Counts:
    """Count the parameters of the model that `folder`/config.json describes, without allocating memory.

    Raises ConfigError if transformers cannot create the model.
    """
    whole = Whole(understood(folder))
    layers, experts, ends = [0] * whole.config.num_hidden_layers, [0] * whole.config.num_hidden_layers, 0
    for name, parameter in whole.module.named_parameters():
        # The first number in a parameter's name is the number of its block.
        place = next((int(component) for component in name.split(".") if component.isdecimal()), len(layers))
        if place >= len(layers):
            ends += parameter.numel()
        elif ".experts." in name:
            experts[place] += parameter.numel()
        else:
            layers[place] += parameter.numel()
    keys = getattr(whole.config, "qk_head_dim", None)
    values = whole.config.v_head_dim / keys if keys else 1.0
    return Counts(tuple(layers), tuple(experts), ends, values)
