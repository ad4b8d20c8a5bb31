"""Run a page block by block, as a reader would from top to bottom."""

from __future__ import annotations

import ast
import builtins
import contextlib
import doctest
import inspect
import io
import json
import math
import re
import symtable
import tokenize
import tomllib
import types
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

import meshcomm
from meshcomm.commands import app
from meshcomm.config import Config, load_config
from meshcomm.errors import RankFailed
from meshcomm.testing import Pool
from meshcomm.testing.pool import Ended, Limits
from tests.documents import ranks
from tests.documents.blocks import ROOT, Block, sides
from tests.documents.commands import NOT_RUN, Command, command_lines, read
from tests.documents.ranks import function_of
from tests.documents.shown import differs
from tests.documents.tables import PRELUDES

MESH = {"pp": 2, "dp": 2, "tp": 2}
# Languages of blocks that are not run: figures, trees, and errors of other programs.
PLAIN = ("", "text")
_OURS = re.compile(r"^\s*(\$ |meshcomm [a-z]|torchrun |python3? -m meshcomm|pytest |>>> )", re.MULTILINE)


class Wrong(AssertionError):
    """A page makes a false statement."""


class Page:
    """The state of one page: its names, its folder, and the output of its last block."""

    def __init__(self, page: str, folder: Path, pool: Pool) -> None:
        self.page, self.folder, self.pool = page, folder, pool
        self.module = types.ModuleType("page")
        self.by_rank: dict[str, list[dict[str, Any]]] = {}
        self.printed: str | None = None
        for name in ("configs", "examples"):
            (folder / name).symlink_to(ROOT / name)

    def run(self, block: Block, *, only_read: bool = False) -> None:
        """Run one block. With `only_read`, check as much as possible without running it. Raises Wrong."""
        kind = {"py": "python", "bash": "sh", "shell": "sh"}.get(block.language, block.language)
        if "file" in block.notes:
            (self.folder / block.notes["file"]).write_text(block.text + "\n", encoding="utf-8")
        if kind == "python":
            self._python(block, only_read or "file" in block.notes)
        elif kind == "pycon":
            if not only_read:
                self._doctest(block)
        elif kind == "toml":
            self._config(tomllib.loads(block.text))
        elif kind in ("json", "yaml"):
            data = json.loads(block.text) if kind == "json" else yaml.safe_load(block.text)
            # The JSON may also be a command's output.
            if isinstance(data, dict) and set(data) <= set(Config.model_fields):
                self._config(data)
        elif kind in ("sh", "console"):
            self._commands(block, only_read)
        elif kind == "diff" and "diff" in block.notes:
            for name, text in sides(block).items():
                ast.parse(text)
                (self.folder / name).write_text(text, encoding="utf-8")
        elif kind not in PLAIN:
            raise Wrong(f"blocks of this language are not run: {block.language}")
        elif not block.language and _OURS.search(block.text):
            raise Wrong("a command in a block without a language: ```console, or ```sh")
        elif "output" in block.notes and not only_read:
            self._output(block)

    # -- Python ------------------------------------------------------------------------------------

    def _python(self, block: Block, only_read: bool) -> None:
        self.printed = None
        tree = ast.parse(block.text)
        if only_read:
            return
        free = free_names(block.text) - set(vars(self.module))
        wanted = block.notes.get("raises")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            error: BaseException | None = None
            try:
                if opens_a_mesh(tree) or "processes" in block.notes:
                    out.write(self._on_processes(block, tree))
                elif "mesh" in free or "mesh" in block.notes:
                    self._simulated(block)
                else:
                    self._statements(block, tree, out)
            except Exception as raised:
                of_ranks = raised.by_rank.values() if isinstance(raised, RankFailed) else ()
                error = next((one for one in [raised, *of_ranks] if type(one).__name__ == wanted), None)
                if error is None:
                    raise
        self.printed = out.getvalue()
        if error is not None:
            self.printed += f"{type(error).__name__}: {error}\n"
        elif wanted is not None and f"{wanted}: " not in self.printed:
            raise Wrong(f"the page says that it raises {wanted}, and it did not")

    def _statements(self, block: Block, tree: ast.Module, out: io.StringIO) -> None:
        """Run a block by itself. A comment after a statement that looks like output must match the statement's output."""
        names = vars(self.module)
        behind = comments(block.text)
        for statement in tree.body:
            began = len(out.getvalue())
            only = ast.Module([statement], [])
            ast.increment_lineno(only, block.line - 1)
            exec(compile(only, str(self.page), "exec"), names)
            printed = out.getvalue()[began:].splitlines()
            last = (statement.end_lineno or 0) - block.line + 1
            said = behind.get(last) or behind.get(-last - 1)
            if printed and said and re.match(r"[\d\[({-]", said) and not any(map(said.startswith, printed)):
                raise Wrong(f"the comment says {said!r}, and it prints {printed}")
        for name in [each.name for each in tree.body if isinstance(each, ast.FunctionDef)]:
            if name.startswith("test_"):
                self._test(block, names[name])

    def _test(self, block: Block, function: Any) -> None:
        """Call a block's test function as the plugin would."""
        marks = {mark.name: mark for mark in getattr(function, "pytestmark", [])}
        given = {"mesh_pool": _PagePool(self.pool, block)}
        wanted = list(inspect.signature(function).parameters)
        arguments = {name: given[name] for name in wanted if name in given}
        if "parametrize" in marks:
            name, values = marks["parametrize"].args[:2]
            arguments[name] = next(iter(values))
        if "mesh" not in marks:
            function(**arguments)
            return
        keys = {"via", "timeout_s", "merge", "views", "options", "rank_order", "ranks", "world_size"}
        dims = {name: size for name, size in marks["mesh"].kwargs.items() if name not in keys}
        meshcomm.simulate(lambda mesh: function(mesh=mesh, **arguments), dims=dims)

    def _simulated(self, block: Block) -> None:
        dims = _dims(block.notes.get("mesh", "")) or MESH
        size = math.prod(dims.values())
        key = str(dims)
        if key not in self.by_rank:
            self.by_rank[key] = [{} for _ in range(size)]
        before = PRELUDES.get(self.page, "")
        code = compile("\n" * (block.line - 1) + block.text, self.page, "exec")
        shared = dict(vars(self.module))

        def as_rank(mesh: meshcomm.Mesh) -> None:
            names = self.by_rank[key][mesh.rank]
            fresh = not names
            names.update({**shared, **names, "mesh": mesh})
            if fresh:
                exec(compile(before, "<preludes>", "exec"), names)
            exec(code, names)

        meshcomm.simulate(as_rank, dims=dims)

    def _on_processes(self, block: Block, tree: ast.Module) -> str:
        dims = _dims(block.notes.get("processes", "")) or dims_of_init(tree) or MESH
        size = math.prod(dims.values())
        source = "\n" * (block.line - 1) + block.text
        if opens_a_mesh(tree):
            path = self.folder / "block.py"
            path.write_text(source, encoding="utf-8")
            return self._script([str(path)], size, None, [], 2 if "raises" in block.notes else 0)
        prelude = PRELUDES.get(self.page, "")
        ended = self._called(partial(ranks.block, str(self.folder), source, self.page, dims, prelude), size)
        return "".join(one.out for one in ended)

    def _called(self, body: Callable[[], Any], size: int) -> list[Ended]:
        ended = self.pool.call(body, ranks=size, limits=Limits(60), capture=True)
        wrong = [one.text for one in ended if one.state != "returned"]
        if wrong:
            raise Wrong(wrong[0])
        return ended

    def _script(
        self,
        arguments: list[str],
        size: int,
        config: str | None,
        overrides: list[str],
        code: int,
        watches: bool = False,
    ) -> str:
        call = partial(ranks.script, str(self.folder), arguments, config, overrides, watches)
        ended = self._called(call, size)
        codes = {one.value[0] for one in ended}
        text = "".join(one.out + one.value[1] + "\n" * bool(one.value[1]) for one in ended)
        if max(codes) != code:
            raise Wrong(f"exit codes of the ranks: {sorted(codes)}, expected {code}\n{text}")
        return text

    def _doctest(self, block: Block) -> None:
        case = doctest.DocTestParser().get_doctest(
            block.text + "\n", vars(self.module), self.page, self.page, block.line - 1
        )
        said = io.StringIO()
        runner = doctest.DocTestRunner(verbose=False)
        if runner.run(case, out=said.write, clear_globs=False).failed or not case.examples:
            raise Wrong(said.getvalue() or "no example in it")
        vars(self.module).update(case.globs)

    # -- configurations and commands ---------------------------------------------------------------

    def _config(self, data: Mapping[str, Any]) -> None:
        """Load a configuration, which must be valid. A partial one is merged into configs/quickstart.toml first."""
        if not (set(data) <= {"mesh", "process", "network", "topology"} and "dims" in data.get("mesh", {})):
            training = {"parallel", "model", "data", "train"} & set(data)
            base = tomllib.loads((ROOT / "configs" / "quickstart.toml").read_text())
            if not training:
                base = {"mesh": base["mesh"]}
            if "parallel" in data:
                del base["parallel"]
            data = _merged(base, data)
        load_config(data)

    def _commands(self, block: Block, only_read: bool) -> None:
        for line, shown in command_lines(block.text, prompt=block.language == "console"):
            command = read(line)
            # Not run: commands for several hosts, commands on files of the reader, and changes of the shell's settings.
            unfit = command is not None and (
                command.hosts > 1
                or not self._is_there(command)
                or "--install-completion" in command.arguments
            )
            if command is None or only_read or command.name in NOT_RUN or unfit:
                if shown and command is None and not only_read:
                    raise Wrong(f"shows what a program prints that is not run: {line}")
                continue
            code = int(block.notes.get("exit", "0"))
            got = self._output_of(command, code)
            wrong = differs(shown, got, block.notes.get("output", "")) if shown else None
            if wrong:
                raise Wrong(f"{line}: {wrong}")

    def _is_there(self, command: Command) -> bool:
        """Whether the files in a command exist. A page may leave some to the reader."""
        named = [word for word in command.arguments if word.endswith((".toml", ".py", ".json"))]
        outputs = {after for before, after in pairwise(command.arguments) if before == "--write"}
        return all((self.folder / name).exists() for name in named if name not in outputs and "=" not in name)

    def _output_of(self, command: Command, code: int) -> str:
        with contextlib.chdir(self.folder):
            if command.name == "script":
                return self._script(list(command.arguments), command.ranks or 1, None, [], code)
            if command.name == "run":
                return self._run(command, code)
            result = CliRunner().invoke(
                app, [*command.name.split(), *command.arguments], prog_name="meshcomm"
            )
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        if result.exit_code != code:
            raise Wrong(f"{command.line}: exit code {result.exit_code}, expected {code}\n{result.output}")
        return result.output

    def _run(self, command: Command, code: int) -> str:
        """Run `meshcomm run` on warm ranks."""
        own = list(command.arguments)
        overrides, world = [], command.ranks
        while own[0].startswith("--"):
            if own[0] == "--set":
                overrides.append(own[1])
            elif own[0] == "--world-size":
                world = int(own[1])
            else:
                raise Wrong(f"{command.line}: an option that the tests do not know: {own[0]}")
            own = own[2:]
        if own[0].endswith(".py"):
            return self._script(own, world or 1, None, [], code, True)
        settings = load_config(own[0], overrides)
        size = world or math.prod(settings.mesh.sizes(None).values())
        return self._script(own[1:], size, own[0], overrides, code, True)

    def _output(self, block: Block) -> None:
        if self.printed is None:
            raise Wrong("says what is printed, and nothing has been run before it")
        wrong = differs(block.text, self.printed, block.notes["output"])
        if wrong:
            raise Wrong(wrong)


