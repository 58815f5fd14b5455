"""Tasks of lm-evaluation-harness (the extra "lm-eval") as our data sets, in the harness's own words.

The harness writes the prompts, few-shot examples included, the choices and the targets; we score them. Its filters and
its metrics are not used, so an accuracy here is near its own, not equal. It fetches a task's data from the hub itself
(HF_HUB_OFFLINE=1 forbids that).
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from noisescope.data.dataset import DataSet, Item, gather
from noisescope.errors import InvalidInput, MissingExtra, whole_number

FEW_SHOT_SEED = 1234  # the harness's own default: the same examples as `lm_eval run`


def load_task(name: str, *, limit: int | None = None) -> DataSet:
    """A task of the harness by name ("arc_easy"), or by the path of its YAML file; the first `limit` of its documents.

    A task's YAML may name Python functions, which the harness runs: load only files that you trust.
    """
    try:
        manager_class: Any = importlib.import_module("lm_eval.tasks").TaskManager
    except ImportError:
        raise MissingExtra(f"the task {name!r} needs the package lm-eval: pip install 'noisescope[lm-eval]'") from None
    is_file = Path(name).suffix in (".yaml", ".yml")
    if is_file and not Path(name).is_file():
        raise InvalidInput(f"there is no task file {name!r}")
    manager = manager_class(include_defaults=not is_file)  # the harness's own thousands take seconds to list
    if not is_file and name not in manager.all_tasks:
        near = difflib.get_close_matches(name, manager.all_tasks, n=3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise InvalidInput(f"lm-eval has no task {name!r}.{hint} `lm_eval ls tasks` lists them all")
    try:
        tasks = manager.load([name])["tasks"]
    except Exception as error:  # the harness and its data library raise anything where a data set can't be had
        line = " ".join(str(error).split())[:500] or type(error).__name__
        raise InvalidInput(f"lm-eval can't load the task {name!r}: {line}") from error
    if len(tasks) != 1:
        raise InvalidInput(
            f"{name!r} is a group of {len(tasks)} tasks; name one of them: {', '.join(list(tasks)[:10])}"
        )
    return from_task(next(iter(tasks.values())), limit=limit)


def from_task(task: Any, *, limit: int | None = None) -> DataSet:
    """A task that the harness has loaded already."""
    name = str(task.config.task)
    make = _MAKERS.get(task.OUTPUT_TYPE)
    if make is None:
        raise InvalidInput(f"the task {name!r} is of type {task.OUTPUT_TYPE!r}; supported: {', '.join(_MAKERS)}")
    if getattr(task, "MULTIMODAL", False) or getattr(task, "multiple_input", 0):
        raise InvalidInput(f"the task {name!r} needs pictures, sound, or a prompt for each choice: not supported")
    if limit is not None:
        whole_number(limit, "limit")
    shots = int(task.config.num_fewshot or 0)
    task.set_fewshot_seed(FEW_SHOT_SEED)  # else the examples would be others in every run
    items = []
    for number, doc in enumerate(task.eval_docs):
        if number == limit:
            break
        items.append(make(task, doc, shots, f"lm-eval task {name}, document {number + 1}"))
    note = f"lm-eval task {name}, {shots} shots"
    if any(item.prompt and not _spaced(task, item) for item in items):
        note += "; prompt and answer are joined by a space, which the harness does not put there"
    return gather(items, f"lm-eval:{name}", note=note)


def _choice(task: Any, doc: Any, shots: int, where: str) -> Item:
    choices, target = [str(choice) for choice in task.doc_to_choice(doc)], task.doc_to_target(doc)
    if isinstance(target, str) and target in choices:
        target = choices.index(target)
    if isinstance(target, bool) or not isinstance(target, int) or not 0 <= target < len(choices):
        raise InvalidInput(f"{where}: the target {target!r:.60} is none of the {len(choices)} choices")
    prompt = _prompt(task, doc, shots)
    if not prompt.strip() or not all(choice.strip() for choice in choices):
        raise InvalidInput(f"{where}: its prompt or one of its choices is empty")
    before, behind = _delimiter(task)
    return Item(0, prompt=prompt + before, choices=tuple(behind + choice for choice in choices), label=target)


def _answer(task: Any, doc: Any, shots: int, where: str) -> Item:
    before, behind = _delimiter(task)
    item = _continuation(task, doc, shots, where)
    return item if item.text else replace(item, prompt=item.prompt + before, answer=behind + item.answer)


def _continuation(task: Any, doc: Any, shots: int, where: str) -> Item:
    """A target right behind its context: where that is empty, nothing is asked and the target is a text."""
    prompt, target = _prompt(task, doc, shots), _target(task, doc, where)
    return Item(0, prompt=prompt, answer=target) if prompt.strip() else Item(0, text=target)


def _text(task: Any, doc: Any, shots: int, where: str) -> Item:
    return Item(0, text=_target(task, doc, where))


def _prompt(task: Any, doc: Any, shots: int) -> str:
    return str(task.fewshot_context(doc, shots, gen_prefix=task.doc_to_prefix(doc)))


def _target(task: Any, doc: Any, where: str) -> str:
    target = task.doc_to_target(doc)
    if isinstance(target, (list, tuple)) and target:  # several right answers: few-shot examples show the first as well
        target = target[0]
    if not str(target).strip():
        raise InvalidInput(f"{where}: the target is empty")
    return str(target)


def _delimiter(task: Any) -> tuple[str, str]:
    """What goes to the end of the prompt and to the front of the answer: `encode` puts a plain space there itself."""
    delimiter = str(task.config.target_delimiter)
    if delimiter.strip():
        return delimiter, ""
    return "", "" if delimiter == " " else delimiter


def _spaced(task: Any, item: Item) -> bool:
    """Whether the harness too has white space between this prompt and its answer."""
    answers = item.choices or (item.answer,)
    within = item.prompt[-1].isspace() or all(answer[0].isspace() for answer in answers)
    return within or (task.config.target_delimiter == " " and task.OUTPUT_TYPE != "loglikelihood")


_MAKERS = {
    "multiple_choice": _choice,
    "generate_until": _answer,
    "loglikelihood": _continuation,
    "loglikelihood_rolling": _text,
}
