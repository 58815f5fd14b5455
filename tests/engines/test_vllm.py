"""vLLM beside transformers on the bundled model; `make engines` runs this in a virtual environment of its own."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("vllm", reason="make engines installs it")

import noisescope as ns
from noisescope.api.systems import record_engine, roundoff_band
from noisescope.comparison.system_comparison import Sampling
from noisescope.data.dataset import read_data
from noisescope.demo import test_file as demo_data
from noisescope.diagnosis.format_question import Question
from noisescope.engines.compare import compare_systems
from noisescope.engines.transformers_engine import TransformersEngine
from noisescope.engines.vllm_engine import VllmEngine
from noisescope.options.device_commands import RecordOptions
from noisescope.plans.kv_cache import VLLM_DTYPES, KvCachePlan, export_vllm, vllm_command

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]


@pytest.fixture(scope="module")
def vllm():
    """Without a given length: the demo has fewer positions than the 1024 that others get."""
    return VllmEngine("demo", dtype="float32")


@pytest.fixture(scope="module")
def reference():
    return TransformersEngine(ns.load("demo", dtype="float32"))


@pytest.fixture(scope="module")
def prompts(reference, vllm):
    data = read_data(demo_data(), limit=3)
    mine, its = reference.encode(data, 40), vllm.encode(data, 40)
    assert mine == its
    return mine


def test_sites_and_tensors_have_the_names_of_transformers(reference, vllm):
    """Merged projections are three and two sites; packed weights are read as they are used, bit for bit."""
    mine, its = ({site.module: site.operator for site in one.sites} for one in (reference, vllm))
    assert mine == its
    weights = dict(vllm.tensors())
    for name, tensor in reference.tensors():
        if name.endswith("weight"):
            tied = "model.embed_tokens.weight" if name == "lm_head.weight" else name  # vLLM has it under one name
            assert torch.equal(weights[tied], tensor), name
        elif name == "model.rotary_emb.inv_freq":
            assert torch.allclose(weights[name], tensor, rtol=1e-5)
    assert vllm.facts.engine == "vllm" and vllm.facts.dtype == "float32" and vllm.facts.prefix_cache is False
    assert vllm.facts.attention


def test_a_healthy_pair_differs_by_round_off(reference, vllm, prompts):
    found = compare_systems(reference, vllm, (prompts, prompts), band=roundoff_band(reference, prompts))
    assert (found.verdict, found.causes) == ("round-off", ())
    assert 0 < found.unexplained_gap.value <= found.band.high
    assert found.token_gap.value < 1e-4 and found.remainder.value < 0.01 * found.total.value


def test_reports_and_generation(reference, vllm, prompts):
    """Log-probabilities of a prompt are those of its logits; the greedy text is that of transformers."""
    report = vllm.reported(prompts[0])
    mine = reference.reported(prompts[0])
    assert torch.allclose(report.tokens, mine.tokens, atol=1e-3)
    given = report.rows.isfinite()
    assert int(given[0].sum()) >= 20 and torch.allclose(report.rows[given], mine.rows[given], atol=1e-3)
    assert vllm.generate(prompts[0], 4) == reference.generate(prompts[0], 4)


def test_reports_after_sampling_settings(reference, vllm, prompts, monkeypatch):
    """vLLM gives processed values for generated tokens alone: each token of the prompt is generated again."""
    config = vllm._llm.llm_engine.vllm_config.model_config
    monkeypatch.setattr(vllm, "_sampling", Sampling(0.7, processed=True))
    asked = []
    plain = vllm._generate
    monkeypatch.setattr(vllm, "_generate", lambda given, **settings: asked.append(settings) or plain(given, **settings))
    report = vllm.reported(prompts[0][:6])
    assert asked[0]["temperature"] == 0.7 and len(report.tokens) == 5
    assert config.logprobs_mode == "raw_logprobs"  # chosen when the engine starts, so these are the model's own
    rows = reference.reported(prompts[0][:6]).rows
    given = report.rows.isfinite()
    assert torch.allclose(report.rows[given], rows[given], atol=1e-3)


@pytest.mark.parametrize("plant", ["scale", "weight", "stale", "gates", "rotary", "norm"])
def test_planted_causes_are_named(reference, vllm, prompts, plant, monkeypatch):
    block = vllm.model.model.layers[5]
    name = "model.layers.5.mlp.gate_proj.weight"
    kept = {key: value.clone() for key, value in vllm.tensors()}
    if plant == "scale":
        monkeypatch.setattr(block.self_attn.attn.impl, "scale", 1.3 * block.self_attn.attn.impl.scale)
        expected = ("state", "setting scaling", (5,))
    elif plant == "weight":
        vllm.write(name, kept["model.layers.2.mlp.gate_proj.weight"])
        expected = ("state", "another layer's weights", (5,))
    elif plant == "stale":
        for key in kept:
            if key.startswith("model.layers.5."):
                noise = torch.randn(kept[key].shape, generator=torch.Generator().manual_seed(0))
                vllm.write(key, kept[key] + 0.02 * noise)
        expected = ("state", "stale layer", (5,))
    elif plant == "gates":
        inner = block.mlp.gate_up_proj.cpu_linear
        rounded = lambda x, weight, bias: inner(x.bfloat16().float(), weight, bias).bfloat16().float()  # noqa: E731
        monkeypatch.setattr(block.mlp.gate_up_proj, "cpu_linear", rounded)
        expected = ("operators", "linear mlp.gate_proj", (5,))
    elif plant == "rotary":
        vllm.write("model.rotary_emb.inv_freq", kept["model.rotary_emb.inv_freq"] * 1.1)
        expected = ("state", "rotary frequencies", ())
    else:
        monkeypatch.setitem(vars(block.input_layernorm), "variance_epsilon", 0.1)
        expected = ("state", "setting variance_epsilon", (5,))
    try:
        found = compare_systems(reference, vllm, (prompts, prompts))
        named = found.causes[0]
        assert (named.stage, named.name, named.layers) == expected
        assert sum(cause.nats.value for cause in found.causes) == pytest.approx(found.total.value, rel=0.05)
    finally:
        for key, value in vllm.tensors():
            if not torch.equal(value, kept[key]):
                vllm.write(key, kept[key])
    assert all(torch.allclose(value, kept[key], rtol=1e-5) for key, value in vllm.tensors())


def test_a_record_of_vllm_is_compared_with_one_of_transformers(vllm, tmp_path, monkeypatch):
    """The same sites, sketches and prompts; only what vLLM has no module for is not compared."""
    monkeypatch.setattr("noisescope.api.systems.open_engine", lambda *given: vllm)
    options = {"samples": 3, "max_tokens": 40, "output": tmp_path / "vllm.record"}
    found = record_engine(RecordOptions(model="demo", engine="vllm", full_layers=(3,), **options))
    assert found.dtype == "float32" and "vllm" in found.device
    subject = ns.load("demo", dtype="float32")
    other = ns.record(subject, None, tmp_path / "hf.record", samples=3, max_tokens=40, full_layers=(3,))
    compared = ns.compare(other, found)
    assert compared.verdict == "round-off"
    assert {row.operator for row in compared.sites} >= {"linear", "norm", "residual", "embedding"}
    assert {site.operator for site in compared.uncompared} <= {"silu", "attention"}
    assert json.loads((tmp_path / "vllm.record" / "record.json").read_text())["versions"]["vllm"]


def test_an_error_of_a_listener_leaves_vllm_usable(vllm, prompts):
    """It is raised when vLLM is done with the prompt."""

    def fails(call):
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        vllm.logits(prompts[0], fails)
    assert len(vllm.logits(prompts[0])) == len(prompts[0])


def test_a_prompt_in_pieces_is_refused(vllm, prompts, monkeypatch):
    """A forward that runs a part of the prompt would be compared with the whole of it."""
    monkeypatch.setattr(vllm, "_run", lambda ids: type(vllm)._run(vllm, ids[:-2]))
    with pytest.raises(ns.InvalidInput, match=r"ran .* tokens of a prompt of .*: turn off prefix caching"):
        vllm.logits(prompts[0])


@pytest.mark.parametrize(("fmt", "granularity"), list(VLLM_DTYPES))
def test_vllm_reads_the_list_of_layers_whose_cache_keeps_16_bits(fmt, granularity):
    """As keyword arguments from the file, and on the command line; the attention looks layers up by their index."""
    from vllm.config.cache import CacheConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    plan = KvCachePlan(Question(fmt, "kv-cache", granularity, None, False), (0, 5), (1,), (), 1.0, 0.1)
    written = json.loads(export_vllm(plan).text)
    typed = vllm_command(plan, "demo").split()[2:]
    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--model", *typed])
    for given in (EngineArgs(model="demo", **written), EngineArgs.from_cli_args(parsed)):
        config = CacheConfig(given.block_size, cache_dtype=given.kv_cache_dtype,
                             kv_cache_dtype_skip_layers=given.kv_cache_dtype_skip_layers)  # fmt: skip
        assert config.cache_dtype == VLLM_DTYPES[fmt, granularity] and config.kv_cache_dtype_skip_layers == ["0", "5"]
