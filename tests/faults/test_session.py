"""What a killed driver leaves is swept up; nobody else's folders and processes are touched."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import filelock
import pytest

from fl_lightning.cluster import session
from fl_lightning.system import processes


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(session.VARIABLE, raising=False)
    return tmp_path


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def left_behind(temporary, *lines):
    """A folder as a killed driver leaves it."""
    folder = temporary / f"{session.PREFIX}old"
    folder.mkdir()
    (folder / session.OWNER).touch()
    (folder / session.PROCESSES).write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_processes_on_the_list_end_with_their_session(temporary, sleeper):
    folder = left_behind(temporary, f"{sleeper.pid} {processes.birth(sleeper.pid)}")
    session.sweep_up()
    assert sleeper.wait(10) == -9
    assert not folder.exists()


def test_who_merely_reads_a_file_of_the_session_lives_on(temporary):
    folder = left_behind(temporary)
    (folder / "raylet.log").write_text("line\n")
    with subprocess.Popen(["tail", "-f", folder / "raylet.log"], stdout=subprocess.PIPE) as reader:
        reader.stdout.readline()  # it has opened the file
        session.sweep_up()
        time.sleep(0.2)
        assert reader.poll() is None
        reader.kill()
    assert not folder.exists()


@pytest.mark.parametrize(
    "line",
    [
        "{pid} other-boot:1",
        "{pid}",
        "{pid} ",
        "-1 x",
        "0 {born}",
        "1 {born}",
        "99999999999999999999 x",
        "\x00\xff",
        "² x",
    ],
)
def test_a_number_that_is_somebody_elses_by_now_is_left_alone(temporary, sleeper, line):
    left_behind(temporary, line.format(pid=sleeper.pid, born=processes.birth(sleeper.pid)))
    session.sweep_up()
    assert sleeper.poll() is None


def test_a_living_driver_keeps_its_session(temporary, sleeper):
    with session.session() as folder:
        session.enrol(sleeper.pid)
        session.sweep_up()
        assert sleeper.poll() is None
        assert (folder / session.PROCESSES).read_text().split() == [str(sleeper.pid), processes.birth(sleeper.pid)]
    assert sleeper.wait(10) == -9
    assert not folder.exists()
    session.enrol(os.getpid())  # without a session nothing happens


def test_a_folder_that_is_a_link_is_not_followed(temporary, sleeper):
    elsewhere = temporary / "elsewhere"
    left_behind(temporary, f"{sleeper.pid} {processes.birth(sleeper.pid)}").rename(elsewhere)
    (temporary / f"{session.PREFIX}link").symlink_to(elsewhere)
    session.sweep_up()
    assert sleeper.poll() is None
    assert (elsewhere / session.OWNER).exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_users_session_is_neither_read_nor_ended(temporary, sleeper, monkeypatch):
    """As an ordinary user beside a closed folder of somebody else's; and as root, who could read it."""
    folder = left_behind(temporary, f"{sleeper.pid} {processes.birth(sleeper.pid)}")
    folder.chmod(0o700)
    public = Path(tempfile.mkdtemp(dir="/tmp"))  # the folders of pytest are closed to others
    folder = folder.rename(public / folder.name)
    public.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(public))
    if (child := os.fork()) == 0:
        os.setuid(65534)
        try:
            session.sweep_up()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for path in (folder, *folder.iterdir()):
        os.chown(path, 65534, 65534)
    session.sweep_up()
    assert sleeper.poll() is None
    assert folder.exists()
    shutil.rmtree(public)


def test_a_folder_that_cannot_be_read_stops_nobody(temporary, monkeypatch):
    folder = left_behind(temporary)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    session.sweep_up()
    assert folder.exists()
