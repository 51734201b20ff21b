"""fl-lightning ui: open the MLflow UI on the runs, on this machine's loopback address, until Ctrl-C."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.cli.flags import CommandParser, add_runs
from fl_lightning.errors import require
from fl_lightning.runs.tracking import ui_view
from fl_lightning.runs.tracking.store import DATABASE, database_of, is_server, sqlite_uri, store_uri, why_broken


def main(arguments: Sequence[str]) -> int:
    """Start the MLflow server on this machine's loopback address and stay until it is stopped."""
    parser = CommandParser(prog="fl-lightning ui", description=__doc__)
    add_runs(parser)
    parser.add_argument("--port", type=int, default=5000, help="port on 127.0.0.1 [5000]")
    options = parser.parse_args(list(arguments))
    require(0 < options.port < 65536, f"--port must lie between 1 and 65535, got {options.port}")
    uri = store_uri(options.out)
    require(not is_server(uri), f"the runs are on a tracking server; open {uri} in a browser")
    database = database_of(uri)
    require(
        database is None or database.exists(),
        f"no runs in {options.out} yet ({database} does not exist); start one with `fl-lightning run`, or name the "
        "folder with --runs",
    )
    broken = why_broken(database) if database is not None else None
    require(broken is None, f"{database} is broken ({broken}); the next run into {options.out} makes a new one")
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
    print(f"charts  {address}/{ui_view.address(charts=True)}")
    print(f"table   {address}/{ui_view.address()}", flush=True)
    server = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(options.port)]
    server += ["--workers", "1", "--backend-store-uri"]
    if database is None or os.access(database.parent, os.W_OK):
        os.execv(sys.executable, [*server, uri])
    print(f"{database.parent} cannot be written to, and MLflow must write: this shows a copy of {DATABASE}", flush=True)
    with tempfile.TemporaryDirectory(prefix="fl_lightning-ui-") as folder:
        for end in ("", "-wal"):  # what is in the log and not yet in the database belongs to it
            if (path := Path(f"{database}{end}")).exists():
                shutil.copyfile(path, Path(folder) / f"{DATABASE}{end}")
        return subprocess.run([*server, sqlite_uri(Path(folder) / DATABASE)], check=False).returncode
