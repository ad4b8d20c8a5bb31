"""Random numbers by role: which ranks draw the same, and which do not."""

from __future__ import annotations

import hashlib

import torch

from meshcomm.errors import ConfigError
from meshcomm.layout import Dims
from meshcomm.mesh.topology_queries import TopologyQueries


class RandomNumbers(TopologyQueries):
    """Seeds and generators of one rank. `Mesh` is one; nothing is communicated."""

    device: torch.device

    def seed(self, *key: int | str, along: Dims = ()) -> int:
        """A seed that differs along the dims of `along` and is equal along all others.

            torch.manual_seed(mesh.seed(0, step, along=("dp", "cp")))   # equal along tp, where activations are

        key:     what it follows from beside this rank's coords along these dims: a seed, a step, a name.
        Returns: 0 to 2^63 - 1, from SHA-256: other keys and coords give unrelated ones. Sizes of dims do not matter:
                 coord 0 has the same on every mesh.
        Raises:  UnknownDim; NotMember; ConfigError without a key.
        """
        if not key:
            raise ConfigError(
                "a seed must follow from something",
                given=f"mesh.seed(along={along!r})",
                expected="a number or more, equal on the ranks that are to draw the same",
                hint="mesh.seed(0, along=...), and the step behind it for other numbers in each step",
            )
        names = (along,) if isinstance(along, str) else along
        coords = {name: self.coord(name) for name in sorted(set(names))}
        digest = hashlib.sha256(f"{key!r} {coords!r}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1

    def generator(
        self, *key: int | str, along: Dims = (), device: torch.device | str | None = None
    ) -> torch.Generator:
        """A generator of that `seed`: a new one in each call, which nothing else draws from.

            noise = torch.randn(shape, generator=mesh.generator(7, step, along="dp"), device=mesh.device)

        device: of what is drawn; None: this rank's. CPUs and GPUs draw different numbers from one seed.
        """
        return torch.Generator(device or self.device).manual_seed(self.seed(*key, along=along))
