"""Tasks of lm-evaluation-harness: a stand-in with its protocol everywhere, the real package where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from noisescope.data.dataset import DataSet, Item
from noisescope.data.lm_eval import from_task, load_task
from noisescope.errors import InvalidInput, MissingExtra


@dataclass
class Config:
    task: str = "stub"
    num_fewshot: int | None = None
    target_delimiter: str = " "


@dataclass
class Task:
    """What we use of the harness's ConfigurableTask."""

    OUTPUT_TYPE: str
    docs: list[dict[str, Any]]
    config: Config = field(default_factory=Config)
    seeds: list[int] = field(default_factory=list)
    multiple_input: int = 0
    prefix: str | None = None

    @property
    def eval_docs(self) -> list[dict[str, Any]]:
        return self.docs

    def set_fewshot_seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def doc_to_prefix(self, doc: dict[str, Any]) -> str | None:
        return self.prefix

    def doc_to_choice(self, doc: dict[str, Any]) -> Any:
        return doc["choices"]

    def doc_to_target(self, doc: dict[str, Any]) -> Any:
        return doc["target"]

    def fewshot_context(self, doc: dict[str, Any], num_fewshot: int, gen_prefix: str | None = None) -> str:
        return "".join(f"shot {number}\n" for number in range(num_fewshot)) + doc.get("ask", "") + (gen_prefix or "")


CAPITAL = {"ask": "Capital?\nAnswer:", "choices": ["Rome", "Paris"], "target": 1}


def only(data: DataSet) -> Item:
    (item,) = data.items
    return item


@pytest.mark.parametrize(
    ("kind", "doc", "item"),
    [
        ("multiple_choice", CAPITAL, Item(0, prompt="Capital?\nAnswer:", choices=("Rome", "Paris"), label=1)),
        ("multiple_choice", {"ask": "a", "choices": ["b", "c"], "target": "c"}, Item(0, "", "a", "", ("b", "c"), 1)),
        ("generate_until", {"ask": "1+1=", "target": "2"}, Item(0, prompt="1+1=", answer="2")),
        ("generate_until", {"ask": "1+1=", "target": ["2", "two"]}, Item(0, prompt="1+1=", answer="2")),
        ("generate_until", {"ask": "1+1=", "target": 2}, Item(0, prompt="1+1=", answer="2")),
        ("loglikelihood", {"ask": "the last", "target": " word"}, Item(0, prompt="the last", answer=" word")),
        ("loglikelihood", {"ask": "", "target": "a text"}, Item(0, text="a text")),
        ("loglikelihood_rolling", {"ask": "", "target": "a text"}, Item(0, text="a text")),
    ],
)  # fmt: skip
def test_each_type_becomes_a_kind(kind: str, doc: Any, item: Item) -> None:
    """Choices, answers and texts come from the task's own functions."""
    data = from_task(Task(kind, [doc]))
    assert only(data) == item and data.kind == item.kind
    assert data.source == "lm-eval:stub" and data.note.startswith("lm-eval task stub, 0 shots")


def test_few_shot_examples_are_in_the_prompt() -> None:
    """They are drawn with the harness's own seed, so that each run has the same; a prefix of the answer is kept."""
    task = Task("multiple_choice", [CAPITAL], Config(num_fewshot=2), prefix=" It is")
    data = from_task(task)
    assert only(data).prompt == "shot 0\nshot 1\nCapital?\nAnswer: It is" and "2 shots" in data.note
    assert task.seeds == [1234]


@pytest.mark.parametrize(
    ("delimiter", "prompt", "choice", "noted"),
    [
        (" ", "Q:", "Rome", False),
        ("\n", "Q:", "\nRome", False),
        ("", "Q:", "Rome", True),  # `encode` joins by a space: stated in the note
        (":", "Q::", "Rome", True),
    ],
)
def test_the_delimiter_of_a_task(delimiter: str, prompt: str, choice: str, noted: bool) -> None:
    """White space goes before the answer, anything else behind the prompt."""
    doc = {"ask": "Q:", "choices": ["Rome", "Paris"], "target": 0}
    data = from_task(Task("multiple_choice", [doc], Config(target_delimiter=delimiter)))
    assert (only(data).prompt, only(data).choices[0]) == (prompt, choice)
    assert ("joined by a space, which the harness does not put there" in data.note) == noted
    answer = from_task(Task("generate_until", [{"ask": "Q:", "target": "Rome"}], Config(target_delimiter=delimiter)))
    assert (only(answer).prompt, only(answer).answer) == (prompt, choice)


