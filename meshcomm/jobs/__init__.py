"""How a command starts processes, and the program of each process. Files have the same names as in `meshcomm/cli`."""
