"""Read conversations from rows, apply a tokenizer's chat template, and pack the tokens into samples."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from meshcomm.config import DataConfig, ModelConfig
from meshcomm.errors import TrainingError
from meshcomm.train.data.build import Indexed, SampleForm
from meshcomm.train.data.corpus import IGNORED, Corpus
from meshcomm.train.data.rows import has_rows, is_table, rows_of

_EXPECTED: Final = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}, or '
    '{"prompt": "...", "completion": "..."}'
)
# The columns of a pair, and whose message each is.
_ANSWER: Final = "assistant"
_ROLES: Final = {"prompt": "user", "completion": _ANSWER}


class Conversation(NamedTuple):
    """The tokens of a conversation, and a copy as labels, in which tokens that are not targets are IGNORED."""

    tokens: list[int]
    labels: list[int]


def chats(
    config: DataConfig, model: ModelConfig | None, vocab_size: int | None, files: Sequence[Path], key: str
) -> Corpus:
    """Return the conversations in the files, one per sample. With data.document_mask, several share a sample.

    Conversations longer than data.seq_len + 1 tokens are truncated.
    Raises TrainingError if there is no template, or if a row is not a conversation. The error names the file and row.
    """
    tokenizer = _tokenizer(config, model)
    most = config.seq_len + 1
    whole = [
        _tokens(tokenizer, messages, tools, config.answers_only, where)
        for path in files
        for where, messages, tools in _conversations(path)
    ]
    conversations = [
        Conversation(tokens[:most], labels[:most])
        for tokens, labels in whole
        if any(label != IGNORED for label in labels[1:most])
    ]
    if not conversations:
        raise TrainingError(
            "there is no conversation to train on",
            given=f"{len(files)} files of {key}, seq_len = {config.seq_len}",
            expected="a conversation with an answer within seq_len tokens"
            if config.answers_only
            else "a conversation of two tokens or more",
            hint=f"more files, or a longer seq_len: the longest conversation has {max((len(tokens) for tokens, _ in whole), default=0)} tokens",
        )
    samples = [_joined([conversations[index] for index in group]) for group in _packed(conversations, config)]
    digest = hashlib.sha256(json.dumps(conversations).encode()).digest()
    part = Indexed(samples, SampleForm(key, config.seq_len, vocab_size, config.document_mask))
    return Corpus(
        (part,),
        digest,
        sum(len(conversation.tokens) for conversation in conversations),
        "tokens",
        tuple(files),
        note=_lost([len(tokens) for tokens, _ in whole], len(conversations), config.seq_len),
    )


def _lost(sizes: Sequence[int], kept: int, seq_len: int) -> str:
    """Return a line about conversations that are truncated or have no target left; "" if all are whole. sizes: their tokens."""
    longer = sum(size > seq_len + 1 for size in sizes)
    if not longer and kept == len(sizes):
        return ""
    return (
        f"{longer} of {len(sizes)} conversations have more than data.seq_len + 1 = {seq_len + 1} tokens and are cut off, the longest has "
        f"{max(sizes)}; {len(sizes) - kept} without a target are left out"
    )


def _packed(conversations: Sequence[Conversation], config: DataConfig) -> list[list[int]]:
    """Return the conversations that form each sample. The longest come first, and each goes into the fullest sample that has
    enough room (best-fit decreasing).
    """
    if not config.document_mask:
        return [[place] for place in range(len(conversations))]
    groups: list[list[int]] = []
    # Remaining room, and the group that has it.
    rooms: list[tuple[int, int]] = []
    for place in sorted(
        range(len(conversations)), key=lambda index: (-len(conversations[index].tokens), index)
    ):
        size = len(conversations[place].tokens)
        room_index = bisect_left(rooms, (size, 0))
        room, group = rooms.pop(room_index) if room_index < len(rooms) else (config.seq_len + 1, len(groups))
        if group == len(groups):
            groups.append([])
        groups[group].append(place)
        insort(rooms, (room - size, group))
    return groups


def _joined(conversations: Sequence[Conversation]) -> dict[str, list[int]]:
    """Return a sample in transformers' format."""
    return {
        "input_ids": [token for conversation in conversations for token in conversation.tokens],
        "labels": [label for conversation in conversations for label in conversation.labels],
        "position_ids": [
            position for conversation in conversations for position in range(len(conversation.tokens))
        ],
    }


def _tokenizer(config: DataConfig, model: ModelConfig | None) -> Any:
    path = config.tokenizer_of(None if model is None else model.pretrained)
    given = "no data.tokenizer, and no model.pretrained that has a tokenizer" if path is None else f"{path}"
    expected = "the folder of a transformers tokenizer with a chat template"
    hint = "set data.tokenizer to the folder of a model that was trained on conversations"
    if path is None:
        raise TrainingError("no tokenizer for conversations", given=given, expected=expected, hint=hint)
    try:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(path if path.is_dir() else path.parent)
        if not tokenizer.chat_template:
            raise ValueError("it has no chat template")
    except Exception as error:
        given = f"{path}: {error}"
        raise TrainingError(
            "no tokenizer for conversations", given=given, expected=expected, hint=hint
        ) from error
    return tokenizer


