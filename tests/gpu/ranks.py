# ruff: noqa: E402 - NCCL's variables come before torch
"""The program of each rank in an experiment. A case that fails is recorded with its error, and the next one runs.

Started by tests/gpu/experiments.py, which passes a Setting as JSON in the variable TESTS_GPU.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from traceback import extract_tb
from typing import Any

SETTING: dict[str, Any] = json.loads(os.environ.get("TESTS_GPU", "{}"))
if SETTING.get("share") in ("hostid", "multi"):
    # Several ranks on one GPU: NCCL takes each for a separate host, or its switch allows it.
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if SETTING["share"] == "hostid":
        os.environ["NCCL_HOSTID"] = f"h{os.environ.get('RANK', '0')}"
    else:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import meshcomm
from meshcomm.collectives import ROWS, Call
from meshcomm.config import Config, load_config
from meshcomm.errors import CommunicationError
from meshcomm.mesh import Mesh
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.context import gather_sequence, ring_attention, split_sequence
from meshcomm.testing import emulated_nccl as emulation
from meshcomm.train import Trainer
from meshcomm.train.callbacks import Callback, Step
from meshcomm.train.checkpoint.parts import parts_of
from meshcomm.train.cost import known_peak
from meshcomm.train.data import batches_of
from meshcomm.train.data import load as text
from meshcomm.train.parity import record, reference
from meshcomm.transfer.link import Link
from meshcomm.transport.process_group import ProcessGroupTransport
from meshcomm.transport.torch_private import bindings, unfinished_collectives
from tests.benchmarks.plain import Plain
from tests.elastic import queued_loop
from tests.group_hooks import HAS_HOOKS
from tests.models import families as of_families
from tests.sizes import model_of
from tests.testing import test_emulated_nccl as queued
from tests.watching import queued_program

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
HERE = Path(__file__).parent
BACKEND, DEVICE = SETTING.get("backend", "nccl"), SETTING.get("device", "cuda")
ON_GPU = DEVICE == "cuda"
# The number of first calls on a group that are compared. A call takes milliseconds if ranks share a GPU.
COMPARED = 8
DIMS = {8: {"pp": 2, "dp": 2, "tp": 2}, 4: {"dp": 2, "tp": 2}, 2: {"dp": 2, "tp": 1}}.get(
    WORLD, {"dp": WORLD, "tp": 1}
)
PERMUTED = {8: [6, 3, 1, 4, 0, 7, 5, 2], 4: [2, 1, 3, 0]}


@contextmanager
def case(name: str) -> Iterator[dict[str, Any]]:
    """Record how the block ended, with the figures that it adds to the row."""
    row: dict[str, Any] = {"case": name, "rank": RANK, "right": False}
    began = time.monotonic()
    try:
        yield row
        row["right"] = True
    except Exception as error:
        lines = [f"{Path(each.filename).name}:{each.lineno}" for each in extract_tb(error.__traceback__)]
        row["said"] = f"{type(error).__name__}: {error}"[:1500] + f" ({' '.join(lines[-6:])})"
    finally:
        row["seconds"] = round(time.monotonic() - began, 3)
        with open(Path(SETTING["folder"]) / f"{RANK}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")


@contextmanager
def opened(source: Any = None, **keys: Any) -> Iterator[Mesh]:
    """A mesh; tensors in the block are created on its device."""
    usual = {"dims": DIMS, "backend": BACKEND, "device": DEVICE, "timeout_s": 30, "validate_calls": COMPARED}
    with meshcomm.init(source, **({**usual, **keys} if source is None else {})) as mesh:
        torch.set_default_device(mesh.device)
        try:
            yield mesh
            finish()
        finally:
            torch.set_default_device(None)


def finish() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if ON_GPU else 0


def communicators() -> int:
    """The number of communicators that NCCL has created in this process, from its log."""
    found = Path(SETTING["folder"]).glob(f"nccl.{os.getpid()}")
    return sum(each.read_text(errors="replace").count("Init COMPLETE") for each in found)


def basics(mesh: Mesh) -> None:
    """Make each call along each dim, and check its result by the ranks that the layout gives."""
    for dims in (*mesh.layout.dims, *mesh.layout.merge):
        ranks, here = mesh.ranks(dims), mesh.coord(dims)
        n, last = len(ranks), len(ranks) - 1
        x = torch.full((8, 4), float(mesh.rank))
        assert mesh.all_gather(dims, x[:1, :1]).view(-1).tolist() == ranks
        assert mesh.all_reduce(dims, x.clone())[0, 0] == sum(ranks)
        assert mesh.reduce_scatter(dims, x)[0, 0] == sum(ranks)
        assert mesh.all_to_all(dims, x)[:: 8 // n, 0].tolist() == ranks
        assert mesh.broadcast(dims, x.clone(), src=last)[0, 0] == ranks[last]
        reduced = mesh.reduce(dims, x.clone(), dst=last)
        assert here != last or (reduced is not None and reduced[0, 0] == sum(ranks))
        gathered = mesh.gather(dims, x[:1, :1], dst=0)
        assert here or (gathered is not None and gathered.view(-1).tolist() == ranks)
        assert (
            mesh.scatter(dims, x if here == 0 else None, src=0, out=torch.empty(8 // n, 4))[0, 0] == ranks[0]
        )
        assert mesh.objects.all_gather(dims, {"rank": mesh.rank}) == [{"rank": rank} for rank in ranks]
        if SETTING.get("messages", True):
            for offset in (1, -1, 2):
                came = mesh.shift(dims, x, offset)
                assert came is not None and came[0, 0] == ranks[(here - offset) % n]
        if n > 1 and mesh.plan.defaults.backend in ("nccl", emulation.NAME):
            with pytest.raises(meshcomm.MeshcommError, match="band of int64 is not possible on"):
                mesh.all_reduce(dims, x.long(), "band")
            with pytest.raises(meshcomm.MeshcommError, match="cannot receive from any source"):
                mesh.recv_any(dims, x)
    mesh.barrier()


# -- the experiments ----------------------------------------------------------------------------------


def probe() -> None:
    """Try NCCL with torch alone: can these ranks share the device, and how long does a call take?"""
    with case(f"{WORLD} ranks, share: {SETTING['share']}") as row:
        began = time.monotonic()
        dist.init_process_group(BACKEND)
        x = torch.ones(4, device=DEVICE)
        dist.all_reduce(x)
        assert x.tolist() == [WORLD] * 4
        row["first_s"] = round(time.monotonic() - began, 2)
        began = time.monotonic()
        for _ in range(20):
            dist.all_reduce(x)
        finish()
        row["ms per call"] = round((time.monotonic() - began) * 50, 2)
        dist.destroy_process_group()


def collectives() -> None:
    keys = {"dims": DIMS, "merge": {"model": tuple(DIMS)[::-1]}, "backend": BACKEND, "device": DEVICE}
    orders = [{}, {"rank_order": PERMUTED[WORLD]}] if WORLD in PERMUTED else [{}]
    for bound, order in product((False, True) if ON_GPU else (False,), orders):
        with case(f"device_id {'on' if bound else 'off'}, {'permuted' if order else 'usual'} order") as row:
            torch.zeros(1, device=DEVICE)
            made, began = communicators(), time.monotonic()
            config = {"mesh": {**keys, **order, "timeout_s": 30}, "process": {"device_id": bound}}
            with opened(config) as mesh:
                row["open_s"] = round(time.monotonic() - began, 2)
                free, early = free_bytes(), communicators()
                basics(mesh)
                mesh.create_group("side", ("dp", "tp"))
                basics(mesh)
                mesh.barrier()
                row["groups"] = len(dist.distributed_c10d._world.pg_map)
                if ON_GPU:
                    torch.cuda.synchronize()
                    row["communicators"] = communicators() - made
                    used = (free - free_bytes()) / max(1, communicators() - early) / WORLD
                    row["MiB per communicator and rank"] = round(used / 2**20, 1)
    if WORLD == 4:
        with (
            case("each kind of call, of meshcomm and of torch, then a wait that times out"),
            opened() as mesh,
        ):
            queued.every_call(mesh, COMPARED + 4)
            queued.limited_wait(mesh)


def messages() -> None:
    for nbytes in (8, 64 << 20):
        with case(f"exchange and shift of {nbytes} B"), opened() as mesh:
            ranks, here = mesh.ranks("dp"), mesh.coord("dp")
            x, out = torch.full((nbytes // 4,), float(mesh.rank)), torch.zeros(nbytes // 4)
            peer = len(ranks) - 1 - here
            for _ in range(3):
                got = mesh.exchange("dp", sends=[(x, peer)], recvs=[(out, peer)])
                assert torch.all(got[0] == ranks[peer])
                assert torch.all(mesh.shift("dp", x) == ranks[here - 1])
    if WORLD == 4:
        with case("irecv and isend in both directions are refused"), opened() as mesh:
            queued.messages(mesh)
        with case("groups of DeviceMesh [[0, 1], [3, 2]]"):
            dist.init_process_group(BACKEND)
            try:
                given = DeviceMesh(DEVICE, [[0, 1], [3, 2]], mesh_dim_names=("dp", "tp"))
                with opened(given) as mesh:
                    basics(mesh)
            finally:
                dist.destroy_process_group()
    two = {"backend": "gloo", "options": {"tp": {"backend": BACKEND}}}
    with case(f"gloo by default, dim tp on {BACKEND}"), opened(**two) as mesh:
        for dim in DIMS:
            assert mesh.all_reduce(dim, torch.ones(2)).tolist() == [mesh.size(dim)] * 2
        assert int(mesh.shift("tp", torch.tensor(mesh.rank))) in mesh.ranks("tp")


def fault() -> None:
    queued_program.main(SETTING["fault"], 70, BACKEND, DEVICE, 10.0)


def one() -> None:
    """A process group of one rank, which copies by the backend's own calls; then the order of streams."""
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cuda", 0) if ON_GPU else torch.device(DEVICE)
    transport = ProcessGroupTransport(dist.group.WORLD, BACKEND, device, False)
    types = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool"]
    for row, kind in product(ROWS.values(), types):
        if row.reduces and kind == "bool":
            continue
        with case(f"{row.name} of {kind}"):
            x = torch.ones(64, device=device).to(getattr(torch, kind))
            out = None if row.in_place or row.name == "barrier" else torch.zeros_like(x)
            op, root = "sum" if row.reduces else None, 0 if row.root else -1
            for blocking in (True, False):
                work = transport.start(Call(row, x, out, op, root, blocking=blocking))
                if work is not None:
                    work.wait()
            assert torch.equal(x if out is None else out, torch.ones_like(x))
    for blocking, elsewhere in product((True, False), (False, True)) if ON_GPU else ():
        where = "another" if elsewhere else "this"
        with case(f"late producer, {'blocking' if blocking else 'async'}, consumer on {where} stream"):
            for value in range(20):
                late(transport, float(value), blocking, elsewhere)
    dist.destroy_process_group()


