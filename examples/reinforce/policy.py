"""The policy: a small Llama with random weights, its samples, and the loss of GRPO (Shao et al. 2024, arXiv 2402.03300)."""

from __future__ import annotations

from typing import Any

import torch
from task import LENGTH, STOP, VOCABULARY, prompts
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

PROMPTS, GROUP = 16, 16  # prompts of a step, and samples of each prompt
EPOCHS = 2  # updates with the samples of a step
LEARNING_RATE, CLIP = 2e-3, 0.2
ENTROPY = 0.05  # the weight of a bonus, without which some seeds settle for a few wrong digits


def new_policy(seed: int) -> Any:
    """Return a new model, in float64, so that the sums of a split model round to the same samples."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=STOP,
        )
    ).double()


def sample(policy: Any, seed: int, step: int, share: int, shares: int) -> tuple[Tensor, Tensor]:
    """Let `policy` answer this share of the step's prompts, GROUP times each. The samples of a prompt follow each other.

    Returns: the sequences, (n, 2 * LENGTH + 1) int64, each a prompt and its answer, and the log-probabilities of the answers'
             tokens, (n, LENGTH), where n = PROMPTS * GROUP / shares. They depend on the arguments and the weights alone.
    """
    step_seed = 1_000_000 * seed + step
    questions = prompts(PROMPTS, step_seed).chunk(shares)[share].repeat_interleave(GROUP, 0)
    torch.manual_seed(1000 * step_seed + share)
    generated = policy.generate(
        questions,
        attention_mask=torch.ones_like(questions),
        do_sample=True,
        top_k=0,
        max_new_tokens=LENGTH,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.stack(generated.logits, 1)
    return generated.sequences, answers_log_probs(logits, generated.sequences)


def answers_log_probs(logits: Tensor, sequences: Tensor) -> Tensor:
    """(n, LENGTH, VOCABULARY) logits of the answers -> (n, LENGTH) log-probabilities of the answers' tokens."""
    return logits.log_softmax(-1).gather(2, sequences[:, -LENGTH:, None]).squeeze(2)


def advantages(rewards: Tensor) -> Tensor:
    """Normalize rewards within each group of samples of one prompt. (n,) -> (n,)."""
    groups = rewards.view(-1, GROUP)
    centered = groups - groups.mean(1, keepdim=True)
    return (centered / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def loss(policy: Any, sequences: Tensor, log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Compute the clipped loss, less a bonus for entropy, as a mean over tokens.

    log_probs: from `sample`, those of the weights that generated.
    """
    logits = policy(sequences[:, :-1], use_cache=False).logits[:, -LENGTH:]
    ratio = (answers_log_probs(logits, sequences) - log_probs).exp()
    gain = advantages[:, None]
    clipped = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return -(clipped + ENTROPY * entropy).mean()
