"""How each command starts processes, and what each process runs. Files have the same names as in `meshcomm/cli`."""
