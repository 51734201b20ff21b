"""fl-lightning demo: FOLA against FedAvg where it matters, on data that comes with the installation."""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.commands.compare import show, writable_picture

# Of the ten clients two get no data, and most others one or two of the ten digits.
SETTINGS = {
    "data": "digits",
    "data.alpha": 0.01,
    "data.clients": 10,
    "model": "mlp",
    "model.hidden": [64],
    "training.lr": 0.1,
    "training.epochs": 5,
    "training.batch_size": 16,
    "federation.rounds": 20,
}


def main(arguments: Sequence[str]) -> int:
    """Run the demo."""
    parser = ArgumentParser(prog="fl-lightning demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of everything that runs leave [runs]")
    parser.add_argument("--fresh", action="store_true", help="compute again what an earlier process has computed")
    options = parser.parse_args(list(arguments))
    options.threshold, options.markdown = 0.8, False
    options.picture = writable_picture(options.out / "demo.png")
    print("FOLA against FedAvg on 8x8 digits. Dirichlet alpha = 0.01 leaves two of the 10 clients without data,")
    print("and most others with one class or two.")
    show(SETTINGS, ["fedavg", "fola"], [0], options)
    return 0
