"""Models of transformers train on every mesh as on one process: loss, norm, gradients and weights, in float64."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import meshcomm
from meshcomm.config import Config, ModelConfig, TrainConfig, load_config
from meshcomm.errors import ConfigError, MeshcommError, TrainingError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.mesh.stats import Stats
from meshcomm.models import model_of
from meshcomm.models.family_code import wide
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.dropout import Dropout, Drops
from meshcomm.predict.estimate import workload
from meshcomm.predict.place import trainable
from meshcomm.testing import Pool
from meshcomm.train import Trainer

from .families import FAMILIES, config_of, differences, folder_of, logits_of

pytestmark = pytest.mark.long

_EXPERT = {"expert": {"pp": 2, "edp": 1, "ep": 2}}

# Every run trains these: each family on one mesh that covers most of its risks.
ALWAYS: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3", "dp=2 tp=2", {"sequence_parallel": True}),
    ("gpt2", "pp=2 tp=2", {"sequence_parallel": True}),
    ("qwen3_moe", "pp=2 dp=2", {"expert": "ep", "views": _EXPERT}),
]

_ULYSSES = {"attention": "ulysses"}
# Families that share code in models/. tests/models/table.py trains every family.
_ALL = ("llama", "gpt2", "qwen3_moe")
_REST = ("llama tied", "llama 3")
_WINDOWS = ("qwen3 layers", "mixtral window")
_MESHES: list[tuple[str, dict[str, Any]]] = [
    ("pp=2 dp=2 tp=2", {"sequence_parallel": True}),
    ("pp=2 cp=2 tp=2", {}),
    ("pp=2 fsdp=2 tp=2", {"schedule": "gpipe", "train": {"activation_checkpointing": True}}),
    ("dp=2 fsdp=2 cp=2", {"attention": "ulysses"}),
    ("pp=2 dp=2", {"schedule": "zero_bubble", "stages_per_rank": 2}),
    ("pp=2 dp=2 tp=2", {"schedule": "interleaved_1f1b", "stages_per_rank": 2}),
    ("cp=2 tp=2", {"attention": "ulysses", "sequence_parallel": True}),
    ("fsdp=4", {"train": {"compile": True}}),
]
PARITY = [(family, dims, more) for family in _ALL for dims, more in _MESHES]
# A split module reads its weights in another way while it runs, also in a compiled graph.
PARITY += [("llama", "dp=2 tp=2", {"sequence_parallel": True, "train": {"compile": True}})]
PARITY += [("llama tied", "pp=2 cp=2", {"schedule": "gpipe"}), ("mistral window", "cp=4", _ULYSSES)]
PARITY += [(family, dims, more) for family in _REST for dims, more in (_MESHES[0], _MESHES[3])]
PARITY += [
    ("qwen3_moe", "dp=4 tp=2", {"expert": "ep", "views": {"expert": {"edp": 2, "ep": 2, "tp": 2}}}),
    ("mixtral", "dp=2 cp=2", {"expert": "ep", "views": {"expert": {"edp": 1, "ep": 4}}}),
    ("mixtral", "dp=4 tp=2", {"expert": "ep", "views": {"expert": {"edp": 2, "ep": 2, "tp": 2}}}),
    ("mixtral", "pp=2 dp=2", {"expert": "ep", "views": _EXPERT}),
    ("mixtral", "fsdp=4 tp=2", {"expert": "ep", "views": {"expert": {"edp": 2, "ep": 2, "tp": 2}}}),
    ("qwen3_moe", "pp=2 fsdp=4", {"expert": "ep", "views": {"expert": {"pp": 2, "edp": 2, "ep": 2}}}),
    ("mixtral", "pp=2 dp=2 cp=2", {"expert": "ep", "views": {"expert": {"pp": 2, "edp": 1, "ep": 4}}}),
]
_LONG: list[tuple[str, dict[str, Any]]] = [
    ("dp=2 cp=2", _ULYSSES),
    ("cp=4 tp=2", _ULYSSES),
    ("pp=2 cp=4", {**_ULYSSES, "schedule": "zero_bubble", "stages_per_rank": 2}),
    ("fsdp=2 cp=4", {**_ULYSSES, "train": {"activation_checkpointing": True}}),
    ("pp=2 dp=2 tp=2", {"sequence_parallel": True}),
]
PARITY += [(family, dims, more) for family in _WINDOWS for dims, more in _LONG]
PARITY += [("qwen3 layers", "cp=2 tp=2", _ULYSSES)]


def _is_the_same(
    pool: Pool, path: Path, family: str, dims: str, more: dict[str, Any], steps: int = 4
) -> None:
    model = {"pretrained": str(folder_of(family, path)), "random_weights": True}
    if family not in ("llama", "qwen2"):
        model["dropout"] = 0.1
    found = differences(pool, config_of(model, dims, **more), steps=steps)
    assert {each.kind for each in found} == {"loss", "gradient norm", "weight", "gradient"}
    assert max(each.relative for each in found) < 1e-9


@pytest.mark.parametrize(("family", "dims", "more"), ALWAYS, ids=lambda each: str(each))
@pytest.mark.deep
def test_a_family_is_the_same_on_a_mesh(
    pool: Pool, tmp_path: Path, family: str, dims: str, more: dict[str, Any]
) -> None:
    _is_the_same(pool, tmp_path, family, dims, more)


@pytest.mark.parity
@pytest.mark.deep
@pytest.mark.parametrize(("family", "dims", "more"), PARITY, ids=lambda each: str(each))
def test_every_family_is_the_same_on_every_mesh(
    pool: Pool, tmp_path: Path, family: str, dims: str, more: dict[str, Any]
) -> None:
    _is_the_same(pool, tmp_path, family, dims, more, 10)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_gives_the_logits_that_transformers_gives(pool: Pool, tmp_path: Path, family: str) -> None:
    folder = folder_of(family, tmp_path, weights=True)
    torch.manual_seed(3)
    tokens = torch.randint(256, (2, 32))
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits
    config = config_of({"pretrained": str(folder), "dropout": 0.0}, "dp=1", train={"dtype": "float32"})
    (ours,) = pool.run(logits_of, config, tokens, ranks=1)
    assert theirs.abs().max() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_products_of_both_precisions_in_float64() -> None:
    """transformers 5.17 multiplies its table of angles by positions in float32."""
    table, positions = torch.full((2, 1), 1 / 3, dtype=torch.float64), torch.arange(3.0)[None]
    with wide(torch.float64):
        angles = table.float() @ positions
    assert angles.dtype == torch.float64 and angles[0, 2] == table[0, 0] * 2


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.split()[-1] in ("window", "layers")]
)
def test_windows_in_float64_are_those_of_transformers(pool: Pool, tmp_path: Path, family: str) -> None:
    folder = folder_of(family, tmp_path, weights=True)
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(3))
    config = transformers.AutoConfig.from_pretrained(folder)
    theirs = []
    for window in (config.sliding_window, None):
        config.sliding_window = window
        if window is None and hasattr(config, "layer_types"):
            config.layer_types = ["full_attention"] * 4
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float64, experts_implementation="eager"
        )
        # The table of rotary angles has stayed in float32.
        with torch.no_grad(), wide(torch.float64):
            model.double()
            theirs.append(model.eval()(tokens).logits)
    own = config_of({"pretrained": str(folder)}, "dp=1")
    (ours,) = pool.run(logits_of, own, tokens, ranks=1)
    torch.testing.assert_close(ours, theirs[0], rtol=0, atol=1e-12)
    assert (ours - theirs[1]).abs().max() > 1e-3


TRAIN: dict[str, Any] = {
    "mesh": {"dims": {"dp": 1, "tp": 1}, "device": "cpu"},
    "parallel": {"data": "dp", "tensor": "tp"},
    "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 64},
    "data": {"seq_len": 32, "max_bytes": 50_000},
    "train": {"steps": 2, "global_batch_size": 8, "micro_batch_size": 2},
}
RING, ULYSSES = 'parallel.context="cp"', 'parallel.options.attention="ulysses"'


def sent(settings: Config, world: int) -> Counter[tuple[str, str]]:
    """The bytes that all ranks send, by dim and call."""

    def body(mesh: Mesh) -> Stats:
        Trainer(mesh, settings).run()
        return mesh.stats()

    everyone = meshcomm.simulate(body, settings, world_size=world)
    found: Counter[tuple[str, str]] = Counter()
    # Objects contain paths and versions, which differ.
    for row in (row for stats in everyone for row in stats.rows if "objects" not in row.call):
        found[row.dim, row.call] += row.nbytes
    return found


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (4, ["mesh.dims={ dp = 2, tp = 2 }"]),
        (
            2,
            [
                "mesh.dims={ dp = 1, tp = 2 }",
                "parallel.options.sequence_parallel=true",
                "train.activation_checkpointing=true",
            ],
        ),
        (4, ["mesh.dims={ dp = 1, cp = 4, tp = 1 }", RING]),
        (4, ["mesh.dims={ dp = 1, cp = 4, tp = 1 }", RING, ULYSSES]),
    ],
    ids=["dp tp", "tp sequence again", "ring", "ulysses"],
)
@pytest.mark.deep_cases(r"\[(ulysses|ring|tp sequence again)\]")
def test_llama_sends_what_the_built_in_model_sends(tmp_path: Path, world: int, overrides: list[str]) -> None:
    built_in = load_config(TRAIN, overrides)
    sizes = built_in.model
    assert sizes is not None
    transformers.LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
    ).save_pretrained(tmp_path)
    facts = built_in.model_dump(exclude_unset=True, mode="python")
    settings = load_config({**facts, "model": {"pretrained": str(tmp_path), "random_weights": True}})
    expected = sent(built_in, world)
    if "parallel.options.sequence_parallel=true" in overrides:
        # Llama's code reads the sequence length from the embedding, which therefore stays whole until the first block.
        embedded = 8 * 32 * 32 * 4 * 2 * 2  # samples, tokens, width, bytes, ranks, steps
        expected["tp", "reduce_scatter"] -= embedded
        expected["tp", "all_reduce"] += embedded
    assert sent(settings, world) == expected


def _refused(path: Path, family: str, seq_len: int = 32, **changes: Any) -> MeshcommError:
    from meshcomm.models.families import hugging_face

    folder_of(family, path)
    facts = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**facts, **changes}))
    with pytest.raises(UnsupportedOp) as caught:
        train = TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1)
        hugging_face(ModelConfig(pretrained=str(path), random_weights=True, dropout=0.0), seq_len, train)
    return caught.value


def test_what_a_family_cannot_do_is_refused_with_the_reason(tmp_path: Path) -> None:
    found = str(_refused(tmp_path / "b", "gpt2", seq_len=128))
    assert "n_positions = 64" in found
    assert "data.seq_len = 64" in found
    assert "add_cross_attention" in str(_refused(tmp_path / "c", "gpt2", add_cross_attention=True))
    assert "router_jitter_noise = 0.1" in str(_refused(tmp_path / "d", "mixtral", router_jitter_noise=0.1))


def test_dropout_of_a_folder_has_to_be_said(tmp_path: Path) -> None:
    model = {"pretrained": str(folder_of("gpt2", tmp_path))}
    with pytest.raises(ConfigError, match=r"resid_pdrop = 0\.1, embd_pdrop|attn_pdrop = 0\.1") as caught:
        config_of(model, "dp=2")
    assert "model.dropout = 0.1, or" in str(caught.value)
    assert "model.dropout = 0.0" in str(caught.value)
    for said in (0.0, 0.1):
        assert config_of({**model, "dropout": said}, "dp=2").model is not None


def _dropped(config: Config) -> dict[str, torch.Tensor]:
    """Where parts of the model output zeros in a training forward pass on samples 5 and 3 in step 7."""
    with meshcomm.init(config) as mesh:
        assert config.model is not None and config.data is not None and config.train is not None
        model = model_of(config.model, config.data, config.train)
        (module,) = Engine(mesh, config, model).modules
        found: dict[str, torch.Tensor] = {}

        def keep(name: str, part: Any, args: Any, output: Any) -> None:
            found[name] = (output[0] if isinstance(output, tuple) else output) == 0

        for name, part in module.named_modules():
            if name.rpartition(".")[2] in ("attn", "self_attn", "mlp"):
                part.register_forward_hook(partial(keep, name))
        module.step = 7  # type: ignore[assignment]
        module(torch.arange(64).reshape(2, 32), samples=torch.tensor([5, 3]))
        seen, found = found, {}
        module.eval()(torch.arange(64).reshape(2, 32))
        assert not any(zeros.any() for zeros in found.values()), "eval mode drops"
        with pytest.raises(TrainingError, match=r"does not know which samples"):
            module.train()(torch.arange(64).reshape(2, 32))
        return seen


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_a_folder_drops_behind_attention_and_feed_forward(pool: Pool, tmp_path: Path, family: str) -> None:
    model = {"pretrained": str(folder_of(family, tmp_path)), "random_weights": True, "dropout": 0.25}
    (found,) = pool.run(_dropped, config_of(model, "dp=1"), ranks=1)
    assert len(found) == 8
    drops = Drops.at(0, 7, torch.tensor([5, 3]), torch.arange(32))
    for name, zeros in found.items():
        assert torch.equal(zeros, ~Dropout(0.25, name).keep(drops, zeros.shape))
        assert 0.2 < zeros.double().mean() < 0.3


def test_sizes_of_every_family_follow_from_its_folder(tmp_path: Path) -> None:
    for family in FAMILIES:
        model = ModelConfig(pretrained=str(folder_of(family, tmp_path / family)), dropout=0.0)
        assert (model.num_layers, model.hidden_size, model.num_heads) == (4, 32, 8)
        assert bool(model.experts) == ("mix" in family or "moe" in family)


@pytest.mark.parametrize("family", ["mistral", "mistral window", "qwen3 layers", "mixtral window"])
def test_a_window_is_refused_around_a_ring_when_the_configuration_is_read(
    tmp_path: Path, family: str
) -> None:
    model = {"pretrained": str(folder_of(family, tmp_path)), "random_weights": True}
    config_of(model, "cp=2", attention="ulysses")
    config_of(model, "cp=1 tp=2")
    if family == "mistral":  # the window has 32 tokens, as many as a sample
        config_of(model, "cp=2")
        return
    with pytest.raises(ConfigError, match="ring attention does not support a sliding window") as caught:
        config_of(model, "cp=2")
    assert "a window of" in str(caught.value)
    assert 'parallel.options.attention = "ulysses"' in str(caught.value)
    assert "mesh.dims.cp = 1" in str(caught.value)


def test_no_mesh_with_a_window_around_a_ring_is_ranked(tmp_path: Path) -> None:
    model = {"pretrained": str(folder_of("mistral window", tmp_path)), "random_weights": True}
    ring = workload(config_of(model, "dp=1 cp=1"))
    assert {sizes.context for sizes in trainable(ring, 4)} == {1}
    split = workload(config_of(model, "dp=1 cp=1", attention="ulysses"))
    assert {sizes.context for sizes in trainable(split, 4)} == {1, 2, 4}
