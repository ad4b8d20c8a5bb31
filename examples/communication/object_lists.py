"""A list of Python objects is sent from the first rank to the last, and another list is scattered to all ranks.

Look at: the received objects, which equal the sent objects, including their types. Each call first exchanges sizes and
readiness, and then sends the bytes. The receiver does not need to know a length, and no pickle is loaded unless both
sides ask for it.

    meshcomm run --world-size 8 examples/communication/object_lists.py
    meshcomm simulate --world-size 8 examples/communication/object_lists.py

Prints:
    rank 0 (all=0): {'file': 'part0.txt', 'lines': 0}
    rank 1 (all=1): {'file': 'part1.txt', 'lines': 10}
    ...
    rank 7 (all=7): ['hello', 123, [1, 2, 3], tensor([1., 1.])]
    rank 7 (all=7): {'file': 'part7.txt', 'lines': 70}
"""

import torch

import meshcomm

with meshcomm.init(dims={"all": -1}, device="cpu") as mesh:
    here, n = mesh.coord("all"), mesh.size("all")
    if here == 0:
        mesh.objects.send("all", ["hello", 123, [1, 2, 3], torch.ones(2)], dst=n - 1)
    if here == n - 1:
        print(f"{mesh.label}: {mesh.objects.recv('all', src=0)}", flush=True)
    files = [{"file": f"part{c}.txt", "lines": 10 * c} for c in range(n)] if here == 0 else None
    print(f"{mesh.label}: {mesh.objects.scatter('all', files, src=0)}", flush=True)
