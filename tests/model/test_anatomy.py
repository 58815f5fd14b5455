"""The anatomy against hand-derived counts, and against what an injection really hits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import noisescope as ns
from noisescope.errors import InvalidInput, NothingInjected, UnsupportedModel
from noisescope.sites import OPERATORS, Place
from noisescope.testing import MODELS, tiny_inputs, tiny_model

Counts = dict[str, int]
EVERYTHING = ns.Injection(ns.Gaussian(0.05))

# One block of each architecture, from its definition. Every block has one `residual`, its output, and unless said
# otherwise matmul 2 = QK^T, PV and softmax 1 = of the scores.
ATTENTION = {"matmul": 2, "softmax": 1, "residual": 1}
BLOCKS: dict[str, Counts] = {
    # q, k, v, o; gate, up, down. Norms before attention and before the MLP. silu(gate) * up.
    "llama": {**ATTENTION, "linear": 7, "silu": 1, "norm": 2},
    "qwen2": {**ATTENTION, "linear": 7, "silu": 1, "norm": 2},
    # Llama's, and a norm each on the heads of q and of k.
    "qwen3": {**ATTENTION, "linear": 7, "silu": 1, "norm": 4},
    "mistral": {**ATTENTION, "linear": 7, "silu": 1, "norm": 2},
    # Norms before and after attention, before and after the MLP. gelu(gate) * up.
    "gemma2": {**ATTENTION, "linear": 7, "gelu": 1, "norm": 4},
    # Gemma 2's four, and a norm each on q and k.
    "gemma3": {**ATTENTION, "linear": 7, "gelu": 1, "norm": 6},
    # qkv in one, o; gate and up in one, down.
    "phi3": {**ATTENTION, "linear": 4, "silu": 1, "norm": 2},
    # Conv1D (addmm): qkv in one, o; up, down. gelu_new.
    "gpt2": {**ATTENTION, "linear": 4, "gelu": 1, "norm": 2},
    "gpt_neox": {**ATTENTION, "linear": 4, "gelu": 1, "norm": 2},
    # q, k, v, o; fc1, fc2 with ReLU between, which is no operator.
    "opt": {**ATTENTION, "linear": 6, "norm": 2},
    # qkv in one, o; up, down. Attention and MLP in parallel after one shared norm.
    "falcon": {**ATTENTION, "linear": 4, "gelu": 1, "norm": 1},
    # As GPT-2, but the products of attention are baddbmm (with ALiBi) and bmm.
    "bloom": {"bmm": 2, "softmax": 1, "residual": 1, "linear": 4, "gelu": 1, "norm": 2},
    # q, k, v, o; all experts' gate_up in one grouped product, all experts' down in another. The router is left alone.
    "mixtral": {**ATTENTION, "linear": 6, "silu": 1, "norm": 2},
    "qwen3_moe": {**ATTENTION, "linear": 6, "silu": 1, "norm": 4},
    # q, k, v, o; up, down. Norms after each sum.
    "bert": {**ATTENTION, "linear": 6, "gelu": 1, "norm": 2},
    "vit": {**ATTENTION, "linear": 6, "gelu": 1, "norm": 2},
    # q, k, v, o; wi, wo with ReLU. The first block of a stack looks up the relative position bias for all.
    "t5 encoder, first block": {**ATTENTION, "linear": 6, "norm": 2, "embedding": 1},
    "t5 encoder, later blocks": {**ATTENTION, "linear": 6, "norm": 2},
    # Self attention, cross attention (q, k, v, o each), wi, wo, and a norm before each of the three.
    "t5 decoder, first block": {"matmul": 4, "softmax": 2, "residual": 1, "linear": 10, "norm": 3, "embedding": 1},
    "t5 decoder, later blocks": {"matmul": 4, "softmax": 2, "residual": 1, "linear": 10, "norm": 3},
    # qkv in one, o (nn.MultiheadAttention's own weights); linear1, linear2 with F.gelu, a call of the block.
    "transformer_encoder": {**ATTENTION, "linear": 4, "gelu": 1, "norm": 2},
}
T5_ORDER = tuple(label for label in BLOCKS if label.startswith("t5"))  # two layers: encoder 0, 1, decoder 2, 3

# Outside the blocks.
LANGUAGE: dict[str, Counts] = {"embed": {"embedding": 1}, "final_norm": {"norm": 1}, "lm_head": {"linear": 1}}
POSITIONS = {**LANGUAGE, "embed": {"embedding": 2}}  # tokens, learned positions
OUTER: dict[str, dict[str, Counts]] = dict.fromkeys(MODELS, LANGUAGE) | {
    "gpt2": POSITIONS,
    "opt": POSITIONS,
    "bloom": {**LANGUAGE, "embed": {"embedding": 1, "norm": 1}},  # a norm right after the embedding
    # Tokens, positions, segments, then a norm; no final norm. Head: dense, gelu, norm, decoder.
    "bert": {"embed": {"embedding": 3, "norm": 1}, "lm_head": {"linear": 2, "gelu": 1, "norm": 1}},
    "vit": {"final_norm": {"norm": 1}, "lm_head": {"linear": 1}},  # patches come from a convolution
    "t5": {"embed": {"embedding": 2}, "final_norm": {"norm": 2}, "lm_head": {"linear": 1}},  # encoder and decoder
    "transformer_encoder": {},
}

# What an injection reaches only when it names it: angles = inverse frequencies x positions, one product for each kind
# of layer (Gemma 3's sliding and full layers turn differently); a router's logits and their softmax.
WITHOUT_ROTARY = {"gpt2", "opt", "bloom", "bert", "vit", "t5", "transformer_encoder"}
ROTARY: dict[str, Counts] = {name: {"matmul": 1} for name in MODELS if name not in WITHOUT_ROTARY}
ROTARY["gemma3"] = {"matmul": 2}
ROUTER: dict[str, Counts] = {name: {"linear": 1, "softmax": 1} for name in ("mixtral", "qwen3_moe")}


def expected(name: str) -> dict[Place, Counts]:
    """Counts per place of the two-layer model."""
    blocks = [BLOCKS[label] for label in (T5_ORDER if name == "t5" else (name, name))]
    return {**dict(enumerate(blocks)), **OUTER[name]}


def fired(model: nn.Module, injection: ns.Injection, **inputs: torch.Tensor) -> dict[Place, Counts]:
    """What an injection hit in one forward, per place and operator."""
    with torch.no_grad(), ns.inject(model, injection) as tally:
        model(**inputs)
    counts: dict[Place, Counts] = {}
    for site in tally.sites:
        if site.forward:
            here = counts.setdefault(site.place, {})
            here[site.operator] = here.get(site.operator, 0) + site.forward
    return counts


@pytest.mark.parametrize("name", MODELS)
def test_counts_are_those_of_the_architecture(name: str) -> None:
    """What is hit, and what the anatomy says, is exactly what the architecture computes."""
    model = tiny_model(name)
    anatomy = ns.dissect(model)
    assert fired(model, EVERYTHING, **tiny_inputs(name)) == expected(name)
    assert anatomy.counts() == expected(name)
    computed = {op for here in expected(name).values() for op in here} | set(ROTARY.get(name, ()))
    assert anatomy.absent() == [op for op in OPERATORS if op not in computed]


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("transformer_encoder", "bloom")])
def test_counts_do_not_depend_on_the_attention_kernel(name: str) -> None:
    """Eager attention computes the same operators as the fused kernel that is opened."""
    model = tiny_model(name, attn_implementation="eager")
    assert fired(model, EVERYTHING, **tiny_inputs(name)) == expected(name)


@pytest.mark.parametrize("name", MODELS)
def test_routers_and_rotary_angles_are_hit_only_when_named(name: str) -> None:
    """An injection into everything leaves them alone (the test above); naming them hits them and nothing else."""
    model, inputs = tiny_model(name), tiny_inputs(name)
    left_alone: dict[Place, Counts] = {}
    if name in ROTARY:
        left_alone["rotary"] = ROTARY[name]
        named = ns.Injection(ns.Gaussian(0.05), places={"rotary"})
        assert fired(model, named, **inputs) == {"rotary": ROTARY[name]}
    if name in ROUTER:
        left_alone |= {0: ROUTER[name], 1: ROUTER[name]}
        named = ns.Injection(ns.Gaussian(0.05), modules=("*.mlp.gate",))
        assert fired(model, named, **inputs) == {0: ROUTER[name], 1: ROUTER[name]}
    assert ns.dissect(model).counts(left_alone=True) == left_alone


def test_rotary_angles_are_a_product_however_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer releases multiply positions and frequencies by broadcasting: the same operator, and the audit knows it."""
    model, inputs = tiny_model("llama"), tiny_inputs("llama")
    rotary = model.model.rotary_emb

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * rotary.inv_freq
        both = torch.cat((angles, angles), dim=-1)
        return (both.cos() * rotary.attention_scaling).to(x.dtype), (both.sin() * rotary.attention_scaling).to(x.dtype)

    monkeypatch.setattr(rotary, "forward", forward)
    assert fired(model, ns.Injection(ns.Gaussian(0.05), places={"rotary"}), **inputs) == {"rotary": ROTARY["llama"]}
    assert ns.locate(model, method="audit").verdict == "healthy"
    with ns.faulty(model, "gain", "rotary"):
        first = ns.locate(model, method="audit").suspects[0]
    assert (first.site.place, first.site.operator) == ("rotary", "matmul")


