"""A two-layer network split along a dim: the first weight by columns, the second by rows.

Look at: the differences in the output and in every gradient from the whole network on one process. Two calls
communicate: `identity` sums the gradient of x in the backward pass, and `all_reduce` sums the output in the forward
pass. docs/guide/gradients.md explains why a call must specify its gradient.

    meshcomm run --world-size 8 examples/by_hand/tp_mlp.py
    meshcomm simulate --world-size 8 examples/by_hand/tp_mlp.py

Prints:
    rank 0 (dp=0 tp=0): differences y 7.1e-15 dx 2.7e-15 dw1 8.9e-16 dw2 2.7e-15
    rank 1 (dp=0 tp=1): differences y 7.1e-15 dx 2.7e-15 dw1 8.9e-16 dw2 8.9e-16
    rank 2 (dp=0 tp=2): differences y 7.1e-15 dx 2.7e-15 dw1 4.4e-16 dw2 1.8e-15
    ...
    rank 7 (dp=1 tp=3): differences y 7.1e-15 dx 2.7e-15 dw1 8.9e-16 dw2 8.9e-16
"""

import torch

import meshcomm

with meshcomm.init(dims={"dp": -1, "tp": 4}, device="cpu") as mesh:
    torch.manual_seed(0)  # the same weights and input on every rank
    x, w1, w2 = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((6, 8), (8, 16), (16, 8)))
    tp, n = mesh.coord("tp"), mesh.size("tp")
    columns = w1.detach().chunk(n, 1)[tp].clone().requires_grad_()
    rows = w2.detach().chunk(n, 0)[tp].clone().requires_grad_()
    mine = x.detach().clone().requires_grad_()

    h = torch.relu(mesh.functional.identity("tp", mine) @ columns)
    y = mesh.functional.all_reduce("tp", h @ rows, grad="identity")
    y.square().mean().backward()

    expected = torch.relu(x @ w1) @ w2
    expected.square().mean().backward()
    pairs = {
        "y": (y, expected),
        "dx": (mine.grad, x.grad),
        "dw1": (columns.grad, w1.grad.chunk(n, 1)[tp]),
        "dw2": (rows.grad, w2.grad.chunk(n, 0)[tp]),
    }
    worst = " ".join(f"{name} {(a - b).abs().max().item():.1e}" for name, (a, b) in pairs.items())
    print(f"{mesh.label}: differences {worst}", flush=True)
