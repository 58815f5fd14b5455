"""Options as values: one check for the command line, files and Python."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from noisescope.errors import InvalidInput
from noisescope.options.base import CommandOptions, takes_options
from noisescope.options.device_commands import CompareOptions, LocateOptions
from noisescope.options.docs_tables import COMMANDS, GROUPS
from noisescope.options.fields import argument, changed, option, options_of
from noisescope.options.plans import PrecisionOptions, SmoothquantOptions
from noisescope.options.sensitivity import DiagnoseOptions, GateOptions, RobustnessOptions
from noisescope.options.shared import ExecutionOptions


@dataclass(frozen=True, kw_only=True)
class Drinks(CommandOptions):
    kind: str = option("tea", "What to drink.", choices=("tea", "coffee"), aliases=("sort",))
    cups: int = option(1, "How many.", least=1)
    heat: float | None = option(None, "Celsius.", above=0, below=100, words={"cold": None})
    sizes: tuple[float, ...] = option((0.2,), "Litres.", most=1)
    place: Path | None = option(None, "Where.", surface="python")
    shown: bool = option(False, "Print it.", surface="command")


@dataclass(frozen=True, kw_only=True)
class Party(Drinks, ExecutionOptions):
    host: str = argument("HOST", "Who invites.")
    cups: int = changed(Drinks, "cups", 20)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kind": "tae"}, "unknown kind 'tae'. Allowed: tea, coffee. Did you mean 'tea'"),
        ({"cups": 0}, "cups must be at least 1, got 0"),
        ({"cups": 1.5}, "cups must be a whole number, got the number 1.5"),
        ({"cups": True}, "cups must be a whole number, got True"),
        ({"cups": None}, "cups must be a whole number, got nothing"),
        ({"heat": 100}, "heat must be below 100, got 100"),
        ({"heat": float("nan")}, "heat must be finite"),
        ({"heat": "warm"}, "heat must be a number or cold, got the text 'warm'"),
        ({"sizes": (0.2, 3)}, "sizes must be at most 1, got 3"),
        ({"sizes": "0.2;3"}, "numbers with commas between or a list of numbers such as 0,0.05,0.10; got 0.2;3"),
        ({"sizes": ()}, "sizes is empty"),
        ({"sizes": {0.2: 1}}, "got a mapping"),
        ({"shown": "yes"}, "shown must be true or false, got the text 'yes'"),
    ],
)
def test_what_is_refused(wrong: dict[str, Any], words: str) -> None:
    """What came, what is allowed."""
    with pytest.raises(InvalidInput, match=words):
        Drinks(**wrong)


def test_one_form() -> None:
    """Text, lists, sets and numbers of any kind end in the same value."""
    assert Drinks(sizes="0.5, 0.2").sizes == Drinks(sizes=[0.5, 0.2]).sizes == (0.5, 0.2)
    assert Drinks(sizes=1).sizes == (1.0,) and Drinks(heat="cold").heat is None and Drinks(heat=3).heat == 3.0
    assert Drinks(place="here").place == Path("here")


def test_a_group_is_written_once() -> None:
    """Own options come first; a changed default keeps everything else of its option."""
    assert list(options_of(Party))[:2] == ["host", "cups"] and {"kind", "output"} <= set(options_of(Party))
    assert options_of(Party)["cups"].default == 20 and options_of(Party)["cups"].least == 1
    with pytest.raises(InvalidInput, match="cups must be at least 1"):
        Party(cups=0)


@pytest.mark.parametrize("cls", [*COMMANDS, *GROUPS], ids=lambda cls: cls.__name__)
def test_the_nearest_class_decides(cls: type) -> None:
    """Where two groups share a third, dataclasses let the wrong one win unless bases are in the right order."""
    for name, known in options_of(cls).items():
        nearest = next(one for one in cls.__mro__ if name in vars(one).get("__annotations__", {}))
        assert known == options_of(nearest)[name], name


@takes_options(Party, "host")
def invite(day: str, options: Party, *, loud: bool = False) -> Party:
    """Invite people."""
    return options


def test_a_python_function_has_the_options_as_keywords() -> None:
    """A real signature, help, the nearest name for a wrong one, aliases, and several options in one value."""
    parameters = inspect.signature(invite).parameters
    assert list(parameters)[:3] == ["day", "host", "loud"] and parameters["cups"].default == 20
    assert parameters["host"].default is inspect.Parameter.empty and "shown" not in parameters
    assert parameters["sizes"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "cups: How many." in (invite.__doc__ or "") and "One of tea, coffee." in (invite.__doc__ or "")
    found = invite("today", "Ada", sort="coffee", options=ExecutionOptions(output="x", workers=3))
    assert (found.host, found.kind, found.output, found.workers) == ("Ada", "coffee", Path("x"), 3)
    assert invite("today", options=found) is found
    for keywords, words in (
        ({"cupps": 3}, "unknown keyword 'cupps'.*Did you mean 'cups'"),
        ({"shown": True}, "unknown keyword 'shown'"),
        ({"sort": "tea", "kind": "tea"}, "kind is given twice, once as kind"),
        ({"options": found, "cups": 3}, "cups beside options="),
    ):
        with pytest.raises(InvalidInput, match=words):
            invite("today", "Ada", **keywords) if "options" not in keywords else invite("today", **keywords)
    with pytest.raises(TypeError, match="host"):
        invite("today")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LocateOptions(method="fingerprint"), "give them as failure, or simulate a fault; got neither"),
        (lambda: LocateOptions(method="replay"), "needs the record of a good device as reference"),
        (lambda: LocateOptions(method="audit", reference=object()), "leave reference out"),
        (lambda: LocateOptions(method="srdd", inputs=["x"]), "inputs are for audit and relations"),
        (lambda: LocateOptions(inputs=Path("nowhere.txt")), "there is no file nowhere.txt .inputs."),
        (lambda: LocateOptions(quick=True, batch=2), "leave it out, or batch"),
        (lambda: LocateOptions(reference=object(), repeat=2), "repeat is for the audit .*got a reference"),
        (lambda: CompareOptions(a=object(), b=object(), affordable=1), "affordable needs sensitivity"),
        (
            lambda: CompareOptions(a="nowhere.record", b="x"),
            "there is no folder nowhere.record: give a record, a .jsonl file, or a system",
        ),
        (lambda: GateOptions(baseline="none.json"), "there is no report at none.json"),
        (lambda: GateOptions(max_degradation=15), "max_degradation must be below 1, got 15"),
        (lambda: RobustnessOptions(noise_levels=(0,)), "noise_levels must hold a noise level above 0"),
        (lambda: PrecisionOptions(export="json"), "export and output belong together"),
        (lambda: SmoothquantOptions(alpha=2), "alpha must be from 0 to 1, got 2"),
        (lambda: DiagnoseOptions(model="a/b/c"), "there is no file or folder 'a/b/c'"),
        (lambda: DiagnoseOptions(model="nobody/no-such-model"), "neither a folder here nor in the local Hugging Face"),
        (lambda: DiagnoseOptions(data="."), "is a folder, and data is a file"),
    ],
)
def test_mistakes_of_several_commands(make: Any, words: str) -> None:
    """Also what must hold between options."""
    with pytest.raises(InvalidInput, match=words):
        make()


def test_a_hub_id_in_the_cache_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the hub library's own variables."""
    (tmp_path / "hub" / "models--somebody--model").mkdir(parents=True)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert DiagnoseOptions(model="somebody/model").model == "somebody/model"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(InvalidInput, match="hf download somebody/model"):
        DiagnoseOptions(model="somebody/model")


