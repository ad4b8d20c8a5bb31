"""Who am I, and who are my neighbours? Look at: each dim's sum of ranks, and the ring along tp.

meshcomm run configs/mesh.toml examples/hello_mesh.py
"""

import torch

import meshcomm

with meshcomm.init() as mesh:
    if mesh.rank == 0:
        print(mesh)
    lines = []
    for dim in mesh.dims:
        total = mesh.all_reduce(dim, torch.tensor([mesh.rank]))
        lines.append(f"{dim}: ranks {mesh.ranks(dim)}, sum {total.item()}")
    came = mesh.shift("tp", torch.tensor([mesh.rank]), +1)
    print(f"{mesh.label}: {'; '.join(lines)}; from the left {came.item()}", flush=True)
