"""Ask a transformers model the questions in asked.jsonl. Print three answers, and the number of correct answers.

python ask.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str) -> None:
    torch.set_num_threads(1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    right = 0
    lines = Path("asked.jsonl").read_text().splitlines()
    for number, line in enumerate(lines):
        question, answer = json.loads(line)["messages"]
        start = tokenizer.apply_chat_template(
            [question], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            said = model.generate(
                input_ids=start["input_ids"], max_new_tokens=24, do_sample=False, pad_token_id=0
            )
        text = tokenizer.decode(said[0, start["input_ids"].shape[1] :], skip_special_tokens=True)
        right += text == answer["content"]
        if number < 3:
            print(f"{question['content']} {text}")
    print(f"{folder}: {right} of {len(lines)} answers are right")


if __name__ == "__main__":
    main(sys.argv[1])
