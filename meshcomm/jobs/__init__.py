"""How the commands become processes, and what each of them does there; one file per command."""
