"""Ulysses: an exchange before attention, from a part of the sequence to a part of the heads, and an exchange back.

Look at: the two `rearrange` calls, and the differences in output and gradients from attention over the whole sequence
on one process. After the first exchange, each rank has the whole sequence for some of the heads, so any attention
function works in between. The size of cp must divide the number of heads.

    meshcomm run --world-size 8 examples/by_hand/ulysses.py
    meshcomm simulate --world-size 8 examples/by_hand/ulysses.py

Prints:
    rank 0 (cp=0): difference of the output 0.0e+00, of the gradients 0.0e+00
    rank 1 (cp=1): difference of the output 0.0e+00, of the gradients 0.0e+00
    rank 2 (cp=2): difference of the output 0.0e+00, of the gradients 0.0e+00
    ...
    rank 7 (cp=7): difference of the output 0.0e+00, of the gradients 0.0e+00
"""

import torch
import torch.nn.functional as F

import meshcomm

with meshcomm.init(dims={"cp": -1}, device="cpu") as mesh:
    torch.manual_seed(0)
    whole = torch.randn(3, 2, 8, 32, 4, dtype=torch.float64, requires_grad=True)  # qkv b h s d
    n, here = mesh.size("cp"), mesh.coord("cp")
    mine = whole.detach().chunk(n, 3)[here].clone().requires_grad_()

    heads = mesh.rearrange(mine, "qkv b (cp h) s d -> qkv b h (cp s) d")
    attended = F.scaled_dot_product_attention(*heads, is_causal=True)
    out = mesh.rearrange(attended, "b h (cp s) d -> b (cp h) s d")
    out.square().sum().backward()

    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    expected.square().sum().backward()
    output = (out - expected.chunk(n, 2)[here]).abs().max().item()
    gradient = (mine.grad - whole.grad.chunk(n, 3)[here]).abs().max().item()
    print(f"{mesh.label}: difference of the output {output:.1e}, of the gradients {gradient:.1e}", flush=True)