def test_rotary_is_refused_where_there_is_none() -> None:
    """Naming a place that the model lacks is an error before anything runs."""
    with pytest.raises(NothingInjected, match="no operator matches the given layers"):
        ns.inject(tiny_model("gpt2"), ns.Injection(ns.Gaussian(0.05), places={"rotary"}))


def test_layer_1_is_not_layer_10() -> None:
    """Blocks are told apart by whole path parts."""
    model = tiny_model("llama", layers=12)
    assert len(ns.dissect(model).blocks) == 12
    hit = fired(model, ns.Injection(ns.Gaussian(0.05), layers={1}), **tiny_inputs("llama"))
    assert hit == {1: BLOCKS["llama"]}
    hit = fired(model, ns.Injection(ns.Gaussian(0.05), layers={10, 11}), **tiny_inputs("llama"))
    assert hit == {10: BLOCKS["llama"], 11: BLOCKS["llama"]}


def test_the_head_is_not_the_last_block() -> None:
    """Noise on lm_head is counted at lm_head and leaves the last block's output clean."""
    model, inputs = tiny_model("llama"), tiny_inputs("llama")
    seen: list[torch.Tensor] = []
    handle = model.get_submodule("model.norm").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        clean = model(**inputs).logits
        with ns.inject(model, ns.Injection(ns.Gaussian(0.05), places={"lm_head"})) as tally:
            noisy = model(**inputs).logits
    handle.remove()
    assert {place: counts.forward for place, counts in tally.per_layer.items()} == {"lm_head": 1}
    assert torch.equal(seen[0], seen[1]) and not torch.equal(clean, noisy)


