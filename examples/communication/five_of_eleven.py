"""A mesh on ranks 2, 4, 6, 8 and 10 of eleven, to compare global ranks with coords.

Look at: rank 2 sends to coord 4, which is rank 10. dst and src are coords, which equal the ranks within the group. In
torch.distributed, dst and src are global ranks even if a group is given, so the call would be `send(x, dst=10,
group=g)` or `send(x, group=g, group_dst=4)`. With `dst=4`, it would send to rank 4.

    meshcomm run --world-size 11 examples/communication/five_of_eleven.py
    meshcomm simulate --world-size 11 examples/communication/five_of_eleven.py

Prints:
    rank 0 (not in the mesh)
    rank 1 (not in the mesh)
    rank 2 (even=0): coord 0 along even, received nothing
    rank 3 (not in the mesh)
    rank 4 (even=1): coord 1 along even, received nothing
    ...
    rank 10 (even=4): coord 4 along even, received 123
"""

import torch

import meshcomm

with meshcomm.init(dims={"even": 5}, ranks=[2, 4, 6, 8, 10], device="cpu") as mesh:
    if mesh.is_member:
        coord = mesh.coord("even")
        assert mesh.ranks("even")[coord] == mesh.rank == mesh.get_rank(even=coord)
        if coord == 0:
            mesh.send("even", torch.tensor([123]), dst=4)
        came = mesh.recv("even", torch.empty(1, dtype=torch.int64), src=0).item() if coord == 4 else "nothing"
        print(f"{mesh.label}: coord {coord} along even, received {came}", flush=True)
    else:
        print(f"{mesh.label}", flush=True)
