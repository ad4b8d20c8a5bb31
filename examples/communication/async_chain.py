"""The same chain as in send_chain.py, with computation while each message is in flight.

Look at: the values, which equal those of send_chain.py, and the work done before each wait. Until a handle's wait()
returns, do not read the tensor that is being received or change the tensor that is being sent. A handle that is
dropped without a wait is reported with its source line.

    meshcomm run --world-size 8 examples/communication/async_chain.py
    meshcomm simulate --world-size 8 examples/communication/async_chain.py

Prints:
    rank 0 (all=0): [100.0, 200.0], and work of 1000000 meanwhile
    rank 1 (all=1): [200.0, 400.0], and work of 2000000 meanwhile
    rank 2 (all=2): [400.0, 800.0], and work of 2000000 meanwhile
    ...
    rank 7 (all=7): [12800.0, 25600.0], and work of 1000000 meanwhile
"""

import torch

import meshcomm


def work():
    return torch.ones(100, 100).matmul(torch.ones(100, 100)).sum().item()


with meshcomm.init(dims={"all": -1}, device="cpu") as mesh:
    here, last = mesh.coord("all"), mesh.size("all") - 1
    x, done = torch.tensor([100.0, 200.0]), 0.0
    if here > 0:
        coming = mesh.irecv("all", torch.empty(2), src=here - 1)
        done += work()
        x = 2 * coming.wait()
    if here < last:
        leaving = mesh.isend("all", x, dst=here + 1)
        done += work()
        leaving.wait()
    print(f"{mesh.label}: {x.tolist()}, and work of {done:.0f} meanwhile", flush=True)