def late(transport: ProcessGroupTransport, value: float, blocking: bool, elsewhere: bool) -> None:
    """The producer is not done when the call is queued; then its tensor is dropped and its memory overwritten."""
    here = torch.cuda.current_stream()
    consumer = torch.cuda.Stream() if elsewhere else here
    x, out = torch.zeros(2, 1 << 20, device=transport.device)
    x = x.clone()
    torch.cuda._sleep(20_000_000)
    x.fill_(value)
    work = transport.start(Call(ROWS["all_gather"], x, out, blocking=blocking))
    del x
    if blocking:
        spoiled = torch.full_like(out, -1.0)
        consumer.wait_stream(here)
        del spoiled
    with torch.cuda.stream(consumer):
        if work is not None:
            work.wait()
        twice = out * 2
    torch.cuda.synchronize()
    assert twice.eq(2 * value).all(), f"got {twice[0].item()}, expected {2 * value}"


def warm_calls(mesh: Mesh, x: Tensor, only: str = "") -> dict[str, Callable[[], Any]]:
    """Each call on existing tensors, after its first, compared calls; with `only`, one of them."""
    out, y = torch.empty_like(x), torch.ones(8, 4, requires_grad=True)
    peer = mesh.size("dp") - 1 - mesh.coord("dp")
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: mesh.all_reduce("dp", x, "avg"),
        "all_gather": lambda: mesh.all_gather("dp", x),
        "exchange": lambda: mesh.exchange("dp", sends=[(x, peer)], recvs=[(out, peer)])[0],
        "reduce_scatter": lambda: mesh.reduce_scatter("dp", x),
        "all_to_all": lambda: mesh.all_to_all("dp", x),
        "broadcast": lambda: mesh.broadcast("dp", x, src=0),
        "shift": lambda: mesh.shift("dp", x),
        "all_gather, async": lambda: mesh.all_gather("dp", x, async_op=True).wait(),
        "rearrange": lambda: mesh.rearrange(x, "a b -> a (dp b)"),
        "functional, with its backward": lambda: (
            mesh.functional.all_reduce("dp", y, grad="sum").sum().backward()
        ),
    }
    for call in [calls[only]] if only else calls.values():
        for _ in range(COMPARED + 4):
            call()
    finish()
    return calls


