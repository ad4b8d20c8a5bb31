"""What a step takes: a batch of this rank's samples, made ready, compared with the other ranks', or refused."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from meshcomm.config import ParallelConfig
from meshcomm.errors import ShapeError, TrainingError, UnsupportedOp
from meshcomm.layout.sizes import fold
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import of_every_rank, ranks_of
from meshcomm.parallel.context.documents import check_documents
from meshcomm.parallel.model import Model
from meshcomm.parallel.splits import Sections, Splits
from meshcomm.parallel.tree import (
    children,
    first_tensor,
    named_leaves,
    named_tensors,
    samples_of,
    tensors_of,
    with_tensors,
)

# Values that are the same for all samples, and for all ranks.
PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), np.generic)


class Batch(NamedTuple):
    """This rank's samples for a step, as trees of tensors: see `meshcomm.parallel.tree`. documents: int64 (samples, tokens), each token's document number, ascending along the
    sequence. Attention stays within documents, and positions restart in each document. If None, each sample is one document.
    """

    inputs: Any
    targets: Any
    documents: Tensor | None = None


@final
class Batches:
    """Makes this rank's batches ready for the steps of a model, and refuses those that a step cannot take.

    share: the number of samples in a step on each rank.
    """

    def __init__(
        self, splits: Splits, sections: Sections, model: Model, microbatches: int, data_size: int
    ) -> None:
        self._mesh, self._model, self._known, self._data_size = splits.mesh, model, sections, data_size
        self._pipelined = splits.pipeline is not None
        self.share = microbatches * sections.train.micro_batch_size
        # The settings with which a loss could not differentiate outputs by inputs. FSDP2 frees gathered weights before a second
        # backward pass, also on one rank.
        apart = {
            "parallel.pipeline": self._pipelined,
            "parallel.context": splits.context.size > 1,
            "parallel.shard": sections.parallel.shard is not None,
        }
        self._apart = [setting for setting, is_used in apart.items() if is_used]
        self._digests: dict[int, str] = {}

    def prepared(self, batch: Batch) -> Batch:
        """Return the batch with int64 tokens and classes, of any integers. In uint8, -100 would equal class 156.

        Raises UnsupportedOp for inputs that need gradients if the loss could not differentiate outputs by them.
        """
        if self._apart and any(tensor.requires_grad for tensor in tensors_of(batch.inputs)):
            apart = ", ".join(self._apart)
            raise UnsupportedOp(
                "inputs that need gradients cannot be trained with this parallelism",
                given=f"an input with requires_grad, and {apart}",
                expected="parallel.data, with which each rank has all weights, and the outputs and inputs that a loss differentiates",
                hint=f"x.detach(), if the loss takes no gradient by x; or remove {apart}",
            )
        if self._model.own_loss is None:
            batch = batch._replace(targets=_as_ids(batch.targets))
        return batch._replace(inputs=_as_ids(batch.inputs)) if self._model.vocab_size else batch

    def check(self, batch: Batch, *, compares: bool) -> None:
        """Raise the errors of `Engine.step` for a batch. compares: whether it is compared with the other ranks' batches."""
        inputs, targets, share = batch.inputs, batch.targets, self.share
        expected = tensors_of(targets)
        every = [*tensors_of(inputs), *expected, *tensors_of(batch.documents)]
        for name, tree in (("inputs", inputs), ("targets", targets)):
            check_dense(tree, name)
            check_lists(tree, name, share)
        if compares:
            scalars = [*scalars_of(inputs, "inputs"), *scalars_of(targets, "targets")]
            self._digests = check_inputs(
                self._mesh, self._known.parallel, *every, scalars=scalars, before=self._digests
            )
        if self._pipelined and not isinstance(inputs, Tensor):
            raise UnsupportedOp(
                "a pipeline's first stage takes one tensor",
                given=f"inputs that are a {type(inputs).__name__}",
                expected="one tensor: tokens, or what the function of ModelSpec(forward=...) takes",
                hint="remove parallel.pipeline; later stages are given hidden states only",
            )
        first_tensor(inputs)
        # A loss of one's own may need no targets.
        targeted = bool(expected) or self._model.own_loss is None
        have = (samples_of(inputs), samples_of(targets) if targeted else share)
        lengths = {x.shape[0] for x in every if x.ndim}
        data, model = self._known.data, self._model
        fixed = self._pipelined or not model.any_length
        of_tokens = model.vocab_size and isinstance(inputs, Tensor) and inputs.ndim == 2
        if data is not None and of_tokens and fixed and inputs.shape[1] != data.seq_len:
            raise ShapeError(
                "the samples of the step have the wrong length",
                given=f"{inputs.shape[1]} tokens on {self._mesh.label}, data.seq_len = {data.seq_len}",
                expected=f"{data.seq_len} tokens, for which this model is built",
                hint="pad to data.seq_len, as with pad_to_multiple_of in the collators of transformers, and -100 in the targets",
            )
        # If no tensor has this rank's share, the batch has another size.
        for name, tree in (("inputs", inputs), ("targets", targets)) if share in lengths else ():
            check_samples(tree, name, share, "the global batch, divided among the ranks along data and shard")
        if set(have) != {share}:
            hint = f"train.global_batch_size = {have[0] * self._data_size}"
            if have[0] < share:
                hint = f"drop_last=True in the DataLoader if this is the short last batch; else {hint}"
            if have[0] != have[1]:
                hint = "one target for each input, along axis 0"
            raise ShapeError(
                "the step has the wrong number of samples for this rank",
                given=f"{have[0]} inputs and {have[1]} targets on {self._mesh.label}",
                expected=f"{share} of both: train.global_batch_size = {self._known.train.global_batch_size} / {self._data_size} ranks along "
                "data and shard",
                hint=hint,
            )

    def documents(self, batch: Batch) -> dict[str, Tensor]:
        """Return the stages' document arguments.

        Raises ShapeError for invalid document numbers, and UnsupportedOp if the model was not built for documents.
        """
        if batch.documents is None:
            return {}
        if not self._model.packed:
            raise UnsupportedOp(
                "document numbers were given, but this model's attention crosses documents",
                given=f"documents {tuple(batch.documents.shape)}, data.document_mask = false",
                expected="only inputs and targets; or data.document_mask = true",
                hint="data.document_mask = true; or, if a third element of a batch is not document numbers, put it into the targets: "
                "(inputs, (targets, weights)), for a loss of your own",
            )
        check_documents(batch.documents, batch.inputs)
        return {"documents": batch.documents}

    def filled(self, batch: Batch) -> tuple[Batch, dict[str, int]]:
        """Return a batch of an evaluation with as many samples as in a step, of which the added ones do not count.

        Their targets are -100. If the loss does not ignore these, also return the number of samples as an argument of the run.
        """
        count, share = samples_of(batch.inputs), self.share
        targeted = bool(tensors_of(batch.targets)) or self._model.own_loss is None
        if count > share or (targeted and count != samples_of(batch.targets)):
            raise ShapeError(
                "an evaluation's batch has the wrong number of samples for this rank",
                given=f"{count} inputs and {samples_of(batch.targets)} targets on {self._mesh.label}",
                expected=f"at most {share} of both, as in a step",
                hint=f"batches of {share} samples on each rank",
            )
        if count == share:
            return batch, {}

        def filled(x: Tensor) -> Tensor:
            if not x.ndim:
                return x
            more = x[:1].expand(share - count, *x.shape[1:]) if count else x.new_zeros(share, *x.shape[1:])
            return torch.cat([x, more])

        added: Batch = with_tensors(filled, batch)
        if self._model.own_loss is None:
            ignored = added.targets.clone()
            ignored[count:] = -100
            return added._replace(targets=ignored), {}
        if self._pipelined:
            raise UnsupportedOp(
                "a short batch cannot be evaluated through a pipeline with this loss",
                given=f"{count} of {share} samples on {self._mesh.label}, and a loss of your own",
                expected="full batches, because the loss does not say which samples count",
                hint="drop_last=True in the DataLoader",
            )
        return added, {"samples": count}


