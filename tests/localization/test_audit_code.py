"""The model's own code on the host: kinds of modules without a formula, code that can't be run, and no trace left."""

from __future__ import annotations

import copy
import json
import sys
import threading
import types
from typing import Any

import pytest
import torch
import transformers
import transformers.cache_utils as caches
import transformers.models.llama.modeling_llama as llama
from torch import Tensor, nn
from typer.testing import CliRunner

import noisescope as ns
from noisescope.cli import app
from noisescope.faults import DeadZone, faulty
from noisescope.localization.audit import audit
from noisescope.localization.exact_functions import is_exact
from noisescope.testing import MODELS, tiny_inputs, tiny_model


def named(verdict):
    assert verdict.verdict == "faulty", verdict.notes
    return [(suspect.site.place, suspect.site.module, suspect.site.tensor) for suspect in verdict.suspects]


class OtherDevice(torch.overrides.TorchFunctionMode):
    """Healthy arithmetic that rounds otherwise: the last bit of a third of all results of inexact functions."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        whole = func is torch.cumsum or getattr(func, "__name__", "") == "cumsum"  # sums of ones are exact everywhere
        if is_exact(func, args) or whole or type(y) is not Tensor or not y.is_floating_point() or not y.numel():
            return y
        draw = torch.rand(y.shape, generator=self.generator)
        up, down = (torch.nextafter(y, torch.full_like(y, end)) for end in (torch.inf, -torch.inf))
        return torch.where((y != 0) & (draw < 0.15), up, torch.where((y != 0) & (draw > 0.85), down, y))


@pytest.mark.parametrize("name", MODELS)
def test_a_healthy_device_that_rounds_otherwise_is_no_alarm(name):
    """No bit of what inexact functions give is that of the host's: tolerances, and choices near a tie, have to hold."""
    with OtherDevice():
        verdict = audit(tiny_model(name), tiny_inputs(name), quick=True)
    assert verdict.verdict == "healthy", [suspect.evidence for suspect in verdict.suspects]


class OwnNorm(nn.Module):
    """Of no known formula."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.tanh(x) * x.abs().mean(-1, keepdim=True).rsqrt()


@pytest.mark.parametrize("factor", [1.0, 1.0001, 1.1])
def test_a_norm_of_an_unknown_kind_within_its_tolerance(factor):
    """Found where it is wrong by far more than rounding, on a device whose bits are not the host's."""
    model = tiny_model("llama", layers=2)
    norm = model.model.layers[1].input_layernorm = OwnNorm()
    norm.forward = lambda x: factor * OwnNorm.forward(norm, x)
    with OtherDevice():
        verdict = audit(model, quick=True)
    if factor == 1.0:
        assert verdict.verdict == "healthy"
    else:
        assert named(verdict) == [(1, "model.layers.1.input_layernorm", "output")]
        assert verdict.suspects[0].fault_class == "gain"


@pytest.mark.parametrize("which", ["choice", "weights"])
def test_a_router_that_chooses_or_weighs_otherwise(which):
    model = tiny_model("mixtral", layers=2)
    gate = model.model.layers[1].mlp.gate
    assert audit(model, quick=True).verdict == "healthy"

    def forward(x: Tensor) -> Any:
        scores, weights, chosen = type(gate).forward(gate, x)
        return (scores, weights, chosen.flip(-1)) if which == "choice" else (scores, 1.01 * weights, chosen)

    gate.forward = forward
    verdict = audit(model, quick=True)
    assert named(verdict) == [(1, "model.layers.1.mlp.gate", "output")]
    assert ("the indices differ from those the code selects" in verdict.suspects[0].evidence) == (which == "choice")


def test_a_sum_of_lora_that_is_scaled_otherwise():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("llama"), lora)
    adapter = model.base_model.model.model.layers[1].self_attn.q_proj

    def forward(self: Any, x: Tensor) -> Tensor:
        low_rank = self.lora_B["default"](self.lora_A["default"](x))
        return self.base_layer(x) + 1.1 * self.scaling["default"] * low_rank

    adapter.forward = types.MethodType(forward, adapter)
    assert named(audit(model, quick=True)) == [(1, "base_model.model.model.layers.1.self_attn.q_proj", "output")]