def syncs() -> None:
    """In steady state, no call makes the host wait for the device."""
    with opened() as mesh:
        for name, call in warm_calls(mesh, torch.ones(8, 4)).items():
            with case(name), no_sync():
                call()


@contextmanager
def no_sync() -> Iterator[None]:
    """In the block, every operation that makes the host wait for the device raises."""
    if not ON_GPU:
        with emulation.no_host_sync():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def training(**changed: Any) -> Config:
    """tests/gpu/train.toml on all ranks of this experiment; the model is small if there is no GPU."""
    size = model_of(4, 512, 8, 8, 1408) if ON_GPU else model_of(2, 64, 4, 4, 128)
    given = {f"model.{key}": value for key, value in size.items()}
    given |= {"train.global_batch_size": 8, "train.micro_batch_size": 2}
    given |= {"data.seq_len": 256 if ON_GPU else 32}
    given |= {"mesh.backend": f'"{BACKEND}"', "mesh.device": f'"{DEVICE}"', "mesh.validate_calls": 8}
    return load_config(HERE / "train.toml", [f"{key}={value}" for key, value in {**given, **changed}.items()])


def several_steps(config: Config, warm: int, more: int) -> list[float]:
    """The losses of `warm` steps, and of `more` steps during which the host must not wait."""
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config).engine
        batches = batches_of(trainer, text(trainer.sections.data))
        given = [batches(step) for step in range(1, warm + more + 1)]

        def run(steps: range) -> None:
            for step in steps:
                trainer.step(*given[step - 1], 1e-3, step)
                mesh.step(step)

        run(range(1, warm + 1))
        found = trainer.results()
        with no_sync() if more else nullcontext():
            run(range(warm + 1, warm + more + 1))
        return [each.loss for each in (*found, *trainer.results())]