def _as_ids(x: Any) -> Any:
    """Return a tensor of integers or of truth values as int64, and anything else unchanged."""
    is_number = not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex()
    return x if is_number else x.to(torch.int64)


# -- the other ranks' samples ------------------------------------------------------------------------


def check_inputs(
    mesh: Mesh,
    parallel: ParallelConfig,
    *batch: Tensor,
    scalars: Sequence[Sequence[str]] = (),
    before: Mapping[int, str] = MappingProxyType({}),
) -> dict[int, str]:
    """Compare this rank's batch with the other ranks' batches: equal along tensor, pipeline and context, not along data and
    shard.

    Equal batches along data and shard are an error only if they are equal in two steps and differ between these steps. A
    batch that stays the same, as in a benchmark, is no evidence: its mean is that of one process.

    scalars:   names and texts of the values that all samples share, which must be equal on all ranks: see `scalars_of`.
    before:    the result of the previous step's call. If empty, ranks along data and shard are not compared.
    Called by: every rank of the mesh. Gathers objects along each dim, and waits for the device.
    Returns:   a digest of each rank's batch.
    Raises:    TrainingError, the same on every rank, that names the ranks, and the dim.
    """
    sums = hashlib.sha256()
    for tensor in batch:
        sums.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        sums.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    shared = hashlib.sha256(repr(scalars).encode()).hexdigest()[:16]
    digests = of_every_rank(mesh, [sums.hexdigest()[:16], shared])
    if len({digest for _, digest in digests}) > 1:
        raise _differing(ranks_of(mesh), of_every_rank(mesh, [list(scalar) for scalar in scalars]))
    digest_of = {rank: digest for rank, (digest, _) in zip(ranks_of(mesh), digests, strict=True)}
    for role, dim in parallel.parts.items():
        if dim in parallel.data_dims or dim not in mesh.layout.dims:
            continue
        for rank, *others in sorted(mesh.layout.groups(dim).tolist()):
            odd = [other for other in others if digest_of[other] != digest_of[rank]]
            if odd:
                raise TrainingError(
                    f"ranks along {dim} ({role}) have different samples",
                    given=f"rank {fold(odd)} against rank {rank}, which differ only in their coord along {dim}",
                    expected=f"the same inputs and targets along {dim}: only data and shard divide the samples",
                    hint="DistributedSampler(dataset, num_replicas=mesh.data_world_size, rank=mesh.data_rank); without these "
                    "two arguments, it divides samples among all ranks of the job. "
                    "Also use the same seed and epoch on all ranks",
                )
    readers: dict[tuple[str, str], int] = {}
    for rank in sorted(digest_of) if before else ():
        # Ranks along all other dims have equal batches.
        if any(coord for dim, coord in mesh.get_coords(rank).items() if dim not in parallel.data_dims):
            continue
        first = readers.setdefault((before[rank], digest_of[rank]), rank)
        if first != rank and before[rank] != digest_of[rank]:
            dims = ", ".join(parallel.data_dims)
            raise TrainingError(
                f"ranks along {dims} read the same samples",
                given=f"the batch of rank {rank} equals that of rank {first}, in two steps with different batches",
                expected=f"different samples on each rank along {dims}: its share of the global batch",
                hint="DataLoader(..., sampler=DistributedSampler(dataset, num_replicas=mesh.data_world_size, "
                "rank=mesh.data_rank)); or trainer.engine.checked_steps = 0 if this is intended",
            )
    return digest_of


