"""Causal attention over a sequence that is split into one block per rank: keys and values move around a ring.

Look at: the differences in output and gradients from attention over the whole sequence on one process. The ring never
needs the whole sequence or the whole score matrix on one rank: it merges each block's contribution using the running
maximum and sum of the softmax. In the backward pass, `functional.shift` sends the gradients back around the ring.
meshcomm.parallel has a version that balances the work, overlaps communication with computation, and stores no scores
for the backward pass: docs/guide/context.md.

    meshcomm run --world-size 8 examples/by_hand/ring_attention.py
    meshcomm simulate --world-size 8 examples/by_hand/ring_attention.py

Prints:
    rank 0 (cp=0): difference of the output 4.4e-16, of the gradients 5.3e-15
    rank 1 (cp=1): difference of the output 4.4e-16, of the gradients 3.6e-15
    rank 2 (cp=2): difference of the output 5.6e-16, of the gradients 1.8e-15
    ...
    rank 7 (cp=7): difference of the output 3.3e-16, of the gradients 1.6e-15
"""

import torch
import torch.nn.functional as F

import meshcomm

with meshcomm.init(dims={"cp": -1}, device="cpu") as mesh:
    torch.manual_seed(0)
    whole = torch.randn(3, 2, 4, 32, 8, dtype=torch.float64, requires_grad=True)  # qkv b h s d
    n, here = mesh.size("cp"), mesh.coord("cp")
    mine = whole.detach().chunk(n, 3)[here].clone().requires_grad_()
    length = 32 // n
    place = torch.arange(length)

    q, kv = mine[0], mine[1:]
    largest, total, out = torch.tensor(float("-inf")), 0.0, 0.0
    for turn in range(n):
        k, v = kv
        behind = (here - turn) % n  # the coord that this block belongs to
        scores = q @ k.mT / 8**0.5
        future = place + behind * length > (place + here * length)[:, None]
        scores = scores.masked_fill(future, float("-inf"))
        before, largest = largest, torch.maximum(largest, scores.detach().amax(-1, keepdim=True))
        weights, shrink = (scores - largest).exp(), (before - largest).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights @ v
        if turn < n - 1:
            kv = mesh.functional.shift("cp", kv, +1)
    out = out / total
    out.square().sum().backward()

    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    expected.square().sum().backward()
    output = (out - expected.chunk(n, 2)[here]).abs().max().item()
    gradient = (mine.grad - whole.grad.chunk(n, 3)[here]).abs().max().item()
    print(f"{mesh.label}: difference of the output {output:.1e}, of the gradients {gradient:.1e}", flush=True)
