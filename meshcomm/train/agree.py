"""Before the first step, check that all ranks use the same settings and data, and count the ranks on each host."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from meshcomm.config import Config, ModelConfig
from meshcomm.config.write import key_path, whole_toml
from meshcomm.errors import TrainingError
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import of_every_rank, on_all_ranks, ranks_of
from meshcomm.models.weights import INDEX, SINGLE
from meshcomm.parallel.splits import Sections, sections
from meshcomm.train.checkpoint.folder import opened, read
from meshcomm.train.checkpoint.lock import NOT_THE_MODEL, PRETRAINED
from meshcomm.train.data import Corpus, load
from meshcomm.watching.verdict import alike, majority

# Settings that may differ between hosts.
_PATHS = {"files", "tokens", "chat", "tokenizer", "validation_files", "pretrained", "out", "init_from"}
_WEIGHTS = "pretrained_sha256"
# The number of bytes of each tensor, and of a file's header, that are read to compare weights.
_FIRST, _LONGEST = 4096, 1 << 28
# The number of settings that an error lists.
_SHOWN = 8


@dataclass(frozen=True)
class Facts:
    """What the ranks agreed on."""

    config: Config
    sections: Sections
    ranks_here: int
    """The number of ranks of the mesh on this host, including this rank."""
    lowest: bool
    """Whether this is the lowest rank on its host."""


def agree(mesh: Mesh, config: Config) -> Facts:
    """Check the configuration, and compare it with the other ranks' configurations.

    Called by: every rank of the mesh.
    Raises:    an error on every rank if one rank cannot start. That rank raises its own error, and the others raise a
               TrainingError that names it. If settings differ, a TrainingError lists their names and values.
               Paths may differ, because hosts have different folders.
    """
    sections_of_config = on_all_ranks(mesh, "start the training", partial(sections, mesh, config))
    _same(mesh, {name: _settings(section) for name, section in sections_of_config._asdict().items()})
    hosts = of_every_rank(mesh, hashlib.sha256(platform.node().encode()).hexdigest())
    my_host = hosts[ranks_of(mesh).index(mesh.rank)]
    lowest = min(rank for rank, host in zip(ranks_of(mesh), hosts, strict=True) if host == my_host)
    return Facts(config, sections_of_config, hosts.count(my_host), mesh.rank == lowest)


def agreed_corpus(mesh: Mesh, facts: Facts, vocab_size: int) -> Corpus:
    """Load the data, and check that all ranks have the same data. Requires [data].

    vocab_size: the vocabulary size of the model; 0 if unknown.
    Called by: every rank of the mesh.
    Raises:    the same errors as `agree` if the data cannot be loaded. If the text differs, the error names data.sha256.
    """
    sections = facts.sections
    read = partial(corpus_of, sections, vocab_size, Path(sections.train.out))
    pretrained = None if sections.model is None else sections.model.pretrained
    data = sections.data
    if data is not None and data.texts_from and data.tokenizer_of(pretrained) is not None:
        # The lowest rank of each host tokenizes the data. The others read the result from train.out.
        on_all_ranks(mesh, "tokenize the data", lambda: read() if facts.lowest else None)
    corpus = on_all_ranks(mesh, "start the training", read)
    digests = {"sha256": corpus.digest.hex()}
    if corpus.validation is not None:
        digests["validation_sha256"] = corpus.validation.digest.hex()
    hint = (
        "in data.files, name files that are identical on every host; the default, the sources of Python's "
        "standard library, differs between Python versions"
    )
    if data is not None and data.build:
        hint = (
            "data.build must return the samples of all ranks on every rank, in one order: meshcomm splits them. Leave out a split "
            "by rank, such as split_dataset_by_node, and shuffle with the same seed"
        )
    _same(mesh, {"data": digests}, hint)
    return corpus


def agree_on_weights(mesh: Mesh, model: ModelConfig | None) -> None:
    """Check that all ranks would read the same weights from their folders of [model] pretrained, whose paths may differ.

    Compares the model's config.json, and the name, kind and first bytes of each tensor.
    Called by: every rank of the mesh, before it reads the weights.
    Raises:    TrainingError on every rank that names model.pretrained_sha256.
    """
    if model is not None and model.reads_weights and not mesh.is_fake:
        digest = _digest_of(Path(str(model.pretrained)))
        # A rank that cannot read its folder says why when it reads the weights.
        if all(of_every_rank(mesh, digest)):
            hint = "in model.pretrained, name folders with the same model and weights on every host"
            _same(mesh, {"model": {_WEIGHTS: digest}}, hint)


def _digest_of(folder: Path) -> str:
    """Return a digest of a model's folder; "" if it cannot be read."""
    tensors: dict[str, Any] = {}
    try:
        settings = json.loads(read(folder / "config.json"))
        if (folder / SINGLE).is_file():
            files = {SINGLE}
        else:
            files = set(json.loads(read(folder / INDEX))["weight_map"].values())
        for name in files:
            with opened(folder / name) as file:
                length = int.from_bytes(file.read(8), "little")
                for tensor, facts in json.loads(file.read(min(length, _LONGEST))).items():
                    if tensor != "__metadata__":
                        begin, end = facts["data_offsets"]
                        file.seek(8 + length + begin)
                        first = hashlib.sha256(file.read(min(end - begin, _FIRST))).hexdigest()
                        tensors[tensor] = facts["dtype"], facts["shape"], first
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ""
    settings = {
        name: value for name, value in settings.items() if f"{PRETRAINED}.{name}" not in NOT_THE_MODEL
    }
    return hashlib.sha256(json.dumps([settings, tensors], sort_keys=True).encode()).hexdigest()


