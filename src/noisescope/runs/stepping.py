"""A model that reads a sequence token by token, as it does in generation: each step is a forward of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from noisescope.errors import InvalidInput
from noisescope.evaluation import evaluating
from noisescope.runs.forwards import input_device


@torch.no_grad()
def stepwise(model: nn.Module, ids: Sequence[int], first: int) -> Tensor:
    """Logits [len(ids) - first, V] that predict ids[first:].

    Forward 0 reads ids[:first] at once, forward i the token ids[first + i - 1] alone, with what was kept of those
    before it: an error in one of them stays in the cache.
    """
    tokens = torch.tensor([list(ids)], device=input_device(model))
    with evaluating(model):
        out = model(input_ids=tokens[:, :first], use_cache=True)
        if getattr(out, "past_key_values", None) is None:
            raise InvalidInput(f"{type(model).__name__} keeps no cache, so it can't be asked token by token")
        rows = [out.logits[:, -1]]
        for at in range(first, len(ids) - 1):
            out = model(input_ids=tokens[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
            rows.append(out.logits[:, -1])
    return torch.cat(rows)