def test_the_limit() -> None:
    """The first documents; the rest is not looked at."""
    docs = [CAPITAL, CAPITAL, {"broken": True}]
    assert len(from_task(Task("multiple_choice", docs), limit=2).items) == 2
    for wrong in (0, True, 1.5):
        with pytest.raises(InvalidInput, match="limit must be an integer of at least 1"):
            from_task(Task("multiple_choice", docs), limit=wrong)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Task("multiple_choice", [CAPITAL | {"target": -1}]), r"document 1: the target -1 is none of the 2 choices"),
        (Task("multiple_choice", [CAPITAL, CAPITAL | {"target": "x"}]), r"stub, document 2: the target 'x' is none"),
        (Task("multiple_choice", [CAPITAL | {"target": [0, 1]}]), r"the target \[0, 1\] is none"),
        (Task("multiple_choice", [CAPITAL | {"ask": ""}]), "its prompt or one of its choices is empty"),
        (Task("multiple_choice", [CAPITAL | {"choices": ["", "b"]}]), "its prompt or one of its choices is empty"),
        (Task("generate_until", [{"ask": "a", "target": ""}]), "document 1: the target is empty"),
        (Task("multiple_choice", [CAPITAL], multiple_input=2), "needs pictures, sound, or a prompt for each choice"),
        (Task("something_new", []), "is of type 'something_new'; supported: multiple_choice, generate_until, "),
        (Task("generate_until", []), "lm-eval:stub holds no data"),
    ],
)
def test_what_is_not_supported(task: Task, words: str) -> None:
    """A document or a task that can't become an item is reported by name."""
    with pytest.raises(InvalidInput, match=words):
        from_task(task)


def test_the_package_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without lm-eval the error is the pip line."""
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(
        MissingExtra, match=r"'arc_easy' needs the package lm-eval: pip install 'noisescope\[lm-eval\]'"
    ):
        load_task("arc_easy")


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a stand-in for lm_eval.tasks in place, with these tasks."""

    def install(tasks: dict[str, Any]) -> None:
        class TaskManager:
            all_tasks = ("arc_easy", "arc_challenge", "mmlu")

            def __init__(self, *, include_defaults: bool = True) -> None:
                pass

            def load(self, names: list[str]) -> dict[str, Any]:
                if not tasks:
                    raise ConnectionError("no route\nto the hub")
                return {"tasks": tasks}

        module = types.ModuleType("lm_eval.tasks")
        module.TaskManager = TaskManager  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "lm_eval", types.ModuleType("lm_eval"))
        monkeypatch.setitem(sys.modules, "lm_eval.tasks", module)

    return install


def test_a_task_by_name(harness: Any, tmp_path: Path) -> None:
    """One task is loaded; groups, unknown names, missing files and the harness's own errors are reported."""
    harness({"arc_easy": Task("multiple_choice", [CAPITAL, CAPITAL])})
    assert len(load_task("arc_easy", limit=1).items) == 1
    with pytest.raises(InvalidInput, match=r"lm-eval has no task 'arc_esy'\. Did you mean arc_easy"):
        load_task("arc_esy")
    with pytest.raises(InvalidInput, match=r"there is no task file '.*mine\.yaml'"):
        load_task(str(tmp_path / "mine.yaml"))
    harness({"mmlu_law": None, "mmlu_art": None})
    with pytest.raises(InvalidInput, match="'mmlu' is a group of 2 tasks; name one of them: mmlu_law, mmlu_art"):
        load_task("mmlu")
    harness({})
    with pytest.raises(InvalidInput, match="lm-eval can't load the task 'arc_easy': no route to the hub"):
        load_task("arc_easy")


# -- the real package, on a file of our own


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
@pytest.mark.filterwarnings("ignore")  # the harness's and its data library's own
@pytest.mark.parametrize(
    ("settings", "item"),
    [
        (
            {"output_type": "multiple_choice", "doc_to_choice": "{{options}}", "doc_to_target": "{{right}}"},
            Item(0, prompt="Q: q0\nA:", choices=("a0", "b0"), label=0),
        ),
        (
            {"output_type": "generate_until", "doc_to_target": "{{options[right]}}"},
            Item(0, prompt="Q: q0\nA:", answer="a0"),
        ),
        (
            {"output_type": "loglikelihood", "doc_to_target": " {{options[1]}}"},
            Item(0, prompt="Q: q0\nA:", answer=" b0"),
        ),
        (
            {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{ask}} {{options[0]}}"},
            Item(0, text="q0 a0"),
        ),
    ],
)  # fmt: skip
def test_the_real_harness(
    settings: dict[str, Any], item: Item, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A YAML task over a local file becomes our data set; few-shot examples are the same in every load."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    docs = [{"ask": f"q{i}", "options": [f"a{i}", f"b{i}"], "right": i % 2} for i in range(12)]
    (tmp_path / "docs.json").write_text("\n".join(map(json.dumps, docs)))
    config = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.json"), "train": str(tmp_path / "docs.json")}},
        "test_split": "test",
        "training_split": "train",
        "fewshot_split": "train",
        "doc_to_text": "Q: {{ask}}\nA:",
        **settings,
    }
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    data = load_task(str(path), limit=5)
    assert data.items[0] == item and len(data.items) == 5 and data.source == "lm-eval:mine"
    if item.kind == "text":
        return
    path.write_text(json.dumps(config | {"num_fewshot": 2}))
    shots, again = load_task(str(path), limit=5), load_task(str(path), limit=5)
    assert shots.fingerprint == again.fingerprint != data.fingerprint
    task = (
        importlib.import_module("lm_eval.tasks").TaskManager(include_defaults=False).load([str(path)])["tasks"]["mine"]
    )
    task.set_fewshot_seed(1234)  # as the harness's own evaluator does
    task.build_all_requests(limit=5)
    contexts = list(dict.fromkeys(request.args[0] for request in task.instances))
    assert [one.prompt for one in shots.items] == contexts and contexts[0].count("Q: ") == 3 and "2 shots" in shots.note
