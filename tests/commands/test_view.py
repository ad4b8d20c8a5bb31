"""`meshcomm view`: its address, its errors, and the page that it writes."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.show.shown import run

ROOT = Path(__file__).parents[2]


def test_the_command_prints_its_address_and_ends_quietly_on_ctrl_c() -> None:
    words = ["view", "configs/gpt_1024.toml", "--world-size", "1024"]
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "meshcomm", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Handle SIGINT as in a terminal, even if the tests run in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(
                r"http://127\.0\.0\.1:(\d+)/  \(configs/gpt_1024\.toml; Ctrl-C ends it\)\n", line
            )
            assert found is not None, line
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=100)
            connection.request("GET", "/facts.json")
            assert json.loads(connection.getresponse().read())["world_size"] == 1024
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=100)
            assert (process.returncode, rest.strip(), errors) == (0, "", "")
            connection.close()
        finally:
            process.kill()


def test_the_command_says_what_is_wrong_and_writes_a_page(tmp_path: Path) -> None:
    page, pdf = tmp_path / "page.html", tmp_path / "x.pdf"
    for words, said in (
        ([str(tmp_path)], "is not the folder of a run"),
        (["configs/mesh.toml", "--export", str(pdf)], "given: the extension .pdf"),
        (["configs/mesh.toml", "--export", str(pdf)], str(pdf.with_suffix(".html"))),
        (
            ["configs/mesh.toml", "--export", str(tmp_path / "no" / "page.html")],
            "cannot be written: no such file",
        ),
    ):
        shown = run("view", *words)
        # The text is folded to the console's width.
        assert (shown.code, shown.out) == (2, "") and said in " ".join(shown.err.split()), words
    assert list(tmp_path.iterdir()) == []
    assert "meshcomm report" in run("view", str(tmp_path)).err
    shown = run("view", "configs/mesh.toml", "--set", "topology.ranks_per_node=4", "--export", str(page))
    assert shown == (0, f"written: {page} ({page.stat().st_size:,} bytes)\n", "")
