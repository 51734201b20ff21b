"""The last lines of a command: where to look next, as commands to paste."""

import shlex
import shutil
import sys
from pathlib import Path

from fl_lightning.runs.tracking.store import is_server, store_uri

GA_AND_LA = (
    "GA is the test accuracy of the aggregated model (R² for a regression), LA the mean of the clients' own models\n"
    "before aggregation, weighted by their data; both after the last round, mean ± standard deviation over the seeds."
)


def program() -> str:
    """How this program is called from here: by its name only if the shell would find it."""
    script = Path(sys.executable).parent / "fl-lightning"
    if shutil.which("fl-lightning") == str(script):
        return "fl-lightning"
    if script.exists():
        return shlex.quote(str(shown(script)))
    return f"{shlex.quote(str(shown(Path(sys.executable))))} -m fl_lightning"


def command(*words: str | Path) -> str:
    """A command of this program, ready to be pasted."""
    return " ".join([program(), *(shlex.quote(str(shown(w) if isinstance(w, Path) else w)) for w in words)])


def look(out: Path) -> str:
    """Where the runs of a folder can be looked at: the address of a tracking server, or how to start the UI."""
    uri = store_uri(out)
    return uri if is_server(uri) else command("ui", "--runs", out)


def shown(path: Path) -> Path:
    """As the user would type it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
