"""Options of `noisescope diagnose` from a YAML file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from noisescope.cli import app
from noisescope.errors import InvalidInput
from noisescope.options.base import WIDEN_TRUST, canonical_names
from noisescope.options.fields import options_of
from noisescope.options.files import read_file
from noisescope.options.sensitivity import DiagnoseOptions
from noisescope.runs.store import Store

ROOT = Path(__file__).parents[2]
KEYS = {n: o for n, o in options_of(DiagnoseOptions).items() if o.surface in ("both", "command") and n != "config"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., DiagnoseOptions]]:
    """Calls the command without running it: what it would have asked."""
    caught: list[DiagnoseOptions] = []

    class Stop(Exception):
        pass

    def caught_loading(options: DiagnoseOptions, announce: Any) -> None:
        caught.append(options)
        raise Stop

    monkeypatch.setattr("noisescope.api.defaults.load_chosen", caught_loading)
    monkeypatch.setattr("noisescope.cli.command_builder.refuse_early", lambda options: None)  # the files are empty

    def call(*arguments: str, of: str = "diagnose") -> DiagnoseOptions:
        result = CliRunner().invoke(app, [of, *arguments])
        assert isinstance(result.exception, Stop), result.output
        return replace(caught.pop(), config=None)

    yield call
    assert not caught


def written(folder: Path, text: str) -> Path:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return file


FORMAT = {"perturbation", "on", "group_size", "asymmetric"}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "perturbation": st.sampled_from(["int4", "int8"]),
    "on": st.sampled_from(["weights", "activations", "kv-cache"]),
    "level": st.lists(st.sampled_from(["operator", "layer", "channel"]), min_size=1, unique=True),
    "operators": st.lists(st.sampled_from(["softmax", "norm", "gemm"]), min_size=1, unique=True),
    "effort": st.sampled_from(["screen", "standard", "full"]),
    "metric": st.sampled_from(["accuracy", "agreement"]),
    "executor": st.sampled_from(["local", "ray"]),
    "dtype": st.sampled_from(["float32", "bf16"]),
    "stream": st.sampled_from(["host", "disk"]),
    "model": st.sampled_from(["demo", "tiny:llama", "./src"]),
    "data": st.just("pyproject.toml"),
    "calibration": st.just("README.md"),
    "device": st.sampled_from(["cpu", "cuda", "cuda:1", "mps"]),
}
BY_KIND: dict[type, st.SearchStrategy[Any]] = {
    int: st.integers(1, 10**9),
    float: st.floats(1e-6, 1e6),
    bool: st.booleans(),
    str: st.text("abcdefghijklmnopqrstuvwxyz_/.0123456789", min_size=1),
    Path: st.text("abcdefghijklmnopqrstuvwxyz_.0123456789", min_size=1),
}


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Any subset of the options with values that they allow."""
    chosen = draw(st.sets(st.sampled_from(sorted(set(KEYS) - {"model", *WIDEN_TRUST, *FORMAT}))))
    if draw(st.booleans()):  # a number format has no noise scale and no operators
        chosen = (chosen - {"noise_scale", "operators"}) | FORMAT
    return {name: draw(VALUES.get(name, BY_KIND[KEYS[name].kind])) for name in ["model", *sorted(chosen)]}


def as_arguments(values: dict[str, Any]) -> list[str]:
    flags = [name for name, value in values.items() if value is True]
    texts = {n: ",".join(v) if isinstance(v, list) else v for n, v in values.items() if not isinstance(v, bool)}
    pairs = [f"--{name.replace('_', '-')}={text}" for name, text in texts.items()]
    return [*(f"--{name.replace('_', '-')}" for name in flags), *pairs]


@given(values=options(), below=st.booleans(), some=st.data())
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])  # the fixture keeps nothing
def test_a_file_asks_what_the_command_line_asks(
    asked: Callable[..., DiagnoseOptions],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, Any],
    below: bool,
    some: st.DataObject,
) -> None:
    """Whatever subset of options is in the file, and whatever part of it on the command line, the question is one."""
    monkeypatch.chdir(ROOT)
    model = values.pop("model")
    if "answer_field" in values:  # one needs the other
        values.setdefault("prompt_field", "prompt")
    on_the_line = asked(*as_arguments(values), "--", model)
    here = some.draw(st.sets(st.sampled_from(sorted(values)))) if values else set()
    flags = {name for name in here if isinstance(values[name], bool)}  # a flag that is off can't be said on the line
    inside = {"model": model} | {name: v for name, v in values.items() if name not in here or name in flags}
    text = yaml.safe_dump({"diagnostic": inside} if below else inside)
    file = written(tmp_path_factory.mktemp("config"), text)
    assert asked("--config", str(file), *as_arguments({n: values[n] for n in here})) == on_the_line


