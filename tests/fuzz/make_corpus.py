"""Write the corpus again: `python -m tests.fuzz.make_corpus`. Run it after a change of a file format.

Each folder holds valid files of one reader. They are small, so that most mutations hit something that matters.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from safetensors.torch import save_file
from tests.api.test_records_msprobe import dump
from tests.model.test_loading import write_gguf
from tests.reports.conftest import diagnosis_report, robustness_report
from tests.reports.test_junit import verdict
from tests.reports.test_run_changes import comparison, row

import noisescope as ns
from noisescope.jsonform import to_json
from noisescope.passports.diff import write_passport
from noisescope.passports.measure import take_passport
from noisescope.reports.saved_report import Report
from noisescope.testing import tiny_model

CORPUS = Path(__file__).parent / "corpus"
YAML = {
    "plain.yaml": "noise_scale: 0.05\nwindow: 3\nlevel: [operator, layer]\noperators: softmax,norm\nseeds: 3\n",
    "notes.yaml": "diagnostic:\n  mode: full\n  operator: {noise_scale: 0.05, operators: [matmul, softmax]}\n"
    "  layer: {window_size: 3, step_size: 1}\n  channel: {calibration_samples: 1000}\nother_tool: {a: 1}\n",
    "aliases.yaml": "diagnostic: &all\n  window: &w 3\n  step: 1\ncopy: *all\nmore: {w: *w}\n",
}
DATA: list[dict[str, Any]] = [
    {"prompt": "2 + 2 =", "choices": ["3", "4"], "label": 1},
    {"prompt": "The capital of France is", "choices": ["Rome", "Paris", "Oslo"], "label": "B"},
]


def written(folder: str, name: str, content: str) -> None:
    (CORPUS / folder).mkdir(parents=True, exist_ok=True)
    (CORPUS / folder / name).write_text(content, encoding="utf-8")


def as_json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    shutil.rmtree(CORPUS, ignore_errors=True)
    CORPUS.mkdir()
    written("report", "diagnosis.json", Report(diagnosis_report()).to_json())
    written("report", "robustness.json", Report(robustness_report()).to_json())
    written(
        "report",
        "changes.json",
        comparison([row("layer 1", 0.1, "worse"), row("gemm", None, "not measurable")]).to_json(),
    )
    written("gate", "gate.json", as_json(to_json(verdict(1.1, 0.02, 3))))
    for name, text in YAML.items():
        written("yaml", name, text)
    written("latency", "latency.json", as_json({"*": {"int8": 0.5, "bf16": 1.0}, "lm_head": {"bf16": 2}}))
    written("tally", "rank0-1.json", as_json({"rank": 0, "forward": 12, "backward": 3}))
    written("prompts", "prompts.txt", "One prompt.\n\nAnother \u00e9\u4e2d.\n")
    write_passport(take_passport(quick=True), CORPUS / "passport" / "cpu.json")
    torch_files()
    data_files()


def torch_files() -> None:
    model = tiny_model("llama", layers=1)
    subject = ns.wrap(model)
    ids = [{"input_ids": torch.arange(3, 11)[None]}]
    ns.record(subject, ids, CORPUS / "record" / "tiny.record", samples=1)
    written("comparison", "same.json", ns.compare(*[CORPUS / "record" / "tiny.record"] * 2).to_json())
    for name in ("llama", "gpt2", "mixtral"):
        written("config", f"{name}.json", tiny_model(name).config.to_json_string())
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    shards = {"model.embed_tokens.weight": names[0], "lm_head.weight": names[1]}
    written("index", "index.json", as_json({"metadata": {"total_size": 9}, "weight_map": shards}))
    (CORPUS / "safetensors").mkdir()
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    save_file(tensors, CORPUS / "safetensors" / "two.safetensors", {"same": '{"c": "a"}'})
    (CORPUS / "gguf").mkdir()
    write_gguf(CORPUS / "gguf" / "tiny.gguf", tokenizer=True)
    scratch = CORPUS / "scratch"
    found = dump(model, scratch) / "step0" / "rank0"
    entries = json.loads((found / "dump.json").read_text())
    entries["dump_data_dir"] = "step0/rank0"
    written("dump", "dump.json", as_json(entries))
    (CORPUS / "tensor").mkdir()
    torch.save(torch.arange(6.0).reshape(2, 3), CORPUS / "tensor" / "plain.pt")
    torch.save(torch.ones(3, dtype=torch.bfloat16), CORPUS / "tensor" / "short.pt")
    shutil.rmtree(scratch)


def data_files() -> None:
    written("jsonl", "data.jsonl", "".join(json.dumps(each) + "\n" for each in DATA))
    written("json", "data.json", as_json({"data": DATA}))
    talk = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    written("jsonl", "chat.jsonl", json.dumps(talk) + "\n")
    written("csv", "data.csv", 'prompt,choices,label\na,"[""x"", ""y""]",1\n"b\nc","[""x"", ""z""]",A\n')
    written("csv", "plain.csv", "text,other\none,1\ntwo,2\n")
    (CORPUS / "parquet").mkdir()
    table = pyarrow.table({"text": ["one", "two"] * 20, "number": np.arange(40)})
    pyarrow.parquet.write_table(table, CORPUS / "parquet" / "text.parquet")
    choices = pyarrow.Table.from_pylist([{"prompt": "a", "choices": ["x", "y"], "label": n % 2} for n in range(9)])
    pyarrow.parquet.write_table(choices, CORPUS / "parquet" / "choices.parquet", compression="none")


if __name__ == "__main__":
    main()
