"""An encoder and a language model on different ranks, and a bridge between them.

Look at: the mesh of each rank, and the features that are sent over the bridge.

    meshcomm run --world-size 8 examples/two_meshes.py
    meshcomm simulate --world-size 8 examples/two_meshes.py

Prints:
    rank 0: in the encoder, {'tp': 0}, features [1.0, 1.0]
    rank 1: in the encoder, {'tp': 1}, features [1.0, 1.0]
    rank 2: in the model, {'pp': 0, 'tp': 0}, features [1.0, 1.0]
    ...
    rank 7: in the model, {'pp': 2, 'tp': 1}, features [1.0, 1.0]
"""

import torch

import meshcomm

# Every rank opens every mesh. If a rank is not in a mesh, `is_member` of that mesh is False.
encoder = meshcomm.init(dims={"tp": 2}, ranks=[0, 1], device="cpu")
model = meshcomm.init(dims={"pp": 3, "tp": 2}, ranks=[2, 3, 4, 5, 6, 7], device="cpu")
bridge = meshcomm.init(dims={"all": -1}, device="cpu")

mesh, name = (encoder, "encoder") if encoder.is_member else (model, "model")
features = mesh.all_reduce("tp", torch.full((2,), float(mesh.rank)))
features = bridge.broadcast("all", features, src=0)  # from the encoder's first rank to all ranks
print(f"rank {bridge.rank}: in the {name}, {mesh.coords}, features {features.tolist()}", flush=True)

for each in (bridge, model, encoder):
    each.close()
