"""The JSON schema of configurations, for editors: the allowed keys and values, and what they mean."""

from __future__ import annotations

import json
from typing import Any, Final

from meshcomm.config.root import Config

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    """Return the schema of a config file, in JSON Schema draft 2020-12.

    It checks less than `load_config`. Rules between settings (sizes that multiply to the world, settings
    without effect, names of dims that exist) are checked only when the file is read, as by `meshcomm plan`.
    """
    found: dict[str, Any] = Config.model_json_schema()
    for part in (found, *found["$defs"].values()):
        part.pop("title", None)
        # Later paragraphs are for readers of the code.
        part["description"] = part["description"].partition("\n\n")[0]
        for setting in part["properties"].values():
            # The title is the key itself in other letters. No file has to write an empty default.
            setting.pop("title", None)
            setting["description"] = " ".join(setting["description"].split())
            if setting.get("default") is None or isinstance(setting["default"], dict):
                setting.pop("default", None)
    properties = {
        "$schema": {
            "type": "string",
            "description": "Location of this schema, for editors. Only in JSON files; meshcomm ignores it.",
        },
        **found["properties"],
    }
    return {
        "$schema": DIALECT,
        "title": "meshcomm configuration",
        **found,
        "properties": properties,
    }


def schema_text() -> str:
    """Return `schema` as the text of a file."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"
