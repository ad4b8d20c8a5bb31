"""Detection of objects: classes, boxes and their presence from learned queries, with several losses (Carion et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracles.kind import SAMPLES, Kind
from tests.oracles.vision import images

QUERIES, CLASSES = 5, 4


@dataclass
class Found:
    """classes: (samples, QUERIES, CLASSES). boxes: (samples, QUERIES, 4). present: (samples, QUERIES), logits."""

    classes: Tensor
    boxes: Tensor
    present: Tensor


class Detector(nn.Module):
    """Queries attend to patches."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.head = width // heads
        self.patches = nn.Conv2d(3, width, 2, 2)
        self.queries = nn.Parameter(torch.randn(QUERIES, width))
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.classes, self.present = nn.Linear(width, CLASSES), nn.Linear(width, 1)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, 4)

    def forward(self, x: Tensor) -> Found:
        """(samples, 3, 8, 8) -> the objects of QUERIES."""
        y = self.patches(x).flatten(2).transpose(1, 2)
        queries = self.queries.expand(len(x), -1, -1)
        q, k, v = (
            each.unflatten(-1, (-1, self.head)).transpose(1, 2)
            for each in (self.query(queries), self.key(y), self.value(y))
        )
        z = queries + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return Found(self.classes(z), self.down(F.relu(self.up(z))).sigmoid(), self.present(z)[..., 0])


def objects(step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Images, and what is there. each: the mean number of objects in an image of the whole batch."""
    generator = torch.Generator().manual_seed(step)
    present = torch.rand(SAMPLES, QUERIES, generator=generator) < 0.5
    targets = {
        "classes": torch.randint(CLASSES, (SAMPLES, QUERIES), generator=generator),
        "boxes": torch.rand(SAMPLES, QUERIES, 4, generator=generator, dtype=torch.float64),
        "present": present,
        "each": present.sum().double() / SAMPLES,
    }
    return images(step), targets


def _losses(found: Found, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of the presence, and sums over objects for the classes and boxes."""
    there = targets["present"]
    presence = F.binary_cross_entropy_with_logits(found.present, there.to(found.present.dtype))
    classes = F.cross_entropy(found.classes[there], targets["classes"][there], reduction="sum")
    return presence, classes, F.l1_loss(found.boxes[there], targets["boxes"][there], reduction="sum")


def by_number(found: Found, targets: dict[str, Tensor]) -> dict[str, Any]:
    """Losses of objects are divided by the number of objects of the whole batch."""
    presence, classes, boxes = _losses(found, targets)
    each = targets["each"] * len(found.present)
    loss = presence + (classes + 5 * boxes) / each
    count = targets["present"].sum()
    return {"loss": loss, "presence": presence, "classes": (classes, count), "boxes": (boxes, count)}


def of_a_batch(found: Found, targets: dict[str, Tensor]) -> dict[str, Any]:
    """Losses of objects are divided by the number of objects in the batch that is given."""
    presence, classes, boxes = _losses(found, targets)
    return {"loss": presence + (classes + 5 * boxes) / targets["present"].sum().clamp(min=1)}


DETECTION = Kind(Detector, objects, by_number)
DETECTION_BY_BATCH = Kind(Detector, objects, of_a_batch)
