"""Each token is sent to the rank that holds its expert, and the expert's output is sent back.

Look at: the number of tokens for each expert, which varies, and the difference from running all experts on one
process. The first all_to_all sends the token counts, the second the tokens, and the third the results. For capacity,
load and gradients, see docs/guide/experts.md.

    meshcomm run --world-size 8 examples/by_hand/expert_all_to_all.py
    meshcomm simulate --world-size 8 examples/by_hand/expert_all_to_all.py

Prints:
    rank 0 (ep=0): 13 tokens came, difference of the result 0.0e+00
    rank 1 (ep=1): 8 tokens came, difference of the result 0.0e+00
    rank 2 (ep=2): 9 tokens came, difference of the result 0.0e+00
    ...
    rank 7 (ep=7): 8 tokens came, difference of the result 0.0e+00
"""

import torch

import meshcomm

with meshcomm.init(dims={"ep": -1}, device="cpu") as mesh:
    n, here = mesh.size("ep"), mesh.coord("ep")
    torch.manual_seed(0)
    experts = torch.randn(n, 4, 4, dtype=torch.float64)  # a rank needs only one; the others are for the check
    torch.manual_seed(1 + mesh.rank)
    tokens, choice = torch.randn(10, 4, dtype=torch.float64), torch.randint(n, (10,))

    order = choice.argsort(stable=True)  # groups the tokens by expert
    counts = choice.bincount(minlength=n)
    arriving = mesh.all_to_all("ep", counts)  # the number of tokens from each rank
    sent, coming = torch.stack([counts, arriving]).tolist()  # the host waits once for both
    received = mesh.all_to_all("ep", tokens[order], input_split_sizes=sent, output_split_sizes=coming)
    made = received @ experts[here]
    returned = mesh.all_to_all("ep", made, input_split_sizes=coming, output_split_sizes=sent)
    out = torch.empty_like(tokens)
    out[order] = returned

    expected = torch.stack([token @ experts[c] for token, c in zip(tokens, choice, strict=True)])
    worst = (out - expected).abs().max().item()
    print(f"{mesh.label}: {len(received)} tokens came, difference of the result {worst:.1e}", flush=True)
