"""fl-lightning list: the methods, models, datasets, engines and studies."""

import json
from collections.abc import Sequence

from fl_lightning import discovery
from fl_lightning.cli.flags import CommandParser
from fl_lightning.errors import UserError, unknown

KINDS = (*discovery.KINDS, "studies")


def main(arguments: Sequence[str]) -> int:
    """Print names and one-line descriptions."""
    parser = CommandParser(prog="fl-lightning list", description=__doc__, epilog="example: fl-lightning list methods")
    parser.add_argument("kind", help=f"one of {', '.join(KINDS)}")
    parser.add_argument("--json", action="store_true", help="print only one JSON object of names and descriptions")
    if not [a for a in arguments if not a.startswith("-")] and "--help" not in arguments and "-h" not in arguments:
        raise UserError(f"list needs a kind: fl-lightning list {'|'.join(KINDS)}")
    options = parser.parse_args(list(arguments))
    if options.kind not in KINDS:
        raise unknown("kind", options.kind, KINDS)
    found = _found(options.kind)
    if options.json:
        print(json.dumps(found))
    else:
        width = max(map(len, found))
        print("\n".join(f"{name:<{width}}  {text}" for name, text in found.items()))
    return 0


def _found(kind: str) -> dict[str, str]:
    if kind == "studies":
        from tune import study_file

        return {name: study_file.describe(name) for name in study_file.names()}
    return {name: _with_ingredients(kind, name, text) for name, text in discovery.summaries(kind).items()}


def _with_ingredients(kind: str, name: str, text: str) -> str:
    """The description, with the settings of a preset."""
    ingredients = discovery.made_of(kind, name)
    return f"{text} Made of {ingredients}." if ingredients else text
