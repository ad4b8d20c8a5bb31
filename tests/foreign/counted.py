"""`counted.py FOLDER SCRIPT ...`: run a script, and write this rank's calls on each group into FOLDER."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.dryrun.test_torch_groups import as_process

if __name__ == "__main__":
    _, folder, script, *arguments = sys.argv
    rows = [[*key, *counts] for key, counts in as_process(script, *arguments).items()]
    (Path(folder) / f"rank{os.environ['RANK']}.json").write_text(json.dumps(rows))
