"""A local Ray cluster that nobody else can reach: it listens on the loopback interface, and asks for a token.

`ray.init` replaces a loopback address by one that other machines can reach, so that they may join. Where Ray knows
no clusters (macOS, Windows) it does not, and then all of its servers bind to the address they are given.
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
    """Whatever Ray is started in the block is for this process and those that it starts, who inherit the token."""
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
    """Let Ray look at the environment's token again; it remembers the one it has seen first."""
    if "ray" in sys.modules:
        from ray import _raylet

        core: Any = _raylet  # compiled: its names are not declared
        core.Config.initialize("")
        core.AuthenticationTokenLoader.instance().reset_cache()
