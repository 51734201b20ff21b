"""Writes to a store that may be away for a while: a tracking server that has died must not stop a computation.

Every write can be repeated without harm, so what a server does not take waits here, in order, and is tried again at
intervals. The files of the run hold it as well: if the process ends first, the same command sends it.
"""

import os
import sqlite3
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fl_lightning.errors import UserError
from fl_lightning.system import activity

RETRY_SECONDS = 20.0
PATIENCE_SECONDS = 5.0
# MLflow's own: seven retries, which take minutes. Ours go on beside the computation.
SETTINGS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
# What a server says that has understood a request and refuses it; repeating it would not help.
REFUSALS = {"BAD_REQUEST", "INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED", "UNAUTHENTICATED"}


class UnreachableError(UserError):
    """A tracking server does not answer; it may again."""


class Outbox:
    """What is to be written to one store, and is not there yet.

    Args:
        uri: Of the store.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._waiting: list[Callable[[], object]] = []
        self._failed = False
        self._next = 0.0

    def send(self, write: Callable[[], object]) -> None:
        """Carry out a write, or keep it for later if the server is away.

        Raises:
            UserError: If the store refuses it.
        """
        self._waiting.append(write)
        if time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> bool:
        """Try to carry out what waits; whether nothing does any more."""
        try:
            check_reachable(self._uri)
            while self._waiting:
                with explained(self._uri):
                    self._waiting[0]()
                del self._waiting[0]
        except UnreachableError:
            if not self._failed:
                activity.warn(
                    f"the MLflow server at {self._uri} does not answer; the computation goes on, what the server lacks "
                    f"is kept and sent when it answers again (tried every {RETRY_SECONDS:g} s)"
                )
            self._failed, self._next = True, time.monotonic() + RETRY_SECONDS
            return False
        if self._failed:
            activity.warn(f"the MLflow server at {self._uri} answers again, and has everything")
            self._failed, self._next = False, 0.0
        return True


def check_reachable(uri: str) -> None:
    """Refuse a server that does not answer within seconds; MLflow would wait for minutes.

    Raises:
        UnreachableError: If it does not.
    """
    if not _is_server(uri):
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
    from alembic.util.exc import CommandError  # of migrations; MLflow does not make it one of its own
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, CommandError, OSError, sqlite3.Error) as error:
        reason = str(error).partition("\n")[0]
        if _is_server(uri) and getattr(error, "error_code", "") not in REFUSALS:
            raise UnreachableError(
                f"the MLflow server at {uri} fails ({reason}); finished rounds are saved, the same command resumes"
            ) from error
        raise UserError(
            f"cannot write to the MLflow store {uri}: {reason}; finished rounds are saved, the same command resumes"
        ) from error


def _is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))
