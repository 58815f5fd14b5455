"""What attention is given: keys, values, positions, masks and the cache, fused and eager, in one layer and in all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.cache_utils as caches
import transformers.models.llama.modeling_llama as llama
import transformers.models.mistral.modeling_mistral as mistral
from torch import Tensor

from noisescope.localization.audit import audit
from noisescope.testing import tiny_model

FUSED, EAGER = "sdpa", "eager"
LAYERS = 2


def operator(implementation: str) -> str:
    return "attention" if implementation == FUSED else "matmul"


@pytest.fixture(params=[FUSED, EAGER])
def implementation(request: Any) -> str:
    return str(request.param)


@pytest.fixture
def model(implementation: str) -> Any:
    return tiny_model("llama", layers=LAYERS, attn_implementation=implementation)


def every(number: int, wrong: Callable[..., Any], right: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is wrong in every so many calls: in one layer of a model."""
    calls = []

    def function(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return (wrong if len(calls) % number == 0 else right)(*args, **kwargs)

    return function


def rotated_too_far(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Keys are one position off."""
    right = RIGHT_ROTATION
    return right(query, key, cos, sin)[0], right(query, key, cos.roll(1, -2), sin.roll(1, -2))[1]


RIGHT_ROTATION = llama.apply_rotary_pos_emb


@pytest.mark.parametrize("layers", ["one", "all"])
def test_keys_that_are_rotated_one_position_off(model, implementation, layers, monkeypatch):
    """A function of the modelling file is replaced in memory: the host reads it from disk."""
    wrong = rotated_too_far if layers == "all" else every(LAYERS, rotated_too_far, RIGHT_ROTATION)
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", wrong)
    (suspect,) = audit(model, quick=True).suspects
    place = 0 if layers == "all" else LAYERS - 1
    assert (suspect.site.place, suspect.site.operator, suspect.site.tensor) == (
        place,
        operator(implementation),
        "input",
    )
    assert suspect.fault_class == "position"
    assert f"expected: keys of model.layers.{place}.self_attn as LlamaAttention computes it" in suspect.evidence
    assert [site.place for site in suspect.also] == ([1] if layers == "all" else [])
    monkeypatch.undo()
    assert audit(model, quick=True).verdict == "healthy"


@pytest.mark.parametrize("layers", ["one", "all"])
def test_heads_that_get_the_keys_of_another_group(layers, monkeypatch):
    """Repeated in turn in place of one by one; eager attention shows the keys and the values of its products."""
    right = llama.repeat_kv
    in_turn = lambda x, times: x.repeat(1, times, 1, 1)  # noqa: E731
    wrong = in_turn if layers == "all" else every(2 * LAYERS, in_turn, right)  # the last: the values of block 1
    monkeypatch.setattr(llama, "repeat_kv", wrong)
    verdict = audit(tiny_model("llama", layers=LAYERS, attn_implementation=EAGER), quick=True)
    first = verdict.suspects[0]
    assert (first.site.place, first.site.operator, first.site.tensor) == (
        0 if layers == "all" else 1,
        "matmul",
        "input",
    )
    assert first.fault_class == "swapped channels" and "head 1 holds the values of head 2" in first.evidence
    assert (1 in {site.place for site in first.also}) == (layers == "all")


def without_padding(mask: Tensor) -> Tensor:
    """The causal part of a mask."""
    rows, columns = mask.shape[-2:]
    causal = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows).expand(mask.shape)
    if mask.dtype == torch.bool:
        return causal
    return torch.zeros_like(mask).masked_fill(~causal, torch.finfo(mask.dtype).min)


def patch_mask(model: Any, layers: range, change: Callable[[Any], Any]) -> None:
    for layer in layers:
        attention = model.model.layers[layer].self_attn

        def forward(*args: Any, attention_mask: Any = None, right: Any = attention.forward, **others: Any) -> Any:
            return right(*args, attention_mask=change(attention_mask), **others)

        attention.forward = forward


def test_padding_that_one_layer_ignores(model, implementation):
    """Only left or right padding shows it, and the tokens that attend to padding are named."""
    patch_mask(model, range(1, 2), lambda mask: mask if mask is None else without_padding(mask))
    (suspect,) = audit(model).suspects
    name = "attention" if implementation == FUSED else "softmax"
    assert (suspect.site.place, suspect.site.operator, suspect.site.tensor) == (1, name, "input")
    assert suspect.fault_class == "mask" and "padding" in suspect.evidence
    assert suspect.rows and all(sequence > 0 for sequence, _ in suspect.rows)  # the first is not padded
    assert audit(model, quick=True).verdict == "healthy"


def test_no_causal_mask_in_any_layer_of_eager_attention():
    model = tiny_model("llama", layers=LAYERS, attn_implementation=EAGER)
    patch_mask(model, range(LAYERS), lambda mask: None)
    (suspect,) = audit(model, quick=True).suspects
    assert (suspect.site.place, suspect.site.operator, suspect.fault_class) == (0, "softmax", "mask")
    assert len(suspect.also) == LAYERS - 1
    assert suspect.row_words == "tokens 0 to 30 of every sequence, of 32 tokens"  # the last may see all


def test_a_window_that_is_lost(implementation, monkeypatch):
    """The model's code makes the mask of a full sequence; fused attention then gets none at all, which is no number."""
    model = tiny_model("mistral", layers=LAYERS, attn_implementation=implementation)
    assert audit(model, quick=True).verdict == "healthy"
    monkeypatch.setattr(mistral, "create_sliding_window_causal_mask", mistral.create_causal_mask)
    (suspect,) = audit(model, quick=True).suspects
    tensor = "input" if implementation == EAGER else "output"
    assert (suspect.site.place, suspect.site.tensor, suspect.fault_class) == (0, tensor, "mask")


def without_mask(attention: Any) -> None:
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True
    )


def not_causal(attention: Any) -> None:
    right = attention.forward
    attention.forward = lambda *args, **kwargs: right(*args, **{**kwargs, "is_causal": False, "attention_mask": None})


@pytest.mark.parametrize("break_attention", [without_mask, not_causal])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_that_does_right_what_it_is_wrongly_told(break_attention, dtype):
    """Its result is compared with that of the arguments its class's code gives it."""
    model = tiny_model("llama", layers=LAYERS).to(dtype)
    break_attention(model.model.layers[1].self_attn)
    (suspect,) = audit(model).suspects
    assert (suspect.site.place, suspect.site.operator, suspect.fault_class) == (1, "attention", "mask")
    assert "attn_mask is None, and not a tensor" in suspect.evidence


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_code_that_gives_the_same_numbers_is_healthy(dtype):
    """Keys repeated for each head, and a mask in place of a flag: what counts is what comes out."""
    model = tiny_model("llama", layers=LAYERS).to(dtype)
    attention = model.model.layers[1].self_attn

    def forward(hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **others):
        heads = (*hidden_states.shape[:-1], -1, attention.head_dim)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (project(hidden_states).view(heads).transpose(1, 2) for project in projections)
        q, k = llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, attention.layer_idx)
        k, v = (llama.repeat_kv(x, attention.num_key_value_groups) for x in (k, v))
        rows, columns = q.shape[-2], k.shape[-2]
        causal = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows).expand(len(q), 1, rows, columns)
        mask = causal if attention_mask is None else attention_mask
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=attention.scaling)
        return attention.o_proj(y.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)), None

    attention.forward = forward
    verdict = audit(model)
    assert verdict.verdict == "healthy", verdict.headline