def test_average_bits_are_those_of_the_formats() -> None:
    """The limits are the narrowest and the widest format that a diagnosis scores."""
    from noisescope.diagnosis.format_costs import FORMATS
    from noisescope.measures.format_costs import weight_format

    known = options_of(PrecisionOptions)["average_bits"]
    bits = [weight_format(name).element_bits for name in FORMATS]
    assert (known.least, known.most) == (min(bits), max(bits))


def test_errors_name_options_as_they_were_given(tmp_path: Path) -> None:
    """A keyword in Python, a flag on the command line, a key of a file: also between options, and where both meet."""
    with pytest.raises(InvalidInput, match=r"^affordable needs sensitivity: "):
        CompareOptions(a=object(), b=object(), affordable=1)
    with pytest.raises(InvalidInput, match=r"^--affordable needs --sensitivity: "):
        CompareOptions.from_command_line({"a": tmp_path, "b": tmp_path, "affordable": 1})
    with pytest.raises(InvalidInput, match=r"^noise_levels \(in run.yaml\) must hold a noise level above 0"):
        RobustnessOptions.from_command_line({"model": "demo", "noise_levels": (0.0,)},
                                            keys={"noise_levels": "noise_levels (in run.yaml)"})  # fmt: skip
    with pytest.raises(InvalidInput, match=r"^max_degradation must be below 1, got 15"):
        GateOptions(max_degradation=15)
    with pytest.raises(InvalidInput, match="is a folder, and --data is a file"):
        DiagnoseOptions.from_command_line({"model": "demo", "data": tmp_path})
