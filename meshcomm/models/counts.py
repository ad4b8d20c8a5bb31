"""Counts the parameters in each part of a transformers model."""

from __future__ import annotations

from pathlib import Path

from meshcomm.config.pretrained import understood
from meshcomm.models.hf import Whole
from meshcomm.predict.estimate import Counts


def counts_of(folder: str | Path) -> Counts:
    """Count the parameters of the model that `folder`/config.json describes, without allocating memory.

    Raises ConfigError if transformers cannot create the model.
    """
    whole = Whole(understood(folder))
    layers, experts, ends = [0] * whole.config.num_hidden_layers, [0] * whole.config.num_hidden_layers, 0
    for name, parameter in whole.module.named_parameters():
        # The first number in a parameter's name is the number of its block.
        place = next((int(each) for each in name.split(".") if each.isdecimal()), len(layers))
        if place >= len(layers):
            ends += parameter.numel()
        elif ".experts." in name:
            experts[place] += parameter.numel()
        else:
            layers[place] += parameter.numel()
    return Counts(tuple(layers), tuple(experts), ends)