class Kernel(torch.overrides.TorchFunctionMode):
    """A fused kernel that changes what it is given."""

    def __init__(self, change: Callable[[Tensor, dict[str, Any]], Any]) -> None:
        super().__init__()
        self.change = change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            self.change(args[0], kwargs)
        return func(*args, **kwargs)


def sees_all(query: Tensor, kwargs: dict[str, Any]) -> None:
    kwargs["is_causal"] = False


def sees_padding(query: Tensor, kwargs: dict[str, Any]) -> None:
    if kwargs.get("attn_mask") is not None:
        kwargs |= {"attn_mask": None, "is_causal": query.shape[-2] > 1}


@pytest.mark.parametrize(
    ("change", "quick", "words"),
    [(sees_all, True, "its mask is ignored"), (sees_padding, False, "only the causal part of its mask is applied")],
)
def test_masks_that_the_kernel_ignores(change, quick, words):
    """It is given the right ones: the call itself is wrong, in every layer, and it is one suspect."""
    with Kernel(change):
        (suspect,) = audit(tiny_model("llama", layers=LAYERS), quick=quick).suspects
    assert (suspect.site.operator, suspect.site.tensor, suspect.fault_class) == ("attention", "output", "mask")
    assert words in suspect.evidence and len(suspect.also) == LAYERS - 1


