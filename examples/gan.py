"""A GAN on two ranks, with a generator, a discriminator and an optimizer for each, compared with one process.

Look at: the two `GradientSync` objects, one for each module. While the generator learns, the discriminator's parameters
need no gradients, so that its `GradientSync` does not take those of the generator's loss.

    meshcomm run --world-size 2 examples/gan.py
    meshcomm simulate --world-size 2 examples/gan.py

Prints:
    step 0: losses 1.4029 and 0.6505, on one process 1.4029 and 0.6505
    step 100: losses 1.7812 and 0.4628, on one process 1.7812 and 0.4628
    step 200: losses 1.6540 and 0.6907, on one process 1.6540 and 0.6907
    step 300: losses 1.5203 and 0.6563, on one process 1.5203 and 0.6563
"""

import torch
import torch.nn.functional as F
from torch import nn

import meshcomm
from meshcomm.parallel import GradientSync

BATCH, NOISE, STEPS = 64, 2, 301


def modules():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(NOISE, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    discriminator = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    return generator, discriminator


def batch(step):
    random = torch.Generator().manual_seed(step)
    angles = 6.2832 * torch.rand(BATCH, 1, generator=random, dtype=torch.float64)
    return torch.cat([angles.cos(), angles.sin()], 1), torch.randn(BATCH, NOISE, generator=random).double()


def judged(discriminator, x, is_real):
    logits = discriminator(x)
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))


def train(rank, ranks, sync):
    generator, discriminator = modules()
    of_generator, of_discriminator = sync(generator), sync(discriminator)
    optimizers = [torch.optim.Adam(module.parameters(), lr=5e-3) for module in (generator, discriminator)]
    losses = []
    for step in range(STEPS):
        real, noise = (x.chunk(ranks)[rank] for x in batch(step))
        optimizers[1].zero_grad()
        with of_discriminator:
            fake = generator(noise).detach()
            first = judged(discriminator, real, True) + judged(discriminator, fake, False)
            first.backward()
        optimizers[1].step()

        optimizers[0].zero_grad()
        discriminator.requires_grad_(False)
        with of_generator:
            second = judged(discriminator, generator(noise), True)
            second.backward()
        discriminator.requires_grad_(True)
        optimizers[0].step()
        losses.append(torch.stack([first.detach(), second.detach()]))
    return losses


class Alone:
    """In place of GradientSync, on one process."""

    def __init__(self, module): ...
    def __enter__(self): ...
    def __exit__(self, *error): ...


with meshcomm.init(dims={"dp": -1}, device="cpu") as mesh:
    losses = train(mesh.rank, mesh.world_size, lambda module: GradientSync(mesh, "dp", module))
    alone = train(0, 1, Alone)
    for step in range(0, STEPS, 100):
        (a, b), (c, d) = mesh.all_reduce("dp", losses[step], op="avg").tolist(), alone[step].tolist()
        if mesh.rank == 0:
            print(f"step {step}: losses {a:.4f} and {b:.4f}, on one process {c:.4f} and {d:.4f}")
