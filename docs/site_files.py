"""Hooks of mkdocs: pages outside docs/ become part of the site, and links between them keep working.

Pages are written for a reader of the repository: `docs/x.md` links to `../benchmarks/README.md`, and CONTRIBUTING.md to
`docs/x.md`. In the site docs/ is the root, and every other file keeps its path in the repository.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OUTSIDE = ("benchmarks/README.md", "benchmarks/coverage.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, and whatever file a page links to."""
    pages = [*sorted(DOCS.glob("*.md")), *(ROOT / name for name in OUTSIDE)]
    linked = {target for page in pages for target in _targets(page) if DOCS not in target.parents}
    for path in sorted({*linked, *(ROOT / name for name in OUTSIDE)} - {ROOT / "README.md"}):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are between the files of the site."""
    here = ROOT / page.file.src_uri if page.file.src_uri in OUTSIDE else DOCS / page.file.src_uri
    start = Path(page.file.src_uri).parent

    def of_the_site(match: re.Match[str]) -> str:
        target = _target(here, match[2])
        if target is None:
            return match[0]
        in_site = target.relative_to(DOCS if DOCS in target.parents else ROOT)
        in_site = Path("index.md") if in_site == Path("README.md") else in_site
        return f"{match[1]}{Path(os.path.relpath(in_site, start)).as_posix()}{match[3] or ''}{match[4]}"

    return LINK.sub(of_the_site, markdown)


def _targets(page: Path) -> set[Path]:
    found = (_target(page, match[2]) for match in LINK.finditer(page.read_text(encoding="utf-8")))
    return {target for target in found if target is not None and target.is_file()}


def _target(page: Path, link: str) -> Path | None:
    """The file that a relative link of a page names; None for an address."""
    return None if "://" in link or link.startswith("mailto:") else (page.parent / link).resolve()
