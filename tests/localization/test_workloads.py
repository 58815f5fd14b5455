"""Which forwards are run: shapes, padding, decode; that decoding them is what generate() does; what is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.localization.coverage import Phase
from noisescope.localization.inputs import Batch
from noisescope.localization.workloads import Workload, decode_inputs, run_workload, within_budget, workloads_for
from noisescope.testing import tiny_inputs, tiny_model

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}


class Bare(nn.Module):
    """A hand-written model: no config, no mask, no cache."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, input_ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.tokens(input_ids))
        return y


def run(model: nn.Module, workload: Workload) -> tuple[list[Batch], list[Any], str]:
    """Arguments and outputs of each forward, and why steps were not run."""
    seen: list[Batch] = []
    outputs = []

    def forward(given: Batch) -> Any:
        seen.append(dict(given))
        with torch.no_grad():
            outputs.append(model(**given))
        return outputs[-1]

    return seen, outputs, run_workload(model, workload, forward)


def shapes(workloads: list[Workload]) -> list[tuple[int, int, str, int]]:
    return [(w.phase.batch, w.phase.tokens, w.phase.padding, w.decode) for w in workloads]


def test_the_design_covers_what_people_ask_about() -> None:
    """One token, one above and below powers of two, a long one; batch 1, 2 and 8; padding; decode after each kind."""
    found, not_run = workloads_for(tiny_model("llama", max_position_embeddings=512), None)
    assert not_run == [] and len(found) <= 7
    cases = shapes(found)
    assert {1, 15, 17, 33, 127, 257} <= {tokens for _, tokens, _, _ in cases}
    assert {batch for batch, *_ in cases} == {1, 2, 8}
    assert {padding for *_, padding, _ in cases} == {"", "left", "right"}
    decoded = [case for case in cases if case[3]]
    assert {1, 2, 8} == {batch for batch, *_ in decoded} and any(case[2] == "left" for case in decoded)
    assert any(tokens > 256 for _, tokens, _, _ in decoded)
    work = [batch * (tokens + steps) for batch, tokens, _, steps in cases[1:]]
    assert work == sorted(work), "a budget cuts the dear ones"


