"""all_reduce and all_gather of the same tensor, side by side.

Look at: the shapes. all_reduce returns one tensor with the shape of each input, and all_gather returns all inputs. If
you need only the sum, do not gather the inputs. The last line shows the largest difference between the result of
all_reduce and the sum of the gathered tensors.

    meshcomm run --world-size 8 examples/communication/reduce_and_gather.py
    meshcomm simulate --world-size 8 examples/communication/reduce_and_gather.py

Prints:
    all_gather (8, 2): [[0, 1], [10, 11], [20, 21], [30, 31], [40, 41], [50, 51], [60, 61], [70, 71]]
    all_reduce (2,): [280, 288]
    their difference, summed by hand: 0
"""

import torch

import meshcomm

with meshcomm.init(dims={"all": -1}, device="cpu") as mesh:
    x = torch.tensor([10 * mesh.rank, 10 * mesh.rank + 1])
    gathered = mesh.all_gather("all", x[None])  # a new axis: one row for each rank
    reduced = mesh.all_reduce("all", x.clone())  # in place, so pass a copy
    if mesh.rank == 0:
        print(f"all_gather {tuple(gathered.shape)}: {gathered.tolist()}")
        print(f"all_reduce {tuple(reduced.shape)}: {reduced.tolist()}")
        print(f"their difference, summed by hand: {(gathered.sum(0) - reduced).abs().max()}", flush=True)
