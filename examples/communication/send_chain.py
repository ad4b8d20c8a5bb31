"""A tensor is sent from rank to rank, and each rank doubles it.

Look at: the values on the last rank. Peers are coords along the dim. A receive writes into memory that the receiver
provides, in this example an empty tensor with two elements.

    meshcomm run --world-size 8 examples/communication/send_chain.py
    meshcomm simulate --world-size 8 examples/communication/send_chain.py

Prints:
    rank 0 (all=0): [100.0, 200.0]
    rank 1 (all=1): [200.0, 400.0]
    rank 2 (all=2): [400.0, 800.0]
    ...
    rank 7 (all=7): [12800.0, 25600.0]
"""

import torch

import meshcomm

with meshcomm.init(dims={"all": -1}, device="cpu") as mesh:
    here, last = mesh.coord("all"), mesh.size("all") - 1
    x = torch.tensor([100.0, 200.0])
    if here > 0:
        x = 2 * mesh.recv("all", torch.empty(2), src=here - 1)
    if here < last:
        mesh.send("all", x, dst=here + 1)
    print(f"{mesh.label}: {x.tolist()}", flush=True)