def steps() -> None:
    """Training steps with every kind of parallelism that four ranks allow."""
    ways = {
        "dp": {"mesh.dims": f"{{ dp = {WORLD} }}"},
        "fsdp": {"mesh.dims": f"{{ fsdp = {WORLD} }}", "parallel.shard": "fsdp", "parallel.data": ""},
    }
    if WORLD == 4:
        ways |= {
            "dp tp": {"mesh.dims": "{ dp = 2, tp = 2 }", "parallel.tensor": "tp"},
            "pp dp": {"mesh.dims": "{ pp = 2, dp = 2 }", "parallel.pipeline": "pp"},
            "dp cp": {"mesh.dims": "{ dp = 2, cp = 2 }", "parallel.context": "cp"},
        }
    for name, changed in ways.items():
        with case(name) as row:
            losses = several_steps(training(**changed), 8, 4)
            row["losses"] = f"{losses[0]:.3f}, {losses[-1]:.3f}"
            assert losses[-1] < losses[0]


def steps_compiled() -> None:
    """In bfloat16, compiled code rounds less often, because it keeps fused values in float32."""
    dims = {"mesh.dims": f"{{ dp = 1, tp = {WORLD} }}", "parallel.tensor": "tp"} if WORLD > 1 else {}
    for name, dtype, limit in (("float32", "", 1e-3), ("bfloat16", '"bfloat16"', 0.1)):
        with case(f"compiled blocks have the losses of others, {name}") as row:
            eager, compiled = (
                several_steps(training(**dims, **{"train.compile": word, "train.compute_dtype": dtype}), 4, 0)
                for word in ("false", "true")
            )
            row["farthest"] = max(abs(a - b) for a, b in zip(eager, compiled, strict=True))
            row["losses"] = ", ".join(f"{a:.4f} {b:.4f}" for a, b in zip(eager, compiled, strict=True))
            assert row["farthest"] < limit


def one_step(trainer: Engine, given: list[tuple[Tensor, Tensor]], number: int) -> None:
    trainer.step(*given[number - 1], 1e-4, number)


