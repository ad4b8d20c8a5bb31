"""The JSON schema of configurations, for editors: the allowed keys and values, and what they mean."""

from __future__ import annotations

import json
from typing import Any, Final

from meshcomm.config.root import Config

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    """Return the schema of a config file, in JSON Schema draft 2020-12.

    The schema checks less than `load_config`. Rules that relate settings (sizes whose product is the world size,
    settings without effect, names of existing dims) are checked only when the file is read, as by `meshcomm plan`.
    """
    found: dict[str, Any] = Config.model_json_schema()
    for part in (found, *found["$defs"].values()):
        part.pop("title", None)
        # Later paragraphs are for readers of the code.
        part["description"] = part["description"].partition("\n\n")[0]
        for setting in part["properties"].values():
            # The title only repeats the key with different capitalization. Empty defaults are left out.
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