class _PagePool:
    """The pool for tests on a page, whose functions no rank can import."""

    def __init__(self, pool: Pool, block: Block) -> None:
        self.pool, self.block = pool, block

    def run(self, function: Any, *arguments: Any, ranks: int = 8) -> list[Any]:
        source = (self.block.text, self.block.page, function.__name__, arguments)
        return self.pool.run(function_of, *source, ranks=ranks)


def _dims(text: str) -> dict[str, int]:
    return {name: int(size) for name, size in (each.split("=") for each in text.split())}


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        whole = key == "dims" or not (isinstance(old, dict) and isinstance(value, dict))
        merged[key] = value if whole else _merged(old, value)
    return merged


# -- what a block of Python says about itself, without being run ------------------------------------------


def free_names(text: str) -> set[str]:
    """Names that a block uses but does not define."""
    top = symtable.symtable(text, "page", "exec")
    made = {one.get_name() for one in top.get_symbols() if one.is_assigned() or one.is_imported()}
    found: set[str] = set()

    def visit(table: symtable.SymbolTable) -> None:
        for one in table.get_symbols():
            if one.is_referenced() and (table is top or one.is_global()):
                found.add(one.get_name())
        for child in table.get_children():
            visit(child)

    visit(top)
    return found - made - set(dir(builtins))


def opens_a_mesh(tree: ast.Module) -> bool:
    """Whether a block calls meshcomm.init outside of every function."""
    return any(_is_init(node) for node in _outside_functions(tree))


def dims_of_init(tree: ast.Module) -> dict[str, int]:
    for node in _outside_functions(tree):
        if _is_init(node):
            for keyword in node.keywords:
                if keyword.arg == "dims":
                    sizes = ast.literal_eval(keyword.value)
                    return {name: 2 if size == -1 else size for name, size in sizes.items()}
    return {}


def _outside_functions(tree: ast.AST) -> list[Any]:
    found, waiting = [], list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop()
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            found.append(node)
            waiting += ast.iter_child_nodes(node)
    return found


def _is_init(node: Any) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("meshcomm.init", "init")


def comments(text: str) -> dict[int, str]:
    """Comments by line number, which is negative if the line has nothing else."""
    tokens = tokenize.generate_tokens(io.StringIO(text + "\n").readline)
    return {
        one.start[0] * (-1 if one.line.lstrip().startswith("#") else 1): one.string.lstrip("# ")
        for one in tokens
        if one.type == tokenize.COMMENT
    }
