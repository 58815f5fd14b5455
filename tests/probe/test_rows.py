"""Noise belongs to (seed, site, sample, position, channel), and to nothing else."""

from __future__ import annotations

import pytest
import torch

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.probe.draws import Draw, Rows
from noisescope.testing import MODELS, tiny_inputs, tiny_model

EVERYTHING = ns.Injection(ns.Gaussian(0.05), seed=1)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for the rounding of another batch shape."""
    return torch.allclose(a, b, atol=2e-6)


def test_a_batch_split_changes_nothing(llama, tokens, logits):
    """Rows named by sample draw the same noise in any batch and any order."""
    probe = ns.inject(llama, EVERYTHING)
    with probe:
        probe.rows([7, 9])
        both = logits(llama, tokens)
        probe.rows([9])
        second = logits(llama, tokens[1:])
        probe.rows([9, 7])
        swapped = logits(llama, tokens.flip(0))
        probe.rows([8, 9])
        other = logits(llama, tokens)
    assert close(both[1:], second) and close(both, swapped.flip(0))
    assert not close(both[0], other[0]) and close(both[1], other[1])


def test_decoding_draws_what_prefill_drew(llama, tokens, logits):
    """With a KV cache, token by token, positions count on; the noise is that of the whole prompt."""
    probe = ns.inject(llama, EVERYTHING)
    with probe, torch.no_grad():
        probe.rows([7, 9])
        whole = llama(tokens).logits
        probe.rows([7, 9])
        out = llama(tokens[:, :3], use_cache=True)
        steps = [out.logits]
        for at in range(3, 6):
            out = llama(tokens[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
            steps.append(out.logits)
    assert close(whole, torch.cat(steps, 1))


def test_positions_come_from_position_ids_or_by_hand(llama, tokens, logits):
    """Left padding: position_ids of the call name the positions; explicit positions win."""
    probe = ns.inject(llama, ns.Injection(ns.Gaussian(0.05), operators={"linear"}))
    with probe:
        probe.rows([5])
        plain = logits(llama, tokens[:1])
        padded = torch.cat([torch.zeros(1, 2, dtype=torch.int64), tokens[:1]], 1)
        mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
        ids = (mask.cumsum(-1) - 1).clamp(min=0)
        probe.rows([5])
        left = logits(llama, padded, attention_mask=mask, position_ids=ids)
        probe.rows([5], positions=torch.arange(6)[None])
        by_hand = logits(llama, tokens[:1])
        probe.rows([5], positions=100)
        elsewhere = logits(llama, tokens[:1])
    assert close(plain, left[:, 2:]) and torch.equal(plain, by_hand) and not close(plain, elsewhere)


def test_one_more_site_changes_no_other_site(llama, tokens, logits):
    """Adding operators to the aim leaves the draws of the others as they were."""
    drawn = []
    for operators in ({"linear"}, {"linear", "norm", "softmax"}):
        seen = {}

        def keep(y, draw, seen=seen):
            z = draw.normal(y)
            seen.setdefault(y.shape[-1], []).append(z)
            return y + 0.0 * z

        keep.scale = 0  # type: ignore[attr-defined]
        with ns.inject(llama, ns.Injection(keep, operators=operators, layers={1})):
            logits(llama, tokens)
        drawn.append(seen[64][:2])  # gate and up: no other operator has 64 channels but silu
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))


def test_unnamed_rows_differ_between_forwards_and_repeat_between_scopes(llama, tokens, logits):
    """Without names the key is (forward number, row): fresh noise each call, the same in a second scope."""
    runs = []
    for _ in range(2):
        with ns.inject(llama, EVERYTHING):
            runs.append((logits(llama, tokens), logits(llama, tokens)))
    (a, b), (c, d) = runs
    assert torch.equal(a, c) and torch.equal(b, d) and not torch.equal(a, b)


def test_the_seed_matters_and_the_callers_generator_does_not(llama, tokens, logits):
    """Another seed is other noise; torch's random state neither matters nor moves."""
    outs = []
    for seed, manual in ((0, 1), (0, 2), (3, 1)):
        torch.manual_seed(manual)
        state = torch.random.get_rng_state()
        with ns.inject(llama, ns.Injection(ns.Gaussian(0.05), seed=seed)):
            outs.append(logits(llama, tokens))
        assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_heads_have_noise_of_their_own(llama, tokens, logits):
    """Two heads of one token draw different numbers."""
    seen = []

    def keep(y, draw):
        seen.append(draw.normal(y))
        return y * 1.01

    probe = ns.inject(llama, ns.Injection(keep, operators={"softmax"}, layers={0}))
    with probe:
        probe.rows([1, 2])
        logits(llama, tokens)
    z = seen[0]  # [B, H, T, S]
    assert not torch.equal(z[:, 0], z[:, 1]) and not torch.equal(z[0], z[1])


