"""The fault table: faults in a job of several processes, and the error that each surviving rank raises.

`pytest -m faults` runs every row; `python -m tests.faults.table` also writes docs/reference/faults.md.
"""