def corpus_of(sections: Sections, vocab_size: int = 0, cache: Path | None = None) -> Corpus:
    """Return the data that this rank reads. vocab_size: see `agreed_corpus`. cache: see `load`."""
    _, model, data, train = sections
    assert data is not None
    if not vocab_size and model is not None and model.given("vocab_size"):
        vocab_size = model.vocab_size
    return load(data, model=model, vocab_size=vocab_size or None, cache=cache, seed=train.seed)


def _same(mesh: Mesh, settings: dict[str, dict[str, Any]], hint: str = "") -> None:
    """Raise on every rank if the settings differ. hint: what to try, in place of the same configuration."""
    digests = of_every_rank(mesh, hashlib.sha256(json.dumps(settings).encode()).hexdigest())
    if len(set(digests)) > 1:
        # Every rank sees the same table, so all ranks raise.
        raise _differing(ranks_of(mesh), of_every_rank(mesh, settings), hint)


def _settings(section: BaseModel | None) -> dict[str, Any]:
    """Return a section as plain data, without the settings that may differ between hosts."""
    return {} if section is None else section.model_dump(mode="json", exclude=_PATHS)


def _differing(ranks: list[int], settings: list[dict[str, Any]], hint: str) -> TrainingError:
    """Return an error that lists every differing field, with the most common value, unless there is a tie, and the values on
    other ranks.
    """
    lines: list[str] = []
    keys: list[str] = []
    odd: set[int] = set()
    flat = [dict(_fields(setting)) for setting in settings]
    for key in dict.fromkeys(key for fields in flat for key in fields):
        values = {rank: whole_toml(fields.get(key)) for rank, fields in zip(ranks, flat, strict=True)}
        usual, others = majority(values)
        if others:
            keys.append(key)
            odd.update(others)
            differing = [f"{ranks_text(like)} = {values[like[0]]}" for like in alike(sorted(others), values)]
            differing += [f"the others {values[usual[0]]}"] if usual else []
            lines.append(f"{key}: {', '.join(differing)}")
    right = len(ranks) - len(odd)
    against = f": {ranks_text(sorted(odd))} against the other {right}" if right else ""
    more = f" and {len(keys) - _SHOWN} more settings" if len(keys) > _SHOWN else ""
    return TrainingError(
        f"ranks disagree on {', '.join(keys[:_SHOWN])}{more}{against}",
        given="\n".join(lines[:_SHOWN]),
        expected="the same on every rank",
        hint=hint
        or f"start {ranks_text(sorted(odd))} with the same configuration{' as the others' if right else ''}",
    )


def _fields(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, object]]:
    """Yield the innermost settings, by dotted key."""
    if isinstance(value, dict) and (value or not path):
        for key, inner in value.items():
            yield from _fields(inner, (*path, key))
    else:
        yield key_path(path), value
