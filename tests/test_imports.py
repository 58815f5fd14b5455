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
VALUES = {"errors", "sites", "injection", "trials", "record_format", "options"}
TORCHLESS = VALUES | {"stats", "findings"}  # interpreting: imported with torch blocked
MEASURING = {"anatomy", "model", "probe", "faults", "metrics", "quantisation", "tasks", "data", "runs"}
ABOVE_RUNS = {"locators", "training"}
TORCH_BLOCKED = {"diagnosis", "comparison", "plans", "reports"}
BELOW_CLI = TORCHLESS | MEASURING | ABOVE_RUNS | TORCH_BLOCKED | {"api", "demo", "testing"}
ALLOWED: dict[str, set[str]] = {
    **dict.fromkeys(VALUES, VALUES),
    "options": {"errors", "sites", "injection"},
    "stats": {"errors"},
    "findings": {"errors", "options", "sites"},
    "diagnosis": TORCHLESS,
    "comparison": TORCHLESS,
    "plans": TORCHLESS | {"diagnosis", "comparison"},
    "reports": {"errors", "findings", "options"},
    "testing": VALUES,
    "demo": VALUES,
    "data": {"errors"},
    "anatomy": VALUES,
    "model": VALUES | {"anatomy", "demo", "testing"},
    "tasks": {"errors", "data"},
    "probe": VALUES | {"anatomy", "model"},
    "faults": VALUES | {"anatomy", "model", "probe"},
    "metrics": VALUES | {"anatomy", "probe"},
    "quantisation": VALUES | {"anatomy", "metrics", "model", "probe"},
    "runs": VALUES | {"anatomy", "model", "probe", "metrics", "quantisation", "tasks"},
    "locators": TORCHLESS - {"findings"} | (MEASURING - {"quantisation"}) | {"comparison"},
    "training": TORCHLESS | MEASURING | {"reports"},
    "noisy_ops": VALUES | {"anatomy", "model", "probe"},
    "api": BELOW_CLI,
    "diagnostic": BELOW_CLI,
    "cli": {"api", "options", "errors"},
}
FILES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def part_of(file: Path) -> str:
    return file.parts[0].removesuffix(".py")


def imported_parts(file: Path) -> set[str]:
    """Parts of noisescope that a file imports, anywhere in it. The package itself only holds the version."""
    names: list[str] = []
    for node in ast.walk(ast.parse((SOURCE / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            module = node.module or ""
            names += [f"{module}.{alias.name}" for alias in node.names] if module == "noisescope" else [module]
    ours = (name.split(".") for name in names if name.startswith("noisescope."))
    return {parts[1] for parts in ours} - {"__version__"}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_point_downwards(file: Path) -> None:
    """Values know nothing above them, the probe knows no command line; a new part must be put in the table."""
    part = part_of(file)
    assert part in ALLOWED, f"{part} is not in the table of import directions: add it"
    assert imported_parts(file) <= ALLOWED[part] | {part}


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
        "import noisescope.options.tables",
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


@pytest.mark.parametrize("name", ["comparing", "drawing", "facts", "fault_plans", "migrating", "passports", "precision",
                                  "stored", "words"])  # fmt: skip
def test_these_parts_of_the_api_need_no_torch(name: str) -> None:
    """They read, plan and print: torch is blocked."""
    code = f"import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import noisescope.api.{name}"
    code += "; import noisescope.api; noisescope.api.compare; noisescope.api.plan_precision"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, check=True)