def test_a_state_space_scan_that_is_scaled():
    """The scan is code of the mixer, in a file of transformers: what it gives enters the last projection."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 2, "intermediate_size": 32, "time_step_rank": 4}
    config = transformers.MambaConfig(vocab_size=64, **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = transformers.MambaForCausalLM(config).eval()
    inputs = torch.arange(3, 15).reshape(2, 6)
    assert audit(model, inputs, tokens=6, batch=2, decode=1).verdict == "healthy"
    mixer = model.backbone.layers[1].mixer
    mixer.out_proj.register_forward_pre_hook(lambda module, args: (1.1 * args[0],))
    verdict = audit(model, inputs, quick=True)
    assert named(verdict) == [(1, "backbone.layers.1.mixer.out_proj", "input")]
    assert verdict.suspects[0].fault_class == "gain"


def test_a_subclass_that_only_wraps_the_call_is_the_device():
    """Like a hook, it runs around the model's code."""

    class Scaled(nn.Linear):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(1.1 * x)

    model = tiny_model("llama", layers=2)
    model.model.layers[1].mlp.down_proj.__class__ = Scaled
    assert named(audit(model, quick=True)) == [(1, "model.layers.1.mlp.down_proj", "input")]


@pytest.mark.parametrize("fault", [False, True])
def test_weights_quantised_by_torchao(fault):
    """Their class has its own product, which the host runs as well."""
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = tiny_model("llama", layers=2)
    quantize_(model, Int8WeightOnlyConfig())
    linear = model.model.layers[1].mlp.up_proj
    if fault:
        linear.forward = lambda x: 1.05 * nn.Linear.forward(linear, x)
    verdict = audit(model, quick=True)
    if fault:
        assert named(verdict) == [(1, "model.layers.1.mlp.up_proj", "output")]
    else:
        assert (verdict.verdict, verdict.coverage.not_judged) == ("healthy", ())


# -- code that changes things in place


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.mul_(2.0)
        y += x
        return y.relu_()


class WritesToItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return self.linear(x)


def uses_what_was_written(self: Any, x: Tensor, **others: Any) -> Tensor:
    h = x + self.self_attn(self.input_layernorm(x), **others)[0]
    normal = self.post_attention_layernorm(h)
    return h + self.mlp(normal) + normal


@pytest.mark.parametrize("cls", [InPlace, WritesToItsInput])
def test_code_that_writes_in_place_is_healthy(cls):
    """Copies are taken when a call begins and when it ends, and what it wrote to its arguments counts."""
    model = tiny_model("llama", layers=2)
    block = model.model.layers[1]
    block.mlp = cls()
    block.__class__ = type("Block", (type(block),), {"forward": uses_what_was_written})
    verdict = audit(model, quick=True)
    assert verdict.verdict == "healthy", [suspect.evidence for suspect in verdict.suspects]

    def also_writes(module: nn.Module, args: Any, y: Tensor) -> None:
        args[0].mul_(1.01)

    block.mlp.register_forward_hook(also_writes)
    assert named(audit(model, quick=True)) == [(1, "model.layers.1", "output")]


def test_an_argument_that_is_written_wrongly_is_named_in_its_module():
    """The module's output is right, what it leaves in its argument is not."""
    model = tiny_model("llama", layers=2)
    block = model.model.layers[1]
    writer = block.mlp = WritesToItsInput()
    block.__class__ = type("Block", (type(block),), {"forward": uses_what_was_written})

    def forward(x: Tensor) -> Tensor:
        y = WritesToItsInput.forward(writer, x)
        x.mul_(1.01)
        return y

    writer.forward = forward
    assert named(audit(model, quick=True)) == [(1, "model.layers.1.mlp", "output")]


