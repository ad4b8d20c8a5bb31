"""How the commands become processes, and what each of them does there; the files are named as in `meshcomm/cli`."""