def test_the_base_is_two_batches_of_one_shape() -> None:
    found, _ = workloads_for(tiny_model("llama"), None)
    base = found[0]
    assert base.required and str(base) == "prefill 2 x 32 tokens" and base.other is not None
    assert base.inputs["input_ids"].shape == base.other["input_ids"].shape
    assert not torch.equal(base.inputs["input_ids"], base.other["input_ids"])
    assert not any(one.required for one in found[1:])


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bloom", "falcon", "gemma3", "mixtral"])
def test_every_workload_runs_and_decoding_continues_the_sequence(name: str) -> None:
    """Decode with the cache gives the logits of one forward over the whole sequence, also after left padding."""
    model = tiny_model(name, max_position_embeddings=512) if name not in ("bloom", "gpt2") else tiny_model(name)
    found, _ = workloads_for(model, None)
    for workload in found:
        seen, outputs, why = run(model, workload)
        assert why == "" and len(seen) == 1 + workload.decode
        if workload.decode:
            whole = {"input_ids": torch.cat([one["input_ids"] for one in seen], dim=1)}
            if workload.phase.padding:
                whole["attention_mask"] = seen[-1]["attention_mask"]
                if "position_ids" in seen[0]:
                    whole["position_ids"] = torch.cat([one["position_ids"] for one in seen], dim=1)
            with torch.no_grad():
                expected = model(**whole).logits[:, -1]
            assert torch.allclose(outputs[-1].logits[:, -1], expected, atol=1e-4), f"{name}: {workload}"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_tokens_are_those_of_generate(name: str) -> None:
    """Greedy decoding after left padding: the same tokens, positions and mask as transformers makes."""
    model = tiny_model(name, max_position_embeddings=512) if name == "llama" else tiny_model(name)
    workload = next(w for w in workloads_for(model, None)[0] if w.phase.padding == "left")
    seen, _, _ = run(model, workload)
    ours = torch.cat([one["input_ids"] for one in seen[1:]], dim=1)
    given = {key: workload.inputs[key] for key in ("input_ids", "attention_mask")}
    theirs: Any = model.generate(  # type: ignore[operator]
        **given, do_sample=False, max_new_tokens=workload.decode, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(ours, theirs[:, workload.phase.tokens :])


def test_after_right_padding_the_last_real_token_counts() -> None:
    model = tiny_model("llama")
    ids = tiny_inputs("llama")["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=mask, use_cache=True)
    following, _ = decode_inputs(model, {"input_ids": ids, "attention_mask": mask}, output)
    assert following is not None
    assert following["input_ids"].flatten().tolist() == [
        int(output.logits[0, -1].argmax()),
        int(output.logits[1, 4].argmax()),
    ]
    assert following["attention_mask"].shape == (2, 9)


@pytest.mark.parametrize(
    ("make", "cache"),
    [
        (lambda: transformers.MambaForCausalLM(transformers.MambaConfig(**SIZES, state_size=4)), "cache_params"),
        (lambda: transformers.RwkvForCausalLM(transformers.RwkvConfig(**SIZES, attention_hidden_size=32)), "state"),
    ],
)
def test_recurrent_models_decode_with_their_own_state(make: Callable[[], nn.Module], cache: str) -> None:
    model = make().eval()
    found, not_run = workloads_for(model, None)
    assert not any("decode" in line for line in not_run)
    for workload in found:
        seen, _, why = run(model, workload)
        assert why == "" and all(cache in one for one in seen[1:])


def test_an_encoder_decoder_runs_its_encoder_once() -> None:
    model = tiny_model("t5")
    found, not_run = workloads_for(model, None)
    assert any("left padding" in line for line in not_run)
    workload = next(w for w in found if w.decode)
    seen, outputs, why = run(model, workload)
    assert why == "" and "input_ids" not in seen[1] and seen[1]["decoder_input_ids"].shape == (1, 1)
    whole = torch.cat([one["decoder_input_ids"] for one in seen], dim=1)
    with torch.no_grad():
        expected = model(input_ids=seen[0]["input_ids"], decoder_input_ids=whole).logits[:, -1]
    assert torch.allclose(outputs[-1].logits[:, -1], expected, atol=1e-4)


def test_what_a_model_cannot_do_is_named_with_the_reason() -> None:
    found, not_run = workloads_for(tiny_model("bert"), None)
    assert "decode: BertForMaskedLM keeps no cache" in not_run and not any(w.decode for w in found)
    assert "prefill 1 x 257 tokens: BertForMaskedLM has 64 positions" in not_run
    assert max(w.phase.tokens for w in found) == 62
    found, not_run = workloads_for(Bare(), None, {"input_ids": torch.arange(1, 41).reshape(2, 20)})
    assert not_run[:2] == ["left and right padding: Bare takes no attention_mask", "decode: Bare keeps no cache"]
    assert {w.phase.batch for w in found} == {1, 2, 8} and not any(w.phase.padding for w in found)
    found, not_run = workloads_for(tiny_model("vit"), None)
    assert [str(w) for w in found] == [f"images, batch of {n}" for n in (2, 1, 8)]
    assert not_run == ["lengths, padding, decode: ViTForImageClassification takes images of one size"]
    found, not_run = workloads_for(tiny_model("transformer_encoder"), None, tiny_inputs("transformer_encoder"))
    assert len(found) == 1 and "only token ids can be resized" in not_run[0]


def test_a_model_that_returns_no_cache_says_so() -> None:
    """BertModel has the argument, and keeps no cache unless it is a decoder."""
    model = transformers.BertModel(transformers.BertConfig(**SIZES, num_attention_heads=4, intermediate_size=64)).eval()
    workload = next(w for w in workloads_for(model, None)[0] if w.decode)
    seen, _, why = run(model, workload)
    assert len(seen) == 1 and why == "decode: BertModel returned no cache"


def test_a_model_without_logits_decodes_its_last_token_again() -> None:
    model: Any = tiny_model("llama").get_submodule("model")
    workload = next(w for w in workloads_for(model, None)[0] if w.decode)
    seen, _, why = run(model, workload)
    assert why == "" and torch.equal(seen[1]["input_ids"], seen[0]["input_ids"][:, -1:])


def test_a_table_of_positions_is_known_without_a_config() -> None:
    """Beyond its end a GPU does not raise an exception that could be caught: it stops working."""

    class Own(Bare):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.places, self.kinds = nn.Embedding(rows, 8), nn.Embedding(2, 8)

        def forward(self, input_ids: Tensor) -> Tensor:
            at = self.places(torch.arange(input_ids.shape[1]))
            y: Tensor = self.head(self.tokens(input_ids) + at + self.kinds(torch.zeros_like(input_ids)))
            return y

    for rows, longest in ((40, 40), (300, 257)):
        model = Own(rows)
        found, _ = workloads_for(model, None, {"input_ids": torch.arange(1, 41).reshape(2, 20)})
        assert max(w.phase.tokens for w in found) == longest
        for workload in found:
            assert run(model, workload)[2] == ""


def test_a_table_beside_that_of_positions_is_of_tokens() -> None:
    """Whatever its name: a short one must not cut the lengths."""

    class Short(Bare):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.pos = nn.Embedding(50, 8), nn.Embedding(300, 8)
            self.emb = self._modules.pop("tokens")

        def forward(self, input_ids: Tensor) -> Tensor:
            y: Tensor = self.head(self.emb(input_ids) + self.pos(torch.arange(input_ids.shape[1])))
            return y

    found, not_run = workloads_for(Short(), None, {"input_ids": torch.arange(1, 41).reshape(2, 20)})
    assert max(w.phase.tokens for w in found) == 257 and not any("positions" in each for each in not_run)


def test_few_positions_cut_the_lengths() -> None:
    """No position beyond the table, decode steps counted; what can't be had is named, and no shape comes twice."""
    model = tiny_model("gpt2", n_positions=16)
    found, not_run = workloads_for(model, None)
    assert all(w.phase.tokens + w.decode <= 16 for w in found) and len(set(shapes(found))) == len(found)
    assert any(line.startswith("prefill 2 x 17 tokens: ") for line in not_run)
    for workload in found:
        assert run(model, workload)[2] == ""


def test_the_long_sequence_passes_a_sliding_window() -> None:
    found, _ = workloads_for(tiny_model("mistral", max_position_embeddings=1024, sliding_window=300), None)
    assert max(w.phase.tokens for w in found) == 301
    _, not_run = workloads_for(tiny_model("mistral", max_position_embeddings=8192, sliding_window=4096), None)
    assert not_run == ["more tokens than the sliding window of 4096: give --tokens 4097"]


def test_one_shape_replaces_the_design() -> None:
    model = tiny_model("llama")
    found, not_run = workloads_for(model, None, tokens=5, batch=3, decode=2)
    assert shapes(found) == [(2, 32, "", 0), (3, 5, "", 2)] and found[1].required
    assert not_run == ["other lengths and batch sizes, padding: one shape was requested"]
    assert shapes(workloads_for(model, None, batch=4)[0])[1] == (4, 32, "", 4)
    assert shapes(workloads_for(model, None, tokens=9, decode=0)[0])[1] == (2, 9, "", 0)
    assert "decode: BertForMaskedLM keeps no cache" in workloads_for(tiny_model("bert"), None, decode=3)[1]
    with pytest.raises(InvalidInput, match="needs 68 positions"):
        workloads_for(tiny_model("gpt2"), None, tokens=64)
    with pytest.raises(InvalidInput, match="apply only to token ids"):
        workloads_for(tiny_model("vit"), None, tokens=7)


def test_quick_is_the_base_alone() -> None:
    found, not_run = workloads_for(tiny_model("llama"), None, quick=True)
    assert shapes(found) == [(2, 32, "", 0)]
    assert not_run == ["other lengths and batch sizes, padding, decode: skipped by quick"]


def test_given_ids_run_as_they_are_and_fill_the_other_shapes() -> None:
    ids = torch.tensor([[7, 9, 11], [7, 9, 13]])
    found, _ = workloads_for(tiny_model("llama"), None, ids)
    assert torch.equal(found[0].inputs["input_ids"], ids) and found[0].other is not None
    assert all(set(w.inputs["input_ids"].flatten().tolist()) <= {0, 7, 9, 11, 13} for w in found)
    masked = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]])}
    found, not_run = workloads_for(tiny_model("llama"), None, masked)
    assert found[0].phase == Phase("prefill", 2, 3, padding="left") and len(found) == 1 and len(not_run) == 1


