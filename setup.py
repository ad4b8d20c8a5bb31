"""The page of the package: README, its links leading to the repository at this version. All else: pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
VERSION = re.findall(r'^__version__ = "(.+)"$', (ROOT / "meshcomm" / "__init__.py").read_text("utf-8"), re.M)


def absolute(link: re.Match[str]) -> str:
    """`](docs/start.md` as `](ADDRESS/blob/vVERSION/docs/start.md`; a picture as the file itself."""
    image, text, target = link.groups()
    return f"{image}[{text}]({ADDRESS}/{'raw' if image else 'blob'}/v{VERSION[0]}/{target}"


readme = (ROOT / "README.md").read_text("utf-8")
setup(
    long_description=re.sub(r"(!?)\[([^\]\n]*)\]\((?![a-z]+:|#)([^)\s]+)(?=\))", absolute, readme),
    long_description_content_type="text/markdown",
)
