"""How a command starts processes, and the program of each process. Files are named like those in `meshcomm/cli`."""
