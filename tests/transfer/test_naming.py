"""Weights under the names of a published folder: from split models to transformers' own, and to the folder's tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import meshcomm
from meshcomm.errors import ShapeError
from meshcomm.layout import Layout
from meshcomm.models.spec import ModelSpec
from meshcomm.train import Trainer, save_pretrained
from meshcomm.transfer.naming import cuts_of, stored_parts
from meshcomm.transfer.placement import Box, Located, Placement
from meshcomm.transfer.tensors import Cut, Cutout, own_regions
from tests.models.families import FAMILIES, config_of, folder_of
from tests.models.table import smallest

transformers = pytest.importorskip("transformers")

_EXPERT = {"expert": {"pp": 2, "edp": 1, "ep": 2}}
_SPREAD = {"dims": "pp=2 dp=2", "views": _EXPERT, "expert": "ep"}
# Layouts of four ranks. The experts' weights are split along ep, along tp, and by FSDP along any axis.
SOURCES: dict[str, dict[str, Any]] = {
    "llama tied": {"dims": "pp=2 tp=2"},
    "mixtral": _SPREAD,
    "gpt2": {"dims": "fsdp=2 tp=2"},
    "qwen2": {"dims": "fsdp=4"},
    "qwen3": {"dims": "pp=2 fsdp=2"},
    "mistral": {"dims": "pp=4"},
    "qwen3_moe": {"dims": "fsdp=2 tp=2"},
    "phi3": {"dims": "pp=2 tp=2"},
    "gemma2": {"dims": "fsdp=2 tp=2"},
    "olmoe": {"dims": "fsdp=4"},
    "deepseek_v3": {"dims": "dp=2 tp=2"},
    "granite": {"dims": "pp=2 tp=2"},
}
FAST = ("llama tied", "mixtral", "gpt2")


def published(family: str, path: Path) -> Path:
    """A folder of a small model of a family, with weights."""
    if family in FAMILIES:
        return folder_of(family, path, weights=True)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(smallest(family))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(path)
    return path


def held(path: Path) -> dict[str, Tensor]:
    """All tensors of a folder."""
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def sent(mesh: Any, config: Any, source: Path, written: Path) -> dict[str, Any]:
    """Send a trainer's weights to copies of transformers' own model, and to a folder's tensors. Return what has arrived."""
    trains = meshcomm.init(config, overrides=["mesh.ranks=[0,1,2,3]"])
    generates = meshcomm.init(dims={"copy": 2}, ranks=range(4, 6))
    link = meshcomm.link(trains, generates, bucket_bytes=20_000)
    if trains.is_member:
        trainer = Trainer(trains, config)
        save_pretrained(trainer, written)
        link.weights(trainer.modules).push(version=1).wait()
        # A folder has a tied weight once.
        skip = [] if "lm_head.weight" in held(source) else ["lm_head.weight"]
        link.weights(trainer.modules, skip=skip).push(version=2).wait()
        return {}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(source))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    assert link.weights(model).pull() == 1
    tensors = {name: torch.full_like(tensor, torch.nan) for name, tensor in held(source).items()}
    assert link.weights(tensors).pull() == 2
    return {"model": model.state_dict(), "folder": tensors}


@pytest.mark.parametrize(
    "family", [each if each in FAST else pytest.param(each, marks=pytest.mark.parity) for each in SOURCES]
)
def test_a_split_model_feeds_the_published_names(family: str, tmp_path: Path) -> None:
    source = published(family, tmp_path / "from")
    config = config_of(
        {"pretrained": str(source), "dropout": 0.0}, train={"dtype": "float32"}, **SOURCES[family]
    )
    ranks = meshcomm.simulate(
        lambda mesh: sent(mesh, config, source, tmp_path / "to"), dims={"all": 6}, timeout_s=60.0
    )
    expected = held(source)
    reference = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    for name, arrived, wanted in (
        ("save_pretrained", held(tmp_path / "to"), expected),
        *(("model", rank["model"], reference) for rank in ranks[4:]),
        *(("folder", rank["folder"], expected) for rank in ranks[4:]),
    ):
        assert arrived.keys() == wanted.keys(), name
        assert [key for key in wanted if not torch.equal(arrived[key], wanted[key])] == [], name


def test_names_of_a_spec_are_cuts_of_its_parameters() -> None:
    rows = (("0.gate", "0.up"), ("1.gate", "1.up"))
    spec = ModelSpec(
        module=torch.nn.Identity,
        stored=lambda name: (rows, True) if name == "experts" else (f"stored.{name}", name == "w"),
    )
    cuts = cuts_of(spec.stored_tensors, "experts", (2, 6, 5))
    assert cuts is not None and cuts["1.up"] == Cut((1, 3, 0), (2, 6, 5), (2, 1))
    assert cuts_of(spec.stored_tensors, "w", (4, 3)) == {"stored.w": Cut((0, 0), (4, 3), (1, 0))}
    assert cuts_of(spec.stored_tensors, "b", ()) == {"stored.b": Cut((), (), ())}
    value = torch.arange(60.0).view(2, 6, 5)
    for name, tensor in spec.stored_tensors("experts", value).items():
        (region,) = own_regions(Cutout(value, cuts[name]))
        assert region.box == Box.at((0, 0), tensor.shape)
        assert torch.equal(region.read((0, 0), tensor.shape), tensor)
        region.write((1, 1), (3, 2), tensor[1:3, 1:2] + 100)
        assert torch.equal(tensor[1:3, 1:2], region.read((1, 1), (3, 2)))
    # Each element but the written ones is as before.
    assert int((value >= 100).sum()) == 8
    for shape in ((2, 5, 5), (3, 6, 5), (2,)):
        with pytest.raises(ShapeError, match=r"ModelSpec\.stored does not fit experts"):
            spec.stored_tensors("experts", torch.empty(shape))


def test_what_is_computed_has_no_cut() -> None:
    assert cuts_of(lambda name, value: {"a": torch.cat([value, value])}, "w", (4, 3)) is None
    assert cuts_of(lambda name, value: {"a": value.flatten()}, "w", (4, 3)) is None
    assert cuts_of(lambda name, value: {"a": value[:, ::2]}, "w", (4, 3)) is None
    plain = torch.nn.Linear(2, 3)
    assert {name: id(tensor) for name, tensor in stored_parts(plain).items()} == {
        "weight": id(plain.weight),
        "bias": id(plain.bias),
    }


@pytest.mark.parametrize("begin", range(0, 13, 2))
def test_a_range_of_a_split_axis_has_the_parts_of_the_axis(begin: int) -> None:
    """A range is on the ranks that hold it, and not split again."""
    layout = Layout({"a": 2, "b": 3})
    whole = Placement.read("(q+k)/a/b d", sizes={"q": 9, "k": 4, "d": 2})
    for end in range(begin, 14):
        cut = Located(whole.cut((begin, 0), (end, 2), (1, 0)), layout)
        assert cut.placement == Placement.of_facts(cut.placement.facts())
        for position in range(6):
            owned = {
                n for box in Located(whole, layout).boxes(position) for n in range(box.begin[0], box.end[0])
            }
            there = {n + begin for box in cut.boxes(position) for n in range(box.begin[1], box.end[1])}
            assert there == owned & {*range(begin, end)}
            assert np.prod(cut.local_shape(position)) == 2 * len(there)
