"""Ray on this machine: nobody else reaches it, Ctrl-C while it starts is obeyed, a terminal sees nothing strange."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from fl_lightning.engines.parallel.ray_session import descendants, session
from tests.support.clusters import ENVIRONMENT, Driver, cluster, wait_for_rounds

pytestmark = pytest.mark.system


STUDY = {
    "base": {
        "data": "digits",
        "data.subset": 0.2,
        "data.clients": 3,
        "model": "mlp",
        "model.hidden": [8],
        "federation.rounds": 30,
        "engine": "functional",
        "engine.chunk": 1,
    },
    "cases": ["fedavg"],
    "seeds": 2,
}
LISTENS = "0A"


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(STUDY))
    return str(path)


@pytest.fixture
def drive(out):
    drivers = []

    def start(*arguments, **environment):
        drivers.append(Driver(out, *arguments, **environment))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.end()


def listening():
    """By inode, the address on which a socket of this machine listens, as the kernel writes it."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENS:
                found[inode] = local.partition(":")[0]
    return found


def sockets(number):
    for file in Path(f"/proc/{number}/fd").iterdir():
        try:
            if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(file)):
                yield found[1]
        except FileNotFoundError:
            continue


def is_loopback(address):
    """127.x.x.x, ::1, or the former written as the latter; the kernel writes words of four bytes, the lowest first."""
    words = [address[place : place + 8] for place in range(0, len(address), 8)]
    if len(words) == 1 or words[:3] == ["0" * 8, "0" * 8, "FFFF0000"]:
        return words[-1].endswith("7F")
    return words == ["0" * 8] * 3 + ["01000000"]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("0100007F", True),
        ("00000000", False),
        ("020200C0", False),
        ("0000000000000000FFFF00000100007F", True),
        ("00000000000000000000000001000000", True),
        ("0" * 32, False),
        ("0000000000000000FFFF0000020200C0", False),
    ],
)
def test_addresses_are_read_as_the_kernel_writes_them(address, expected):
    assert is_loopback(address) == expected


def test_every_server_of_a_local_sweep_listens_on_loopback_and_has_a_token(out, study, drive):
    driver = drive(study, "--max-concurrent", "1", RAY_AUTH_MODE="disabled")  # for other clusters; ours has its own
    wait_for_rounds(out, 5, driver.process)
    known, servers = listening(), {}
    for number in [driver.process.pid, *descendants(driver.process.pid)]:
        command = Path(f"/proc/{number}/cmdline").read_text().replace("\0", " ")
        addresses = [known[inode] for inode in sockets(number) if inode in known]
        servers |= {command: addresses} if addresses else {}
        if number != driver.process.pid and not command.startswith("ray::"):  # those write over what they were given
            variables = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
            assert b"RAY_AUTH_MODE=token" in variables, command
            assert any(re.fullmatch(rb"RAY_AUTH_TOKEN=[0-9a-f]{64}", variable) for variable in variables), command
    assert any("gcs_server" in command for command in servers)
    assert any("raylet" in command for command in servers)
    assert any(command.startswith("ray::") for command in servers), "no worker"
    for command, addresses in servers.items():
        assert all(map(is_loopback, addresses)), (command, addresses)
    assert driver.wait() == 0, driver.errors


OWN_RAY_AFTERWARDS = """
import subprocess, sys
import ray
from fl_lightning.engines.parallel.ray_cluster import Resources, connected

child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
with connected(None, Resources()):
    pass
print("its other child", "lives" if child.poll() is None else "was ended")
child.communicate(b"\\n")
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
print(ray.get(ray.remote(lambda: "answered").remote()))
"""


def test_a_program_keeps_its_children_and_may_start_its_own_ray_after_ours(monkeypatch, tmp_path):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    made = subprocess.run([sys.executable, "-c", OWN_RAY_AFTERWARDS], capture_output=True, text=True, cwd=tmp_path)
    assert made.stdout.splitlines() == ["its other child lives", "answered"], made.stderr


@pytest.fixture
def token(monkeypatch):
    """Every Ray that this process starts asks for a token, which is forgotten afterwards."""
    from fl_lightning.engines.parallel.ray_cluster import read_again

    with monkeypatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", "a" * 64)
        read_again()
        yield
    read_again()


def test_a_wrong_token_is_named(out, study, drive, token):
    with cluster(1) as made:
        address = made.address
        driver = drive(study, "--address", address, RAY_AUTH_TOKEN="b" * 64)
        assert driver.wait() == 2
    assert f"the Ray cluster at {address} does not take the token of this machine" in driver.errors
    assert driver.errors.count("\n") == 1


def test_ctrl_c_while_ray_starts(out, study, drive):
    """As soon as the session has its folder, its head, its node: the right word and number, and nothing left."""
    stages = {"": signal.SIGINT, "/**/gcs_server.out": signal.SIGTERM, "/**/raylet.out": signal.SIGINT}
    for sign, number in stages.items():
        driver = drive(study)
        while not any(Path(driver.temporary).glob(f"fl-ray-*{sign}")):
            assert driver.process.poll() is None, driver.errors
            time.sleep(0.005)
        driver.process.send_signal(number)
        assert driver.wait() == 128 + number, driver.errors
        last = "fl-lightning: stopped; finished rounds are saved, the same command goes on"
        assert driver.errors.split("\n") == ["", last, ""]
        assert driver.wait_until_gone() == {}
        assert not any(Path(driver.temporary).glob("fl-ray-*"))


WRITES_ON = """
import sys, time
from pathlib import Path

logs, end = Path(sys.argv[1], "logs"), time.monotonic() + 60
while time.monotonic() < end:
    try:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / str(time.monotonic_ns())).touch()
    except FileNotFoundError:  # somebody removes it
        continue
"""


def test_nothing_is_left_of_a_session_whose_last_process_writes_on():
    """As a worker does that Ray has just started: on no list, an orphan, and its log makes the folder anew."""
    with session() as folder:
        start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WRITES_ON!r}, {str(folder)!r}])"
        subprocess.run([sys.executable, "-c", start], check=True)
        while not (folder / "logs").exists():
            time.sleep(0.005)
    assert not folder.exists()
    time.sleep(0.5)
    assert not folder.exists()


def test_a_terminal_sees_no_stray_letters(out, study):
    number, terminal = pty.fork()
    if number == 0:
        command = [sys.executable, "-m", "fl_lightning", "sweep", study, "--runs", str(out)]
        os.execve(sys.executable, command, {**os.environ, **ENVIRONMENT})
    seen = b""
    while select.select([terminal], [], [], 300)[0]:
        try:
            seen += os.read(terminal, 65536)
        except OSError:  # it has ended
            break
    assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 0, seen
    os.close(terminal)
    assert b"2 runs" in seen
    assert b"\x1b[0m" not in seen
    assert seen.rstrip().endswith(str(out).encode())
