"""Two broadcasts from two roots, one after the other.

Look at: the two tensors after each broadcast. The root is a coord. Every rank passes a tensor of the same shape, which
is overwritten on all ranks except the root.

    meshcomm run --world-size 8 examples/communication/two_broadcasts.py
    meshcomm simulate --world-size 8 examples/communication/two_broadcasts.py

Prints:
    rank 0 (all=0): after the first [1.0, 2.0, 3.0] [0.0, 0.0]
    rank 0 (all=0): after the second [1.0, 2.0, 3.0] [10.0, 20.0]
    rank 1 (all=1): after the first [1.0, 2.0, 3.0] [10.0, 20.0]
    rank 1 (all=1): after the second [1.0, 2.0, 3.0] [10.0, 20.0]
    rank 2 (all=2): after the first [1.0, 2.0, 3.0] [0.0, 0.0]
    rank 2 (all=2): after the second [1.0, 2.0, 3.0] [10.0, 20.0]
    ...
"""

import torch

import meshcomm

with meshcomm.init(dims={"all": -1}, device="cpu") as mesh:
    here = mesh.coord("all")
    first = torch.tensor([1.0, 2.0, 3.0]) if here == 0 else torch.zeros(3)
    second = torch.tensor([10.0, 20.0]) if here == 1 else torch.zeros(2)
    mesh.broadcast("all", first, src=0)
    print(f"{mesh.label}: after the first {first.tolist()} {second.tolist()}", flush=True)
    mesh.broadcast("all", second, src=1)
    print(f"{mesh.label}: after the second {first.tolist()} {second.tolist()}", flush=True)
