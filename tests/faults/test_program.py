"""The program in poor surroundings: stopped while it loads, without streams, memory, disk or a good locale."""

import os
import resource
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.system


# Without Lightning, which takes as long to import as all the rest.
RUN = ["run", "--data.clients", "3", "--model.hidden", "[4]", "--federation.rounds", "3", "--engine", "functional"]
STOPPED = {"fl-lightning: stopped", "fl-lightning: stopped; finished rounds are saved, the same command goes on"}


def start(*arguments, **options):
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen([sys.executable, "-m", "fl_lightning", *arguments], **settings)


STOPS_ITSELF = """
import os, runpy, sys

name, number = sys.argv.pop(1), int(sys.argv.pop(1))


class Trap:
    def find_spec(asked, *_):
        if asked == name:
            sys.meta_path.remove(Trap)
            os.kill(os.getpid(), number)


sys.meta_path.insert(0, Trap)
runpy.run_module("fl_lightning", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["docstring_parser", "numpy", "torch.nn", "fl_lightning.experiment"])
def test_stopped_while_modules_are_imported(out, module, number):
    """Exactly when a module is asked for: the first ones before anything is known, the last before the first round."""
    command = [sys.executable, "-c", STOPS_ITSELF, module, str(int(number)), *RUN, "--runs", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 128 + number
    lines = {line for line in done.stderr.splitlines() if line.startswith("fl-lightning:")}
    assert lines
    assert lines <= STOPPED
    assert "Traceback" not in done.stdout + done.stderr


AFTERWARDS = """
import atexit, os, signal


def stop(kill=os.kill, process=os.getpid()):
    kill(process, signal.SIGINT)


class Kept:
    __del__ = lambda self, kill=os.kill, process=os.getpid(): kill(process, 2)


"""


@pytest.mark.parametrize(
    ("moment", "code", "line"),
    [("atexit.register(stop)", 130, "fl-lightning: stopped"), ("kept = Kept()", 0, "")],
    ids=["libraries end", "the interpreter ends"],
)
def test_stopped_after_the_result(tmp_path, moment, code, line):
    (tmp_path / "late.py").write_text(AFTERWARDS + moment)
    done = subprocess.run(
        [sys.executable, "-m", "fl_lightning", "list", "methods"],
        env={**os.environ, "FL_LIGHTNING_PLUGINS": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert "fedavg" in done.stdout
    assert (done.returncode, done.stderr.strip()) == (code, line)


NAMELESS = """
import pwd, sys


def unknown(number):
    raise KeyError(number)


pwd.getpwuid = unknown
from fl_lightning.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("home", [{}, {"HOME": "/proc/nothing"}], ids=["none", "not writable"])
def test_a_user_without_a_home(out, tmp_path, home):
    """Neither HOME nor an entry among the users, as in containers on clusters; or a folder that cannot be written."""
    unset = ("HOME", "USER", "LOGNAME", "MPLCONFIGDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    if not home:  # root could write to `/`
        variables |= {"XDG_CONFIG_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", NAMELESS, *RUN, "--runs", str(out)],
        env={**variables, **home, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "GA" in done.stdout) == (0, True), done.stderr
    assert "atplotlib" not in done.stderr
    assert not list(tmp_path.glob("fl_lightning-*"))


def descriptors_closed(*numbers):
    return lambda: [os.close(number) for number in numbers]


@pytest.mark.parametrize("closed", [(2,), (0, 1, 2)])
def test_closed_streams(out, closed):
    with start(*RUN, "--runs", str(out), preexec_fn=descriptors_closed(*closed)) as process:
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 0
    assert ("GA" in output) == (1 not in closed)
    assert errors == "" or 2 not in closed
    database = (out / "mlflow.db").read_bytes()
    assert database.startswith(b"SQLite format 3\0"), "something was written into what took the place of a stream"
    with start("run", "--method", "nothing", preexec_fn=descriptors_closed(*closed)) as process:
        process.communicate(timeout=300)
    assert process.returncode == 2


def test_a_reader_of_progress_that_goes_away(out):
    reading, writing = os.pipe()
    os.close(reading)
    with start(*RUN, "--runs", str(out), stderr=writing) as process:
        os.close(writing)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "GA" in output


@pytest.mark.parametrize("arguments", [["list", "methods"], ["run", "--help"]])
def test_output_to_a_full_disk(arguments):
    with open("/dev/full", "w", encoding="utf-8") as full, start(*arguments, stdout=full) as process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    assert errors.startswith("fl-lightning: No space left on device")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("megabytes", [150, 500, 800])
def test_a_limit_of_memory(out, megabytes):
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (megabytes * 10**6, megabytes * 10**6))

    with start(*RUN, "--runs", str(out), "--quiet", preexec_fn=limit) as process:
        _, errors = process.communicate(timeout=300)
    assert "Traceback" not in errors
    if process.returncode == 1:  # compiled code ends the process by itself, in one line of its own
        assert errors == "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.\n"
    elif process.returncode != 0:
        assert process.returncode == 2
        assert "cannot have as much memory as it needs" in errors.splitlines()[-1]


@pytest.mark.parametrize(
    "locale",
    [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
)
def test_a_locale_without_letters(tmp_path, out, locale):
    study = tmp_path / "mine.yaml"
    study.write_text(
        "about: größer ± ☃\nbase: {data: digits}\nspace: {training.lr: [0.1]}\ncases: [{label: FÖLA ☃, method: fola}]",
        encoding="utf-8",
    )
    variables = {**os.environ, **locale}
    for arguments in ([*RUN, "--runs", str(out)], ["sweep", str(study), "--dry-run", "--runs", str(out)]):
        with start(*arguments, env=variables, encoding="utf-8", errors="replace") as process:
            output, errors = process.communicate(timeout=300)
        assert (process.returncode, "Traceback" in errors) == (0, False), errors
        assert output


def test_a_thread_that_a_plugin_has_left_keeps_no_finished_run(tmp_path, out):
    (tmp_path / "waiting.py").write_text(
        "import atexit, threading\n"
        "from fl_lightning.methods.fedavg import FedAvg\n"
        "class Waiting(FedAvg):\n"
        "    '''Leaves a thread behind.'''\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "atexit.register(print, 'closed')\n"
    )
    variables = {**os.environ, "FL_LIGHTNING_PLUGINS": str(tmp_path)}
    with start(*RUN, "--method", "waiting", "--json", "--quiet", "--runs", str(out), env=variables) as process:
        try:
            output, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")
    assert output.splitlines()[0].startswith("{")
    assert output.splitlines()[1:] == ["closed"]
