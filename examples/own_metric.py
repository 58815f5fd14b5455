"""Diagnose a model by a metric of your own: here, how often it continues a sequence with the right token.

A metric gets the model (under noise, or not) and the batches, and returns one score a sample. noisescope pairs the
scores of the clean and the noisy model and says which operators cost how much, with intervals.
"""

import torch

import noisescope as ns
from noisescope.testing import tiny_model


def right_last_token(model, batches):
    """1 where the last token is predicted rightly."""
    scores = []
    for batch in batches:
        tokens = batch["input_ids"]
        with torch.no_grad():
            guessed = model(tokens[:, :-1]).logits[:, -1].argmax(-1)
        scores += (guessed == tokens[:, -1]).float().tolist()
    return scores


def main() -> None:
    model = tiny_model("llama", layers=3)
    start = torch.randint(1, 60, (32, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # data this random model is right about: its own continuations
        answers = model(start).logits[:, -1].argmax(-1, keepdim=True)
    data = [torch.cat([start, answers], 1)]
    report = ns.diagnose(
        ns.wrap(model), data, metric=right_last_token, level=("operator",), operators=("linear", "softmax"), seeds=2
    )
    for name, row in report["operator_analysis"].items():
        loss = row["degradation"]
        print(f"{name}: {loss['value']:.1%} of the score lost [{loss['low']:.1%}, {loss['high']:.1%}], n = {loss['n']}")


if __name__ == "__main__":
    main()
