"""Every causal language model of transformers on every kind of parallelism: `python -m tests.models.table` runs it, or the
families that are named, and writes their rows into docs/reference/models.md.

A small model of each family, with random weights in float64, trains 5 steps on each mesh. Losses, gradient norms, gradients
and weights must be within 1e-9 of one process; else the row has the reason. Families without a plan: data and FSDP only.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshcomm.config import Config
from meshcomm.errors import MeshcommError
from meshcomm.testing import Pool
from meshcomm.train.parity import Record, compare, reference
from tests.models.families import config_of, recorded

STEPS, RANKS, ROOM = 5, 4, 1e-9
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
_TRAIN = {"global_batch_size": 4}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp4": ("dp=4", {}),
    "fsdp4": ("fsdp=4", {}),
    "pp2 dp2": ("pp=2 dp=2", {}),
    "pp2 tp2": ("pp=2 tp=2", {}),
    "dp2 tp2, sequence": ("dp=2 tp=2", {"sequence_parallel": True}),
    "dp2 cp2": ("dp=2 cp=2", {"attention": "ulysses"}),
    "dp4 ep2": ("dp=4", {"expert": "ep", "views": {"expert": {"edp": 2, "ep": 2}}}),
}
_PLAIN = ("dp4", "fsdp4")
# Settings without a usable default: a family leaves them open, or no mesh can train with its value.
_SAID: dict[str, dict[str, Any]] = {
    # Encoders by default: see `check_family`.
    **{
        name: {"is_decoder": True}
        for name in (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
            *("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
            *("xlm-roberta", "xlm-roberta-xl", "xmod"),
        )
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "mamba2": {"expand": 1, "n_groups": 1, "num_heads": 64, "head_dim": 64},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
}
# Parameters without a gradient from a language model's loss, for train.frozen.
_FROZEN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"), ("*.indexer.*",)),
    "deepseek_v4": ("*.compressor.*", "*.indexer.*"),
    **dict.fromkeys(("bart", "bigbird_pegasus", "marian", "mbart", "mvp", "trocr"), ("*.encoder_attn*",)),
    "big_bird": ("bert.pooler.*",),
}
# Without its kernels, linear attention takes a minute for a step, while the next stage waits.
_TIMEOUT_S = 600.0
# The family has no experts.
_NONE = "-"
# Larger models, or models made of other models, are not tried.
_LARGEST = 12_000_000


def names() -> list[str]:
    """The model types that AutoModelForCausalLM supports."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def has_plan(name: str) -> bool:
    """Whether the family publishes a tensor-parallel plan."""
    from transformers import CONFIG_MAPPING

    return getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None) is not None


def published() -> list[str]:
    """The families with a published plan that the page has."""
    return [name for name, row in rows_of(PAGE.read_text()).items() if len(row) == len(KINDS)]


def rows_of(text: str) -> dict[str, dict[str, str]]:
    """The rows from which `page` made a document."""
    reasons = {
        number: re.sub(r"\\(.)", r"\1", reason)
        for number, reason in re.findall(r"^(\d+)\. (.+)$", text, re.M)
    }
    rows: dict[str, dict[str, str]] = {}
    for line in re.findall(r"^\| (.+) \|$", text, re.M):
        name, *cells = line.split(" | ")
        if name != "family":
            kinds = KINDS if len(cells) == len(KINDS) else _PLAIN
            said = ("" if cell == "yes" else reasons.get(cell, cell) for cell in cells)
            rows[name] = dict(zip(kinds, said, strict=True))
    return rows


def smallest(name: str) -> Any:
    """A small configuration of a family, based on the library's defaults."""
    from transformers import CONFIG_MAPPING

    from meshcomm.models.tiny import SIZES, tiny

    kind = CONFIG_MAPPING[name]
    said = kind().to_dict()
    sizes = {key: size for key, size in SIZES.items() if key in said and said[key] is None}
    return tiny(kind(**{**sizes, **_SAID.get(name, {})}))


