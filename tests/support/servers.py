"""Real servers for tests, on free ports of the loopback address."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

# Ports that the kernel never assigns by itself.
PORTS = range(20_000, 32_768)
_held: list[socket.socket] = []


def free_port() -> int:
    """A port that no other test is given while this process lives: UDP's of the same number is held for it."""
    for port in random.SystemRandom().sample(PORTS, 1000):
        held = socket.socket(type=socket.SOCK_DGRAM)
        try:
            held.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            continue
        _held.append(held)
        return port
    raise OSError("no port is free")


def wait_for(url: str, seconds: float = 120) -> str:
    """The page at this address, as soon as somebody serves it."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as page:
                return page.read().decode()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)


@contextmanager
def serving(*arguments: str):
    """Run `python -m ...` in a process group of its own, and end all of it afterwards."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-m", *arguments], start_new_session=True, **quiet)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
