"""A model written without any mesh, parallelized over dp x tp and compared with the same model on one process.

Look at: the plan, which specifies how each layer is split, and the two losses in each line, which are equal.

    meshcomm run --world-size 8 examples/bring_your_own_model.py
    meshcomm simulate --world-size 8 examples/bring_your_own_model.py

Prints:
    step  0: loss 14.440048659, on one process 14.440048659
    step  5: loss 4.205353976, on one process 4.205353976
    step 10: loss 2.183982251, on one process 2.183982251
    step 15: loss 1.234707146, on one process 1.234707146
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import meshcomm
from meshcomm.parallel import GradientSync, cross_entropy, tensor_parallel

VOCAB, WIDTH, HEADS, TOKENS, BATCH, STEPS = 64, 32, 4, 32, 8, 20


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# -- the model ends here; the code below makes it parallel -----------------------------------------

PLAN = {
    "tokens": "vocab",
    "blocks.*.attn": {"set": {"heads": "split"}},
    "blocks.*.attn.qkv": "column:3",
    "blocks.*.attn.out": "row",
    "blocks.*.mlp.0": "column",
    "blocks.*.mlp.2": "row",
    "head": "column",
}

with meshcomm.init(dims={"dp": -1, "tp": 2}, device="cpu") as mesh:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, batch = GPT(), torch.randint(VOCAB, (BATCH, TOKENS + 1)).sort(1).values
    alone = copy.deepcopy(model)

    split = tensor_parallel(model, mesh, "tp", PLAN, example=(batch[:2, :-1],))
    sync = GradientSync(mesh, "dp", model, op="sum")
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    alone_optimiser = torch.optim.AdamW(alone.parameters(), lr=1e-2)

    mine = batch.chunk(mesh.size("dp"))[mesh.coord("dp")]  # different samples along dp, the same along tp
    for step in range(STEPS):
        sync.start()
        loss = cross_entropy(split, model(mine[:, :-1]), mine[:, 1:], reduction="sum") / batch[:, 1:].numel()
        loss.backward()
        sync.finish()
        optimiser.step()

        if mesh.rank == 0:  # the same step on one process, with all samples
            alone_optimiser.zero_grad()
            alone_loss = F.cross_entropy(alone(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            alone_loss.backward()
            alone_optimiser.step()
        loss = mesh.all_reduce("dp", loss.detach())
        if mesh.rank == 0 and step % 5 == 0:
            print(f"step {step:2}: loss {loss:.9f}, on one process {alone_loss:.9f}", flush=True)
