"""A mesh on ranks 0 and 1 with a custom timeout, in a job that also has ranks outside the mesh.

Look at: ranks 0 and 1 print the sum. On the other ranks, `mesh.is_member` is False, and a call on the mesh raises an
error instead of hanging or returning a wrong result. Every rank of the job opens the mesh, so that all ranks agree on
it.

    meshcomm run --world-size 8 examples/communication/subgroup.py
    meshcomm simulate --world-size 8 examples/communication/subgroup.py

Prints:
    rank 0 (pair=0): sum 1, timeout 30 s
    rank 1 (pair=1): sum 1, timeout 30 s
    rank 2 (not in the mesh): rank 2 is not in the mesh {'pair': 2}
    ...
    rank 7 (not in the mesh): rank 7 is not in the mesh {'pair': 2}
"""

import torch

import meshcomm

with meshcomm.init(dims={"pair": 2}, ranks=[0, 1], timeout_s=30, device="cpu") as mesh:
    x = torch.tensor([mesh.rank])
    if mesh.is_member:
        seconds = mesh.plan.defaults.timeout_s
        print(f"{mesh.label}: sum {mesh.all_reduce('pair', x).item()}, timeout {seconds:g} s", flush=True)
    else:
        try:
            mesh.all_reduce("pair", x)
        except meshcomm.MeshcommError as error:
            print(f"{mesh.label}: {error.what}", flush=True)
