"""The MLflow run of what this process computes, kept up to date beside the computation."""

import time
from pathlib import Path
from threading import Condition, Thread

from fl_lightning.runs.tracking.store import UnreachableError, check_reachable, explained, is_server, store_uri
from fl_lightning.runs.tracking.sync import Account, Copy, open_place, sync
from fl_lightning.system import activity

# A batch of metrics costs MLflow about the same for one round as for many.
SYNC_EVERY_SECONDS = 1.0
RETRY_SECONDS = 20.0
# How long a run waits for its server: before the first round, where a refusal shows early, and after the last.
START_SECONDS, END_SECONDS = 2.0, 20.0


class LiveCopy:
    """The MLflow run of what this process computes: written at once to a database, by a thread where there is a server.

    A server that is away, silent or slow neither stops nor slows the computation: the thread always sends the latest
    account, and tries again at intervals.

    Args:
        out: The folder of all runs.
        account: What the store is to know at first.
        is_new: Whether no process can have begun the MLflow run.
        seconds: So long a server is waited for.

    Raises:
        UserError: If the store refuses it; so do the other methods.
    """

    def __init__(self, out: Path, account: Account, is_new: bool = False, seconds: float = START_SECONDS) -> None:
        self.uri, self._out, self._copy = store_uri(out), out.resolve(), Copy(is_new=is_new)
        self._account, self._wanted, self._done = account, 0, 0  # the number of the account that is wanted, or there
        self._changed = Condition()
        self._thread: Thread | None = None
        self._failures = 0  # since the server has answered
        self._urged, self._closed = False, False
        self._error: Exception | None = None
        self._updated = time.monotonic()
        with explained(self.uri):
            import mlflow.entities  # noqa: F401 - takes seconds: here, not in a thread
        self.flush(account, seconds)

    @property
    def run_id(self) -> str:
        """Of the MLflow run; empty until the store has answered."""
        return self._copy.run_id

    def update(self, account: Account) -> None:
        """Update the store, if the last time is long enough ago."""
        if time.monotonic() - self._updated > SYNC_EVERY_SECONDS:
            self._tell(account)

    def flush(self, account: Account, seconds: float | None = None) -> bool:
        """Update the store now; whether it has everything after so many seconds at most, or when it does not answer."""
        self._tell(account)
        with self._changed:
            failures, self._urged = self._failures, True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_done or self._failures > failures, seconds)
            self._urged = False
            self._raise_refusal()
            return self._is_done

    def close(self, account: Account, seconds: float | None = END_SECONDS) -> bool:
        """Update the store the last time; what it lacks after so many seconds, the same command sends."""
        done = self.flush(account, seconds)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return done

    @property
    def _is_done(self) -> bool:
        return self._done == self._wanted

    def _tell(self, account: Account) -> None:
        self._updated = time.monotonic()
        if not is_server(self.uri):
            self._sync(account)
            return
        with self._changed:
            self._raise_refusal()
            self._account, self._wanted = account, self._wanted + 1
            if self._thread is None:
                self._thread = Thread(target=self._work, name="MLflow", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _sync(self, account: Account) -> None:
        with explained(self.uri):
            sync(account, open_place(self.uri, self._out), self._copy)

    def _work(self) -> None:
        """Update the server after each change, until the end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._is_done)
                account, wanted = self._account, self._wanted
            if self._closed:
                return
            try:
                if self._failures:
                    check_reachable(self.uri)
                self._sync(account)
            except UnreachableError:
                self._wait()
            except Exception as error:  # a refusal; or the interpreter is about to end
                self._settle(wanted, error)
            else:
                self._settle(wanted, None)

    def _settle(self, wanted: int, error: Exception | None) -> None:
        with self._changed:
            self._done, self._error = wanted, error
            is_back = self._failures and self._is_done and error is None
            self._failures = 0 if is_back else self._failures
            self._changed.notify_all()
        if is_back:
            activity.warn(f"the MLflow server at {self.uri} answers again, and has everything")

    def _wait(self) -> None:
        """Until it is time to try again."""
        if not self._failures and not self._closed:
            activity.warn(
                f"the MLflow server at {self.uri} does not answer; the computation goes on, what the server lacks "
                f"is kept and sent when it answers again (tried every {RETRY_SECONDS:g} s)"
            )
        with self._changed:
            self._failures, self._urged = self._failures + 1, False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._urged or self._closed, RETRY_SECONDS)

    def _raise_refusal(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
