"""What a training configuration asks of any mesh: sizes of the model, the batch, and bytes of an element; and sizes of a mesh."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from meshcomm.config import Config
from meshcomm.config.parallel import Part, PipelineSchedule
from meshcomm.errors import ConfigError
from meshcomm.predict.stages import part_costs

_BYTES: Final = {"float32": 4, "float64": 8, "bfloat16": 2}
# The parts that lie along dims of the base, outermost first where nothing else decides.
BASE: Final[tuple[Part, ...]] = ("pipeline", "data", "shard", "context", "tensor")


class Sizes(NamedTuple):
    """Sizes of the dims that play the parts; 1 where none does. microbatches: of a rank and step. expert_copies: of
    experts' shards.
    """

    pipeline: int = 1
    data: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    microbatches: int = 1
    expert_copies: int = 1


class Workload(NamedTuple):
    """Everything that the model of place reads; from a Config by `workload`, or made by hand.

    parts: those that the configuration plays. layer_macs, head_macs: multiply-adds of a forward pass for
    each token, as the mean over the layers, and of the head. expert_layers: those with experts. whole_tables: embedding and
    head stay whole on ranks that do not divide the vocabulary.
    activation_bytes: of one element in a message and in memory, and of a weight that FSDP has gathered;
    weight_bytes: of a weight; reduced_bytes: of a gradient that FSDP adds up.
    """

    parts: tuple[Part, ...]
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    experts: int
    experts_per_token: int
    expert_layers: int
    seq_len: int
    global_batch_size: int
    micro_batch_size: int
    layer_macs: float
    head_macs: float
    activation_bytes: int
    weight_bytes: int
    reduced_bytes: int
    sequence_parallel: bool
    schedule: PipelineSchedule
    stages_per_rank: int
    ulysses: bool
    activation_checkpointing: bool | Literal["selective"] | int
    bucket_bytes: float
    head_dim: int | None = None
    reshard: bool | None = None
    ff_matrices: int = 3
    whole_tables: bool = False

    def reshards(self, sizes: Sizes) -> bool:
        """Whether gathered weights are let go between passes, as ParallelConfig.reshards has it."""
        return sizes.pipeline == 1 if self.reshard is None else self.reshard

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def attention_weights(self) -> int:
        """Weights of a layer's attention, without norms."""
        return self.hidden_size * self.head_size * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def expert_weights(self) -> int:
        """Weights of one feed-forward block."""
        return self.ff_matrices * self.hidden_size * self.intermediate_size

    def tokens(self, sizes: Sizes) -> float:
        """Tokens of a micro-batch on one rank."""
        return self.micro_batch_size * self.seq_len / sizes.context

    def layers_of_rank(self, sizes: Sizes) -> int:
        """Layers of the rank that has most, as if stages were cut evenly."""
        each = self.stages_per_rank if sizes.pipeline > 1 else 1
        return -(-self.num_layers // (sizes.pipeline * each)) * each

    def expert_layers_of_rank(self, sizes: Sizes) -> int:
        """Of these the ones with experts: where only every n-th has them, a rank's share, rounded up."""
        return -(-self.layers_of_rank(sizes) * self.expert_layers // self.num_layers)

    def layers_again(self, sizes: Sizes) -> int:
        """Layers of that rank whose whole forward pass runs a second time; none where it does so selectively."""
        layers = self.layers_of_rank(sizes)
        if isinstance(self.activation_checkpointing, bool) or self.activation_checkpointing == "selective":
            return layers if self.activation_checkpointing is True else 0
        # Of a run of them as many, or one less.
        return (
            layers // self.activation_checkpointing
            if sizes.pipeline == 1
            else -(-layers // self.activation_checkpointing)
        )

    def expert_layers_again(self, sizes: Sizes) -> int:
        """Of these the ones with experts: a share, rounded up."""
        return -(-self.layers_again(sizes) * self.expert_layers // self.num_layers)

    def shards(self, sizes: Sizes) -> int:
        """Ranks that weights are sharded over: those of shard and, with them, of context."""
        return sizes.shard * (sizes.context if "shard" in self.parts else 1)

    def expert_shards(self, sizes: Sizes) -> int:
        """Ranks that experts' weights are sharded over: with the others, or what their own view leaves for it."""
        if "shard" not in self.parts or "expert" not in self.parts:
            return self.shards(sizes)
        return sizes.data * sizes.shard * sizes.context // sizes.expert // sizes.expert_copies

    def flops(self, sizes: Sizes) -> float:
        """Floating-point operations of one micro-batch on the rank with most layers and the head: 6 for each
        multiply-add of a forward pass and token, as backward costs twice as much as forward; 2 more in layers that are
        computed again. Selectively that is one matrix where its product is a part of a sum over ranks.
        """
        macs = 6 * (self.layers_of_rank(sizes) * self.layer_macs + self.head_macs)
        macs += 2 * self.layers_again(sizes) * self.layer_macs
        if self.activation_checkpointing == "selective" and sizes.tensor > 1:
            macs += 2 * self.layers_of_rank(sizes) * self.hidden_size * self.num_heads * self.head_size
        return self.tokens(sizes) * macs / sizes.tensor


def workload(settings: Config) -> Workload:
    """What `settings` trains. Raises ConfigError where it does not train, or fixes who sits where."""
    parallel, model, data, train = settings.parallel, settings.model, settings.data, settings.train
    if parallel is None or model is None or data is None or train is None:
        raise ConfigError(
            f"{settings.source} says nothing about training",
            given="a mesh without [parallel], [model], [data] and [train]",
            expected="all four sections: bytes and memory follow from them",
            hint="configs/quickstart.toml has them all",
        )
    model = model.sized("bytes and memory")
    _check_mesh(settings)
    costs = part_costs(model, data.seq_len)
    expert_layers = sum(model.has_experts(layer) for layer in range(model.num_layers))
    return Workload(
        parts=tuple(parallel.parts),
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
        tied=model.tied_embeddings,
        experts=model.experts,
        experts_per_token=min(model.experts_per_token, model.experts),
        expert_layers=expert_layers,
        seq_len=data.seq_len,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        layer_macs=sum(costs.layers) / model.num_layers,
        head_macs=costs.head,
        activation_bytes=_BYTES[train.compute_dtype or train.dtype],
        weight_bytes=_BYTES[train.dtype],
        reduced_bytes=_BYTES[parallel.options.reduce_dtype or train.dtype],
        sequence_parallel=parallel.options.sequence_parallel,
        schedule=parallel.options.schedule,
        stages_per_rank=parallel.options.stages_per_rank,
        ulysses=parallel.options.attention == "ulysses",
        activation_checkpointing=train.activation_checkpointing,
        bucket_bytes=parallel.options.bucket_mb * 1e6,
        head_dim=model.head_dim,
        reshard=parallel.options.reshard,
        ff_matrices=model.ff_matrices,
        whole_tables=not model.is_built_in,
    )


def _check_mesh(settings: Config) -> None:
    """Raise ConfigError for what would not fit other sizes, or would undo another order."""
    mesh, expert = settings.mesh, settings.expert_view
    others = [name for name in mesh.views if name != expert]
    unused = [dim for dim in mesh.dims if settings.parallel and dim not in settings.parallel.parts.values()]
    fixed = {
        "mesh.ranks": mesh.ranks is not None,
        "mesh.rank_order": mesh.rank_order is not None,
        **{f"mesh.views.{name}": True for name in others},
        **{f"mesh.dims.{name}": True for name in unused},
    }
    for key in (key for key, there in fixed.items() if there):
        raise ConfigError(
            f"{key} belongs to one mesh, and place looks for another",
            given=f"{settings.source} with {key}",
            expected="dims that play the parts of [parallel], and the view of its expert, alone",
            hint=f"--set {key}=   (nothing behind = removes it)",
        )
