"""What mkdocs cannot know by itself: which pages there are, and how the links of the repository lead to them.

Guides, pages of the repository's root and modules appear by existing. Links are written as they work in the
repository; here they are turned to where the same thing lies in the site.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from formulas import Formulas
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from plain_text import PlainText

PACKAGES = ("fl_lightning", "tune", "analysis")
# Pages that lie outside of docs/, and their names in the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "LICENSE": "LICENSE",
    "CITATION.cff": "CITATION.cff",
}
# Guides by task. A guide that is missing here follows under Reference.
NAVIGATION = {
    "Start": {"Tutorial": "tutorial", "Fine-tuning": "finetuning"},
    "Understand": {"FOLA": "fola", "Methods": "methods", "Results": "results", "Rules of the verdicts": "claims"},
    "Run": {"Runs": "running", "Data and models": "data"},
    "Sweep": {"Sweeps": "sweeps"},
    "Analyse": {"Reports, tables, figures": "analysis", "Uncertainty": "uncertainty"},
    "Extend": {"Extending": "extending", "Architecture": "architecture", "Contributing": "contributing"},
    "Operate": {
        "Workers, clusters": "scaling",
        "GPUs": "gpu",
        "Reliability": "reliability",
        "Benchmarks": "benchmarks",
    },
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)([^)]*)\)")
LINE = re.compile(r"#L(\d+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Formulas and doctests are understood on all pages, docstrings included."""
    config.markdown_extensions += [Formulas(), PlainText()]  # type: ignore[list-item]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/ and one page for each module, and lay out the navigation."""
    root = Path(config.config_file_path).parent
    for source, target in OUTSIDE.items():
        files.append(File.generated(config, target, abs_src_path=str(root / source)))
    modules = {name: page for package in PACKAGES for name, page in modules_of(root, package)}
    for name, page in modules.items():
        files.append(File.generated(config, page, content=f"# {name}\n\n::: {name}\n"))
    pages = {Path(file.src_uri).stem for file in files.documentation_pages() if "/" not in file.src_uri}
    nav: list[Any] = [{"Home": "index.md"}]
    for task, guides in NAVIGATION.items():
        nav.append({task: [{title: f"{name}.md"} for title, name in guides.items() if name in pages]})
        pages -= set(guides.values())
    others = [f"{name}.md" for name in sorted(pages - {"index"})]
    config.nav = [*nav, {"Reference": [*others, *_tree(modules)]}]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they work in the repository become links of the site; what the site lacks is named without a link."""
    root = Path(config.config_file_path).parent
    places = {target: source for source, target in OUTSIDE.items()}
    source = places.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def turned(link: re.Match[str]) -> str:
        image, text, target, after = link.groups()
        if "://" in target:
            return link.group()
        wanted = normpath(str(PurePosixPath(source).parent / target))
        there = OUTSIDE.get(wanted) or _reference_page(wanted) or wanted.removeprefix("docs/")
        if wanted.endswith(".py"):
            line = LINE.fullmatch(after)
            after = _anchor(root, root / wanted, int(line[1])) if line else ""
        if files.get_file_from_path(there) is None and not wanted.startswith("docs/"):
            return text
        return f"{image}[{text}]({relpath(there, PurePosixPath(page.file.src_uri).parent)}{after})"

    return LINK.sub(turned, markdown)


def _reference_page(path: str) -> str | None:
    """The page of a module, by the path of its file in the repository."""
    if path.partition("/")[0] not in PACKAGES or not path.endswith(".py"):
        return None
    return f"reference/{path.removesuffix('.py')}.md".replace("/__init__.md", "/index.md")


def _anchor(root: Path, path: Path, line: int) -> str:
    """The anchor of the definition that begins at a line, or of what surrounds it where that has no docstring."""
    module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")

    def names(body: list[ast.stmt], before: str) -> Iterator[tuple[int, str]]:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                name = f"{before}.{node.name}" if ast.get_docstring(node) else before
                yield node.lineno, name
                if isinstance(node, ast.ClassDef):
                    yield from names(node.body, name)

    found = dict(names(ast.parse(path.read_text(encoding="utf-8")).body, module)).get(line)
    return f"#{found}" if found and found != module and "._" not in found else ""


def modules_of(root: Path, package: str) -> Iterator[tuple[str, str]]:
    """The modules of a package that have something to say, with their pages: `a.b` and `reference/a/b.md`."""
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if not path.read_text().strip() or parts[-1] == "__main__":
            continue
        if parts[-1] == "__init__":
            yield ".".join(parts[:-1]), "/".join(("reference", *parts[:-1], "index.md"))
        else:
            yield ".".join(parts), "/".join(("reference", *parts)) + ".md"


def _tree(modules: dict[str, str], prefix: str = "") -> list[Any]:
    """The navigation of the modules below a package: subpackages as sections, modules by their last name."""
    found: list[Any] = [modules[prefix]] if prefix in modules else []
    start = f"{prefix}." if prefix else ""
    below = sorted({name[len(start) :].partition(".")[0] for name in modules if name.startswith(start)} - {""})
    for part in below:
        name = start + part
        if any(other.startswith(f"{name}.") for other in modules):
            found.append({part: _tree(modules, name)})
        else:
            found.append({part: modules[name]})
    return found
