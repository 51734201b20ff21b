"""Where runs are tracked, and how its database comes to be: as a whole, or not at all.

MLflow makes a database by dozens of migrations that are no transaction: killed among them, or begun by two processes
at once, they leave a file that no command can open. So one process at a time makes it, in a file beside it, and gives
it its name when it is complete.
"""

import os
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import filelock

from fl_lightning.errors import UserError, require
from fl_lightning.system import activity

DATABASE = "mlflow.db"
# What SQLite keeps beside a database; read with another one it would be nonsense.
COMPANIONS = ("-wal", "-shm", "-journal")


def store_uri(out: Path) -> str:
    """Where runs are tracked: MLFLOW_TRACKING_URI if set, else a database in the folder of all runs."""
    return os.environ.get("MLFLOW_TRACKING_URI") or sqlite_uri((out / DATABASE).resolve())


def sqlite_uri(database: Path) -> str:
    """The URI of a database file, whatever characters its path has.

    >>> sqlite_uri(Path("/runs/mlflow.db"))
    'sqlite:////runs/mlflow.db'
    >>> database_of(sqlite_uri(Path("/50%20?/#1/mlflow.db")))
    PosixPath('/50%20?/#1/mlflow.db')
    """
    from sqlalchemy import URL, make_url

    uri = URL.create("sqlite", database=str(database)).render_as_string()
    if uri != f"sqlite:///{database}":
        # Of a URI without a driver MLflow makes the folder that it seems to name, percent signs and all.
        uri = URL.create("sqlite+pysqlite", database=str(database)).render_as_string()
    require(
        make_url(uri).database == str(database),
        f"the installed SQLAlchemy cannot name the database {database}; update it, or choose an --out without ?",
    )
    return uri


def database_of(uri: str) -> Path | None:
    """The file that the URI of a SQLite database names; None for other stores."""
    if not re.match(r"sqlite(\+\w+)?://", uri):
        return None
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        name = make_url(uri).database
    except ArgumentError:
        raise UserError(f"expected the URI of a database as sqlite:////folder/mlflow.db, got {uri!r}") from None
    return None if not name or name.startswith((":memory:", "file:")) else Path(name)


def ensure(database: Path, fill: Callable[[str], None]) -> None:
    """Make a database where there is none, or none that is whole; a broken one is set aside.

    Args:
        database: The file.
        fill: Writes into a new one, given its URI, before anybody else sees it.
    """
    if not _is_whole(database):
        database.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(database.with_name(f"{database.name}.lock")):
            if not _is_whole(database):  # or another process was faster
                if database.exists():
                    _set_aside(database)
                _create(database, fill)
    # Write-ahead logging halves the cost of a batch and lets the UI read while a run writes.
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")


def why_broken(database: Path) -> str | None:
    """What is wrong with a database, if it can never be opened again; locks and permissions may pass."""
    try:
        with closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True, timeout=1)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            # MLflow's first experiment is written after the last migration.
            if "experiments" in tables and connection.execute("SELECT 1 FROM experiments").fetchone():
                left = sorted(name for name in tables if name.startswith("_alembic_tmp_"))
                return f"a migration of it was interrupted, which left {left[0]}" if left else None
            return "its creation was interrupted"
    except sqlite3.OperationalError:
        return None
    except sqlite3.DatabaseError as error:
        return str(error)


def _is_whole(database: Path) -> bool:
    return database.exists() and why_broken(database) is None


def _create(database: Path, fill: Callable[[str], None]) -> None:
    passing, whole = (database.with_name(f"{database.name}.{name}") for name in ("new", "part"))
    for path in (passing, whole, database):  # by a process that was killed, or by somebody who deleted the database
        _remove(path)
    fill(sqlite_uri(passing.resolve()))
    # A copy, because MLflow keeps the file open that it has made.
    with closing(sqlite3.connect(passing)) as source, closing(sqlite3.connect(whole)) as target:
        source.backup(target)
    os.replace(whole, database)
    _remove(passing)


def _set_aside(database: Path) -> None:
    aside = database.with_name(f"{database.stem}.broken-{time.time_ns()}{database.suffix}")
    activity.warn(
        f"the MLflow database {database} is broken ({why_broken(database)}); it is kept as {aside.name}, and a new one "
        "is made of what the folders of the runs know"
    )
    for end in (*COMPANIONS, ""):
        if (path := Path(f"{database}{end}")).exists():
            os.replace(path, f"{aside}{end}")


def _remove(database: Path) -> None:
    for end in ("", *COMPANIONS):
        Path(f"{database}{end}").unlink(missing_ok=True)
