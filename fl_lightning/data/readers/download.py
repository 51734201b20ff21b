"""Files from the network, each one whole or not at all.

torchvision knows the addresses and checksums. The download is ours, because torchvision's prints progress bars, may
hang for minutes behind a firewall, and leaves half a file behind when it is killed, which it later takes for a whole
one.
"""

import hashlib
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen
from uuid import uuid4

from fl_lightning.errors import UserError

PATIENCE_SECONDS = 8.0


class DownloadError(Exception):
    """No address gave the file."""


def download(addresses: Sequence[str], md5: str) -> bytes:
    """The content of the first address that has the file with this checksum."""
    reason = "no address is known"
    for address in addresses:
        try:
            content = _get(address)
        except HTTPError as error:
            error.close()
            reason = f"{address}: {error}"
            continue
        except (OSError, HTTPException) as error:
            reason = f"{address}: {getattr(error, 'reason', error)}"
            continue
        # Not for security: it tells the file from the login page of a hotel or a proxy.
        if hashlib.md5(content, usedforsecurity=False).hexdigest() == md5:
            return content
        reason = f"{address} sent something else, its checksum is wrong"
    raise DownloadError(" ".join(reason.split()))


def unusable(folder: Path, name: str, error: OSError) -> UserError:
    """The folder of the data cannot be read or written."""
    return UserError(
        f"cannot use {folder} for {name}: {error}; choose another folder by --data.root or FL_LIGHTNING_DATA, "
        "or use --data digits, which needs no files"
    )


def damaged(file: Path, what: str) -> str:
    """What to say about a file that is not what it should be and can be had again."""
    return f"{file} is damaged ({what}); delete it so that it is downloaded again, or replace it by a good copy"


def write_whole(file: Path, content: bytes) -> None:
    """Write under a passing name and rename, so that nobody, not even a process beside us, sees half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    passing = file.with_name(f".{file.name}.{uuid4().hex}")
    try:
        passing.write_bytes(content)
        passing.replace(file)
    finally:
        passing.unlink(missing_ok=True)


def _get(address: str) -> bytes:
    """The content of an address, or OSError if the first answer takes longer than our patience.

    A timeout of `urlopen` alone is no bound: it holds for each address of the host in turn, and not for the name
    lookup. So a thread asks, and is left behind if it hangs.
    """
    answers: SimpleQueue[Any] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put(urlopen(address, timeout=PATIENCE_SECONDS))
        except Exception as error:
            answers.put(error)

    Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=PATIENCE_SECONDS)
    except Empty:
        raise TimeoutError(f"no answer within {PATIENCE_SECONDS:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    with answer:
        content: bytes = answer.read()
    return content
