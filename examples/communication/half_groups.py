"""Two groups, each with half of the ranks: a sum within each group, and both sums on every rank.

Look at: the ranks in each half, and the two sums, which every rank has. The two groups form one dim of the mesh,
`place`. The other dim, `half`, connects the halves, so one all_gather along it returns both sums.

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
