"""fl-lightning demo: FOLA against FedAvg on very heterogeneous clients, with embedded data, in a minute or two."""

from collections.abc import Sequence

from fl_lightning.cli.flags import CommandParser, add_runs
from fl_lightning.cli.sweep import show


def main(arguments: Sequence[str]) -> int:
    """Sweep the study called demo, and draw its curves."""
    parser = CommandParser(prog="fl-lightning demo", description=__doc__)
    add_runs(parser)
    parser.add_argument("--scale", default="small", help="smoke, small or paper: rounds and seeds [small]")
    parser.add_argument("--fresh", action="store_true", help="delete earlier results and compute again")
    options = parser.parse_args(list(arguments))
    options.json = options.quiet = False
    print("FOLA against FedAvg on 8x8 digits, and against training on all data in one place. Dirichlet alpha = 0.01")
    print("leaves some of the 10 clients without data, and most others with one class or two.")
    from tune.study_file import load
    from tune.sweep import Options

    return show(load("demo", options.scale), Options(options.out.resolve(), fresh=options.fresh), options, curves=True)
