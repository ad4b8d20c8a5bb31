"""Two groups, each of half the world: a sum in each, and both sums on every rank.

Look at: the ranks of the own half, and that everyone has both sums. The two groups are one dim of the mesh; the other
dim joins the halves, so one all_gather along it brings the sum of the other half.

    meshcomm run --world-size 8 examples/communication/half_groups.py
    meshcomm simulate --world-size 8 examples/communication/half_groups.py

Prints:
    rank 0 (half=0 place=0): ranks [0, 1, 2, 3] sum to 6, the halves to [6, 22]
    rank 1 (half=0 place=1): ranks [0, 1, 2, 3] sum to 6, the halves to [6, 22]
    rank 2 (half=0 place=2): ranks [0, 1, 2, 3] sum to 6, the halves to [6, 22]
    ...
    rank 7 (half=1 place=3): ranks [4, 5, 6, 7] sum to 22, the halves to [6, 22]
"""

import torch

import meshcomm

with meshcomm.init(dims={"half": 2, "place": -1}, device="cpu") as mesh:
    mine = mesh.all_reduce("place", torch.tensor([mesh.rank]))
    both = mesh.all_gather("half", mine)
    ranks = mesh.ranks("place")
    print(f"{mesh.label}: ranks {ranks} sum to {mine.item()}, the halves to {both.tolist()}", flush=True)
