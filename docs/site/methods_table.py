"""The table of docs/methods.md, made from the code. `python docs/site/methods_table.py` writes it into the page."""

import re
from pathlib import Path

from fl_lightning import discovery

PAGE = Path(__file__).parents[1] / "methods.md"
BEGIN, END = "<!-- made by docs/site/methods_table.py -->\n", "<!-- end of the table -->"


def table(sections: set[str]) -> str:
    """One row for each built-in method: its name, what it does, of what it is a preset.

    Args:
        sections: The headings of the page; a name leads to its own, or to that of what it is made of.
    """
    rows = ["| `--method` | what it does | preset of |", "|---|---|---|"]
    for name, cls in discovery.discover("methods").items():
        if cls.__module__.startswith("fl_lightning."):
            made_of = discovery.made_of("methods", name)
            preset = f"`{made_of}`" if made_of else ""
            section = name if name in sections else made_of.partition("+")[0]
            rows.append(f"| [`{name}`](#{section}) | {discovery.summary(cls)} | {preset} |")
    return "\n".join(rows) + "\n"


def updated(text: str) -> str:
    """The page with the table as the code has it now."""
    before, _, rest = text.partition(BEGIN)
    sections = set(re.findall(r"^## (\w+)$", text, re.MULTILINE))
    return f"{before}{BEGIN}\n{table(sections)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
