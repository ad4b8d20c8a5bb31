"""Samples of conversations: their targets, their packing, and errors for files without conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from meshcomm.config import DataConfig
from meshcomm.errors import ConfigError, TrainingError
from meshcomm.train.data.corpus import IGNORED, Corpus, Samples
from meshcomm.train.data.load import load

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def folder_of(path: Path, template: str | None = TEMPLATE) -> Path:
    """A tokenizer with one token for every character, numbered by its code."""
    vocabulary = {chr(code): code for code in range(1, 128)} | {"?": 0}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
    made.chat_template = template
    made.save_pretrained(path)
    return path


def lines_of(path: Path, *conversations: list[tuple[str, str]]) -> Path:
    rows = [
        {"messages": [{"role": role, "content": content} for role, content in each]} for each in conversations
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return path


def corpus_of(tmp_path: Path, *conversations: list[tuple[str, str]], **more: Any) -> Corpus:
    lines = lines_of(tmp_path / "chat.jsonl", *conversations)
    settings: dict[str, Any] = {"seq_len": 24, "chat": (str(lines),), **more}
    return load(DataConfig(tokenizer=str(folder_of(tmp_path / "tok")), **settings), vocab_size=128)


def read(tmp_path: Path, *conversations: list[tuple[str, str]], **more: Any) -> list[Samples]:
    (part,) = corpus_of(tmp_path, *conversations, **more).parts
    return [part.read(np.array([number])) for number in range(len(part))]


def text_of(row: Any) -> str:
    return "".join("_" if token == IGNORED else chr(token) for token in row if token)


HELLO = [("user", "hi"), ("assistant", "yo"), ("user", "b"), ("assistant", "ok")]
SHORT = [("user", "x"), ("assistant", "y")]


def test_a_conversation_is_a_sample_and_all_of_it_counts(tmp_path: Path) -> None:
    first, second = read(tmp_path, HELLO, SHORT)
    assert text_of(first[0][0]) == "u:hi;a:yo;u:b;a:ok" and text_of(second[0][0]) == "u:x;a:y"
    assert text_of(first[1][0]).rstrip("_") == ":hi;a:yo;u:b;a:ok;"
    assert len(first) == 2


def test_only_answers_count_where_asked_and_conversations_are_packed(tmp_path: Path) -> None:
    (both, more) = read(tmp_path, SHORT, HELLO, SHORT, answers_only=True, document_mask=True)
    # The longest conversation comes first; one more of eight tokens does not fit into 25.
    assert text_of(both[0][0]) == "u:hi;a:yo;u:b;a:ok" and text_of(more[0][0]) == "u:x;a:y;u:x;a:y"
    assert text_of(both[1][0]).rstrip("_") == "______yo;______ok;"
    assert text_of(more[1][0]).rstrip("_") == "_____y;______y;"
    assert more[2][0].tolist() == [0] * 8 + [1] * 16


def test_what_is_too_long_is_cut_and_what_has_no_answer_left_is_left_out(tmp_path: Path) -> None:
    long = [("user", "q" * 30), ("assistant", "never")]
    (only,) = read(tmp_path, long, SHORT, answers_only=True)
    assert text_of(only[0][0]) == "u:x;a:y"
    cut, _ = read(tmp_path, long, SHORT)
    assert text_of(cut[0][0]) == "u:" + "q" * 22
    note = corpus_of(tmp_path, long, SHORT, SHORT, answers_only=True).note
    assert note.startswith("1 of 3 conversations have more than data.seq_len + 1 = 25 tokens")
    assert note.endswith("the longest has 41; 1 without a target are left out")
    assert not corpus_of(tmp_path, SHORT, HELLO).note
    with pytest.raises(
        TrainingError, match=r"there is no conversation to train on[^$]*the longest conversation has 41"
    ):
        read(tmp_path, long, answers_only=True)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r"chat\.jsonl:2: JSONDecodeError"),
        ('{"text": "x"}', r"chat\.jsonl:2: \{'text': 'x'\}"),
        ('{"messages": [{"role": "assistant"}]}', r"chat\.jsonl:2: message 0: it has no content"),
        ('{"messages": ["hi"]}', r"chat\.jsonl:2: message 0: it has no role"),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"content": "y"}]}',
            r":2: message 1: it has no role",
        ),
        (
            '{"messages": [{"from": "gpt", "value": "y"}]}',
            r":2: message 0: it has no role; its keys are from, value",
        ),
        ('{"messages": [{"role": "user", "content": null}]}', r":2: message 0: it has no content"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            r":2: message 0: .*not texts",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}',
            r":2: message 0: weight = 0\.5",
        ),
        (
            '{"messages": [{"role": "user", "content": "x", "weight": 0}]}',
            r":2: message 0: weight = 0, role = 'user'",
        ),
        (
            '{"messages": [{"role": "human", "content": "x"}, {"role": "gpt", "content": "y"}]}',
            r":2: its roles are human, gpt",
        ),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', r":2: .* it begins with an answer"),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "tools": [{"a": 1}]}',
            r":2: ValueError: the template leaves out tools",
        ),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": [1]}]}',
            r":2: ValueError: the template leaves out tool_calls",
        ),
        ('{"messages": [], "tools": "["}', r":2: \{'messages': \[\]"),
    ],
)
def test_lines_that_are_no_conversations_are_named(tmp_path: Path, line: str, said: str) -> None:
    path = lines_of(tmp_path / "chat.jsonl", SHORT)
    path.write_text(path.read_text().strip() + "\n" + line)
    config = DataConfig(
        seq_len=24, chat=(str(path),), answers_only=True, tokenizer=str(folder_of(tmp_path / "tok"))
    )
    with pytest.raises(TrainingError, match=said):
        load(config)


def test_parts_weights_and_tools_are_read_as_transformers_and_openai_define_them(tmp_path: Path) -> None:
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE.replace(
        "{{ message['content'] }}",
        "{{ message.content }}{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}",
    )
    folder = folder_of(tmp_path / "tok", template)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": "no", "weight": 0},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "", "tool_calls": call, "weight": 1},
    ]
    plain = [{**messages[0], "content": "hi"}, *messages[1:]]
    expected = reference.apply_chat_template(plain, tools=tools, tokenize=False)
    for name, given in (("list", tools), ("text", json.dumps(tools))):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": messages, "tools": given}) + "\n")
    # Arrow gives each message and each tool the keys of all others.
    others = [{"type": "function", "function": {"name": "g", "strict": True}}]
    table = pyarrow.Table.from_pylist(
        [{"messages": plain, "tools": tools}, {"messages": plain[:2], "tools": others}]
    )
    assert "strict" in table["tools"][0].as_py()[0]["function"]
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    for answers_only in (True, False):
        for file in ("list.jsonl", "text.jsonl", "rows.parquet"):
            config = DataConfig(
                seq_len=256, chat=(f"{tmp_path}/{file}",), tokenizer=str(folder), answers_only=answers_only
            )
            (inputs,), (targets,) = load(config).parts[0].read(np.array([0]))
            assert text_of(inputs) == expected[:-1], file
            last, found = json.dumps(call) + ";", text_of(targets).rstrip("_")
            assert "no" not in found and found.endswith(last)
            assert found.lstrip("_") == last if answers_only else found.startswith(expected[1:20])


def test_a_template_that_is_missing_or_hides_answers_and_other_sources_are_refused(tmp_path: Path) -> None:
    path = lines_of(tmp_path / "chat.jsonl", HELLO)
    plain = DataConfig(seq_len=24, chat=(str(path),), tokenizer=str(folder_of(tmp_path / "none", None)))
    with pytest.raises(TrainingError, match="no tokenizer for conversations"):
        load(plain)
    counting = "{{ messages | length }}" + TEMPLATE
    tokenizer = str(folder_of(tmp_path / "other", counting))
    hiding = DataConfig(seq_len=24, chat=(str(path),), tokenizer=tokenizer, answers_only=True)
    with pytest.raises(TrainingError, match="the chat template does not accept this conversation"):
        load(hiding)
    with pytest.raises(ConfigError, match="answers_only"):
        DataConfig(seq_len=24, answers_only=True)
    with pytest.raises(ConfigError, match="2 sources of data"):
        DataConfig(seq_len=24, chat=("a",), tokens=("b",))