def test_the_command_line_wins_over_the_file_over_the_default(
    asked: Callable[..., DiagnoseOptions], tmp_path: Path
) -> None:
    """Also where the line repeats the default, and where --config comes last; the file itself is not asked for."""
    file = written(tmp_path, "model: tiny:gpt2\nseeds: 7\nwindow: 5\nretry-failed: true\n")
    found = asked("--seeds", "3", "tiny:llama", "--config", str(file))
    assert (found.model, found.seeds, found.window, found.step) == ("tiny:llama", 3, 5, 1)
    assert found.retry_failed is True and found.output == Path("noisescope-run")


def test_relative_paths_are_relative_to_the_current_folder(
    asked: Callable[..., DiagnoseOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the command line: the folder of the file plays no part."""
    (tmp_path / "configs").mkdir()
    file = written(tmp_path / "configs", "model: demo\ndata: x.jsonl\noutput: out\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text("")
    assert asked("--config", str(file)) == asked("demo", "--data", "x.jsonl", "-o", "out")
    assert asked("--config", str(file)).data == Path("x.jsonl")


def test_the_layout_of_the_original_method_notes(
    asked: Callable[..., DiagnoseOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sections by level, their names, their "matmul" (every product), and keys that leave no choice."""
    monkeypatch.chdir(tmp_path)
    for name in ("t.jsonl", "c.jsonl"):
        (tmp_path / name).write_text("")
    text = """
    trainer: {seed: 3}
    model: {path: for another tool}
    diagnostic:
      enabled: true
      mode: full
      model: demo
      test_data: t.jsonl
      calibration_data: c.jsonl
      operator: {noise_scale: 5e-2, operators: [matmul, softmax, layernorm]}
      layer: {window_size: 4, step_size: 2, noise_scale: 0.05}
      channel: {calibration_samples: 50, outlier_threshold: 20, save_activations: true}
    """
    line = "--level operator,layer,channel --data t.jsonl --calibration c.jsonl --noise-scale 0.05 --window 4 --step 2"
    line += " --operators gemm,softmax,layernorm --calibration-samples 50 --outlier-threshold 20 --save-activations"
    assert asked("--config", str(written(tmp_path, text))) == asked("demo", *line.split())


def test_every_alias_is_an_option() -> None:
    """No alias hides an option, and the names of the original method notes are understood."""
    names = canonical_names(KEYS.values())
    assert all(names[name] == name for name in KEYS)
    notes = {"mode": "level", "test_data": "data", "calibration_data": "calibration", "window_size": "window",
             "step_size": "step", "n_samples": "samples", "model_path": "model"}  # fmt: skip
    assert notes.items() <= names.items() and "config" not in names


def test_lists_and_empty_values(tmp_path: Path) -> None:
    """Lists where the line has commas; an optional value may be left empty; an empty file asks for nothing."""
    text = "level: [operator, layer]\noperators: softmax, norm\ndata:\n"
    assert read_file(written(tmp_path, text), DiagnoseOptions) == {
        "level": ("operator", "layer"),
        "operators": ("softmax", "norm"),
        "data": None,
    }
    for empty in ("", "{}", "diagnostic:", "# nothing"):
        assert read_file(written(tmp_path, empty), DiagnoseOptions) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("windw: 3", "run.yaml: unknown option 'windw'.*Did you mean 'window'"),
        ("diagnostic: {windowsize: 3}", "Did you mean 'window_size'"),
        ("operator: softmax", "Did you mean 'operators'"),
        ("layer: {operators: [softmax]}", "unknown option 'operators'. Allowed: noise_scale, window, step"),
        ("config: other.yaml", "unknown option 'config'"),
        ("3: 4", "unknown option '3'"),
        ("window: three", "run.yaml: window must be a whole number, got the text 'three'"),
        ("diagnostic: {window_size: 2.5}", "diagnostic.window_size must be a whole number, got the number 2.5"),
        ("seeds: true", "seeds must be a whole number, got True"),
        ("seeds: [0, 1]", "seeds must be a whole number, got a list"),
        ("noise_scale: much", "noise_scale must be a number, got the text 'much'"),
        ("noise_scale: false", "noise_scale must be a number, got False"),
        ("noise_scale:", "noise_scale must be a number, got nothing"),
        ("generate: 1", "generate must be true or false, got the number 1"),
        ("generate: 'yes'", "generate must be true or false, got the text 'yes'"),
        ("revision: 12", "revision must be text, got the number 12 .put it into quotes"),
        ("data: [a, b]", "data must be a path as text, got a list"),
        ("data: 2025-01-01", "data must be a path as text, got a date"),
        ("operators: {softmax: 1}", "operators must be text or a list of names such as softmax,norm, got a mapping"),
        ("operators: []", "list of names such as"),
        ("level: [1]", "list of names such as"),
        ("window: 3\nwindow_size: 4", "window and window_size both set 'window', to 3 and 4"),
        ("operator: {noise_scale: 0.1}\nlayer: {noise_scale: 0.2}", "operator.noise_scale and layer.noise_scale both"),
        ("window: 3\n\nstep: 1\nwindow: 3", "line 4: window occurs twice .first on line 1"),
        ("channel:\n  save_activations: 1", "channel.save_activations must be true or false, got the number 1"),
        ("diagnostic: {enabled: false}", "diagnostic.enabled is false"),
        ("noise_scale: 0.1\ndiagnostic: {window: 3}", "noise_scale stands beside `diagnostic:`"),
        ("noise_scal: 0.1\ndiagnostic: {window: 3}", "noise_scal stands beside `diagnostic:`"),
        (
            "trust-remote-code: true",
            "trust-remote-code can't be set in a file.*give --trust-remote-code on the command",
        ),
        ("diagnostic: {address: 'ray://x:1'}", "diagnostic.address can't be set in a file.*give --address on the"),
        ("- window", "must hold `option: value` lines, got a list"),
        ("diagnostic: 3", "diagnostic must hold `option: value` lines, got the number 3"),
        ("window: 3\nstep: [1", "run.yaml is not a valid config file: line 2: "),
        ("window: 3\n\tstep: 1", "run.yaml is not a valid config file: line 2: "),
        ("a: 1\n---\nb: 2", "run.yaml is not a valid config file: line 2: "),
        ("window: !!python/object/apply:os.system ['true']", "run.yaml is not a valid config file: line 1: "),
        ("data: 2025-13-01", "is not a valid config file: month must be in"),
        ("a: &a [*a]", "line 1: an alias of itself"),
    ],
)
def test_mistakes_say_file_key_and_what_is_allowed(text: str, words: str, tmp_path: Path) -> None:
    """What came, what is allowed, what to do."""
    with pytest.raises(InvalidInput, match=words):
        read_file(written(tmp_path, text), DiagnoseOptions)


