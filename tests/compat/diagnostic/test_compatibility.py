"""Every name of the notes has a row in docs/compatibility.md, and what the row maps it to is there and works.

notes_names.txt has the names, by the page's sections: a name without a row fails, and so does a row without a name.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main

import noisescope
from noisescope import diagnostic, noisy_ops
from noisescope.cli import app
from noisescope.compat.noisy_ops import environment
from noisescope.compat.noisy_ops.settings import ERROR_TYPES
from noisescope.faults import parse_fault
from noisescope.options.fields import options_of
from noisescope.options.files import read_file
from noisescope.options.sensitivity import DiagnoseOptions
from noisescope.sites import canonical_operator

HERE = Path(__file__).parent
Kit = Any  # of conftest.py
NOT_OFFERED, YOURS = "not offered", "yours"


def names_of(text: str) -> list[tuple[str, str]]:
    found, section = [], ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            found.append((section, line))
    return found


NAMES = names_of((HERE / "notes_names.txt").read_text(encoding="utf-8"))


def in_section(page: list[Any], title: str) -> list[Any]:
    found = [row for row in page if row.section == title]
    assert found, f"the page has no section {title!r}"
    return found


def test_every_name_has_one_row(page):
    """In its own section; no row is without a name of the notes."""
    assert len(NAMES) > 250
    assert sorted(NAMES) == sorted((row.section, row.name) for row in page)


def test_a_missing_row_is_noticed(page):
    """Also where the same name has a row in another section."""
    without = [row for row in page if (row.section, row.name) != ("Keys of the report", "recommendations")]
    assert sorted(NAMES) != sorted((row.section, row.name) for row in without)


def test_what_is_not_offered_says_why(page):
    for row in page:
        if row.here in (NOT_OFFERED, YOURS):
            assert len(row.note.split()) >= 2, row
        else:
            assert row.here, row


def test_modules(page):
    for row in in_section(page, "Modules"):
        assert importlib.import_module(row.here)


def test_the_page_has_every_public_name(page):
    """A name added to either module has a row, or is ours alone."""
    functions = [value for value in vars(noisy_ops).values() if inspect.isfunction(value)]
    public = {f.__name__ for f in functions if f.__module__ == noisy_ops.__name__ and not f.__name__.startswith("_")}
    ours_alone = {name for name in public if name.startswith("get_") and not name.endswith("_stats")}
    ours_alone |= {"noisy_ops_context", "set_phase_scales", "set_training_only", "is_enabled"}
    assert {*diagnostic.__all__, *(public - ours_alone)} <= {row.name for row in page}
    assert set(diagnostic.__all__) == set(dir(diagnostic))


# -- keys


def reached(value: Any, path: str) -> bool:
    """Whether a path such as `per_layer.*.max_ratio` leads somewhere; `*` is any entry."""
    if not path:
        return True
    step, _, rest = path.partition(".")
    if step == "*":
        entries = list(value.values()) if isinstance(value, Mapping) else list(value)
        return any(reached(entry, rest) for entry in entries)
    return isinstance(value, Mapping) and step in value and reached(value[step], rest)


def statistics(kit: Kit) -> dict[str, Any]:
    calls = (
        noisy_ops.get_injection_stats,
        noisy_ops.get_layer_injection_stats,
        noisy_ops.get_operator_injection_stats,
    )
    counts = kit.inside_noise(lambda: {call.__name__: call() for call in calls})
    return {"activation_stats": kit.detector.activation_stats, **counts}


def correlations(kit: Kit) -> dict[str, Any]:
    rows, _ = diagnostic.correlate_layer_and_channel_sensitivity(kit.windows, kit.results["channel_results"])
    return {**kit.results, **rows[0], **diagnostic.validate_metric_correlations(kit.results)}


OBJECTS: dict[str, Callable[[Kit], Any]] = {
    "Keys of the report": lambda k: k.diagnosed.generate_report(),
    "Keys of avalanche points": lambda k: diagnostic.identify_avalanche_points(k.windows),
    "Keys of the dashboard": lambda k: k.dashboard.metrics,
    "Keys of statistics": statistics,
    "Keys of correlations": correlations,
    "Keys of the migration plan": lambda k: k.migration,
    "Keys of fault tests": lambda k: k.generator.generate_test_cases(),
    "Keys of a checkpoint's result": lambda k: k.monitor.history[0],
}


def test_every_section_of_keys_has_its_object(page):
    assert sorted(OBJECTS) == sorted({row.section for row in page if row.section.startswith("Keys of")})


@pytest.mark.parametrize("section", OBJECTS)
def test_keys(page, kit, section):
    """Every key of the page is in a real result."""
    found = OBJECTS[section](kit)
    assert [row.here for row in in_section(page, section) if not reached(found, row.here)] == []
    assert not reached(found, "nonsense")


# -- environment, YAML, commands, values


def test_environment_variables(page, monkeypatch):
    """Each is known to `noisy_ops`, under both names."""
    for row in in_section(page, "Environment variables"):
        suffix = row.name.removeprefix("VERL_NOISY_OPS_")
        assert row.here == f"NOISESCOPE_{suffix}"
        for name in (row.name, row.here):
            with monkeypatch.context() as patch:
                patch.setenv(name, "nonsense")
                with pytest.raises(noisescope.errors.InvalidInput, match=f"{name}='nonsense'"):  # type: ignore[attr-defined]
                    environment.read_environment()


def test_yaml_keys(page, tmp_path):
    """Each is taken from the notes' layout, and sets the option that the page says."""
    values = {"enabled": "true", "mode": "operator", "operators": "[softmax]", "save_activations": "true"}
    keys = set(options_of(DiagnoseOptions))
    for row in in_section(page, "YAML keys"):
        *above, key = row.name.split(".")
        text = values.get(key, "3")
        for name in reversed([*above, key] if above else []):
            text = f"{{{name}: {text}}}"
        (tmp_path / "run.yaml").write_text(text if above else f"{key}: {{}}")
        found = read_file(tmp_path / "run.yaml", DiagnoseOptions)
        assert set(found) == ({row.here} if row.here in keys else set()), row
        assert row.here in keys or row.here in ("diagnostic", "diagnostic.enabled"), row