def test_tied_weights_are_two_sites() -> None:
    """Weight noise on the head leaves the embedding that shares its table clean."""
    model, inputs = tiny_model("llama", tie_word_embeddings=True), tiny_inputs("llama")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        clean = model.model(**inputs).last_hidden_state
        table = model.lm_head.weight.clone()
        head = ns.Injection(ns.Gaussian(0.05), operators={"linear"}, places={"lm_head"}, tensor="weight")
        with ns.inject(model, head) as tally:
            output = model(**inputs, output_hidden_states=True)
    assert tally.per_layer.keys() == {"lm_head"}
    assert torch.equal(output.hidden_states[-1], clean)
    assert torch.equal(model.lm_head.weight, table)


def share_activation(model: nn.Module) -> nn.Module:
    model.model.layers[1].mlp.act_fn = model.model.layers[0].mlp.act_fn
    return model


def test_a_shared_module_counts_where_it_is_called() -> None:
    """One nn.SiLU in two blocks is attributed to the block that calls it."""
    model = share_activation(tiny_model("llama"))
    silu = ns.Injection(ns.Gaussian(0.05), operators={"silu"})
    assert fired(model, silu, **tiny_inputs("llama")) == {0: {"silu": 1}, 1: {"silu": 1}}


@pytest.mark.parametrize("layer", [0, 1])
def test_a_shared_module_is_aimed_at_in_one_block_only(layer: int) -> None:
    """Aimed at one of the two blocks that share a module, the other one's call stays clean."""
    model = share_activation(tiny_model("llama"))
    silu = ns.Injection(ns.Gaussian(0.05), operators={"silu"}, layers={layer})
    assert fired(model, silu, **tiny_inputs("llama")) == {layer: {"silu": 1}}


