"""A weighted sum, a softmax and an L2 norm of a vector that is split across the ranks.

Look at: the differences from NumPy on the whole vector, which are at most a few units in the last place. No rank needs
the whole vector: the softmax and the norm only reduce scalars. The example gathers the vector only to check the
results.

    meshcomm run --world-size 8 examples/communication/distributed_math.py
    meshcomm simulate --world-size 8 examples/communication/distributed_math.py

Prints:
    rank 0 (all=0): weighted sum, difference from NumPy 4.4e-16
    rank 0 (all=0): softmax, difference from NumPy 1.4e-17
    rank 0 (all=0): norm, difference from NumPy 8.9e-16
    ...
"""

import numpy as np
import torch

import meshcomm

with meshcomm.init(dims={"all": -1}, device="cpu") as mesh:
    n, rank = mesh.size("all"), mesh.rank
    x = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))

    weighted = mesh.all_reduce("all", x.clone(), op="premul_sum", factor=(rank + 1) / n)

    largest = mesh.all_reduce("all", x.max(), op="max")  # exp() of large numbers would overflow
    exps = (x - largest).exp()
    softmax = exps / mesh.all_reduce("all", exps.sum())

    norm = mesh.all_reduce("all", x.square().sum()).sqrt()

    whole = mesh.all_gather("all", x).numpy().reshape(n, 5)
    expected = np.exp(whole - whole.max()) / np.exp(whole - whole.max()).sum()
    differences = {
        "weighted sum": np.abs(weighted.numpy() - np.arange(1, n + 1) / n @ whole).max(),
        "softmax": np.abs(softmax.numpy() - expected[rank]).max(),
        "norm": abs(norm.item() - np.linalg.norm(whole)),
    }
    for name, difference in differences.items():
        print(f"{mesh.label}: {name}, difference from NumPy {difference:.1e}", flush=True)
