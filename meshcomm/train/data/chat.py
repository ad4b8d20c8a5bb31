"""Read conversations from rows, apply a tokenizer's chat template, and pack the tokens into samples."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshcomm.config import DataConfig, ModelConfig
from meshcomm.errors import TrainingError
from meshcomm.train.data.build import Indexed, SampleForm
from meshcomm.train.data.corpus import IGNORED, Corpus
from meshcomm.train.data.rows import has_rows, rows_of

_EXPECTED: Final = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}, or '
    '{"prompt": "...", "completion": "..."}'
)
# The columns of a pair, and whose message each is.
_ROLES: Final = {"prompt": "user", "completion": "assistant"}


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
    conversations = [
        Conversation(*(token[:most] for token in _tokens(tokenizer, messages, config.answers_only, where)))
        for path in files
        for where, messages in _conversations(path)
    ]
    conversations = [
        conversation
        for conversation in conversations
        if any(label != IGNORED for label in conversation.labels[1:])
    ]
    if not conversations:
        raise TrainingError(
            "there is no conversation to train on",
            given=f"{len(files)} files of {key}, seq_len = {config.seq_len}",
            expected="a conversation with an answer within seq_len tokens"
            if config.answers_only
            else "a conversation of two tokens or more",
            hint="more files, or a longer seq_len",
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


def _conversations(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the location and the messages of each row."""
    if not has_rows(path):
        raise TrainingError(
            "conversations cannot be read",
            given=f"{path}",
            expected="a file with rows: .jsonl, .parquet or .arrow",
        )
    for number, row in rows_of(path, ("messages", *_ROLES)):
        messages = row.get("messages")
        if "messages" not in row and all(isinstance(row.get(column), str) for column in _ROLES):
            messages = [{"role": role, "content": row[column]} for column, role in _ROLES.items()]
        if not isinstance(messages, list):
            raise TrainingError(
                "a row is not a conversation", given=f"{path}:{number}: {row!s:.80}", expected=_EXPECTED
            )
        yield f"{path}:{number}", messages


def _tokens(tokenizer: Any, messages: Any, answers_only: bool, where: str) -> tuple[list[int], list[int]]:
    try:
        tokens = _templated(tokenizer, messages)
        if not answers_only:
            return tokens, tokens
        labels = [IGNORED] * len(tokens)
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = _templated(tokenizer, messages[:place], add_generation_prompt=True)
            until = _templated(tokenizer, messages[: place + 1])
            if until[: len(before)] != before or tokens[: len(until)] != until:
                raise ValueError(
                    "the template renders the text before an answer differently when the answer follows"
                )
            labels[len(before) : len(until)] = until[len(before) :]
    except Exception as error:
        raise TrainingError(
            "the chat template does not accept this conversation",
            given=f"{where}: {type(error).__name__}: {error}",
            expected=_EXPECTED
            + ", and a template that renders the start of a conversation as the start of the full text",
            hint="set data.answers_only = false, or use data.build with your own labels",
        ) from error
    return tokens, labels


def _templated(tokenizer: Any, messages: Any, **more: Any) -> list[int]:
    tokens = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **more)["input_ids"]
    return [int(token) for token in tokens]
