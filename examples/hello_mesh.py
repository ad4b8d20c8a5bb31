"""Who am I, and who are my neighbors? The mesh is defined in the config that is passed to the command.

Look at: the table of dims, groups and neighbors, which rank 0 prints, and the line from each rank. The line shows the
rank's groups, the sums of their ranks, and the left neighbor along tp, which wraps around at the ends.

    meshcomm run configs/mesh.toml examples/hello_mesh.py
    meshcomm simulate configs/mesh.toml examples/hello_mesh.py

Prints:
    ...
    rank 0 (pp=0 dp=0 tp=0): pp [0, 4] sum 4, dp [0, 2] sum 2, tp [0, 1] sum 1, from the left 1
    rank 5 (pp=1 dp=0 tp=1): pp [1, 5] sum 6, dp [5, 7] sum 12, tp [4, 5] sum 9, from the left 4
    ...
"""

import torch

import meshcomm

with meshcomm.init() as mesh:
    if mesh.rank == 0:
        print(mesh)
    lines = []
    for dim in mesh.dims:
        total = mesh.all_reduce(dim, torch.tensor([mesh.rank]))
        lines.append(f"{dim} {mesh.ranks(dim)} sum {total.item()}")
    came = mesh.shift("tp", torch.tensor([mesh.rank]), +1)
    print(f"{mesh.label}: {', '.join(lines)}, from the left {came.item()}", flush=True)
