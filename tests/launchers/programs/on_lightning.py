"""A Lightning program. Its Trainer starts four processes, with a mesh on their default group: python on_lightning.py [--dies RANK]"""
# mypy: ignore-errors

from __future__ import annotations

import argparse
import os
import signal

import lightning
import torch

import meshcomm


class Sums(lightning.LightningModule):
    """Training steps that sum along the dims of a mesh."""

    def __init__(self, dies: int) -> None:
        super().__init__()
        self.layer, self.dies, self.mesh = torch.nn.Linear(4, 1), dies, None

    def on_fit_start(self) -> None:
        self.mesh = meshcomm.init(dims={"dp": 2, "tp": 2}, device="cpu", timeout_s=30)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if index == 8 and self.mesh.rank == self.dies:
            print(f"rank {self.mesh.rank} is killed\n", end="", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        self.total = self.mesh.all_reduce("dp", self.mesh.all_reduce("tp", torch.ones(1))).item()
        assert self.total == 4
        return self.layer(batch).sum()

    def on_fit_end(self) -> None:
        print(f"rank {self.mesh.rank} summed 16 times: {self.total:g}\n", end="", flush=True)
        self.mesh.close()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dies", type=int, default=-1)
    given = parser.parse_args()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=4, strategy="ddp", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Sums(given.dies), torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=1))
