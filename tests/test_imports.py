"""Who may import whom, and what stays light."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import noisescope

SOURCE = Path(noisescope.__file__).parent

# part -> parts it may import besides itself. A part is a module or a package right under noisescope.
READING = {"errors", "jsonform", "progress", "text_escaping", "untrusted_files"}  # files and text from elsewhere
VALUES = READING | {
    "atomic_write",
    "estimate",
    "injection",
    "names_in_trial_ids",
    "options",
    "sites",
    "tables",
    "trials",
}
TORCHLESS = VALUES | {"stats", "findings"}  # interpreting: imported with torch blocked
MEASURING = {"model", "data", "probe", "faults", "measures"}
TORCH_BLOCKED = {"diagnosis", "comparison", "plans", "reports"}
ABOVE = {"runs", "localization", "passports", "training", "engines"}
BELOW_CLI = TORCHLESS | MEASURING | TORCH_BLOCKED | ABOVE | {"api", "demo", "testing"}
ALLOWED: dict[str, set[str]] = {
    **dict.fromkeys(VALUES, VALUES),
    "options": READING | {"sites", "injection", "testing"},
    "stats": {"errors", "estimate"},
    "findings": {"errors", "estimate", "options", "sites"},
    "diagnosis": TORCHLESS,
    "comparison": TORCHLESS | {"diagnosis"},
    "plans": TORCHLESS | {"diagnosis", "comparison"},
    "reports": TORCHLESS
    | {"diagnosis", "comparison", "plans", "localization"},  # of localization its values: torch is blocked
    "testing": VALUES,
    "demo": VALUES | {"model"},
    "model": VALUES | {"demo", "testing"},
    "data": READING | {"model", "options"},
    "probe": VALUES | {"model"},
    "faults": VALUES | {"model", "probe"},
    "measures": VALUES | {"model", "probe"},
    "runs": VALUES | {"comparison", "data", "measures", "model", "probe"},
    "passports": READING | {"atomic_write", "estimate", "model"},
    "localization": TORCHLESS - {"findings"} | MEASURING | {"comparison"},
    "engines": TORCHLESS | MEASURING | {"comparison", "demo", "localization", "training"},
    "training": TORCHLESS | MEASURING | {"diagnosis", "reports", "runs"},
    "compat": BELOW_CLI | {"noisy_ops"},
    "noisy_ops": {"compat", "errors"},
    "diagnostic": {"compat"},
    "api": BELOW_CLI,
    "cli": {"api", "options", "errors", "text_escaping", "progress"},
    "__main__": {"cli"},
}
FILES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def part_of(file: Path) -> str:
    return file.parts[0].removesuffix(".py")


def imported_parts(file: Path) -> set[str]:
    """Parts of noisescope that a file imports, anywhere in it; "" is a relative import.

    The package itself only holds the version.
    """
    names: list[str] = []
    for node in ast.walk(ast.parse((SOURCE / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "noisescope." if node.level else node.module or ""
            names += [f"{module}.{alias.name}" for alias in node.names] if module == "noisescope" else [module]
    ours = (name.split(".") for name in names if name.startswith("noisescope."))
    return {parts[1] for parts in ours} - {"__version__"}


def violations(file: Path) -> list[str]:
    """What is wrong with the imports of one file, a line for each mistake."""
    part, imported = part_of(file), imported_parts(file)
    if part not in ALLOWED:
        return [f"{file}: {part} is not in the table of import directions: add it"]
    relative = [f"{file}: relative import"] if "" in imported else []
    return relative + [
        f"{file}: {part} may not import {other}" for other in sorted(imported - ALLOWED[part] - {part, ""})
    ]


def test_imports_point_downwards() -> None:
    """Values know nothing above them, the probe knows no command line; a new part must be put in the table."""
    assert len(FILES) > 100, f"few files under {SOURCE}: this test looks at the wrong place"
    found = [line for file in FILES for line in violations(file)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "code", "expected"),
    [
        ("probe/x.py", "import noisescope.cli", ["probe/x.py: probe may not import cli"]),
        (
            "sites.py",
            "def f():\n    from noisescope.probe.noise import Bias",
            ["sites.py: sites may not import probe"],
        ),
        ("stats/x.py", "from noisescope import runs, errors, __version__", ["stats/x.py: stats may not import runs"]),
        ("probe/x.py", "from . import draws", ["probe/x.py: relative import"]),
        ("new/x.py", "", ["new/x.py: new is not in the table of import directions: add it"]),
        (
            "probe/x.py",
            "import torch\nfrom noisescope.probe import draws\nfrom noisescope.model.loading import load",
            [],
        ),
    ],
)
def test_a_wrong_import_is_found(
    path: str, code: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check sees every form of import, also inside a function, and says who may not import what."""
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(code, encoding="utf-8")
    assert violations(Path(path)) == expected


def test_the_lazy_names_exist() -> None:
    """Every public name is where the package says it is."""
    for name in noisescope.__all__:
        assert getattr(noisescope, name) is not None
    assert set(noisescope.__all__) <= set(dir(noisescope)) | {"__version__"}
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        noisescope.nonsense  # noqa: B018


@pytest.mark.parametrize(
    "code",
    [
        "import noisescope",
        "import noisescope.sites, noisescope.injection, noisescope.errors",
        "import noisescope.testing",
        "import noisescope.api; noisescope.api.Options",
        "import noisescope.options.docs_tables",
        "import noisescope.faults; noisescope.faults.make_fault('dead_zone', magnitude=0.3)",
        "import noisescope.api.locate_simulated; noisescope.api.locate_simulated.check_fault('gain:0.01@3/linear')",
        "import noisescope.demo, noisescope.demo.problems",
        "import noisescope; noisescope.Injection, noisescope.Site, noisescope.NoisescopeError",
        "import sys; sys.argv = ['noisescope', '--help']; from noisescope.cli import main; main()",
        "import sys; sys.argv = ['noisescope', 'inspect', '--help']; from noisescope.cli import main; main()",
        "import sys; sys.argv = ['noisescope', '--version']; from noisescope.cli import main; main()",
    ],
)
def test_light_imports(code: str) -> None:
    """Values, the package itself and --help load neither torch nor transformers."""
    check = "import sys; loaded = {'torch', 'transformers', 'numpy'} & set(sys.modules); assert not loaded, loaded"
    script = f"try:\n    exec({code!r})\nexcept SystemExit as left:\n    assert not left.code, left.code\n{check}"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    subprocess.run(
        [sys.executable, "-W", "error", "-c", script], env=environment, check=True, stdout=subprocess.DEVNULL
    )


@pytest.mark.parametrize("name", ["comparison", "plans", "reports"])
def test_these_parts_of_the_api_need_no_torch(name: str) -> None:
    """They read, plan and print: torch is blocked."""
    code = f"import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import noisescope.api.{name}"
    code += "; import noisescope.api; noisescope.api.compare; noisescope.api.plan_precision"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, check=True)


def test_the_command_line_calls_what_the_api_has() -> None:
    """`api` is lazy, so type checkers believe every name: each `api.module.name` in the commands is looked up here."""
    from noisescope import api

    found = 0
    for path in (SOURCE / "cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            inner = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)
            if inner and ast.unparse(node.value.value) == "api":  # type: ignore[attr-defined]
                assert hasattr(getattr(api, node.value.attr), node.attr), f"{path.name}: {ast.unparse(node)}"  # type: ignore[attr-defined]
                found += 1
    assert found > 40