def _differing(ranks: Sequence[int], scalars: Sequence[Sequence[Sequence[str]]]) -> TrainingError:
    """Return an error that names the first value that is not equal on all ranks."""
    tables = [{name: text for name, text in scalar} for scalar in scalars]  # noqa: C416
    names = dict.fromkeys(name for table in tables for name in table)
    name = next(name for name in names if len({table.get(name) for table in tables}) > 1)
    first = tables[0].get(name, "nothing")
    odd, other = next(
        (rank, table.get(name, "nothing"))
        for rank, table in zip(ranks, tables, strict=True)
        if table.get(name, "nothing") != first
    )
    return TrainingError(
        "ranks have different values where all samples of the global batch share one",
        given=f"{name} = {first} on rank {ranks[0]}, {other} on rank {odd}",
        expected="the same numbers, strings and tensors without axes on every rank. Only tensors with the samples along axis 0 may "
        "differ",
        hint="a tensor with one value for each sample; for a count or a mean of this rank's samples, return (sum, count) from the loss",
    )


def scalars_of(tree: Any, name: str) -> list[list[str]]:
    """Return the names and texts of the values in a tree that all samples share: numbers, strings, and tensors without axes."""
    scalars = []
    for leaf_name, leaf in named_leaves(tree, name):
        if isinstance(leaf, PLAIN) or (isinstance(leaf, Tensor) and not leaf.ndim and not leaf.is_nested):
            value = leaf.item() if isinstance(leaf, (Tensor, np.generic)) else leaf
            scalars.append([leaf_name, repr(value)])
    return scalars


