"""A checkpoint's lock: which settings may differ when a run resumes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from meshcomm.errors import ConfigError
from meshcomm.train.checkpoint.lock import Lock, resume_differences

LOCK = Lock(
    step=40,
    seconds=1.0,
    fingerprint="f",
    plan={"device": "cpu"},
    config={
        "mesh": {"dims": {"pp": 2, "dp": 2}},
        "model": {"hidden_size": 32},
        "data": {"seq_len": 8, "files": [], "sha256": "aa"},
        "train": {"lr": 0.1, "seed": 7, "global_batch_size": 16, "dtype": "float32", "steps": 60},
    },
    versions={"torch": "2.13.0"},
)


def changed(section: str, **values: Any) -> Lock:
    return dataclasses.replace(
        LOCK, config={**LOCK.config, section: {**LOCK.config.get(section, {}), **values}}
    )


@pytest.mark.parametrize(
    ("now", "line"),
    [
        (changed("mesh", dims={"dp": 4}), "mesh.dims: { pp = 2, dp = 2 } -> { dp = 4 }"),
        (changed("mesh", dims={"dp": 2, "pp": 2}), "mesh.dims: { pp = 2, dp = 2 } -> { dp = 2, pp = 2 }"),
        (changed("train", lr=0.2), "train.lr: 0.1 -> 0.2"),
        (changed("train", steps=80), "train.steps: 60 -> 80"),
        (changed("train", steps=40), "train.steps: 60 -> 40"),
        (changed("train", new=1), "train.new: null -> 1"),
        (changed("train", clip_norm=1.0), "train.clip_norm: null -> 1.0"),
        (changed("train", compute_dtype="bfloat16"), 'train.compute_dtype: null -> "bfloat16"'),
        (changed("parallel", options={"stages_per_rank": 2}), "parallel.options.stages_per_rank: null -> 2"),
        (changed("data", files=["x"]), 'data.files: [] -> ["x"]'),
        (dataclasses.replace(LOCK, versions={"torch": "2.14"}), 'versions.torch: "2.13.0" -> "2.14"'),
        (dataclasses.replace(LOCK, plan={"device": "cuda"}), 'device: "cpu" -> "cuda"'),
        # Settings of checkpoints and logging are not differences.
        *(
            (changed("train", **{key: 3}), None)
            for key in ("checkpoint_async", "checkpoint_every", "keep", "log_every")
        ),
    ],
)
def test_what_may_differ_is_shown(now: Lock, line: str | None) -> None:
    assert resume_differences(LOCK, now, Path("x")) == (() if line is None else (line,))


def test_what_differs_in_a_long_table_is_shown() -> None:
    def group(momentum: float, **more: float) -> dict[str, Any]:
        return {
            "lr": 1.0,
            "weight_decay": 1.0,
            "optimizer": "muon",
            "optimizer_args": {"momentum": momentum},
        } | more

    def lines(before: Any, after: Any, key: str = "groups") -> tuple[str, ...]:
        return resume_differences(
            changed("train", **{key: before}), changed("train", **{key: after}), Path("x")
        )

    a, b, c = "*.attn.w?.weight", "*.ff.w1.weight", "*.ff.w2.weight"
    assert lines({a: group(0.9), b: group(0.9)}, {a: group(0.9), b: group(0.5, lr=2.0)}) == (
        f'train.groups."{b}".lr: 1.0 -> 2.0',
        f'train.groups."{b}".optimizer_args: {{ momentum = 0.9 }} -> {{ momentum = 0.5 }}',
    )
    # The first pattern that matches applies, so the order is a difference. One that another pattern replaces is shown in full.
    (line,) = lines({a: group(0.9), b: group(0.9)}, {b: group(0.9), a: group(0.9)})
    assert line.startswith('train.groups: { "*.attn') and '-> { "*.ff' in line
    (line,) = lines({a: group(0.9), b: group(0.9)}, {a: group(0.9), c: group(0.9)})
    assert b in line.split(" -> ")[0] and c in line.split(" -> ")[1]
    assert lines(0.9, None, "ema") == ("train.ema: 0.9 -> null",)


@pytest.mark.parametrize(
    ("now", "values"),
    [
        (changed("model", hidden_size=64), "model.hidden_size = 64, and 32 in x"),
        (changed("data", seq_len=16), "data.seq_len = 16, and 8 in x"),
        (changed("data", sha256="bb"), 'data.sha256 = "bb", and "aa" in x'),
        (changed("train", seed=1), "train.seed = 1, and 7 in x"),
        (changed("train", global_batch_size=8), "train.global_batch_size = 8, and 16 in x"),
        (changed("train", dtype="float64"), 'train.dtype = "float64", and "float32" in x'),
        (changed("train", steps=30), "train.steps = 30, and step 40 in x"),
    ],
)
def test_what_may_not_differ_is_refused(now: Lock, values: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resume_differences(LOCK, now, Path("x"))
    assert caught.value.given == values and caught.value.hint


@pytest.mark.parametrize(
    ("key", "now", "read"),
    [
        ("global_batch_size", changed("train", global_batch_size=8), 640),
        ("data", changed("data", sha256="bb"), 0),
        ("seq_len", changed("data", seq_len=16), 0),
    ],
)
def test_settings_in_resume_changed_may_differ(key: str, now: Lock, read: int) -> None:
    with pytest.raises(ConfigError) as caught:
        resume_differences(LOCK, now, Path("x"))
    assert f'train.resume_changed = ["{key}"]' in str(caught.value.hint)
    train = {**now.config["train"], "resume_changed": [key]}
    now = dataclasses.replace(now, config={**now.config, "train": train})
    lines = resume_differences(LOCK, now, Path("x"))
    assert len(lines) == (1 if read else 2) and "->" in lines[0]
    assert now.continuing(LOCK).samples == read
    assert now.continuing(dataclasses.replace(LOCK, samples=99)).samples == (99 if read else 0)
