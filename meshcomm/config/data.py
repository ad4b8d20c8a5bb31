"""On what is it trained? The `[data]` section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from meshcomm.config.model import Model
from meshcomm.config.problems import Broken, Problem, either
from meshcomm.config.table import FrozenList

Text = Annotated[str, Field(min_length=1)]


class DataConfig(Model):
    """`[data]`: bytes of real text."""

    files: FrozenList[Text] = Field(
        default=(),
        description="Paths or globs, relative to the config file. Default []: the sources of Python's "
        "standard library.",
    )
    sequence: int = Field(ge=1, description="Tokens (bytes) of a sample.", examples=[128])
    max_bytes: int = Field(
        default=8_000_000, ge=2, description="Bytes that are read at most. Default 8,000,000."
    )

    def problems(self, broken: Broken) -> Iterator[Problem]:
        """See Model.problems."""
        if not broken.touches("sequence", "max_bytes") and self.max_bytes <= self.sequence:
            yield Problem(
                "max_bytes",
                f"does not hold one sample: {self.sequence} + 1 > {self.max_bytes}",
                given=f"sequence = {self.sequence}, max_bytes = {self.max_bytes}",
                expected="max_bytes above sequence: a sample is its tokens and the one that follows",
                hint=either(
                    [f"data.max_bytes = {self.sequence + 1}", f"data.sequence = {self.max_bytes - 1}"]
                ),
            )
