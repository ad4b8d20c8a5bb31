"""`python -m meshcomm` is the `meshcomm` command."""

from __future__ import annotations

from meshcomm.commands import main

if __name__ == "__main__":
    main()
