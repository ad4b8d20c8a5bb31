"""A mesh in five lines: two dims, and a sum along one of them.

Look at: the ranks in each sum. Along dp, ranks 0, 2, 4 and 6 form one group, and ranks 1, 3, 5 and 7 form the other.

    meshcomm run --world-size 8 examples/mesh_in_five_lines.py
    meshcomm simulate --world-size 8 examples/mesh_in_five_lines.py

Prints:
    rank 0 (dp=0 tp=0): along dp [0, 2, 4, 6], whose sum is 12
    rank 1 (dp=0 tp=1): along dp [1, 3, 5, 7], whose sum is 16
    rank 2 (dp=1 tp=0): along dp [0, 2, 4, 6], whose sum is 12
    ...
    rank 7 (dp=3 tp=1): along dp [1, 3, 5, 7], whose sum is 16
"""

import torch

import meshcomm

with meshcomm.init(dims={"dp": -1, "tp": 2}, device="cpu") as mesh:
    total = mesh.all_reduce("dp", torch.tensor([mesh.rank]))
    print(f"{mesh.label}: along dp {mesh.ranks('dp')}, whose sum is {total.item()}", flush=True)