def test_a_block_listed_twice_is_one_block() -> None:
    """Calls of one module under two names can't be told apart, so they count as one block, and a note says so."""
    model = tiny_model("llama")
    model.model.layers[1] = model.model.layers[0]
    anatomy = ns.dissect(model)
    assert anatomy.blocks == ("model.layers.0",)
    assert anatomy.notes == ("model.layers.1 is the same module as model.layers.0: both names refer to one block",)
    hit = fired(model, ns.Injection(ns.Gaussian(0.05), layers={0}), **tiny_inputs("llama"))
    assert hit == {0: {operator: 2 * count for operator, count in BLOCKS["llama"].items()}}


class QuantLinear(nn.Module):
    """A packed linear as GPTQ's: integers and a scale, no float weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = float(linear.weight.detach().abs().max()) / 127
        self.register_buffer("qweight", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.qweight.to(x.dtype) * self.scale)


def test_a_packed_linear_is_a_linear_whose_weight_is_refused_by_name() -> None:
    """Noise falls on the output of a quantised linear; its packed weight is refused, and the message names it."""
    model = tiny_model("llama")
    model.model.layers[0].mlp.down_proj = QuantLinear(model.model.layers[0].mlp.down_proj)
    assert fired(model, EVERYTHING, **tiny_inputs("llama")) == expected("llama")
    assert [u.packed for u in ns.dissect(model).units if u.module.endswith("0.mlp.down_proj")] == ["QuantLinear"]
    weight = ns.Injection(ns.Gaussian(0.05), operators={"linear"}, tensor="weight")
    with pytest.raises(InvalidInput, match=r"model\.layers\.0\.mlp\.down_proj is a QuantLinear whose weight is packed"):
        fired(model, weight, **tiny_inputs("llama"))


def test_eight_bit_floats_are_packed() -> None:
    """A float8 weight means nothing without its scale, so it is no plain weight."""
    model = tiny_model("llama")
    linear = model.model.layers[0].mlp.down_proj
    linear.weight = nn.Parameter(linear.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    assert [unit.packed for unit in ns.dissect(model).units if unit.packed] == ["Linear"]


@pytest.mark.parametrize(
    ("name", "settings", "change"),
    [
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, {"norm": 2}),  # ln_attn and ln_mlp
        ("falcon", {"parallel_attn": False}, {"norm": 2}),  # attention, then MLP
        ("transformer_encoder", {"activation": "relu"}, {"gelu": 0}),
        ("transformer_encoder", {"activation": nn.functional.silu}, {"gelu": 0, "silu": 1}),
        ("transformer_encoder", {"norm_first": True}, {}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, {"linear": 7}),  # a plain MLP: gate, up, down
    ],
)
def test_variants_are_read_from_the_model(name: str, settings: dict[str, object], change: Counts) -> None:
    """The anatomy follows the configuration, not the architecture's name."""
    model = tiny_model(name, **settings)
    block = {operator: count for operator, count in {**BLOCKS[name], **change}.items() if count}
    assert fired(model, ns.Injection(ns.Gaussian(0.05), layers={0}), **tiny_inputs(name)) == {0: block}
    assert ns.dissect(model).counts()[0] == block


