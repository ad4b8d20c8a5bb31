"""Words and numbers of YAML, byte order marks and line ends."""

from __future__ import annotations

from pathlib import Path

from meshcomm.config import load_config
from meshcomm.config.parse import parse_yaml


def test_a_file_with_a_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_bytes(b"\xef\xbb\xbf[mesh]\r\ndims = { dp = 2 }\r\n")
    assert load_config(path).mesh.dims == {"dp": 2}


def test_words_and_numbers_of_yaml_are_those_of_yaml_1_2() -> None:
    text = "{a: 1:20, on: 2, yes: 2, no: no, b: 010, c: 0o10, d: 0x1F, e: 1e-5, f: -.5, g: true, h: ~, i: 1_0, j: .inf}"
    assert parse_yaml(text, "a.yaml") == {
        "a": "1:20",
        "on": 2,
        "yes": 2,
        "no": "no",
        "b": 10,
        "c": 8,
        "d": 31,
        "e": 1e-5,
        "f": -0.5,
        "g": True,
        "h": None,
        "i": "1_0",
        "j": float("inf"),
    }
    assert parse_yaml("a:\nb: ''\n", "a.yaml") == {"a": None, "b": ""} and parse_yaml("", "a.yaml") is None
