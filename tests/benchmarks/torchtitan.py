"""A step of torchtitan 0.3, which must be installed: see `counted`."""
# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.distributed.parallel_dims as parallel_dims
import torchtitan.distributed.pipeline_parallel as pipelines
import torchtitan.models.llama3 as llama3
import torchtitan.models.llama3.config_registry as registry
import torchtitan.tools.utils as tools
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.distributed import utils
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.trainer import Trainer

from tests.benchmarks.counted import SHAPES, Case


def theirs(case: Case) -> Callable[[], Callable[[], None]]:
    """Return a function that builds Llama 3 and returns its step, as torchtitan's trainer does."""
    tools.device_type = parallel_dims.device_type = "cpu"
    _attention_of_torch(case.dims.get("cp", 1) > 1)
    pipelines.PipelineStage = _stage_of(case)
    return _Steps(case).build


def _attention_of_torch(context: bool) -> None:
    """Replace attention by one operator. With context parallelism, keys and values are gathered, as for flex attention."""
    kind = FlexAttention if context else ScaledDotProductAttention
    llama3.get_attention_config = lambda _: kind.Config()

    def attend(self: Any, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    if context:
        FlexAttention.forward = attend
        Decoder.get_attention_masks = lambda self, **_: None


def _stage_of(case: Case) -> Callable[..., PipelineStage]:
    """Stages with given shapes, because a fake group cannot exchange them."""

    def stage(part: Any, index: int, count: int, device: Any, group: Any = None, get_mesh: Any = None) -> Any:
        shape = (1, case.tokens // case.dims["tp"], SHAPES[case.model]["hidden_size"])
        hidden, more = (
            torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in "io"
        )
        first = torch.empty((1, case.tokens), dtype=torch.int64, device="meta")
        given = {"input_args": hidden if index else first, "output_args": more}
        return PipelineStage(part, index, count, device, group=group, get_mesh=get_mesh, **given)

    return stage


def _config_of(case: Case) -> Trainer.Config:
    config = registry.llama3_8b() if case.model == "8B" else registry.llama3_70b()
    config.model_spec = llama3.model_registry(case.model)
    config.training.disable_cuda_graphs = True
    config.training.local_batch_size, config.training.seq_len = case.samples, case.tokens
    config.activation_checkpoint, config.compile.enable = None, False
    size, parallel = {name: case.dims.get(name, 1) for name in ("pp", "fsdp", "cp", "tp")}, config.parallelism
    parallel.data_parallel_shard_degree, parallel.tensor_parallel_degree = size["fsdp"], size["tp"]
    parallel.pipeline_parallel_degree, parallel.context_parallel_degree = size["pp"], size["cp"]
    if size["cp"] > 1:
        parallel.spmd_backend = "partial_dtensor"
    return config


class _Steps:
    """The parts of torchtitan's trainer, and its step without data and metrics."""

    def __init__(self, case: Case) -> None:
        self._case, self._config = case, _config_of(case)
        self._trainer: Any = Trainer.__new__(Trainer)
        parallel = self._config.parallelism
        self._dims = parallel_dims.ParallelDims.from_config(parallel, dist.get_world_size())
        self._dims.build_mesh()
        trainer = self._trainer
        trainer.config, trainer.device, trainer.parallel_dims = self._config, torch.device("cpu"), self._dims
        utils.set_spmd_backend(parallel.spmd_backend)
        trainer.model_config = self._config.model_spec.model
        trainer.model_config.update_from_config(config=self._config)

    def build(self) -> Callable[[], None]:
        """Make the model and the optimizer. Returns the step."""
        config, trainer, dims = self._config, self._trainer, self._dims
        with torch.device("meta"):
            model = trainer.model_config.build()
        trainer.loss_fn = config.loss.build(compile_config=config.compile)
        self._split(model)
        for part in trainer.model_parts:
            part.to_empty(device="cpu")
            with torch.no_grad():
                part.init_weights(buffer_device=None)
            part.train()
        last = not dims.pp_enabled or trainer.pp_has_last_stage
        if last and isinstance(trainer.loss_fn, ChunkedLossWrapper):
            trainer.loss_fn.set_lm_head(trainer.model_parts[-1].lm_head)
            trainer.model_parts[-1]._skip_lm_head = True
        self._optimizers = config.optimizer.build(model_parts=trainer.model_parts)
        self._schedulers = config.lr_scheduler.build(optimizers=self._optimizers, training_steps=10)
        trainer.train_context = utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)
        trainer.fwd_bwd_fn, trainer.ntokens_seen = trainer._forward_backward_body, 0
        return self._step

    def _split(self, model: Any) -> None:
        config, trainer, made = self._config, self._trainer, self._config.model_spec
        shared = {
            "parallel_dims": self._dims,
            "training": config.training,
            "parallelism": config.parallelism,
            "compile_config": config.compile,
            "ac_config": None,
            "dump_folder": "",
        }
        if not self._dims.pp_enabled:
            trainer.model_parts = [made.parallelize_fn(model, **shared)]
            return
        found = made.pipelining_fn(
            model,
            device=trainer.device,
            model_config=trainer.model_config,
            parallelize_fn=made.parallelize_fn,
            loss_fn=trainer.loss_fn,
            **shared,
        )
        trainer.pp_schedule, trainer.model_parts, trainer.pp_has_first_stage, trainer.pp_has_last_stage = (
            found
        )

    def _step(self) -> None:
        case, trainer, dims = self._case, self._trainer, self._dims
        self._optimizers.zero_grad(set_to_none=True)
        batches = [torch.zeros((1, case.tokens), dtype=torch.int64) for _ in range(case.samples)]
        # torchtitan annotates each tensor, so inputs and labels must not share one.
        inputs, labels = [{"input": each} for each in batches], [each.clone() for each in batches]
        for given in inputs if dims.cp_enabled else ():
            given["positions"] = torch.arange(case.tokens).unsqueeze(0)
        valid = torch.tensor(0, dtype=torch.int64)
        for each in labels:
            valid += (each != -100).sum()
        total = utils.dist_sum_tensor(valid, dims.get_mesh("batch"))
        trainer.forward_backward_step(
            input_dict=inputs if dims.pp_enabled else inputs[0],
            labels=labels if dims.pp_enabled else labels[0],
            global_valid_tokens=total,
        )
        parameters = [each for part in trainer.model_parts for each in part.parameters()]
        pipeline = dims.get_optional_mesh("pp")
        utils.clip_grad_norm_(parameters, 1.0, foreach=True, pp_mesh=pipeline, ep_enabled=False)
        self._optimizers.step()
        self._schedulers.step()