class Remembers(nn.Module):
    """Counts its calls and keeps a running mean: the same code, in the same order, has to run on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(32, 32), 0
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.mul_(0.9).add_(0.1 * x.mean((0, 1)))
        return torch.tanh(self.linear(x) * (1 + 0.1 * self.calls)) + self.mean


def test_modules_that_remember_are_run_once_for_each_call():
    """Runs with random rounding are made from the same state."""
    model = tiny_model("llama", layers=2)
    mlp = model.model.layers[1].mlp = Remembers()
    with OtherDevice():
        verdict = audit(model, quick=True)
    assert verdict.verdict == "healthy", [suspect.evidence for suspect in verdict.suspects]
    assert mlp.calls == verdict.forwards == 4


# -- code that can't be run on the host


class Locked(nn.Module):
    """Holds what can't be copied; `used` says whether its code needs it."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.lock, self.used = threading.Lock(), used

    def forward(self, x: Tensor) -> Tensor:
        if self.used:
            with self.lock:
                return x.tanh()
        return x.tanh()


@pytest.mark.parametrize(
    ("used", "blocks", "said"), [(False, 2, "healthy"), (True, 1, "healthy"), (True, 2, "undecided")]
)
def test_modules_that_hold_what_can_not_be_copied(used, blocks, said):
    """All other modules are judged, and one whose code needs it is named; too many of them leave the verdict open."""
    model = tiny_model("llama", layers=2)
    for block in model.model.layers[:blocks]:
        block.mlp = Locked(used)
    verdict = audit(model, quick=True)
    assert verdict.verdict == said
    assert verdict.coverage.modules.total - verdict.coverage.modules.judged == blocks * used
    if used:
        (left_out,) = verdict.coverage.not_judged
        assert (left_out.module_class, len(left_out.modules)) == ("Locked", blocks)
        assert "its code can't be run on the host (TypeError" in left_out.reason
        assert verdict.headline.count("% of modules") == 1
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, y: 1.01 * y)
    assert named(audit(model, quick=True)) == [(0, "model.layers.0", "output")]


def test_a_model_that_refuses_to_be_copied_is_not_healthy():
    """Its operators are judged, its own code is not, and the verdict says so."""
    model = tiny_model("llama", layers=2)

    class NoCopies(type(model.model)):  # type: ignore[misc]
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("there can be only one")

    model.model.__class__ = NoCopies
    verdict = audit(model, quick=True)
    assert verdict.verdict == "undecided" and not verdict.suspects
    reasons = {each.reason for each in verdict.coverage.not_judged}
    assert reasons == {"the model can't be copied (RuntimeError: there can be only one)"}
    assert verdict.coverage.multiply_adds.share == 1.0 and verdict.coverage.modules.share < 0.95
    with ns.faulty(model, "gain:0.05@1/linear/up_proj"):
        assert named(audit(model, quick=True)) == [(1, "model.layers.1.mlp.up_proj", "output")]


@pytest.mark.parametrize(("blocks", "code"), [(1, 0), (2, 3)])
def test_the_command_says_what_was_not_judged(blocks, code, monkeypatch):
    """Exit code 0 with the share where it is 95 % at least; below, 3, with the class and the reason."""
    model = tiny_model("llama", layers=2)
    for block in model.model.layers[:blocks]:
        block.mlp = Locked(used=True)
    monkeypatch.setattr("noisescope.api.preparation.load_subject", lambda options: ns.wrap(model, None))
    result = CliRunner().invoke(app, ["locate", "demo", "--method", "audit", "--quick"])
    assert result.exit_code == code, result.output
    headline = result.stdout.splitlines()[0]
    assert ("healthy" in headline) == (code == 0) and "% of modules" in headline and "100 % of modules" not in headline
    assert "Locked (model.layers.0.mlp" in result.output and "can't be run on the host" in result.output
    result = CliRunner().invoke(app, ["locate", "demo", "--method", "audit", "--quick", "--json"])
    found = json.loads(result.stdout)
    assert found["coverage"]["not_judged"][0]["class"] == "Locked"
    assert (found["coverage"]["modules"] < 0.95) == (code == 3)


# -- no trace


def snapshot(model: nn.Module) -> list[Any]:
    """Names and identities of all that modules hold, hooks among them."""
    found = []
    for name, module in model.named_modules():
        found.append((name, type(module), sorted(vars(module))))
        found += [(key, id(value)) for key, value in vars(module).items()]
        found += [(key, dict(value)) for key, value in vars(module).items() if "hooks" in key]
    return found


