"""torch's FSDP2 and tensor parallelism on a meshcomm mesh.

Look at: the loss, which is the same on every rank and decreases. `mesh["tp"]` and `mesh["dp"]` are torch DeviceMeshes
over the existing groups of the mesh, so torch creates no groups.

    meshcomm run --world-size 8 examples/fsdp_and_tensor_parallel.py
    meshcomm simulate --world-size 8 examples/fsdp_and_tensor_parallel.py

Prints:
    rank 0 (dp=0 tp=0): step 10, loss 0.0604
    rank 0 (dp=0 tp=0): step 20, loss 0.0196
    rank 1 (dp=0 tp=1): step 10, loss 0.0604
    rank 1 (dp=0 tp=1): step 20, loss 0.0196
    ...
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import meshcomm

with meshcomm.init(dims={"dp": -1, "tp": 2}, device="cpu") as mesh:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Tanh())
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-2)

    torch.manual_seed(1 + mesh.coord("dp"))  # different data along dp, the same data along tp
    x = torch.randn(8, 16)
    for step in range(20):
        loss = (net(x) - x.tanh()).square().mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        if step % 10 == 9:
            mean = mesh.all_reduce("dp", loss.detach().clone(), op="avg")
            print(f"{mesh.label}: step {step + 1}, loss {mean.item():.4f}", flush=True)
