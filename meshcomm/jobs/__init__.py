"""How a command starts processes, and the program of each process; files have the names of those in `meshcomm/cli`."""
