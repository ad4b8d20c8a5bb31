"""Reading YAML, where PyYAML is installed."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from meshcomm.config.syntax import syntax_error, unreadable
from meshcomm.errors import ConfigError


def parse_yaml(text: str, label: str) -> Any:
    """The value that a YAML text holds. Numbers as in YAML 1.2: 1e-5 is one. A repeated key is refused.

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

    loader_class: Any = type("Loader", (yaml.SafeLoader,), {})

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
    # YAML 1.1, which PyYAML follows, takes 1e-5 for text.
    loader_class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )
    try:
        return yaml.load(text, loader_class)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        said = " ".join(part for part in (error.context, error.problem) if part)
        raise syntax_error(label, "YAML", text, line, column, said) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise unreadable(label, "YAML", error) from None
