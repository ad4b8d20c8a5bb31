"""How each command starts processes, and what each process runs. File names match those in `meshcomm/cli`."""