def test_nothing_of_the_model_or_of_transformers_is_changed():
    """Attributes, hooks, classes, registries of cache layers, loaded modules, random state."""
    model = tiny_model("llama", layers=2)
    model.model.layers[0].register_forward_hook(lambda module, args, y: None)
    model.model.layers[1].mlp.forward = types.MethodType(
        type(model.model.layers[1].mlp).forward, model.model.layers[1].mlp
    )
    audit(model, quick=True)  # imports what it needs
    tables = {name: dict(value) for name, value in vars(caches).items() if name.isupper() and isinstance(value, dict)}
    assert tables
    methods = {cls: dict(vars(cls)) for cls in (caches.DynamicCache, caches.DynamicLayer, type(model.model.layers[0]))}
    before, loaded, weights = snapshot(model), set(sys.modules), copy.deepcopy(model.state_dict())
    torch_state, versions = torch.random.get_rng_state(), [p._version for p in model.parameters()]
    assert audit(model, tokens=5, batch=2, decode=2).verdict == "healthy"
    assert snapshot(model) == before
    assert {name for name in set(sys.modules) - loaded if not name.endswith("_as_on_disk")} == set()
    assert torch.equal(torch.random.get_rng_state(), torch_state)
    assert versions == [p._version for p in model.parameters()]
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert tables == {name: dict(vars(caches)[name]) for name in tables}
    assert all(dict(vars(cls)) == found for cls, found in methods.items())


def test_the_caller_gets_what_the_model_gives():
    """Inputs are not written to, and a model of one's own that writes to them gets its own copies each time."""
    model = tiny_model("llama", layers=2)
    tokens = torch.arange(3, 19).reshape(2, 8)
    mask = torch.ones_like(tokens)
    kept = tokens.clone(), mask.clone()
    assert audit(model, {"input_ids": tokens, "attention_mask": mask}, quick=True).verdict == "healthy"
    assert torch.equal(tokens, kept[0]) and torch.equal(mask, kept[1])


def test_a_model_that_writes_to_its_inputs():
    """Each forward is judged on what it was given."""
    model = tiny_model("llama", layers=2)

    class Shifts(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, **others: Any) -> Any:
            input_ids.add_(1).remainder_(60)
            return super().forward(input_ids, **others)

    model.__class__ = Shifts
    verdict = audit(model, torch.arange(3, 19).reshape(2, 8), quick=True)
    assert verdict.verdict == "healthy", [suspect.evidence for suspect in verdict.suspects]


def with_extra(seed=0):
    """A model with a linear for images, which text does not reach."""
    torch.manual_seed(seed)
    model = tiny_model("llama").eval()
    model.model.vision_embed = torch.nn.Linear(48, 512)
    return model


def test_linears_that_no_forward_calls_are_called_alone():
    verdict = ns.locate(with_extra(), method="audit")
    assert verdict.verdict == "healthy" and verdict.coverage.parameters.share == 1
    assert any("called alone" in note and "model.vision_embed" in note for note in verdict.notes)


def test_only_some_of_many_are_named():
    model = with_extra()
    model.model.others = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(9))
    notes = ns.locate(model, method="audit").notes
    assert any("called alone" in note and note.endswith(" and 7 more") for note in notes)


def test_a_fault_in_a_linear_that_no_forward_calls_is_named():
    model = with_extra()
    model.model.vision_embed.register_forward_hook(lambda module, args, y: y.index_fill(-1, torch.tensor([3]), 0.0))
    verdict = ns.locate(model, method="audit")
    assert verdict.verdict == "faulty" and verdict.suspects[0].site.module == "model.vision_embed"


def test_rows_of_a_table_that_no_prompt_has_are_looked_up():
    """One wrong row in 64, of a token that the built-in text does not contain."""
    model = tiny_model("llama")
    seen: set[int] = set()
    hook = model.model.embed_tokens.register_forward_hook(
        lambda module, args, y: seen.update(args[0].unique().tolist())
    )
    assert ns.locate(model, tokens=8, batch=1, decode=0).verdict == "healthy"
    hook.remove()
    right = model.model.embed_tokens.forward
    assert seen == set(range(64))
    model.model.embed_tokens.forward = lambda ids: right(torch.where(ids == 41, 40, ids))
    first = ns.locate(model, tokens=8, batch=1, decode=0).suspects[0]
    assert (first.site.operator, first.site.module) == ("embedding", "model.embed_tokens")


