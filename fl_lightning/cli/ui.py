"""fl-lightning ui: the MLflow UI on the run store."""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.cli.flags import CommandParser
from fl_lightning.cli.hints import is_server
from fl_lightning.errors import require
from fl_lightning.runs import view
from fl_lightning.runs.track import store_uri


def main(arguments: Sequence[str]) -> int:
    """Start the MLflow server on this machine's loopback address and stay until it is stopped."""
    parser = CommandParser(prog="fl-lightning ui", description="Open the MLflow UI on the runs.")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the runs [runs]")
    parser.add_argument("--port", type=int, default=5000, help="port on 127.0.0.1 [5000]")
    options = parser.parse_args(list(arguments))
    require(0 < options.port < 65536, f"--port must lie between 1 and 65535, got {options.port}")
    uri = store_uri(options.out)
    require(not is_server(uri), f"the runs are on a tracking server; open {uri} in a browser")
    database = Path(uri.removeprefix("sqlite:///"))
    require(
        not uri.startswith("sqlite:///") or database.exists(),
        f"no runs in {options.out} yet ({database} does not exist); start one with `fl-lightning run`, or name the "
        "folder with --out",
    )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", options.port))
        except OSError:
            free = False
        else:
            free = True
    require(free, f"port {options.port} is in use; choose another with --port")
    address = f"http://127.0.0.1:{options.port}"
    print("MLflow UI, on this machine only; stop it with Ctrl-C")
    print(f"charts  {address}/{view.address(charts=True)}")
    print(f"table   {address}/{view.address()}", flush=True)
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--host", "127.0.0.1"]
    os.execv(sys.executable, [*command, "--port", str(options.port), "--workers", "1"])