def test_commands_and_flags(page):
    """A command of the table exists and has the flag."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for row in in_section(page, "Commands"):
        if row.here == NOT_OFFERED:
            continue
        program, first, *rest = row.here.split()
        command = commands[first]
        if rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        flags = {flag for parameter in command.params for flag in parameter.opts}
        assert program == "noisescope" and all(word == "MODEL" or word in flags for word in rest), row


def test_values(page):
    """Error types, faults, methods, levels and operators by the names that the page gives them."""
    from noisescope.diagnosis.context import LEVELS
    from noisescope.options.fields import LOCATE_METHODS as METHODS
    from noisescope.plans import fault_tests

    written_out = inspect.getsource(fault_tests)
    known: dict[str, Callable[[str], Any]] = {
        "error_type": lambda name: name in ERROR_TYPES,
        "mode": lambda name: set(name.split(",")) <= set(LEVELS),
        "method": lambda name: name in METHODS,
        "fault_type": lambda name: parse_fault(f"{name}@0") or True,
        "fault_model": lambda name: parse_fault(f"{name}:channels=0.5@0") or True,
        "test_type": lambda name: name in written_out,
        "operator": lambda name: canonical_operator(name) == name,
    }
    for row in in_section(page, "Values"):
        assert known[row.name.split()[0]](row.here), row


def test_names_are_loaded_when_used():
    """Importing the package loads no torch; a name that is not there says so."""
    heavy = "{'torch', 'numpy', 'matplotlib'} & set(sys.modules)"
    script = f"import sys, noisescope.diagnostic as names; assert not {heavy}; assert names.__all__"
    environment = {**os.environ, "PYTHONPATH": str(Path(noisescope.__file__).parents[1])}
    subprocess.run([sys.executable, "-W", "error", "-c", script], env=environment, check=True)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        diagnostic.nonsense  # noqa: B018


def test_links_of_the_page():
    page = (HERE.parents[2] / "docs" / "compatibility.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([a-z_]+\.md)", page):
        assert (HERE.parents[2] / "docs" / target).is_file()
