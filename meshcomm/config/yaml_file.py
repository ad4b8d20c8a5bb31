"""Reading YAML, where PyYAML is installed."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any, Final

from meshcomm.config.syntax import check_size, syntax_error, unreadable
from meshcomm.errors import ConfigError

# The core schema of YAML 1.2. PyYAML follows YAML 1.1, in which 1:20 is 80, 010 is 8, on is true and 1e-5 is text.
_CORE: Final = (
    ("null", r"^(~|null|Null|NULL|)$", "~nN"),
    ("bool", r"^(true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    (
        "float",
        r"^([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$",
        "-+0123456789.",
    ),
)


def _inside(node: Any) -> list[Any]:
    """The nodes right inside a node of a document."""
    if node.id == "mapping":
        return [part for pair in node.value for part in pair]
    return list(node.value) if node.id == "sequence" else []


def parse_yaml(text: str, label: str) -> Any:
    """The value that a YAML text holds. Numbers and words as in YAML 1.2: 1e-5 is a number, 1:20 and on are text.
    A repeated key is refused, and so are aliases that make a small file large.

    Raises ConfigError: PyYAML missing, or the text is no YAML.
    """
    try:
        yaml = import_module("yaml")
    except ImportError:
        raise ConfigError(
            f"{label}: YAML files need PyYAML, which is not installed",
            given=label,
            expected="PyYAML beside meshcomm; TOML and JSON need nothing",
            hint="pip install 'meshcomm[yaml]'",
        ) from None

    loader_class: Any = type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": {}})
    for tag, pattern, first in _CORE:
        loader_class.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), [*first, ""])

    def table(loader: Any, node: Any) -> dict[Any, Any]:
        seen: list[Any] = []
        for key_node, _ in node.value:
            key = loader.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key} is there twice", key_node.start_mark
                )
            seen.append(key)
        found: dict[Any, Any] = loader.construct_mapping(node, deep=True)
        return found

    loader_class.add_constructor("tag:yaml.org,2002:map", table)
    loader_class.add_constructor(
        "tag:yaml.org,2002:int",
        # int(text, 0) refuses 010, which is 10.
        lambda _, node: int(node.value, 0 if node.value[:2] in ("0o", "0x") else 10),
    )
    try:
        loader = loader_class(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            # An alias stands for all that it names: nine lines of nine aliases each for 9^9 values.
            check_size(node, _inside, label, "YAML")
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        said = " ".join(part for part in (error.context, error.problem) if part)
        raise syntax_error(label, "YAML", text, line, column, said) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise unreadable(label, "YAML", error) from None
