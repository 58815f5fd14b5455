"""The smallest use: 5 % noise on the attention of one layer of a tiny random model, and the tally of what it hit.

python examples/first_injection.py
"""

import torch

import noisescope as ns
from noisescope.testing import tiny_model

model = tiny_model("llama")
tokens = torch.arange(16)[None]

with torch.no_grad():
    clean = model(tokens).logits
    with ns.inject(model, ns.Injection(ns.Gaussian(0.05), operators={"attention"}, layers={1}, seed=0)) as tally:
        noisy = model(tokens).logits
    again = model(tokens).logits

print(tally)
print(f"largest change of a logit: {(noisy - clean).abs().max():.4f}")
print(f"after the scope, bit-equal to before: {torch.equal(clean, again)}")