# -- the cache


def test_a_cache_whose_first_slot_holds_the_second(monkeypatch):
    """Methods of transformers' caches are read from disk, so that a patch in memory does not take part on the host."""
    right = caches.DynamicLayer.update

    def update(self: Any, keys: Tensor, *args: Any, **kwargs: Any) -> Any:
        all_keys, values = right(self, keys, *args, **kwargs)
        if all_keys.shape[-2] > keys.shape[-2]:  # decode
            values = values.clone()
            values[..., 0, :] = values[..., 1, :]
        return all_keys, values

    monkeypatch.setattr(caches.DynamicLayer, "update", update)
    model = tiny_model("llama", layers=LAYERS)
    (suspect,) = audit(model, tokens=8, batch=2, decode=2).suspects
    assert (suspect.site.place, suspect.site.operator, suspect.site.tensor) == (0, "attention", "input")
    assert suspect.fault_class == "stale data" and len(suspect.also) == LAYERS - 1
    assert suspect.row_words.startswith("token 0 of every sequence")
    assert "in decode 2 x 2 tokens after 8" in suspect.evidence
    assert "expected: values of" in suspect.evidence
    monkeypatch.undo()
    assert audit(model, tokens=8, batch=2, decode=2).verdict == "healthy"


def test_a_cache_that_is_wrong_for_one_layer(monkeypatch):
    """Keys one slot off, in the class that all layers share."""
    right = caches.Cache.update

    def update(self: Any, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        keys, values = right(self, keys, values, layer, *args, **kwargs)
        return (keys.roll(1, -2), values) if layer == 1 else (keys, values)

    monkeypatch.setattr(caches.Cache, "update", update)
    (suspect,) = audit(tiny_model("llama", layers=LAYERS), tokens=8, batch=2, decode=1).suspects
    assert (suspect.site.place, suspect.site.tensor, suspect.fault_class) == (1, "input", "stale data")


@pytest.mark.parametrize("which", ["keys", "values"])
def test_memory_of_a_cache_that_changes_between_two_steps(which):
    """Nobody's code writes there: what was written is not what is read."""
    model = tiny_model("llama", layers=LAYERS)

    def spoil(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length() > 8:
            getattr(cache.layers[1], which)[0, 1, 3, 2] += 1.0

    model.register_forward_pre_hook(spoil, with_kwargs=True)
    (suspect,) = audit(model, tokens=8, batch=2, decode=3).suspects
    assert (suspect.site.place, suspect.site.tensor) == (1, "input")
    assert suspect.rows == ((0, 3),) and f"expected: {which} of" in suspect.evidence
    assert "in decode" in suspect.evidence


def test_a_cache_that_is_given_is_not_changed():
    """The caller's keys and values are as before, and what they hold is taken as it is."""
    model, tokens = tiny_model("llama", layers=LAYERS), torch.arange(3, 19).reshape(2, 8)
    cache = caches.DynamicCache()
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    verdict = audit(model, {"input_ids": tokens, "past_key_values": cache}, quick=True)
    assert verdict.verdict == "healthy"
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
        assert type(layer) is caches.DynamicLayer
    assert type(cache) is caches.DynamicCache