def test_mistakes_are_one_line_for_a_user(tmp_path: Path) -> None:
    """Exit code 2, no traceback: a wrong key, no file, a file that is no text, and no model anywhere."""
    file = written(tmp_path, "windw: 3")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for arguments, words in (
        (["--config", str(file)], "Did you mean 'window'"),
        (["demo", "--config", str(tmp_path / "none.yaml")], "there is no config file"),
        (["demo", "--config", str(tmp_path)], "it is a folder"),
        (["demo", "--config", str(tmp_path / "binary.yaml")], "is not UTF-8"),
        (["--config", str(written(tmp_path, "window: 3"))], "MODEL"),
    ):
        file.write_text("windw: 3" if "Did" in words else "window: 3")
        result = CliRunner().invoke(app, ["diagnose", *arguments])
        assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output


def test_a_run_from_a_file_is_resumed_without_it(asked: Callable[..., DiagnoseOptions], tmp_path: Path) -> None:
    """The store keeps plain options, all that the command needs: the file may be gone. So may names of before."""
    (tmp_path / "x.jsonl").write_text("")
    text = f"model: demo\ndata: {tmp_path / 'x.jsonl'}\noperators: [softmax, norm]\noutput: {tmp_path}\n"
    file = written(tmp_path, text)
    found = asked("--config", str(file))
    stored = json.loads(json.dumps(found.plain()))
    for options in (stored, {**stored, "level": "operator,layer,channel", "slice_samples": stored["slice"]}):
        with Store(tmp_path) as store:
            store.note(command={"name": "diagnose", "options": options})
        file.unlink(missing_ok=True)
        assert asked("resume", str(tmp_path), of="runs") == dataclasses.replace(found, resumes="", left_open=())


def test_what_a_file_and_options_say_together_names_the_key(tmp_path: Path) -> None:
    """A rule between options that a key of the file breaks."""
    file = written(tmp_path, "method: fingerprint\n")
    said = CliRunner().invoke(app, ["locate", "demo", "--config", str(file), "--reference", str(tmp_path)]).output
    assert "give them as --failure" in said
    file.write_text("method: audit\nfailure: .\n")
    said = CliRunner().invoke(app, ["locate", "demo", "--config", str(file)]).output
    assert f"failure (in {file}) is for the method fingerprint" in said and len(said.splitlines()) == 1


def test_a_bare_on_is_an_option_and_no_boolean(tmp_path: Path) -> None:
    """YAML 1.1 reads the key `on` as true."""
    file = tmp_path / "run.yaml"
    file.write_text("perturbation: int4\non: kv-cache\ngroup_size: 32\nasymmetric: true\n")
    assert read_file(file, DiagnoseOptions) == {
        "perturbation": "int4",
        "on": "kv-cache",
        "group_size": 32,
        "asymmetric": True,
    }
