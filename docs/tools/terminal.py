"""Write docs/images/hang.svg, README's first script under `meshcomm run` as a terminal shows it: `python docs/tools/terminal.py`."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT: Final = Path(__file__).parents[2]
PICTURE: Final = ROOT / "docs" / "images" / "hang.svg"
COMMAND: Final = ("meshcomm", "run", "--world-size", "4", "train.py")


def script() -> str:
    """README's script."""
    found = re.search(
        r"<!-- file: train\.py -->\n```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S
    )
    assert found is not None
    return found[1]


def picture(output: str) -> str:
    """Return the SVG of the command and its output, up to the launcher's summary of the ranks, which may differ from run to run."""
    lines = output.partition("\nmeshcomm: ")[0].splitlines()
    console = Console(record=True, width=104, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text("$ " + " ".join(COMMAND), style="bold"))
    for line in lines:
        text = Text(line, style="bold red" if "Error: " in line else "")
        text.highlight_regex(r"^  (given|expected|try):", "bold cyan")
        text.highlight_regex(r"\bat train\.py:\d+", "bold yellow")
        console.print(text)
    made = console.export_svg(title="", theme=MONOKAI, unique_id="hang")
    # The fonts are on another host.
    return re.sub(r"@font-face \{.*?\}\s*", "", made, flags=re.DOTALL)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(script(), "utf-8")
        command = [sys.executable, "-m", *COMMAND]
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    PICTURE.write_text(picture(ran.stdout + ran.stderr), "utf-8")


if __name__ == "__main__":
    main()
