"""The table of docs/methods.md, made from the code. `python docs/site/methods_table.py` writes it into the page."""

from pathlib import Path

from fl_lightning import discovery

PAGE = Path(__file__).parents[1] / "methods.md"
BEGIN, END = "<!-- made by docs/site/methods_table.py -->\n", "<!-- end of the table -->"


def table() -> str:
    """One row for each built-in method: its name, that in tables and figures, what it does, of what it is a preset."""
    rows = ["| `--method` | in tables | what it does | preset of |", "|---|---|---|---|"]
    displayed = discovery.display_names("methods")
    for name, cls in discovery.discover("methods").items():
        if cls.__module__.startswith("fl_lightning."):
            made_of = discovery.made_of("methods", name)
            preset = f"`{made_of}`" if made_of else ""
            rows.append(f"| `{name}` | {displayed.get(name, name)} | {discovery.summary(cls)} | {preset} |")
    return "\n".join(rows) + "\n"


def updated(text: str) -> str:
    """The page with the table as the code has it now."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
