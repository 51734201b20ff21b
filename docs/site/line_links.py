"""Links to lines of the code, [`name`](file.py#L12). `python docs/site/line_links.py` sets the numbers."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[`([\w.]+)`\]\(([\w./]+\.py)#L(\d+)\)")


def updated(page: Path) -> str:
    """The text of a page with the line of every definition as it is now."""

    def link(match: re.Match[str]) -> str:
        name, target = match[1], match[2]
        return f"[`{name}`]({target}#L{line_of(name, page.parent / target)})"

    return LINK.sub(link, page.read_text(encoding="utf-8"))


def line_of(name: str, path: Path) -> int:
    """Where a file defines a class or a function, `name` or `Class.name`."""
    body, line = ast.parse(path.read_text(encoding="utf-8")).body, 0
    for part in name.split("."):
        nodes = [inner for node in body for inner in ast.walk(node)]
        definitions = [node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        found = next((node for node in definitions if node.name == part), None)
        if found is None:
            raise LookupError(f"{path.name} defines no {name}")
        body, line = found.body, found.lineno
    return line


if __name__ == "__main__":
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        page.write_text(updated(page), encoding="utf-8")
