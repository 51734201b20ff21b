"""A private local Ray cluster: it listens on the loopback interface alone, and asks for a token.

Ray has no public way to this. `ray.init` and `ray start --node-ip-address 127.0.0.1` both replace the loopback address
by one that other machines can reach, so that they may join (Ray 2.60). Where Ray knows no clusters (macOS, Windows) it
keeps the address, and all of its servers bind to it: hence the constant. Ray reads the token once per process, and a
second cluster of the same process has another token: hence the reset.
"""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LOOPBACK = "127.0.0.1"
MODE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"


@contextmanager
def private() -> Iterator[None]:
    """A Ray that is started in the block belongs to this process and to its children, which inherit the token."""
    before = {name: os.environ.get(name) for name in (MODE, TOKEN)}
    os.environ.update({MODE: "token", TOKEN: secrets.token_hex(32)})
    read_again()
    from ray._private import ray_constants

    joinable = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = joinable
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        read_again()  # a program that starts a Ray of its own afterwards would be asked for a token that is gone


def read_again() -> None:
    """Let Ray look at the environment's token again; it keeps the first that it has seen."""
    if "ray" in sys.modules:
        from ray import _raylet

        core: Any = _raylet  # compiled: its names are not declared
        core.Config.initialize("")
        core.AuthenticationTokenLoader.instance().reset_cache()
