"""The fault table: what goes wrong in a job of several processes, and what each surviving rank says to it.

`pytest -m faults` runs every row; `python -m tests.faults.table` also writes docs/reference/faults.md.
"""