def records(configs: list[Config]) -> list[Record | str]:
    """The record of the steps on each mesh, on one rank, or the error."""
    found: list[Record | str] = []
    for config in configs:
        try:
            found.append(recorded(config, STEPS))
        except MeshcommError as error:
            found.append(f"{error.what}: {error.given}" if error.given else error.what)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def row(pool: Pool, name: str) -> dict[str, str]:
    """For each kind: "" if the results equal one process's, else the reason."""
    from transformers import AutoModelForCausalLM

    from meshcomm.parallel.memory import on_meta

    kinds = tuple(KINDS) if has_plan(name) else _PLAIN
    with tempfile.TemporaryDirectory() as folder:
        try:
            small = smallest(name)
            with on_meta():
                made = AutoModelForCausalLM.from_config(small)
        except Exception as error:
            return dict.fromkeys(
                kinds, f"could not create a small model: {type(error).__name__}: {_line(error)}"
            )
        if sum(each.numel() for each in made.parameters()) > _LARGEST:
            return dict.fromkeys(
                kinds, "even a small model is too large, because it has parts other than a text decoder"
            )
        small.save_pretrained(folder)
        model = {"pretrained": folder, "random_weights": True, "dropout": 0.0}
        train = {**_TRAIN, **({"frozen": _FROZEN[name]} if name in _FROZEN else {})}
        found: dict[str, str] = {}
        configs: dict[str, Config] = {}
        for kind in kinds:
            dims, more = KINDS[kind]
            try:
                configs[kind] = config_of(model, dims, train=train, timeout_s=_TIMEOUT_S, **more)
            except MeshcommError as error:
                found[kind] = _NONE if "the model has no experts" in str(error) else _line(error)
        if not configs:
            return found
        alone = reference(config_of(model, "dp=1", train=train))
        ((one,),) = pool.run(records, [alone], ranks=1, timeout_s=900)
        if isinstance(one, str):
            return dict.fromkeys(kinds, f"fails on one process: {_line(one)}")
        # Linear attention is slow without its kernels.
        ranks = pool.run(records, list(configs.values()), ranks=RANKS, timeout_s=3600)
        for place, kind in enumerate(configs):
            found[kind] = _judged([each[place] for each in ranks], one)
        return {kind: found[kind] for kind in kinds}


def _judged(ranks: Iterable[Record | str], alone: Record) -> str:
    most = 0.0
    for each in ranks:
        if isinstance(each, str):
            return _line(each)
        most = max(most, *(difference.relative for difference in compare(each, alone)))
    return "" if most < ROOM else f"differs by {most:.1e}"


def _line(text: object) -> str:
    # The path of a file on this machine is not part of the reason.
    return re.sub(r" at /\S+", "", " ".join(str(text).split()))[:160]


def page(rows: dict[str, dict[str, str]]) -> str:
    """The text of the document."""
    import torch
    import transformers

    reasons: dict[str, int] = {}

    def table_of(kinds: Iterable[str]) -> list[str]:
        kinds = tuple(kinds)
        lines = [f"| family | {' | '.join(kinds)} |", "|---|" + "---|" * len(kinds)]
        for name, cells in rows.items():
            if tuple(cells) == kinds:
                texts = [_cell(cell, reasons) for cell in cells.values()]
                lines.append(f"| {name} | {' | '.join(texts)} |")
        return lines

    published, others = table_of(KINDS), table_of(_PLAIN)
    plans = sum(map(has_plan, names()))
    tried = f"{len(published) - 2} of {plans} families with a published plan and {len(others) - 2} of {len(names()) - plans} others were run."
    if not others[2:]:
        others = ["None of them was run."]
    every = sum(
        all(cell in ("", _NONE) for cell in cells.values()) for cells in rows.values() if len(cells) > 2
    )
    plain = sum(cells["dp4"] == cells["fsdp4"] == "" for cells in rows.values())
    version = torch.__version__.partition("+")[0]
    return "\n".join(
        [
            "# Models: every family on every kind of parallelism",
            "",
            f"The tables list every family that `AutoModelForCausalLM` can create, with transformers {transformers.__version__} and torch {version}. "
            "`python -m tests.models.table NAME` runs one family and updates its row.",
            f"Each test trains a small model with random weights in float64 for {STEPS} steps.",
            "",
            f"- yes: losses, gradient norms, gradients and weights differ from those on one process by at most {ROOM:g}.",
            "- a number: the number of the [reason](#reasons) at the end of the page.",
            "- a dash: the model has no experts.",
            "- dp2 tp2, sequence: tensor parallelism with `parallel.options.sequence_parallel`.",
            "- dp2 cp2: context parallelism with Ulysses.",
            "",
            f"{tried} {every} of these families train with every kind of parallelism that applies, and {plain} train with data parallelism and FSDP.",
            "",
            "Some families have parameters that receive no gradient. The tests freeze these with `train.frozen`: "
            + "; ".join(
                f"{', '.join(f'`{each}`' for each in frozen)} in {name}" for name, frozen in _FROZEN.items()
            )
            + ".",
            "",
            "## Families with a published plan",
            "",
            *published,
            "",
            "## Families without a published plan",
            "",
            *others,
            "",
            "## Reasons",
            "",
            *(f"{number}. {text}" for text, number in reasons.items()),
            "",
        ]
    )


def _cell(cell: str, reasons: dict[str, int]) -> str:
    if cell in ("", _NONE):
        return cell or "yes"
    text = re.sub(r"[<>|*_`\[\]]", lambda found: "\\" + found.group(), cell)
    return str(reasons.setdefault(text, len(reasons) + 1))


def main() -> None:
    """Run the named families, or all, print their rows and write them into the page."""
    rows = rows_of(PAGE.read_text())
    pool = Pool(preload=("meshcomm.train", "meshcomm.models.families", "torch.distributed.fsdp"))
    try:
        for name in sys.argv[1:] or names():
            rows[name] = row(pool, name)
            print(name, rows[name], flush=True)
            PAGE.write_text(page({each: rows[each] for each in names() if each in rows}))
    finally:
        pool.close()


if __name__ == "__main__":
    main()
