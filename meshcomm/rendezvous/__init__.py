"""How the processes of a job find each other, before any of them opens a mesh: launcher, store, ranks, generations."""
