"""Load a model with transformers, without meshcomm, and print its loss on held_out.txt and a generated sentence.

python evaluate.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SEQUENCE = 64
PROMPT = "On a mesh of pp 2 dp 2 tp 2 rank"


def main(folder: str) -> None:
    torch.set_num_threads(1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer.encode(Path("held_out.txt").read_text()))
    samples = ids[: len(ids) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)
    with torch.no_grad():
        loss = model(samples, labels=samples).loss
        start = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
        said = model.generate(
            **start, max_new_tokens=16, do_sample=False, pad_token_id=model.config.eos_token_id
        )
    print(f"{folder}: loss on held_out.txt {loss.item():.3f}")
    print(f"{folder}: {tokenizer.decode(said[0]).splitlines()[0]}")


if __name__ == "__main__":
    main(sys.argv[1])