def speed() -> None:
    """Tokens per second and MFU of a step with 1B parameters, sequence 4,096, bfloat16; compared with plain PyTorch."""
    layers, width, heads, ff, sequence = (20, 2048, 16, 5632, 4096) if ON_GPU else (2, 64, 4, 128, 64)
    changed = {f"model.{key}": value for key, value in model_of(layers, width, heads, heads, ff).items()}
    changed |= {"data.seq_len": sequence, "train.global_batch_size": 4, "train.micro_batch_size": 2}
    tokens_of_step, rounds = 4 * sequence, 5

    def timed(name: str, row: dict[str, Any], parameters: int, step: Callable[[int], object]) -> None:
        for number in range(3):
            step(number + 1)
        finish()
        began = time.perf_counter()
        for number in range(rounds):
            step(number + 4)
        finish()
        rate = tokens_of_step * rounds / (time.perf_counter() - began)
        row[f"{name} tokens/s"] = round(rate)
        # 6 operations per parameter and token, plus causal attention (PaLM, appendix B, halved).
        flops = 6 * parameters + 6 * layers * width * sequence
        if ON_GPU and (peak := known_peak(torch.cuda.get_device_name(0), "bfloat16", False)) is not None:
            row[f"{name} MFU"] = round(rate * flops / peak, 3)
        row[f"{name} GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 1) if ON_GPU else None

    for compiled in (False, True) if ON_GPU else (False,):
        with case("compiled" if compiled else "eager") as row:
            config = training(**changed, **{"train.compile": str(compiled).lower()})
            with meshcomm.init(config) as mesh:
                trainer = Trainer(mesh, config).engine
                parameters = sum(each.numel() for _, each in trainer.named_parameters())
                row["parameters"] = parameters
                batches = batches_of(trainer, text(trainer.sections.data))
                given = [batches(number) for number in range(1, 9)]
                timed("ours", row, parameters, partial(one_step, trainer, given))
                assert all(each.loss < 7 for each in trainer.results())
                del trainer
            fresh()
            with torch.device(DEVICE):
                plain = Plain(config.model, sequence, range(layers))
            optimizer = torch.optim.AdamW(plain.parameters(), 1e-4, fused=True)
            if compiled:
                for layer in plain.layers.values():
                    layer.compile()

            def step(number: int, plain: Plain = plain, optimizer: torch.optim.Optimizer = optimizer) -> None:
                for tokens, targets in zip(*(x.split(2) for x in given[number - 1]), strict=True):
                    with torch.autocast(DEVICE, torch.bfloat16):
                        logits = plain(tokens)
                    (F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / 2).backward()
                nn.utils.clip_grad_norm_(plain.parameters(), 1.0, foreach=True)
                optimizer.step()
                optimizer.zero_grad()

            timed("plain", row, sum(each.numel() for each in plain.parameters()), step)
            row["ratio"] = round(row["ours tokens/s"] / row["plain tokens/s"], 3)
            del plain, optimizer, step
            fresh()


def fresh() -> None:
    """Exclude memory of earlier measurements from the next peak."""
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def checkpoint() -> None:
    """The speed at which a checkpoint copies to the host, compared with a copy into pageable memory."""
    device = torch.device(DEVICE)
    elements = (1 << 28) if ON_GPU else (1 << 20)
    state = {"weight": torch.randn(elements, device=device)}
    (part,) = parts_of(state)
    with case(f"{elements * 4 >> 20} MiB") as row:
        ways = {
            "ours": lambda: part.on_host(True),
            "pageable": lambda: state["weight"].to("cpu", copy=True),
        }
        for name, copy in ways.items():
            times = []
            for _ in range(4):  # the first copy takes pinned memory from the system
                finish()
                began = time.perf_counter()
                copied = copy()
                times.append(time.perf_counter() - began)
                assert torch.equal(copied[:9], state["weight"][:9].cpu())
                assert torch.equal(copied[-9:], state["weight"][-9:].cpu())
            row[f"{name} first GB/s"] = round(elements * 4e-9 / times[0], 1)
            row[f"{name} GB/s"] = round(elements * 4e-9 / sorted(times[1:])[1], 1)
        assert copied.is_pinned() is False
        assert not ON_GPU or part.on_host(True).is_pinned()


def graphs() -> None:
    for mode, name in product(
        ("thread_local", "global") if ON_GPU else ("emulated",), ("all_reduce", "all_gather", "exchange")
    ):
        with case(f"{name}, capture {mode}"), opened() as mesh:
            x = torch.ones(8, 4)
            call = warm_calls(mesh, x, name)[name]
            graph = torch.cuda.CUDAGraph() if ON_GPU else None
            with (
                torch.cuda.graph(graph, capture_error_mode=mode) if ON_GPU else emulation.capture()
            ) as capturing:
                result = call()
            for value in (2.0, 3.0):
                x.fill_(value)
                (graph or capturing).replay()
                finish()
                assert result.eq(value).all(), f"got {result.tolist()}, expected {value}"
            del graph, capturing


def graph_alive() -> None:
    """A mesh closes while a graph of its calls is alive. NCCL would wait for the graph without a limit."""
    told = "closes while a CUDA graph still contains"
    with case("refused"), pytest.raises(CommunicationError, match=told), opened() as mesh:
        call = warm_calls(mesh, torch.ones(8, 4), "all_reduce")["all_reduce"]
        graph = torch.cuda.CUDAGraph() if ON_GPU else None
        with torch.cuda.graph(graph) if ON_GPU else emulation.capture() as captured:
            call()
        (graph or captured).replay()
        finish()
    (graph or captured).reset()


def queue() -> None:
    """The backend's record of calls that a peer has not reached."""
    with opened() as mesh:
        x, late, name = torch.ones(4), mesh.coord("dp") == 1, mesh.group("dp").group_name
        y, out = torch.ones(4), torch.zeros(4)
        for each in ("exchange", "all_reduce"):
            warm_calls(mesh, x.view(1, 4), each)
        for calls in range(3):
            with case(f"{calls} calls and an exchange that a peer has not reached") as row:
                if late:
                    mesh.store.wait([f"queued/{calls}/{mesh.ranks('dp')[0]}"])
                for _ in range(calls):
                    mesh.all_reduce("dp", x)
                mesh.exchange("dp", sends=[(y, int(not late))], recvs=[(out, int(not late))])
                if not late:
                    time.sleep(0.2)
                    found = unfinished_collectives()
                    if calls < 2 and ON_GPU:
                        row["trace"] = bindings._dump_nccl_trace_json(
                            includeCollectives=True, onlyActive=True
                        )[-2500:].decode()
                    mesh.store.set(f"queued/{calls}/{mesh.rank}", b"")
                    assert len(found.get(name, ())) == calls, found
                finish()
                time.sleep(1.5)
                found = unfinished_collectives()
                assert not found.get(name), found


def lost() -> None:
    """A rank dies while the others wait for its call; a new one takes its place."""
    with case(SETTING["fault"]) as row:
        began = time.monotonic()
        queued_loop.main([SETTING["fault"]], 0, BACKEND, DEVICE)
        row["s"] = round(time.monotonic() - began, 1)


class Dies(Callback):
    """Rank 1 dies after step 3 and rank 0 after step 6, in each case after the last call of the step."""

    def on_step(self, step: Step) -> None:
        """See Callback."""
        generation = self.trainer.mesh.elastic.generation.number
        if (step.step, RANK, generation) in ((3, 1, 0), (6, 0, 1)):
            os.kill(os.getpid(), signal.SIGKILL)


TRAINS = {
    "dp_fsdp": {
        "mesh.dims": "{ dp = 2, fsdp = 2 }",
        "parallel.data": "dp",
        "parallel.shard": "fsdp",
    },
    "pp_dp": {"mesh.dims": "{ pp = 2, dp = 2 }", "parallel.pipeline": "pp", "parallel.data": "dp"},
    "copies": {
        "mesh.dims": f"{{ fsdp = {WORLD} }}",
        "parallel.shard": "fsdp",
        "parallel.data": "",
        "elastic.replace": "2",
        "elastic.copy_every": "1",
    },
}


def trains() -> None:
    """Ten steps in which two ranks die, compared with the same steps undisturbed."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    with case(SETTING["fault"]) as row:
        out = str(Path(SETTING["folder"]) / "run")
        more = {"train.steps": "10", "train.log_every": "1", "train.out": f'"{out}"'}
        config = training(**TRAINS[SETTING["fault"]], **more)
        losses = []
        for name, callbacks in (("disturbed", [Dies()]), ("undisturbed", [])):
            began = time.monotonic()
            own = load_config(config, [f'train.out="{out}/{name}"'])
            with meshcomm.init(own) as mesh:
                losses.append(Trainer(mesh, own, callbacks=callbacks).run().losses)
            row[f"{name} s"] = round(time.monotonic() - began, 1)
        row["losses"] = f"{losses[0][0]:.6f}, {losses[0][-1]:.6f}"
        row["farthest"] = max(abs(a - b) for a, b in zip(*losses, strict=True))
        assert row["farthest"] < 1e-4


def families() -> None:
    """Losses and norms of four steps in float64 equal the values of one process on a CPU."""
    expert = {"expert": "ep", "views": {"expert": {"pp": 2, "edp": 1, "ep": 2}}}
    tried: list[tuple[str, str, dict[str, Any]]] = [
        ("llama", "dp=2 tp=2", {"sequence_parallel": True}),
        ("llama 3", "pp=2 cp=2", {}),
        ("mistral window", "cp=4", {"attention": "ulysses"}),
        ("gpt2", "pp=2 tp=2", {"sequence_parallel": True}),
        ("qwen3 layers", "fsdp=4", {}),
        ("qwen3_moe", "pp=2 dp=2", expert),
        ("mixtral", "dp=2 cp=2", {"expert": "ep", "views": {"expert": {"edp": 1, "ep": 4}}}),
    ]
    for family, dims, more in tried if WORLD == 4 else ():
        with case(f"{family}, {dims}") as row:
            folder = of_families.folder_of(family, Path(SETTING["folder"]) / f"{family} {RANK}")
            model = {"pretrained": str(folder), "random_weights": True, "dropout": 0.0}
            host = of_families.config_of(model, dims, **more)
            config = load_config(host, [f'mesh.device="{DEVICE}"', f'mesh.backend="{BACKEND}"'])
            with meshcomm.init(config) as mesh:
                here = record(mesh, config, 4)
            alone = reference(host)
            one = meshcomm.simulate(lambda mesh: record(mesh, alone, 4), alone, world_size=1)[0]
            pairs = [*zip(here.losses, one.losses, strict=True), *zip(here.norms, one.norms, strict=True)]
            row["farthest"] = max(abs(a / b - 1) for a, b in pairs)
            assert row["farthest"] < 1e-9


def watched() -> None:
    """A call of torch with another shape on one rank, or the error if this torch cannot be watched."""
    if not HAS_HOOKS and ON_GPU:
        with case("refused"), pytest.raises(meshcomm.MeshcommError) as caught:
            meshcomm.watch()
        print(caught.value)
        return
    with case("another shape"):
        watch = meshcomm.watch()
        dist.init_process_group(BACKEND)
        dist.all_reduce(torch.ones(4, device=DEVICE))
        with pytest.raises(meshcomm.MeshcommError, match="rank 3 is mismatched"):
            dist.all_reduce(torch.ones(6 if RANK == 3 else 4, device=DEVICE))
            # The hosts of ranks that called first do not wait for the others. They raise at their next call.
            time.sleep(5)
            dist.all_reduce(torch.ones(4, device=DEVICE))
        watch.close()


@contextmanager
def linked() -> Iterator[tuple[Mesh, Mesh, Link]]:
    """A link from the first two ranks to the last two; tensors in the block are created on its device."""
    keys = {"backend": BACKEND, "device": DEVICE, "timeout_s": 30, "validate_calls": COMPARED}
    source = meshcomm.init(dims={"fsdp": 2}, ranks=[0, 1], **keys)
    target = meshcomm.init(dims={"tp": 2}, ranks=[2, 3], **keys)
    link = meshcomm.link(source, target, bucket_bytes=1 << 16)
    torch.set_default_device(link.mesh.device)
    try:
        yield source, target, link
        finish()
        for mesh in (link, target, source):
            mesh.close()
    finally:
        torch.set_default_device(None)


def whole_of(version: int) -> dict[str, Tensor]:
    """The tensors of a version, on the host."""
    draw = torch.Generator("cpu").manual_seed(version)
    shapes = {"large": (511, 257), "small": (7, 6), "scalar": ()}
    return {name: torch.randn(shape, generator=draw, device="cpu") for name, shape in shapes.items()}


def models_of(source: Mesh, target: Mesh, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of no version, split along the first axis on the source and along the last on the target."""
    mesh, axis = (source["fsdp"], 0) if source.is_member else (target["tp"], -1)
    blank = {name: torch.full(x.shape, torch.nan, dtype=dtype) for name, x in whole_of(0).items()}
    return {
        name: distribute_tensor(x, mesh, [Shard(axis % x.ndim)], src_data_rank=None) if x.ndim else x
        for name, x in blank.items()
    }


def own_parts(model: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to_local() if isinstance(x, DTensor) else x for name, x in model.items()}


def parts_at(mesh: Mesh, dim: str, axis: int, version: int) -> dict[str, Tensor]:
    """This rank's parts of a version, on the host."""
    return {
        name: x.chunk(mesh.size(dim), axis)[mesh.coord(dim)] if x.ndim else x
        for name, x in whole_of(version).items()
    }


def transfers() -> None:
    """Tensors and versions of weights between two meshes, with late producers and streams of their own."""
    side = torch.cuda.Stream() if ON_GPU else None
    with linked() as (source, target, link):
        for late in (False, True) if ON_GPU else (False,):
            with (
                case(f"link.transfer, {'late producer on a stream of its own' if late else 'one stream'}"),
                torch.cuda.stream(side) if late else nullcontext(),
            ):
                for turn in range(20):
                    x = out = None
                    if source.is_member:
                        part = parts_at(source, "fsdp", 0, turn)["large"].to(link.mesh.device)
                        if late:
                            torch.cuda._sleep(20_000_000)
                        x = (part * 2).T.contiguous().T
                    else:
                        out = torch.full((511, 129 - target.coord("tp")), torch.nan)
                    link.transfer(x, out, "n/fsdp k -> n k/tp")
                    del x
                    spoiled = torch.full((256, 257), -1.0)
                    if out is not None:
                        expected = 2 * parts_at(target, "tp", -1, turn)["large"]
                        assert torch.equal(out.cpu(), expected), f"turn {turn}"
                    del spoiled
        for staging, snapshot in product(("whole", "buckets"), (False, True)):
            with case(f"weights, {staging}{', snapshot' * snapshot}, cast to bfloat16"):
                dtype = torch.float32 if source.is_member else torch.bfloat16
                model = models_of(source, target, dtype)
                cast = torch.bfloat16 if source.is_member else None
                weights = link.weights(model, cast=cast, staging=staging)
                weights._lazy = not ON_GPU  # the emulation orders the operators of one thread
                for version in range(1, 6):
                    with torch.cuda.stream(side) if side is not None else nullcontext():
                        if source.is_member:
                            parts = parts_at(source, "fsdp", 0, version)
                            if side is not None:
                                torch.cuda._sleep(20_000_000)
                            for name, part in own_parts(model).items():
                                part.copy_(parts[name], non_blocking=True)
                            push = weights.push(version, snapshot=snapshot)
                            if snapshot:
                                for part in own_parts(model).values():
                                    part.fill_(torch.nan)
                            push.wait()
                            continue
                    assert weights.pull() == version
                    reader = torch.cuda.Stream() if ON_GPU else None
                    with (
                        weights.reading(),
                        torch.cuda.stream(reader) if reader is not None else nullcontext(),
                    ):
                        read = {name: part.clone() for name, part in own_parts(model).items()}
                    finish()
                    for name, part in parts_at(target, "tp", -1, version).items():
                        assert torch.equal(read[name].cpu(), part.bfloat16()), f"{name}, version {version}"


def transfer_killed() -> None:
    """A generator dies before the second version. As with every call on NCCL, the job ends, and its launcher names the rank."""
    with linked() as (source, target, link):
        weights = link.weights(models_of(source, target, torch.float32))
        weights._lazy = not ON_GPU
        weights.push(1).wait() if source.is_member else weights.pull()
        if RANK == 3:
            print(f"fault at {time.time()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        weights.push(2).wait() if source.is_member else weights.pull()


def gloo() -> None:
    """Gloo supports collectives on the device's tensors, but its messages need host memory and are refused by name."""
    with case("collectives"), opened(backend="gloo") as mesh:
        basics(mesh)
    with case("a message from the device is refused"), opened(backend="gloo") as mesh:
        if mesh.size("dp") > 1:
            with pytest.raises(meshcomm.MeshcommError):
                mesh.shift("dp", torch.ones(2))


def compiled() -> None:
    with opened() as mesh:
        f = mesh.functional
        bodies: dict[str, Callable[[Tensor], Tensor]] = {
            "all_reduce": lambda x: f.all_reduce("dp", x * 2, grad="sum") + 1,
            "all_gather": lambda x: f.all_gather("dp", x * 2, grad="reduce_scatter") + 1,
            "reduce_scatter": lambda x: f.reduce_scatter("dp", x * 2) + 1,
            "all_to_all": lambda x: f.all_to_all("dp", x * 2, 0, 1) + 1,
            "shift": lambda x: f.shift("dp", x * 2) + 1,
            "rearrange": lambda x: mesh.rearrange(x * 2, "a b -> a (dp b)", grad="reduce_scatter") + 1,
        }
        for name, body in bodies.items():
            with case(name):
                x = (torch.arange(32.0).view(8, 4) + mesh.rank).requires_grad_()
                compiler = "inductor" if ON_GPU else "aot_eager"
                results = [each(x) for each in (body, torch.compile(body, fullgraph=True, backend=compiler))]
                slopes = [torch.autograd.grad(each.square().sum(), x)[0] for each in results]
                torch.testing.assert_close(results[1], results[0])
                torch.testing.assert_close(slopes[1], slopes[0])


def attention() -> None:
    """Ring attention over the ranks, compared with torch's attention on the whole sequence, forward and backward."""
    dtype = torch.bfloat16 if ON_GPU else torch.float32

    def flash(*given: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if ON_GPU else nullcontext():
            return F.scaled_dot_product_attention(*given, is_causal=True)

    for sequence in (4096, 16384) if ON_GPU else (256,):
        with (
            case(f"sequence {sequence}, 16 heads of 128, {dtype}") as row,
            opened(dims={"cp": WORLD}) as mesh,
        ):
            torch.manual_seed(0)
            whole = [torch.randn(1, 16, sequence, 128, dtype=dtype) for _ in range(3)]
            parts = [split_sequence(x, 2, mesh, "cp", "zigzag").detach() for x in whole]
            both: list[Tensor] = []
            for name, inputs, attend in (
                ("torch", whole, flash),
                ("ring", parts, partial(ring_attention, mesh, "cp")),
            ):
                leaves = [x.clone().requires_grad_() for x in inputs]
                times = []
                for _ in range(5):
                    mesh.barrier()
                    finish()
                    began = time.perf_counter()
                    out = attend(*leaves)
                    out.sum().backward()
                    finish()
                    times.append(time.perf_counter() - began)
                row[f"{name}_ms"] = round(sorted(times)[2] * 1000, 2)
                both.append(out.detach())
            joined = gather_sequence(both[1], 2, mesh, "cp", "zigzag")
            row["farthest"] = float((joined - both[0]).abs().max())
            assert row["farthest"] < 0.05


if __name__ == "__main__":
    emulated = BACKEND == emulation.NAME and sys.argv[1] != "fault"
    with emulation.emulated_nccl() if emulated else nullcontext():
        globals()[sys.argv[1]]()
