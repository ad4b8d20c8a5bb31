"""A command line with a script on it: which options are the command's, and which are the script's?"""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

from typer.core import TyperCommand

from meshcomm.errors import LaunchError


@final
class ScriptCommand(TyperCommand):
    """A command `[OPTIONS] [CONFIG] SCRIPT [ARGUMENTS]` whose options may also stand behind SCRIPT.

    As with torchrun, what follows SCRIPT is the script's. But the command's own options (all but
    --help) are the command's there too, up to a `--`, behind which nothing is. One that could be
    either's is refused: the command was given it before SCRIPT, or the script reads one of that name.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command's options before the words."""
        return super().parse_args(ctx, self._options_first(args))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The usage line as it is documented."""
        words = {"parity": ["CONFIG", "[SCRIPT]"], "dryrun": ["[CONFIG]", "[SCRIPT]"]}.get(
            self.name or "", ["[CONFIG]", "SCRIPT"]
        )
        return ["[OPTIONS]", *words, "[ARGUMENTS]..."]

    def _options_first(self, args: list[str]) -> list[str]:
        flags = {
            name: bool(getattr(option, "is_flag", False)) for option in self.params for name in option.opts
        }
        options: list[str] = []
        words: list[str] = []
        rest = iter(args)
        for word in rest:
            behind = _script(words)
            name = word.partition("=")[0]
            if word == "--":
                words += rest
            elif name.startswith("--") and name in flags:
                if behind is not None:
                    self._refuse_ambiguous(name, word, Path(behind), options)
                options.append(word)
                if "=" not in word and not flags[name]:
                    options += [value for value in [next(rest, None)] if value is not None]
            elif behind is None and word.startswith("-"):
                # Help, or an option that nobody has: the parser says so.
                options.append(word)
            else:
                words.append(word)
        return [*options, *words]

    def _refuse_ambiguous(self, name: str, word: str, script: Path, options: list[str]) -> None:
        given = any(each.partition("=")[0] == name for each in options) and name != "--set"
        if not given and not _reads(script, name):
            return
        raise LaunchError(
            f"{name} behind {script} could be the command's or the script's",
            given=f"{word} behind {script}, "
            + (f"and {name} before it" if given else f"which has {name} in its own text"),
            expected=f"{name} before {script} for meshcomm {self.name}, or behind -- for the script",
            hint=f"meshcomm {self.name} {name} ... {script}, or meshcomm {self.name} {script} -- {name} ...",
        )


def _script(words: list[str]) -> str | None:
    """The script among the words so far: the first that ends in .py, else the second."""
    if words and words[0].endswith(".py"):
        return words[0]
    return words[1] if len(words) > 1 else None


def _reads(script: Path, name: str) -> bool:
    """Whether the script's text has the option's name in quotes, as argparse, click and sys.argv need it."""
    try:
        text = script.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return f'"{name}"' in text or f"'{name}'" in text