# -- trees that cannot be divided ---------------------------------------------------------------------


def check_dense(tree: Any, name: str) -> None:
    """Raise UnsupportedOp for tensors of a tree that cannot be divided along axis 0."""
    for tensor_name, tensor in named_tensors(tree, name):
        if tensor.layout != torch.strided or tensor.is_nested:
            raise UnsupportedOp(
                "a step takes dense tensors, which are divided along axis 0",
                given=f"{tensor_name}, a nested tensor"
                if tensor.is_nested
                else f"{tensor_name} with layout {tensor.layout}",
                expected="torch.strided",
                hint=f"{tensor_name}.to_padded_tensor(0.0)"
                if tensor.is_nested
                else f"{tensor_name}.to_dense(); or indices and values as two tensors, padded to equally many for each sample",
            )


def check_lists(tree: Any, name: str, count: int) -> None:
    """Raise UnsupportedOp for a list in a tree with a plain value for each of `count` samples, which would not be divided."""
    for key, child in children(tree):
        check_lists(child, f"{name}{key}", count)
    if not isinstance(tree, (list, tuple)) or hasattr(tree, "_fields") or len(tree) != count:
        return
    # A tuple of numbers is a size, for example.
    kinds = PLAIN if isinstance(tree, list) else str
    if count and all(isinstance(child, kinds) for child in tree):
        kind = type(tree[0]).__name__
        raise UnsupportedOp(
            "a list has one value for each of this rank's samples, and only tensors are divided among microbatches",
            given=f"{name}, a {type(tree).__name__} of {count} values such as {tree[0]!r}",
            expected="a tensor with the samples along axis 0",
            hint="ids of the text in an int64 tensor (samples, length), with padding"
            if kind == "str"
            else f"torch.tensor({name}); or a tuple, if all samples share the values",
        )


def check_samples(tree: Any, name: str, count: int, expected: str) -> None:
    """Raise ShapeError unless axis 0 of each tensor of a tree, except scalars, has `count` samples."""
    for tensor_name, tensor in named_tensors(tree, name):
        if tensor.ndim and len(tensor) != count:
            raise ShapeError(
                "a tensor of the step does not have this rank's samples along axis 0",
                given=f"{tensor_name} of shape {tuple(tensor.shape)}",
                expected=f"{count} samples: {expected}",
                hint="x.expand(samples, *x.shape) for a tensor that all samples share; a buffer of the module if it never changes; "
                "padding to (samples, length), in place of all samples' values with offsets",
            )