def test_a_linear_that_can_not_be_called_alone_is_not_judged():
    model = with_extra()

    def refuse(module, args):
        raise RuntimeError("an image was expected")

    model.model.vision_embed.register_forward_pre_hook(refuse)
    verdict = ns.locate(model, method="audit")
    assert verdict.verdict == "undecided"
    assert "model.vision_embed" in verdict.coverage.not_judged[0].modules


@pytest.mark.filterwarnings("ignore")
def test_modules_that_the_code_exchanges_are_judged_as_they_are():
    """BigBird's first forward of a short text puts full attention where sparse attention was."""
    config = transformers.BigBirdConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=128,
        is_decoder=True,
    )
    torch.manual_seed(0)
    verdict = ns.locate(transformers.BigBirdForCausalLM(config).eval(), method="audit")
    assert verdict.verdict == "healthy" and verdict.coverage.modules.share == 1


def test_hidden_states_and_attentions_that_transformers_collects_are_not_the_code():
    """They are gathered by hooks around the class's code, which the host does not run."""
    model = tiny_model("llama", layers=2, attn_implementation="eager")
    ids = torch.arange(3, 35).reshape(2, 16)
    verdict = ns.locate(
        ns.wrap(model),
        inputs={"input_ids": ids, "output_hidden_states": True, "output_attentions": True},
        quick=True,
    )
    assert verdict.verdict == "healthy", verdict.notes


def test_a_compiled_module_inside_the_model_is_judged_by_the_code_in_it():
    model = tiny_model("llama", layers=2)
    for block in model.model.layers:
        block.mlp = torch.compile(block.mlp, backend="eager")
    verdict = ns.locate(ns.wrap(model), quick=True)
    assert (verdict.verdict, verdict.coverage.not_judged) == ("healthy", ())
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 1.01)
    assert ns.locate(ns.wrap(model), quick=True).suspects[0].site.place == 1


@pytest.mark.parametrize("where", ["host", "disk"])
def test_weights_that_accelerate_keeps_elsewhere_are_judged(where, tmp_path):
    """Between forwards they are on no device; the audit reads them where they are, and puts nothing in their place."""
    accelerate = pytest.importorskip("accelerate")
    model, here = tiny_model("llama"), torch.device("cpu")
    if where == "host":
        accelerate.cpu_offload(model, execution_device=here)
    else:
        accelerate.disk_offload(model, tmp_path, execution_device=here)
    verdict = audit(model)
    assert verdict.verdict == "healthy" and verdict.coverage.smallest_share == 1, verdict.headline
    assert all(p.is_meta for p in model.parameters())
    with faulty(model, DeadZone(0.1), 1, operator="linear", module="*.up_proj"):
        first = audit(model).suspects[0]
    assert (first.site.module, first.fault_class) == ("model.layers.1.mlp.up_proj", "dead zone")


def fused_rotation(turn: int = 0, factor: float = 1.0) -> Any:
    """In float64, rounded once."""

    def rotate(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = (x.roll(turn, -2).unsqueeze(unsqueeze_dim).double() for x in (cos, sin))

        def one(x):
            first, second = x.double().chunk(2, -1)
            return (factor * (x.double() * cos + torch.cat((-second, first), -1) * sin)).to(x.dtype)

        return one(q), one(k)

    return rotate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fused_kernel_in_place_of_a_function_of_the_file(dtype, monkeypatch):
    """It may leave roundings out; it may not compute something else."""
    model = tiny_model("llama").to(dtype)
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", fused_rotation())
    verdict = audit(model)
    assert not verdict.suspects, verdict.headline
    assert verdict.verdict == "healthy", verdict.headline
    assert any("apply_rotary_pos_emb" in note for note in verdict.notes)
    for wrong in (fused_rotation(turn=1), fused_rotation(factor=1.1)):
        monkeypatch.setattr(llama, "apply_rotary_pos_emb", wrong)
        first = audit(model, quick=True).suspects[0]
        assert (first.site.place, first.site.tensor) == (0, "input"), first
