"""Noise in a vLLM worker process, switched on by environment variables through its entry point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make engines installs it")

from noisescope.errors import NothingInjected
from noisescope.training import launch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from noisescope import demo
from noisescope.training import launch

def main():
    llm = LLM(str(demo.folder()), dtype="float32", max_model_len=128, enforce_eager=True, disable_log_stats=True,
              enable_prefix_caching=False, max_num_seqs=8, max_num_batched_tokens=int(sys.argv[2]))
    prompts = [[5 + (7 * i + 3 * j) % 90 for j in range(12 + i)] for i in range(6)]
    settings = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, prompt_logprobs=0, ignore_eos=True,
                              detokenize=False)
    def run(chosen):
        found = llm.generate([{"prompt_token_ids": ids} for ids in chosen], settings, use_tqdm=False)
        rows = [(one.prompt_logprobs[1:] + one.outputs[0].logprobs) for one in found]
        return [[next(iter(row.values())).logprob for row in text] for text in rows]
    found = {"together": run(prompts), "alone": [run([ids])[0] for ids in prompts]}
    if len(sys.argv) > 3:
        launch.set_step(sys.argv[3], 9)
        found["last step"] = run(prompts)
    open(sys.argv[1], "w").write(json.dumps(found))

if __name__ == "__main__":
    main()
"""


def run_vllm(tmp_path: Path, variables: dict[str, str], *arguments: str, tokens: int = 512) -> dict[str, list]:
    script, out = tmp_path / "run.py", tmp_path / "out.json"
    script.write_text(SCRIPT, encoding="utf-8")
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}  # fmt: skip
    command = [sys.executable, str(script), str(out), str(tokens), *arguments]
    done = subprocess.run(command, env={**os.environ, **settings, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list] = json.loads(out.read_text())
    return found


def mean_gap(a: list[list[float]], b: list[list[float]], tokens: int) -> float:
    """Over the first tokens: what is generated later may be another text."""
    gaps = [abs(x - y) for left, right in zip(a, b, strict=True) for x, y in zip(left[:tokens], right, strict=False)]
    return sum(gaps) / len(gaps)


def test_noise_in_a_worker_is_that_of_the_prompt_whatever_the_batch(tmp_path):
    """Bit for bit the same one by one, together and in chunks; counted, confirmed, and by the trainer's step.

    Clean is a run whose variables ask for the same noise in training alone, of which `confirm` says so.
    """
    asked = {"operators": ["linear"], "phases": "forward", "seed": 3, "tally": tmp_path}
    variables = launch.environment(0.05, **asked)
    clean = run_vllm(tmp_path, variables)
    assert clean["together"] == clean["alone"]
    with pytest.raises(NothingInjected, match="0 of 1 workers reported"):
        launch.confirm(variables["NOISESCOPE_TALLY"], workers=1)
    variables = launch.environment(0.05, **asked, without_gradients=True, schedule="linear", steps=10)
    tally = variables["NOISESCOPE_TALLY"]
    noisy = run_vllm(tmp_path, variables, tally)
    assert noisy["together"] == noisy["alone"]
    noise = mean_gap(clean["together"], noisy["together"], 11)
    assert noise > 0.01
    assert 0 < mean_gap(clean["together"], noisy["last step"], 11) < noise / 20  # a hundredth of the scale
    (counts,) = launch.confirm(tally, workers=1).values()
    assert counts["forward"] > 100 and counts["backward"] == 0
    chunks = run_vllm(tmp_path, launch.environment(0.05, **asked, without_gradients=True), tokens=16)
    assert chunks["together"] == noisy["together"]
