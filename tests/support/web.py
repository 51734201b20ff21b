"""Small web servers on this machine that write nothing to the test's output."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


class QuietServer(ThreadingHTTPServer):
    """Says nothing of clients that hang up early, as torchvision does when it asks for redirects."""

    def handle_error(self, *_):
        pass


class QuietHandler(BaseHTTPRequestHandler):
    """Says nothing of requests."""

    def log_message(self, *_):
        pass


class QuietFiles(QuietHandler, SimpleHTTPRequestHandler):
    """Serves the files of a folder."""


@contextmanager
def serving(handler, port: int = 0) -> Iterator[QuietServer]:
    """A server in a thread of its own."""
    with QuietServer(("127.0.0.1", port), handler) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


@contextmanager
def serving_files(folder: Path) -> Iterator[str]:
    """The address of a server of the files in a folder."""
    with serving(partial(QuietFiles, directory=str(folder))) as server:
        yield f"http://127.0.0.1:{server.server_port}/"