def test_prompts_from_a_file(tmp_path: Path) -> None:
    """Run as they are, the first of them; the built-in text is replaced in all other shapes as well."""
    subject = ns.load("demo")
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(["3 + 4 = 7"] * 12) + "\n", encoding="utf-8")
    found, not_run = workloads_for(subject.model, subject.tokenizer, file)
    assert not_run[0] == f"4 more prompts of {file}: the first 8 ran"
    own = set(subject.tokenizer("3 + 4 = 7")["input_ids"])
    ids = [set(w.inputs["input_ids"].flatten().tolist()) for w in found if not w.phase.padding]
    assert all(one <= own for one in ids) and sum(w.required for w in found) == 4  # eight prompts, two and two
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('{"prompt": "3 + 4 =", "answer": "7"}\n', encoding="utf-8")
    found, _ = workloads_for(subject.model, subject.tokenizer, rows, quick=True)
    assert found[0].inputs["input_ids"].tolist() == [subject.tokenizer("3 + 4 =")["input_ids"]]
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(InvalidInput, match="holds no prompts"):
        workloads_for(subject.model, subject.tokenizer, file)


def test_a_budget_cuts_the_tail_and_names_it() -> None:
    """What is required always runs."""
    found, not_run = workloads_for(tiny_model("llama"), None)
    times = iter([0.0, 1.0, 3.0, 11.0, 12.0, 13.0, 14.0])
    started = list(within_budget(found, 10, not_run, clock=lambda: next(times)))
    assert started == found[:3]
    assert f"{found[3]}: the budget of 10 s was spent" in not_run
    assert list(within_budget(found, None, [])) == found
    assert list(within_budget(found, 0, [])) == found[:1]


@pytest.mark.parametrize("stem", ["Bart", "Whisper"])
def test_cross_attention_is_reached_by_made_up_encoder_states(stem: str) -> None:
    """A decoder alone never calls it on tokens: a third of its parameters would stay unjudged."""
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 48, "vocab_size": 64}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = getattr(transformers, f"{stem}Config")(**sizes, **tokens)
    model = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
    workloads, _ = workloads_for(model, None)
    (encoded,) = [workload for workload in workloads if workload.phase.encoded]
    called = []
    for name, module in model.named_modules():
        if name.endswith("encoder_attn"):
            module.register_forward_hook(lambda *_, name=name: called.append(name))
    inputs, _, problem = run(model, encoded)
    assert not problem and len(inputs) == 3 and len(called) == 6
    assert "with encoder states" in str(encoded.phase)
