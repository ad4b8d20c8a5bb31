"""Do the ranks that must have the same samples have them?"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from meshcomm.config import ParallelConfig
from meshcomm.errors import TrainingError
from meshcomm.layout.sizes import fold
from meshcomm.mesh import Mesh


def check_inputs(mesh: Mesh, parallel: ParallelConfig, *batch: Tensor) -> None:
    """Compare this rank's batch with those of the ranks along tensor, pipeline and context.

    Called by: every rank of the mesh. A gather of objects per dim; this waits for the device.
    Raises:    TrainingError, the same on every rank, naming ranks and the dim along which samples differ and must not.
    """
    sums = hashlib.sha256()
    for tensor in batch:
        sums.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        sums.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    table: list[Any] = [[mesh.rank, sums.hexdigest()[:16]]]
    for dim in reversed(list(mesh.layout.dims)):
        table = [row for rows in mesh.objects.all_gather(dim, table) for row in rows]
    found = dict(table)
    for part, dim in parallel.parts.items():
        if dim in parallel.data_dims or dim not in mesh.layout.dims:
            continue
        for rank in sorted(found):
            coords = mesh.coords_of(rank)
            if coords[dim]:
                continue
            others = [mesh.rank_at(**{**coords, dim: coord}) for coord in range(mesh.size(dim))]
            odd = [other for other in others if found[other] != found[rank]]
            if odd:
                raise TrainingError(
                    f"ranks along {dim} ({part}) have different samples",
                    given=f"rank {fold(odd)} against rank {rank}, which differ only in their coord along {dim}",
                    expected=f"the same inputs and targets along {dim}: "
                    "only data and shard divide the samples",
                    hint="DistributedSampler(dataset, num_replicas=mesh.data_world, rank=mesh.data_rank); without the two it "
                    "divides by all ranks of the job. And the same seed and epoch on all ranks",
                )
