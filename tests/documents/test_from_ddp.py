"""The pages that start from a DDP script: each step gives the losses of the script, within 1e-9 in float64."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from meshcomm.testing import Pool
from meshcomm.testing.pool import Limits
from tests.documents.blocks import blocks, sides
from tests.documents.commands import command_lines, read
from tests.documents.ranks import script

PAGE = "docs/guide/models.md"
# The page trains in bfloat16, and prints three digits.
EXACT = {
    "torch.bfloat16)": "torch.bfloat16, enabled=False)",
    "logits.float()": "logits",
    ":.3f}": ":.17g}",
    "def main():\n": "def main():\n    import torch\n\n    torch.set_default_dtype(torch.float64)\n",
    'compute_dtype = "bfloat16"': 'dtype = "float64"',
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The page's files, changed to float64."""
    for block in blocks(PAGE):
        if "file" in block.notes:
            text = block.text
            for said, exact in EXACT.items():
                text = text.replace(said, exact)
            (tmp_path / block.notes["file"]).write_text(text + "\n")
    texts = [(tmp_path / name).read_text() for name in ("ddp.py", "train.py", "train.toml")]
    assert all(any(exact in text for text in texts) for exact in EXACT.values())
    return tmp_path


def steps() -> list[tuple[str, ...]]:
    """The arguments of each `meshcomm run` on the page."""
    commands = [
        read(line)
        for block in blocks(PAGE)
        if block.language in ("sh", "console")
        for line, _ in command_lines(block.text, prompt=block.language == "console")
    ]
    return [each.arguments for each in commands if each is not None and each.name == "run"]


def losses(pool: Pool, folder: Path, config: str | None, overrides: list[str], name: str) -> list[float]:
    call = partial(script, str(folder), [name], config, overrides)
    ended = pool.call(call, ranks=4, limits=Limits(100), capture=True)
    assert [(one.state, one.value) for one in ended] == [("returned", (0, ""))] * 4, ended[0].text
    lines = [line for one in ended for line in one.out.splitlines() if line.startswith("step ")]
    return [float(line.rpartition(" ")[2]) for line in lines]


STEPS = steps()


def test_the_steps_of_the_page_shard_split_and_pipeline() -> None:
    texts = [text for words in STEPS for text in words]
    assert all(any(each in text for text in texts) for each in ("shard", "tensor", "pipeline"))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "words",
    # The last step splits the module and has a pipeline. The tests of the page run the other steps in bfloat16.
    [pytest.param(each, marks=pytest.mark.parity) for each in STEPS],
    ids=[str(number) for number in range(1, len(STEPS) + 1)],
)
def test_every_step_gives_the_losses_of_the_script_that_one_has(
    pool: Pool, folder: Path, words: tuple[str, ...]
) -> None:
    wanted = losses(pool, folder, None, [], "ddp.py")
    assert len(wanted) == 16 and wanted[-1] < wanted[0]
    overrides = [after for before, after in pairwise(words) if before == "--set"]
    assert words[-2:] == ("train.toml", "train.py")
    found = losses(pool, folder, "train.toml", overrides, "train.py")
    assert found == pytest.approx(wanted, rel=1e-9)


def test_six_changed_lines_give_the_losses_and_weights_of_the_ddp_script(pool: Pool, tmp_path: Path) -> None:
    (block,) = (block for block in blocks("docs/coming_from/two_dims.md") if block.language == "diff")
    found = []
    for name, text in sides(block).items():
        text = text.replace("torch.manual_seed", "torch.set_default_dtype(torch.float64)\ntorch.manual_seed")
        (tmp_path / name).write_text(text.replace("{loss:.4f}", "{loss:.17g}").replace("epoch {", "step {"))
        found.append((losses(pool, tmp_path, None, [], name), torch.load(tmp_path / "model.pt")))
    (wanted, weights), (split, unsplit) = found
    assert len(wanted) == 3 and wanted[-1] < wanted[0] / 3 and split == pytest.approx(wanted, rel=1e-9)
    assert list(unsplit) == list(weights)
    for name, weight in weights.items():
        torch.testing.assert_close(unsplit[name], weight, rtol=1e-9, atol=1e-12)
