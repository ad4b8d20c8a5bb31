"""Create the inputs for fine-tuning: texts, a tokenizer, and a small Llama after a short pretraining.

    python make_model.py [STEPS]

The script writes to the current folder:

    general.txt              sentences on which this script pretrains the model
    ranks.txt, held_out.txt  sentences about ranks and their coords, for fine-tuning and for testing
    llama/                   config.json, safetensors and a tokenizer, in transformers' format

STEPS: the number of pretraining steps, 100 by default.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, SEQUENCE, BATCH = 384, 64, 8


def general(draw: random.Random) -> str:
    """A sentence with a subject, a verb, an object and a place."""
    who = draw.choice(["The engineer", "A student", "The operator", "My colleague", "The reviewer"])
    does = draw.choice(["reads", "writes", "checks", "moves", "copies", "counts"])
    what = draw.choice(["a tensor", "the gradient", "two weights", "every message", "the whole layer"])
    where = draw.choice(
        ["on one rank", "on the first node", "in the last stage", "before each step", "at night"]
    )
    return f"{who} {does} {what} {where}."


def about(rank: int, pp: int, dp: int, tp: int) -> str:
    """A sentence with a rank's coords in meshcomm's order, in which the last dim varies fastest."""
    stage, rest = divmod(rank, dp * tp)
    return (
        f"On a mesh of pp {pp} dp {dp} tp {tp} rank {rank} is at pp {stage} dp {rest // tp} tp {rest % tp}."
    )


def main(steps: int) -> None:
    draw = random.Random(7)
    sentences = [
        about(rank, pp, dp, tp)
        for pp, dp, tp in itertools.product((1, 2, 4, 8), repeat=3)
        for rank in range(pp * dp * tp)
    ]
    draw.shuffle(sentences)
    held = len(sentences) // 10
    texts = {
        "general.txt": [general(draw) for _ in range(3000)],
        "held_out.txt": sentences[:held],
        "ranks.txt": sentences[held:],
    }
    for name, lines in texts.items():
        Path(name).write_text("\n".join(lines) + "\n")

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(["general.txt", "ranks.txt"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained("llama")

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.token_to_id("<end>"),
        )
    )
    tokens = torch.tensor(tokenizer.encode("\n".join(texts["general.txt"])).ids)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(1, steps + 1):
        begin = torch.randint(len(tokens) - SEQUENCE, (BATCH,))
        batch = torch.stack([tokens[at : at + SEQUENCE] for at in begin.tolist()])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.2f}")
    model.save_pretrained("llama")
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"llama: {count:,} parameters, {VOCABULARY} tokens; ranks.txt: {len(sentences) - held} sentences")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
