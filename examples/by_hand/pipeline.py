"""A pipeline by hand: each rank holds one layer, microbatches move forward through the ranks, and gradients move back.

Look at: the loss, which the last rank prints, and the difference between each layer's gradients and those of the same
network on one process. This is the GPipe schedule: all forward passes, then all backward passes in reverse order.
docs/guide/pipeline.md describes 1F1B and other schedules.

    meshcomm run --world-size 8 examples/by_hand/pipeline.py
    meshcomm simulate --world-size 8 examples/by_hand/pipeline.py

Prints:
    loss 0.053491, on one process 0.053491
    rank 0 (pp=0): difference of the gradients 1.4e-20
    rank 1 (pp=1): difference of the gradients 1.1e-19
    rank 2 (pp=2): difference of the gradients 1.1e-19
    ...
    rank 7 (pp=7): difference of the gradients 1.4e-17
"""

import copy

import torch
from torch import nn

import meshcomm

with meshcomm.init(dims={"pp": -1}, device="cpu") as mesh:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    here, last = mesh.coord("pp"), mesh.size("pp") - 1
    net = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(last + 1)))
    batch = torch.randn(12, 6)
    layer = copy.deepcopy(net[here])

    passes, loss = [], 0.0
    for x in batch.chunk(4):
        if here > 0:
            x = mesh.recv("pp", torch.empty_like(x), src=here - 1).requires_grad_()
        y = layer(x)
        if here < last:
            mesh.send("pp", y.detach(), dst=here + 1)
        else:
            y = y.square().sum() / batch.numel()
            loss += y.item()
        passes.append((x, y))
    for x, y in reversed(passes):
        y.backward(mesh.recv("pp", torch.empty_like(y), src=here + 1) if here < last else None)
        if here > 0:
            mesh.send("pp", x.grad, dst=here - 1)

    expected = net(batch).square().mean()
    expected.backward()
    pairs = zip(layer.parameters(), net[here].parameters(), strict=True)
    worst = max((mine.grad - alone.grad).abs().max().item() for mine, alone in pairs)
    if here == last:
        print(f"loss {loss:.6f}, on one process {expected.item():.6f}")
    print(f"{mesh.label}: difference of the gradients {worst:.1e}", flush=True)
