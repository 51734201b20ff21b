"""Where runs are tracked, whether a server answers there, and how a database comes to be: as a whole, or not at all.

MLflow makes a database by dozens of migrations outside of a transaction: killed among them, or begun by two processes
at once, they leave a file that no command can open. So one process at a time makes it, in a file beside it, and gives
it its name when it is complete.
"""

import logging
import os
import re
import sqlite3
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import filelock

from fl_lightning.errors import UserError, require
from fl_lightning.system import activity

DATABASE = "mlflow.db"
# What SQLite keeps beside a database; read with another one it would be nonsense.
COMPANIONS = ("-wal", "-shm", "-journal")
PATIENCE_SECONDS = 10.0
# MLflow's own: seven retries, which take minutes. Ours go on beside the computation.
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # from a thread, amid what a command prints
}
# What a server says that has understood a request and refuses it; repeating it would not help.
REFUSALS = {"BAD_REQUEST", "INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED", "UNAUTHENTICATED"}


class UnreachableError(UserError):
    """A tracking server does not answer; it may again."""


def store_uri(out: Path) -> str:
    """Where runs are tracked: MLFLOW_TRACKING_URI if set, else a database in the folder of all runs."""
    given = os.environ.get("MLFLOW_TRACKING_URI")
    return given or sqlite_uri(Path(os.path.realpath(out / DATABASE)))


def is_server(uri: str) -> bool:
    """Whether runs are tracked by a server."""
    return uri.startswith(("http://", "https://"))


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
        f"the installed SQLAlchemy cannot name the database {database}; update it, or choose a --runs without ?",
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


def check_reachable(uri: str) -> None:
    """Refuse a server that does not answer within seconds; MLflow would wait for minutes.

    Raises:
        UnreachableError: If it does not.
    """
    if not is_server(uri):
        return
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=PATIENCE_SECONDS):
            pass
    except urllib.error.HTTPError:
        pass  # something answers there; a proxy may not know /health
    except (OSError, ValueError) as error:
        raise UnreachableError(
            f"no MLflow server answers at {uri} ({error}); start it, correct MLFLOW_TRACKING_URI, or unset it to "
            "track in the runs folder"
        ) from None


@contextmanager
def explained(uri: str) -> Iterator[None]:
    """MLflow's failures as one line.

    Raises:
        UnreachableError: If a server does not answer.
        UserError: If the store refuses.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it logs a traceback of what is raised, too
    from alembic.util.exc import CommandError  # of migrations; MLflow does not make it one of its own
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, CommandError, OSError, sqlite3.Error) as error:
        reason = str(error).partition("\n")[0]
        if is_server(uri) and getattr(error, "error_code", "") not in REFUSALS:
            raise UnreachableError(
                f"the MLflow server at {uri} fails ({reason}); finished rounds are saved, the same command resumes"
            ) from error
        raise UserError(
            f"cannot write to the MLflow store {uri}: {reason}; finished rounds are saved, the same command resumes"
        ) from error


def ensure(database: Path, fill: Callable[[str], None]) -> None:
    """Make a database where there is none, or none that is whole; a broken one is set aside.

    Args:
        database: The file.
        fill: Writes into a new one, given its URI, before other processes see it.
    """
    for end in ("", *COMPANIONS):
        path = Path(f"{database}{end}")
        require(not path.is_dir(), f"expected a file of the MLflow database at {path}, got a folder; move it away")
    # The links of a path were followed before: what still is one leads to itself.
    require(not database.is_symlink() or database.exists(), f"{database} is a link to itself; remove it")
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
    for path in (passing, whole, database):  # by a process that was killed, or by the user who deleted the database
        _remove(path)
    fill(sqlite_uri(passing.resolve()))
    # A copy, because MLflow keeps the file open that it has made.
    with closing(sqlite3.connect(passing)) as source, closing(sqlite3.connect(whole)) as target:
        source.backup(target)
    _remove(passing)  # before the database has its name: from then on what is left here is not looked for
    os.replace(whole, database)


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
