"""The memory use of scatter, which gives each rank its part, compared with a broadcast of the whole tensor.

Look at: the size of the memory that holds each rank's part. A slice of a broadcast tensor keeps the whole tensor
alive. To free the memory, copy the slice and drop the tensor. With scatter, only the root ever allocates more than its
part: it keeps the whole tensor and, during the call, a second copy.

    meshcomm run --world-size 8 examples/communication/scatter_memory.py
    meshcomm simulate --world-size 8 examples/communication/scatter_memory.py

Prints:
    rank 0 (all=0): scatter 9,000,000 bytes, slice 8,000,000, copy 1,000,000
    rank 1 (all=1): scatter 1,000,000 bytes, slice 8,000,000, copy 1,000,000
    rank 2 (all=2): scatter 1,000,000 bytes, slice 8,000,000, copy 1,000,000
    ...
    rank 7 (all=7): scatter 1,000,000 bytes, slice 8,000,000, copy 1,000,000
"""

import torch

import meshcomm


def held(*tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


with meshcomm.init(dims={"all": -1}, device="cpu") as mesh:
    here, n = mesh.coord("all"), mesh.size("all")
    mine = [torch.arange(n * 250_000.0).reshape(n * 1000, 250)] if here == 0 else []

    part = mesh.scatter("all", mine[0] if mine else None, src=0)  # only the root needs to know the shape
    by_scatter = held(part, *mine)

    whole = mesh.broadcast("all", mine[0] if mine else torch.empty(n * 1000, 250), src=0)
    same = whole.chunk(n)[here]
    assert torch.equal(part, same)
    slices, copies = held(same), held(same.clone())
    print(f"{mesh.label}: scatter {by_scatter:,} bytes, slice {slices:,}, copy {copies:,}", flush=True)