DENSE = [name for name in MODELS if name not in ("mixtral", "qwen3_moe")]  # permuted experts are outside the promise


@pytest.mark.parametrize("name", DENSE)
def test_batch_split_on_every_architecture(name, logits):
    """Naming rows works whatever layout an architecture gives its tensors."""
    model = tiny_model(name)
    inputs = tiny_inputs(name)
    if name == "t5":
        inputs["decoder_input_ids"] = inputs["decoder_input_ids"][:, :3]
    probe = ns.inject(model, ns.Injection(ns.Gaussian(0.05)))
    with probe:
        probe.rows([3, 4])
        both = logits(model, **inputs)
        probe.rows([4])
        one = logits(model, **{key: value[1:] for key, value in inputs.items()})
    assert torch.allclose(both[1:], one, atol=1e-5)


def test_a_kept_tail_of_tokens_draws_what_it_draws_among_all(llama, tokens, logits):
    """generate asks the head for the last logits only: the same noise as for all of them."""
    tails = []
    for keep in (0, 1):
        probe = ns.inject(llama, ns.Injection(ns.Gaussian(0.5), places={"lm_head"}))
        with probe:
            probe.rows([0, 1])
            tails.append(logits(llama, tokens, logits_to_keep=keep)[:, -1])
    assert close(*tails)


def test_naming_errors_say_what_came(llama, tokens, logits):
    """A batch of another size than named, wrong positions, or float ids are refused."""
    probe = ns.inject(llama, EVERYTHING)
    with probe:
        with pytest.raises(InvalidInput, match="names 3 samples, but the batch has 2"):
            probe.rows([1, 2, 3])
            logits(llama, tokens)
        with pytest.raises(InvalidInput, match="names 4 positions, but the call has 6 tokens"):
            probe.rows([1, 2], positions=torch.arange(4)[None])
            logits(llama, tokens)
        with pytest.raises(InvalidInput, match="list of ints"):
            probe.rows([0.5, 1.5])
        probe.rows([1, 2])
        logits(llama, tokens)


def test_wide_rows_use_a_window_per_part():
    """Rows wider than the widest window draw independent parts."""
    like = torch.empty(2, 150_000)
    z = Draw(Rows(1), 12345, layout="plain", tensor="output").normal(like)
    a, b = z[:, :65536], z[:, 65536:131072]
    assert z.shape == like.shape and abs((a * b).mean()) < 6 / (2 * 65536) ** 0.5


def test_a_single_row_draws_what_it_draws_among_others():
    """The shortcut for one token gives the very numbers of the general path."""
    rows = Rows(1, torch.tensor([4, 5]), torch.arange(3)[None].expand(2, 3))
    alone = Rows(9, torch.tensor([5]), torch.tensor([[2]]))
    key = ns.Site("linear", 0, "m").key(7)
    many = Draw(rows, key, layout="tokens", tensor="output").normal(torch.empty(2, 3, 40))
    one = Draw(alone, key, layout="tokens", tensor="output").normal(torch.empty(1, 1, 40))
    assert torch.equal(many[1, 2], one[0, 0])
