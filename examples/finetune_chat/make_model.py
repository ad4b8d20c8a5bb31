"""Create the inputs for fine-tuning: questions about a glossary, a tokenizer, and a small Llama pretrained on the glossary.

    python make_model.py [STEPS]

The script writes to the current folder:

    chat.jsonl    conversations: questions about the terms in the glossary, and their answers
    asked.jsonl   questions about the same terms, each with a wording that chat.jsonl does not use for that term
    llama/        config.json, safetensors, and a tokenizer with a chat template, in transformers' format

STEPS: the number of pretraining steps, 200 by default.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, SEQUENCE, BATCH = 512, 64, 8
GLOSSARY = {
    "a rank": "one process of the job",
    "a mesh": "all ranks, laid out along named dims",
    "a dim": "one axis of the mesh, with a name and a size",
    "a coord": "the place of a rank along a dim",
    "a group": "the ranks that differ in one coord alone",
    "a view": "another factorisation of the same ranks",
    "a plan": "every group in one order on all ranks",
    "a stage": "consecutive layers on one rank of a pipeline",
    "a microbatch": "the samples of one forward pass",
    "a checkpoint": "the state of a training on a disk",
    "a verdict": "who did what where, when a call fails",
    "a ring": "ranks that pass blocks on to the next one",
    "data parallelism": "the same weights and other samples on each rank",
    "tensor parallelism": "a part of each weight on each rank",
    "pipeline parallelism": "a part of the layers on each rank",
    "context parallelism": "a part of the sequence on each rank",
    "expert parallelism": "some of the experts on each rank",
    "an all reduce": "the sum over all ranks, on each of them",
    "an all gather": "the parts of all ranks, on each of them",
    "a broadcast": "the tensor of one rank, on all of them",
}
WAYS = (
    "What is {}?",
    "Say what {} is.",
    "Can you explain {}?",
    "I do not know {}. Help me.",
    "{}: what does it mean?",
    "What do people mean by {}?",
)
WHO = ("A student", "The engineer", "My colleague", "The reviewer")
DOES = ("asks about", "reads about", "has forgotten", "wants to know more of")
TEMPLATE = (
    "{% for message in messages %}{{ '<ask>' if message['role'] == 'user' else '<answer>' }}{{ message['content'] }}<end>"
    "{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


def upper(text: str) -> str:
    """The text with its first letter capitalized."""
    return text[0].upper() + text[1:]


def conversation(word: str, way: str) -> str:
    """A question and its answer, as a line of JSON."""
    question, answer = upper(way.format(word)), f"{upper(word)} is {GLOSSARY[word]}."
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages})


def tokenizer_of(text: str) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer trained on `text`, with a token for each role and a token that ends each message."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>", "<ask>", "<answer>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=TEMPLATE)


def pretrained(tokens: torch.Tensor, end: int, steps: int) -> LlamaForCausalLM:
    """A Llama trained on `steps` batches of the tokens."""
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
            eos_token_id=end,
        )
    )
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
    return model


def main(steps: int) -> None:
    draw = random.Random(7)
    read = [
        f"{draw.choice(WHO)} {draw.choice(DOES)} {word}. {upper(word)} is {GLOSSARY[word]}."
        for word in draw.choices(list(GLOSSARY), k=2000)
    ]
    text = "\n".join(read)
    pairs = [(word, way) for word in GLOSSARY for way in WAYS]
    held = {(word, WAYS[number % len(WAYS)]) for number, word in enumerate(GLOSSARY)}
    for name, some in (("chat.jsonl", [p for p in pairs if p not in held]), ("asked.jsonl", sorted(held))):
        Path(name).write_text("\n".join(conversation(*pair) for pair in some) + "\n")

    asked = "\n".join(upper(way.format(word)) for word, way in pairs)
    tokenizer = tokenizer_of(f"{text}\n{asked}")
    tokenizer.save_pretrained("llama")
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    model = pretrained(tokens, tokenizer.eos_token_id, steps)
    model.save_pretrained("llama")
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"llama: {count:,} parameters; chat.jsonl: {len(pairs) - len(held)} conversations")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
