"""A ring: every rank exchanges tensors with both of its neighbors at the same time.

Look at: the tensors from the left and right neighbors. `exchange` starts all messages before it waits for any of them,
so the ring cannot deadlock. Blocking sends on every rank would deadlock. `shift` does the same for one
direction in a single line.

    meshcomm run --world-size 8 examples/communication/batch_ring.py
    meshcomm simulate --world-size 8 examples/communication/batch_ring.py

Prints:
    rank 0 (ring=0): from the left [14, 15], from the right [2, 3]
    rank 1 (ring=1): from the left [0, 1], from the right [4, 5]
    rank 2 (ring=2): from the left [2, 3], from the right [6, 7]
    ...
    rank 7 (ring=7): from the left [12, 13], from the right [0, 1]
"""

import torch

import meshcomm

with meshcomm.init(dims={"ring": -1}, device="cpu") as mesh:
    here, n = mesh.coord("ring"), mesh.size("ring")
    left, right = (here - 1) % n, (here + 1) % n
    x = torch.arange(2) + 2 * here
    y, z = mesh.exchange(
        "ring",
        sends=[(x, right), (x, left)],
        recvs=[(torch.empty_like(x), left), (torch.empty_like(x), right)],
    )
    assert torch.equal(mesh.shift("ring", x, +1), y) and torch.equal(mesh.shift("ring", x, -1), z)
    print(f"{mesh.label}: from the left {y.tolist()}, from the right {z.tolist()}", flush=True)