def _conversations(path: Path) -> Iterator[tuple[str, list[dict[str, Any]], Any]]:
    """Yield the location, the messages and the tools of each row. Raises TrainingError."""
    if not has_rows(path):
        raise TrainingError(
            "conversations cannot be read",
            given=f"{path}",
            expected="a file with rows: .jsonl, .parquet or .arrow",
        )
    for number, row in rows_of(path, ("messages", *_ROLES, "tools")):
        where, given = f"{path}:{number}", f"{path}:{number}: {row!s:.80}"
        if is_table(path):
            row = _without_nulls(row)
        messages, tools = row.get("messages"), row.get("tools")
        pair = {role: row[column] for column, role in _ROLES.items() if row.get(column) is not None}
        if messages is None and len(pair) == 2 and all(isinstance(text, str) for text in pair.values()):
            messages = [{"role": role, "content": text} for role, text in pair.items()]
        if not isinstance(messages, list) or not messages:
            raise TrainingError(
                "a row is not a conversation",
                given=given,
                expected=_EXPECTED,
                hint="rename the columns, such as conversations to messages, or data.build",
            )
        messages = [_message(message, f"{where}: message {place}") for place, message in enumerate(messages)]
        # Some data sets repeat the first message as the prompt.
        if any(text not in [message.get("content") for message in messages] for text in pair.values()):
            raise TrainingError(
                "a row has messages and another prompt or completion",
                given=given,
                expected=_EXPECTED,
                hint="leave out the column messages, or the columns prompt and completion",
            )
        yield where, messages, tools


def _without_nulls(value: Any) -> Any:
    """Return data without the keys that have no value: columns give each object the keys of all others."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def _message(given: Any, where: str) -> dict[str, Any]:
    """Return a message whose content is one text; a call of tools may be without text. Raises TrainingError."""
    message: dict[str, Any] = given if isinstance(given, dict) else {}
    role, content, weight = message.get("role"), message.get("content"), message.get("weight")
    fault = ""
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        if len(texts) == len(content):
            message = {**message, "content": "".join(texts)}
        else:
            fault = "the content has parts that are not texts"
    elif not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
        fault = "it has no content"
    if not isinstance(role, str):
        fault = "it has no role"
    if weight not in (None, 1) and (weight != 0 or role != _ANSWER):
        fault = f"weight = {weight!r}, role = {role!r}"
    if fault:
        raise TrainingError(
            "a message cannot be trained on",
            given=f"{where}: {fault}; its keys are {', '.join(map(str, message)) or 'none'}",
            expected="a role and a content, which is a text or a list of texts; an answer may have weight = 0",
            hint="rename its keys, such as from and value, to role and content; data.build for content that is not text",
        )
    return message


def _tokens(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Any, answers_only: bool, where: str
) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation and its labels. Answers whose weight is 0, as in OpenAI's format, do not count."""
    # The messages whose labels are unlike those of the other messages.
    unlike = [
        message["role"] == _ANSWER and (message.get("weight") != 0) == answers_only for message in messages
    ]
    roles = [message["role"] for message in messages]
    if unlike[0] or (answers_only and _ANSWER not in roles):
        raise TrainingError(
            "the answers of a conversation cannot be told from the other messages",
            given=f"{where}: its roles are {', '.join(dict.fromkeys(roles))}"
            + ", and it begins with an answer" * unlike[0],
            expected=f"answers with the role {_ANSWER}, after a message with another role",
            hint="rename the roles, leave out this row" + ", or data.answers_only = false" * answers_only,
        )
    hint = ""
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
        render = partial(_templated, tokenizer, tools=tools)
        tokens = render(messages)
        if unused := _unused(tokenizer, messages, tools, tokens):
            hint = f"data.tokenizer of a model that was trained with {unused}, or rows without {unused}"
            raise ValueError(f"the template leaves out {unused}")
        labels = [IGNORED] * len(tokens) if answers_only else [*tokens]
        for place in np.flatnonzero(unlike).tolist():
            before = render(messages[:place], add_generation_prompt=True)
            until = render(messages[: place + 1])
            if until[: len(before)] != before or tokens[: len(until)] != until:
                hint = "set data.answers_only = false, or use data.build with your own labels"
                raise ValueError(
                    "the template renders the text before an answer differently when the answer follows"
                )
            answer = slice(len(before), len(until))
            labels[answer] = until[answer] if answers_only else [IGNORED] * (len(until) - len(before))
    except Exception as error:
        raise TrainingError(
            "the chat template does not accept this conversation",
            given=f"{where}: {type(error).__name__}: {error}",
            expected=_EXPECTED
            + ", and a template that renders the start of a conversation as the start of the full text",
            hint=hint or "another data.tokenizer, or data.build with your own labels",
        ) from error
    return tokens, labels


def _unused(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, tokens: list[int]) -> str:
    """Return what the template renders as if it were not there: the tools, or the calls of tools; "" if nothing."""
    if tools and _templated(tokenizer, messages) == tokens:
        return "tools"
    for name in ("tool_calls", "function_call"):
        without = [{key: value for key, value in message.items() if key != name} for message in messages]
        # A template may need the content of a message without calls.
        with suppress(Exception):
            if without != messages and _templated(tokenizer, without, tools=tools) == tokens:
                return name
    return ""


def _templated(tokenizer: Any, messages: Any, **more: Any) -> list[int]:
    tokens = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **more)["input_ids"]
    return [int(token) for token in tokens]
