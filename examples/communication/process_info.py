"""Every process describes itself, and every process receives all descriptions.

Look at: the list, which is in coord order. Every rank has the list, and rank 0 prints it. The objects may differ in
size: no object is packed into a tensor of fixed length, and no pickle is loaded. In the simulator, `pid` is the same
for all ranks.

    meshcomm run --world-size 8 examples/communication/process_info.py
    meshcomm simulate --world-size 8 examples/communication/process_info.py

Prints:
    {'rank': 0, 'device': 'cpu', 'pid': 21699}
    ...
    {'rank': 7, 'device': 'cpu', 'pid': 21718}
    rank 0 (all=0): 8 processes, the sum of their ranks is 28
    ...
    rank 7 (all=7): 8 processes, the sum of their ranks is 28
"""

import os

import torch

import meshcomm

with meshcomm.init(dims={"all": -1}, device="cpu") as mesh:
    mine = {"rank": mesh.rank, "device": str(mesh.device), "pid": os.getpid()}
    everyone = mesh.objects.all_gather("all", mine)
    total = mesh.all_reduce("all", torch.tensor([mesh.rank]))
    if mesh.rank == 0:
        for info in everyone:
            print(info)
    print(f"{mesh.label}: {len(everyone)} processes, the sum of their ranks is {total.item()}", flush=True)