def test_a_block_that_calls_functions_itself_is_watched() -> None:
    """A hand-written block without an activation module may call gelu: it isn't counted before, but it is hit."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.gelu(self.up(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = Model().eval()
    anatomy = ns.dissect(model)
    assert anatomy.counts() == {0: {"linear": 2, "residual": 1}, 1: {"linear": 2, "residual": 1}}
    assert {"gelu", "softmax"}.isdisjoint(anatomy.operators()) and anatomy.absent() == ["embedding"]
    hit = {"linear": 2, "gelu": 1, "residual": 1}
    assert fired(model, EVERYTHING, x=torch.ones(2, 3, 8)) == {0: hit, 1: hit}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own import
def test_a_compiled_model_has_the_anatomy_of_the_model_inside() -> None:
    """torch.compile's wrapper does not show in the names, which are those the probe uses."""
    model = tiny_model("llama")
    assert ns.dissect(torch.compile(model)) == ns.dissect(model)


def test_a_model_without_blocks_is_refused() -> None:
    """The error says what noisescope looks for and what to pass."""
    with pytest.raises(
        UnsupportedModel, match=r"Linear has no transformer blocks, .* Pass the model that contains that list"
    ):
        ns.dissect(nn.Linear(4, 4))
    with pytest.raises(UnsupportedModel, match=r"expected a torch\.nn\.Module, got dict"):
        ns.dissect({})


@pytest.mark.parametrize(("package", "engine"), [("vllm.entrypoints.llm", "vLLM"), ("sglang.srt", "SGLang")])
def test_serving_engines_are_refused(package: str, engine: str) -> None:
    """Their kernels run in other processes: the error says what to load instead."""
    served = type("LLM", (), {"__module__": package})()
    with pytest.raises(UnsupportedModel, match=rf"LLM is a {engine} object: .* with transformers \(noisescope\.load\)"):
        ns.wrap(served)


# -- the page docs/architectures.md


def table(header: str) -> list[dict[str, str]]:
    """The rows of the table whose first header cell is `header`, as {column: cell}."""
    page = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(page) if line.startswith(f"| {header} |"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page[start:] if line.startswith("|")]
    end = next((i for i, line in enumerate(page[start:]) if not line.startswith("|")), len(page))
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:end]]


def counts_in(cell: str) -> Counts:
    """`counts_in("3 embedding, 1 norm") == {"embedding": 3, "norm": 1}`."""
    return {operator: int(count) for count, operator in (part.split() for part in cell.split(",") if part.strip())}


def test_the_page_shows_the_same_blocks() -> None:
    """The table of blocks in the docs is the one tested here."""
    shown = {row["block"]: {op: int(row[op]) for op in OPERATORS if int(row[op])} for row in table("block")}
    assert shown == BLOCKS


def test_the_page_shows_the_same_outer_places() -> None:
    """The table of what lies outside the blocks is the one tested here."""
    rows = {row.pop("model"): {place: counts_in(cell) for place, cell in row.items()} for row in table("model")}
    assert tuple(rows) == MODELS
    for name, shown in rows.items():
        known = {**OUTER[name], "rotary": ROTARY.get(name, {}), "router": ROUTER.get(name, {})}
        assert {place: counts for place, counts in shown.items() if counts} == {p: c for p, c in known.items() if c}
