"""Pipeline, data and tensor parallelism, each of size 2, for plain torch modules, compared with one process.

Look at: the losses on eight ranks and on one process, which agree to every printed digit in every step. Four
statements make the model parallel: the choice of this rank's layers, `tensor_parallel`, `GradientSync` and
`Pipelined`.

    meshcomm run --world-size 8 examples/hybrid_training.py
    meshcomm simulate --world-size 8 examples/hybrid_training.py

Prints:
    step 0: loss 3.607314004, on one process 3.607314004
    step 3: loss 2.651236384, on one process 2.651236384
    step 6: loss 2.050180137, on one process 2.050180137
    step 9: loss 1.664215662, on one process 1.664215662
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import meshcomm
from meshcomm.parallel import GradientSync, Pipelined, cross_entropy, tensor_parallel

VOCAB, WIDTH, TOKENS, BATCH, MICROBATCHES = 32, 16, 8, 16, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


with meshcomm.init(dims={"pp": 2, "dp": -1, "tp": 2}, device="cpu") as mesh:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(VOCAB, WIDTH), Block(), Block(), Block(), nn.Linear(WIDTH, VOCAB))
    alone = copy.deepcopy(net)
    ids = torch.randint(VOCAB, (BATCH, TOKENS))
    ids[:, 1::2] = ids[:, ::2]  # every second token repeats the token before it, which can be learned

    stage = net[:3] if mesh.coord("pp") == 0 else net[3:]
    ends = {"0": "vocab"} if mesh.coord("pp") == 0 else {"4": "column"}  # slicing keeps names
    split = tensor_parallel(stage, mesh, "tp", {"*.up": "column", "*.down": "row", **ends})
    sync = GradientSync(mesh, "dp", stage, op="sum", microbatches=MICROBATCHES)
    each = BATCH // mesh.size("dp") // MICROBATCHES
    run = Pipelined(
        mesh,
        "pp",
        stage,
        lambda logits, targets: cross_entropy(split, logits, targets, reduction="sum") / ids[:, 1:].numel(),
        microbatches=MICROBATCHES,
        schedule="1f1b",
        shapes=((each, TOKENS - 1), (each, TOKENS - 1, WIDTH), (each, TOKENS - 1, VOCAB // mesh.size("tp"))),
        dtype=torch.float64,
    )
    optimiser = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    alone_optimiser = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    mine = ids.chunk(mesh.size("dp"))[mesh.coord("dp")]
    for step in range(10):
        sync.start()
        loss = run(mine[:, :-1], mine[:, 1:])  # None on the first stage
        sync.finish()
        optimiser.step()

        alone_loss = F.cross_entropy(alone(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        alone_optimiser.zero_grad()
        alone_loss.backward()
        alone_optimiser.step()
        if loss is not None:
            loss = mesh.all_reduce("dp", loss)
            if mesh.coord("dp") == mesh.coord("tp") == 0 and step % 3 == 0:
                print(f"step {step}: loss {loss:.9f}, on one process {alone_loss:.9f}", flush=True)
