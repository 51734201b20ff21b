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

from fl_lightning.engines.parallel import ray_session
from fl_lightning.engines.parallel.ray_cluster import Resources, connected

pytestmark = pytest.mark.system


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(ray_session.VARIABLE, raising=False)
    return tmp_path


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def left_behind(temporary, *lines):
    """A folder as a killed driver leaves it."""
    folder = temporary / f"{ray_session.PREFIX}old"
    folder.mkdir(mode=0o700)
    (folder / ray_session.OWNER).touch()
    (folder / ray_session.PROCESSES).write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_processes_on_the_list_end_with_their_session(temporary, sleeper):
    folder = left_behind(temporary, f"{sleeper.pid} {ray_session.birth(sleeper.pid)}")
    ray_session.sweep_up()
    assert sleeper.wait(10) == -9
    assert not folder.exists()


def test_who_merely_reads_a_file_of_the_session_lives_on(temporary):
    folder = left_behind(temporary)
    (folder / "raylet.log").write_text("line\n")
    with subprocess.Popen(["tail", "-f", folder / "raylet.log"], stdout=subprocess.PIPE) as reader:
        reader.stdout.readline()  # it has opened the file
        ray_session.sweep_up()
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
    left_behind(temporary, line.format(pid=sleeper.pid, born=ray_session.birth(sleeper.pid)))
    ray_session.sweep_up()
    assert sleeper.poll() is None


def test_a_living_driver_keeps_its_session(temporary, sleeper):
    with ray_session.session() as folder:
        ray_session.enrol(sleeper.pid)
        ray_session.sweep_up()
        assert sleeper.poll() is None
        listed = (folder / ray_session.PROCESSES).read_text().split()
        assert listed == [str(sleeper.pid), ray_session.birth(sleeper.pid)]
    assert sleeper.wait(10) == -9
    assert not folder.exists()
    ray_session.enrol(os.getpid())  # without a session nothing happens


def test_a_folder_that_is_a_link_is_not_followed(temporary, sleeper):
    elsewhere = temporary / "elsewhere"
    left_behind(temporary, f"{sleeper.pid} {ray_session.birth(sleeper.pid)}").rename(elsewhere)
    (temporary / f"{ray_session.PREFIX}link").symlink_to(elsewhere)
    ray_session.sweep_up()
    assert sleeper.poll() is None
    assert (elsewhere / ray_session.OWNER).exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_users_session_is_neither_read_nor_ended(temporary, sleeper, monkeypatch):
    """As an ordinary user beside a closed folder of somebody else's; and as root, who could read it."""
    folder = left_behind(temporary, f"{sleeper.pid} {ray_session.birth(sleeper.pid)}")
    folder.chmod(0o700)
    public = Path(tempfile.mkdtemp(dir="/tmp"))  # the folders of pytest are closed to others
    folder = folder.rename(public / folder.name)
    public.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(public))
    if (child := os.fork()) == 0:
        os.setuid(65534)
        try:
            ray_session.sweep_up()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for path in (folder, *folder.iterdir()):
        os.chown(path, 65534, 65534)
    ray_session.sweep_up()
    assert sleeper.poll() is None
    assert folder.exists()
    shutil.rmtree(public)


AS_ANOTHER = """
import os, sys
os.setuid(65534)
for name in sys.argv[2:]:
    try:
        with open(os.path.join(sys.argv[1], name), "a") as file:
            file.write("1 x")
        print("wrote", name)
    except PermissionError:
        continue
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_writes_into_no_file_of_a_running_session():
    """Ray opens its own folder to all users, and others could replace what lies in it."""
    with connected(None, Resources()):
        folder = Path(os.environ[ray_session.VARIABLE])
        assert (folder / ray_session.RAY).stat().st_mode & 0o777 == 0o777  # or there would be nothing to protect
        names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
        assert {Path(ray_session.PROCESSES), Path(ray_session.OWNER)} < set(names)
        command = [sys.executable, "-c", AS_ANOTHER, folder, "new", f"{ray_session.RAY}/new", *names]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == ""


def test_a_list_that_others_could_write_is_not_believed(temporary, sleeper):
    folder = left_behind(temporary, f"{sleeper.pid} {ray_session.birth(sleeper.pid)}")
    folder.chmod(0o777)
    ray_session.sweep_up()
    assert sleeper.poll() is None
    assert folder.exists()


@pytest.mark.parametrize(("age", "stays"), [(0.0, True), (3600.0, False)])
def test_a_folder_without_a_lock_is_being_made_or_was_left(temporary, age, stays):
    folder = temporary / f"{ray_session.PREFIX}new"
    folder.mkdir(mode=0o700)
    then = time.time() - age
    os.utime(folder, (then, then))
    ray_session.sweep_up()
    assert folder.exists() == stays


def test_a_folder_that_cannot_be_read_stops_nobody(temporary, monkeypatch):
    folder = left_behind(temporary)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    ray_session.sweep_up()
    assert folder.exists()
