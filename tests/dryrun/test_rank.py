"""A pretended rank against a real one: the same memory in each part, and the same calls and bytes on every dim."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.distributed_c10d as c10d

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.dryrun.rank import RankStep, counted_step, pretended_step
from meshcomm.errors import LayoutError, UnsupportedOp
from meshcomm.testing import Pool
from tests.dryrun.measured import Watched
from tests.group_hooks import HAS_HOOKS, needs_group_hooks
from tests.models.families import folder_of

pytestmark = pytest.mark.long

WORLD = 4
BUILT_IN: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 4,
    "intermediate_size": 256,
}


def config_of(dims: str, parallel: dict[str, Any], train: dict[str, Any], model: dict[str, Any]) -> Config:
    sizes = {name: int(size) for name, _, size in (each.partition("=") for each in dims.split())}
    copies = sizes.get("dp", 1) * sizes.get("fsdp", 1)
    mesh: dict[str, Any] = {"dims": sizes, "device": "cpu", "timeout_s": 120.0, "validate_calls": 0}
    return load_config(
        {
            "mesh": mesh,
            "parallel": parallel,
            "model": model,
            "data": {"seq_len": 64, **({"tokenizer": "bytes"} if "pretrained" in model else {})},
            "train": {"steps": 1, "global_batch_size": 8 * copies, "micro_batch_size": 2, **train},
        }
    )


def real(config: Config) -> RankStep:
    with meshcomm.init(config) as mesh:
        return counted_step(mesh, config, Watched)


def compared(pool: Pool, config: Config, world: int = WORLD) -> list[float]:
    """The ratios of predicted to measured peaks on the first and the last rank."""
    found = []
    measured = pool.run(real, config, ranks=world, timeout_s=300)
    for rank in (0, world - 1):
        is_, was = pretended_step(config, rank, world), measured[rank]
        assert (is_.rank, is_.coords, is_.parameters) == (was.rank, was.coords, was.parameters)
        # Before torch 2.14, real calls of FSDP are not seen. A dry run sees them with every version.
        rows = is_.rows if HAS_HOOKS else [row for row in is_.rows if not row.call.endswith("(torch)")]
        assert sorted(rows) == sorted(was.rows)
        assert sum(was.peak.parts.values()) == was.peak.nbytes
        for part, nbytes in was.peak.parts.items():
            # On processes, buffers live until Gloo's thread has let go of them. The rest includes these buffers.
            bound = 0.15 if part == "rest" else 0.1
            assert abs(is_.peak.parts[part] - nbytes) < bound * was.peak.nbytes, part
        for part in ("weights", "gradients", "optimizer"):
            # FSDP pads uneven shards, which the dry run does not see.
            assert is_.before[part] == pytest.approx(was.before[part], rel=0.02) and was.before[part] > 0
        found.append(is_.peak.nbytes / was.peak.nbytes)
        assert 0.9 < found[-1] < 1.1
    return found


def test_the_memory_and_the_calls_of_a_step(pool: Pool, figures: Callable[[str], None]) -> None:
    """tests/dryrun/test_eight_ranks.py has the other kinds of parallelism."""
    ratios = compared(pool, config_of("fsdp=4", {"shard": "fsdp"}, {}, BUILT_IN))
    figures(f"dry run, fsdp: predicted / measured peak {', '.join(f'{each:.3f}' for each in ratios)}")


@pytest.mark.deep
def test_of_a_folder_of_transformers(pool: Pool, figures: Callable[[str], None], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = folder_of("qwen3", tmp_path / "qwen3", weights=True)
    parallel = {"shard": "fsdp", "tensor": "tp"}
    ratios = compared(pool, config_of("fsdp=2 tp=2", parallel, {}, {"pretrained": str(folder)}))
    figures(f"dry run, Qwen3: predicted / measured peak {', '.join(f'{each:.3f}' for each in ratios)}")


def test_a_world_that_no_machine_here_holds() -> None:
    dims = "pp=4 dp=16 tp=4"
    parallel = {"pipeline": "pp", "data": "dp", "tensor": "tp"}
    config = config_of(dims, parallel, {"global_batch_size": 128}, BUILT_IN)
    first, last = (pretended_step(config, rank, 256) for rank in (0, 255))
    assert (first.coords, last.coords) == ({"pp": 0, "dp": 0, "tp": 0}, {"pp": 3, "dp": 15, "tp": 3})
    # With 1F1B, the first stage has four microbatches in flight and the last stage one.
    assert first.peak.parts["activations"] > last.peak.parts["activations"]
    assert "of stage 0" in first.peak.during and first.peak.at == ""
    assert not dist.is_initialized()


def test_a_folder_without_weights_in_a_large_world(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = folder_of("mixtral", tmp_path / "model")
    model = {"pretrained": str(folder), "random_weights": True}
    parallel = {"shard": "fsdp", "tensor": "tp"}
    config = config_of("fsdp=512 tp=2", parallel, {"global_batch_size": 1024}, model)
    step = pretended_step(config, 1023, 1024)
    assert step.groups["fsdp[tp=1]"] == list(range(1, 1024, 2))
    assert {row.dim for row in step.rows} == {"fsdp", "tp"} and step.peak.parts["activations"] > 0


def test_a_shape_that_depends_on_values_is_refused() -> None:
    model = {"build": "tests.dryrun.test_rank:looks"}
    config = config_of("dp=4", {"data": "dp"}, {}, model)
    with pytest.raises(UnsupportedOp, match="shapes depend on values"):
        pretended_step(config, 0, WORLD)


class Looks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x) * len(x.nonzero())


def looks() -> torch.nn.Module:
    return Looks()


def test_patterns_may_match_another_stage_only() -> None:
    settings = {"groups": {"layers.0.*w1*": {"optimizer": "muon"}}, "frozen": ["head*"]}
    config = config_of("pp=2 dp=1", {"pipeline": "pp", "data": "dp"}, settings, BUILT_IN)
    assert all(pretended_step(config, rank, 2).calls for rank in (0, 1))


def test_the_order_of_calls_and_waits() -> None:
    config = config_of("pp=2 fsdp=2", {"pipeline": "pp", "shard": "fsdp"}, {}, BUILT_IN)
    first, last = pretended_step(config, 0, WORLD), pretended_step(config, 3, WORLD)
    for step in (first, last):
        begun, ended = (
            {event.call: place for place, event in enumerate(step.events) if event.kind == kind}
            for kind in ("start", "wait")
        )
        assert list(begun) == list(range(len(step.calls)))
        assert all(place < ended[call] for call, place in begun.items())
        flops = [event.flops for event in step.events]
        assert flops == sorted(flops) and flops[0] == 0 and flops[-1] == step.flops
        assert {call.group for call in step.calls} == set(step.groups)
    assert first.groups == {"pp[fsdp=0]": [0, 2], "fsdp[pp=0]": [0, 1]}
    assert last.groups == {"pp[fsdp=1]": [1, 3], "fsdp[pp=1]": [2, 3]}
    # torch's schedule starts to send a gradient and to receive the next input, then waits for both.
    pairs = [(event.kind, last.calls[event.call].call) for event in last.events]
    assert [("start", "send"), ("start", "recv"), ("wait", "send"), ("wait", "recv")] in [
        pairs[place : place + 4] for place in range(len(pairs))
    ]
    assert {(call.call, call.op, call.root) for call in last.calls if not call.parts} == {
        ("all_gather", None, -1),
        ("reduce_scatter", "sum", -1),
        ("all_reduce", "sum", -1),
        ("broadcast", None, 1),
    }


def test_fsdp_s_calls_overlap_with_the_layers_beside_theirs() -> None:
    train = {"activation_checkpointing": True, "global_batch_size": 8}
    step = pretended_step(
        config_of("dp=2 fsdp=2", {"data": "dp", "shard": "fsdp"}, train, BUILT_IN), 0, WORLD
    )
    of_kind: dict[str, list[tuple[int, int]]] = {}
    starts: dict[int, int] = {}
    for event in step.events:
        if event.kind == "start":
            starts[event.call] = event.flops
        elif (call := step.calls[event.call]).nbytes > 100:
            of_kind.setdefault(call.call, []).append((starts[event.call], event.flops))
    layers = BUILT_IN["num_layers"]
    gathers, scatters = of_kind["all_gather"], of_kind["reduce_scatter"]
    # The ends of the model, and all layers twice.
    assert len(gathers) == 1 + 2 * layers and len(scatters) == layers + 1
    forward, backward = gathers[1 : layers + 1], gathers[layers + 1 :]
    # A layer is gathered while the one before it computes, but for the first one, behind the table of tokens.
    assert gathers[0] == forward[0] == (0, 0)
    assert [start for start, _ in forward[1:]] == [end for _, end in forward[:-1]]
    (each,) = {end - start for start, end in forward[1:]}
    assert each > 0
    # In a backward pass, the next layer is gathered when a layer begins, which also computes most of its forward pass again.
    (both,) = {end - start for start, end in backward[1:]}
    assert 2 * each < both < 3 * each
    # A layer's gradients are sent while the next layer computes. The last ones, those of the ends, are waited for.
    assert [end for _, end in scatters[:-1]] == [start for start, _ in scatters[1:]]
    assert {end - start for start, end in scatters[:-2]} == {both}
    assert scatters[-1] == (step.flops, step.flops)
    assert of_kind["all_reduce"][: layers + 1] == scatters


class Summing(torch.nn.Module):
    """Calls torch's functional collectives, as DTensor does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group = next(each for each in c10d._world.pg_map if each.group_desc.startswith("dp"))
        y = self.table(x)
        # The names since torch 2.14, or those before.
        gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
        scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
        whole = gather(y.detach()[0, :4], 0, group)
        part = scatter(whole * 2, "max", 0, group)
        return y + 0 * funcol.all_reduce(part.sum(), "sum", group)


def summing() -> torch.nn.Module:
    return Summing()


@needs_group_hooks
def test_functional_collectives(pool: Pool) -> None:
    config = config_of("dp=4", {"data": "dp"}, {}, {"build": "tests.dryrun.test_rank:summing"})
    compared(pool, config)
    step = pretended_step(config, 1, WORLD)
    first = next(
        place for place, event in enumerate(step.events) if step.calls[event.call].call == "all_gather"
    )
    forward = step.events[first : first + 6]
    assert [(event.kind, step.calls[event.call].call) for event in forward] == [
        (kind, call) for call in ("all_gather", "reduce_scatter", "all_reduce") for kind in ("start", "wait")
    ]
    assert [step.calls[event.call].op for event in forward[::2]] == [None, "max", "sum"]


def test_without_a_model_there_is_nothing_to_run() -> None:
    config = load_config(
        {
            "mesh": {"dims": {"dp": 4}, "device": "cpu"},
            "parallel": {"data": "dp"},
            "train": {"steps": 1, "global_batch_size": 4, "micro_batch_size": 1},
        }
    )
    with pytest.raises(LayoutError, match="needs a model and data"):
        pretended_step(config, 0, WORLD)
    assert not dist.is_initialized()
