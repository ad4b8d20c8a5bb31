"""Four collectives, each derived from an einops pattern that contains a mesh dim.

Look at: the shapes, and the assertions, which compare each result with the whole tensor. The position of a dim's name
determines the call. If the name is only on the right, the slices are gathered. If the name is only on the left, the
tensor is sliced, or reduced and scattered. If it is on both sides at different positions, slices are exchanged.
`explain_pattern` shows what a pattern sends, without communicating.

    meshcomm run --world-size 8 examples/communication/patterns.py
    meshcomm simulate --world-size 8 examples/communication/patterns.py

Prints:
    all_gather (2, 6, 8) slice (2, 6, 4) reduce_scatter (2, 6, 4) all_to_all (2, 3, 8)
    b (tp s) h -> b s (tp h)    on mesh tp=2
      tp: moves: slices are exchanged between all ranks along it
      step                                            axes        shape      each rank sends
      x                                               b (tp s) h  (2, 6, 4)
      all_to_all along tp, split axis 1, join axis 2  b s (tp h)  (2, 3, 8)  24
      sent by each rank: 24 elements, times the bytes per element
"""

import torch

import meshcomm

with meshcomm.init(dims={"dp": -1, "tp": 2}, device="cpu") as mesh:
    tp, n = mesh.coord("tp"), mesh.size("tp")
    whole = torch.arange(2.0 * 6 * 8).reshape(2, 6, 8)  # batch, sequence, hidden
    mine = whole.chunk(n, 2)[tp]

    gathered = mesh.rearrange(mine, "b s h -> b s (tp h)")
    sliced = mesh.rearrange(whole, "b s (tp h) -> b s h")
    summed = mesh.rearrange(whole, "b s (tp h) -> b s h", partial="sum")
    swapped = mesh.rearrange(mine, "b (tp s) h -> b s (tp h)")

    assert torch.equal(gathered, whole)
    assert torch.equal(sliced, mine)
    assert torch.equal(summed, n * mine)
    assert torch.equal(swapped, whole.chunk(n, 1)[tp])
    if mesh.rank == 0:
        print("all_gather", tuple(gathered.shape), "slice", tuple(sliced.shape), end=" ")
        print("reduce_scatter", tuple(summed.shape), "all_to_all", tuple(swapped.shape))
        print(meshcomm.explain_pattern("b (tp s) h -> b s (tp h)", mesh.dims, mine.shape), flush=True)
