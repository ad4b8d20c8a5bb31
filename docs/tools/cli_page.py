"""Print the reference page of all commands: `python docs/tools/cli_page.py > docs/reference/cli.md`."""

from __future__ import annotations

from typing import Any

import typer

from meshcomm.commands.app import GROUPS, app, first_paragraph


def page() -> str:
    """The page in Markdown, generated from the command-line app."""
    lines = [
        "# Commands",
        "",
        "This page lists every command with its arguments, options and exit codes. `python docs/tools/cli_page.py` generates it from the commands; a test compares them.",
        "",
        "The exit code is 0 on success. Unless noted otherwise, it is 2 if an argument, an option or the configuration is invalid. The error is then printed on stderr, without a traceback.",
        "`python -m meshcomm` is the same as `meshcomm`. Use it as the program to start under torchrun, Slurm or MPI.",
        "",
        "`meshcomm --version` prints the versions of meshcomm, torch and Python.",
        "",
        "| to | command | |",
        "|---|---|---|",
    ]
    commands = all_commands()
    for title, names in GROUPS.items():
        for name in names:
            title_once = title if name == names[0] else ""
            lines.append(
                f"| {title_once} | [`meshcomm {name}`](#{name}) | {_cell(first_paragraph(commands[name].help))} |"
            )
    for name, one in commands.items():
        lines += ["", f"## {name}", "", *_section(name, one)]
    return "\n".join(lines) + "\n"


def all_commands() -> dict[str, Any]:
    """All commands by name, in the order of GROUPS."""
    group: Any = typer.main.get_command(app)
    return {name: group.commands[name] for name in group.list_commands(None)}


def _section(name: str, command: Any) -> list[str]:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    words = ["meshcomm", name, *(["[OPTIONS]"] if options else []), *map(_argument, arguments)]
    if command.allow_extra_args:
        words.append("[ARGUMENTS]...")
    lines = ["```text", " ".join(words), "```", "", _paragraphs(command.help or "")]
    if arguments or options:
        lines += ["", "| | default | |", "|---|---|---|"]
    for each in arguments:
        # The displayed name decides, because for `[CONFIG] SCRIPT` the parser only knows that one of the two is required.
        optional = _argument(each).startswith("[")
        needed = "" if optional else "required"
        names = _argument(each).strip("[]").split("|")
        either = "` or `".join(f"[{name}]" if optional else name for name in names)
        lines.append(f"| `{either}` | {needed} | {_cell(each.help or '')} |")
    context = command.context_class(command, info_name=name)
    for each in options:
        flags, _ = each.get_help_record(context)
        lines.append(
            f"| `{_cell(flags.replace(' range', ''))}` | {_default(each)} | {_cell(each.help or '')} |"
        )
    return lines


def _argument(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if parameter.is_flag or parameter.default is None or callable(parameter.default):
        return ""
    return f"`{parameter.default}`"


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
