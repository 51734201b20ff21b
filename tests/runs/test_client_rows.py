"""What clients remember, in files: a round writes what it has changed, and whatever happens a checkpoint is whole."""

import io
import math

import pytest
import torch

from fl_lightning.client_state import ClientMemory, Snapshot
from fl_lightning.errors import UserError
from fl_lightning.methods.fedcurv import FedCurv
from fl_lightning.methods.scaffold import Scaffold, State
from fl_lightning.runs import checkpoint, client_rows
from fl_lightning.runs.client_rows import AppendedFile
from fl_lightning.system import memory as system_memory
from fl_lightning.testing.purity import same
from tests.support.cases import equal_bits, final, ragged

NUMBERS = 50
RECORD = client_rows.RECORD.size + 208  # 50 floats, up to a multiple of 16


def some_row(value):
    return {"w": torch.full((NUMBERS,), float(value))}


def memory_of(values):
    return ClientMemory.blank(some_row(0)).replaced({n: some_row(value) for n, value in values.items()})


def snapshot(round, memory):
    return Snapshot(round, State(some_row(round), some_row(-round), memory), {})


def write(folder, round, memory):
    checkpoint.write(folder, "id", snapshot(round, memory))


def read(folder):
    return checkpoint.read(folder, "id", snapshot(0, ClientMemory.blank(some_row(0))))


def files(folder):
    return {path.name: path.stat().st_size for path in folder.glob("rows-*")}


def test_a_round_writes_what_has_changed_since_the_last_but_one(tmp_path):
    memory = memory_of(dict.fromkeys(range(20), 1))
    write(tmp_path, 1, memory)
    assert files(tmp_path) == {"rows-1.bin": client_rows.RECORD.size + 20 * RECORD}
    memory = memory.replaced({3: some_row(7), 90_000: some_row(8)})
    write(tmp_path, 2, memory)
    assert files(tmp_path) == {
        "rows-1.bin": client_rows.RECORD.size + 20 * RECORD,
        "rows-2.bin": client_rows.RECORD.size + 21 * RECORD,
    }
    memory = memory.replaced({4: some_row(9)})
    write(tmp_path, 3, memory)
    assert files(tmp_path) == {
        "rows-1.bin": client_rows.RECORD.size + 23 * RECORD,
        "rows-2.bin": client_rows.RECORD.size + 21 * RECORD,
    }
    write(tmp_path, 4, memory)
    write(tmp_path, 5, memory)
    assert files(tmp_path) == {
        "rows-1.bin": client_rows.RECORD.size + 23 * RECORD,
        "rows-2.bin": client_rows.RECORD.size + 22 * RECORD,
    }
    assert (tmp_path / checkpoint.CURRENT).stat().st_size < 3000
    assert same(read(tmp_path).state.clients, memory)


@pytest.mark.parametrize("damaged", ["rows-1.bin", "rows-2.bin"])
@pytest.mark.parametrize("rounds", [2, 3, 4])
def test_no_single_file_takes_both_checkpoints_along(tmp_path, damaged, rounds):
    memory, states = memory_of({n: n for n in range(4)}), {}
    for round in range(1, rounds + 1):
        memory = states[round] = memory.replaced({round % 3: some_row(10 * round)})
        write(tmp_path, round, memory)
    (tmp_path / damaged).write_bytes(b"")
    found = read(tmp_path)
    assert found.round in (rounds - 1, rounds)
    assert same(found.state.clients, states[found.round])
    for round in range(found.round + 1, 8):  # and it goes on as if nothing had been
        memory = found.state.clients.replaced({1: some_row(round)})
        write(tmp_path, round, memory)
        found = read(tmp_path)
        assert same(found.state.clients, memory)


def test_a_process_that_goes_on_begins_the_other_copy_and_adds_to_the_one_it_found(tmp_path):
    write(tmp_path, 1, memory_of({1: 1, 2: 2}))
    later = read(tmp_path).state.clients.replaced({2: some_row(3), 4: some_row(4)})
    write(tmp_path, 2, later)
    whole = {"rows-1.bin": client_rows.RECORD.size + 2 * RECORD, "rows-2.bin": client_rows.RECORD.size + 3 * RECORD}
    assert files(tmp_path) == whole
    assert same(read(tmp_path).state.clients, later)
    last = later.replaced({5: some_row(5)})
    write(tmp_path, 3, last)
    assert files(tmp_path) == {**whole, "rows-3.bin": 3 * RECORD}
    assert checkpoint._named(tmp_path / checkpoint.CURRENT) == {"rows-1.bin", "rows-3.bin"}
    assert same(read(tmp_path).state.clients, last)
    (tmp_path / checkpoint.CURRENT).unlink()
    assert same(read(tmp_path).state.clients, later)


def test_checkpoints_that_share_a_file_are_still_read(tmp_path):
    """As they were written before there were two copies."""
    memory = memory_of({1: 1, 2: 2})
    write(tmp_path, 1, memory)
    memory.saved.copies.following = memory.saved.copies.latest
    memory.unsaved = ({}, {})
    later = memory.replaced({1: some_row(5)})
    write(tmp_path, 2, later)
    assert files(tmp_path).keys() == {"rows-1.bin"}
    assert same(read(tmp_path).state.clients, later)
    last = read(tmp_path).state.clients.replaced({2: some_row(6)})
    write(tmp_path, 3, last)
    (tmp_path / "rows-1.bin").unlink()
    assert same(read(tmp_path).state.clients, last)


def test_a_memory_that_begins_anew_forgets_the_earlier_rows(tmp_path):
    write(tmp_path, 1, memory_of({1: 1, 2: 2}))
    write(tmp_path, 2, memory_of({2: 5, 3: 3}))
    assert same(read(tmp_path).state.clients, memory_of({2: 5, 3: 3}))
    (tmp_path / checkpoint.CURRENT).unlink()
    assert same(read(tmp_path).state.clients, memory_of({1: 1, 2: 2}))


def test_going_on_from_an_earlier_state_writes_that_one(tmp_path):
    first = memory_of({1: 1, 2: 2})
    write(tmp_path, 1, first)
    write(tmp_path, 2, first.replaced({1: some_row(8), 5: some_row(9)}))
    other = first.replaced({2: some_row(6)})
    write(tmp_path, 2, other)
    assert same(read(tmp_path).state.clients, other)


@pytest.mark.parametrize("length", [0, 10, -1, -RECORD, -RECORD - 5])
def test_lost_rows_of_the_last_round_fall_back_to_the_previous_one(tmp_path, length):
    memory = memory_of({1: 1})
    write(tmp_path, 1, memory)
    write(tmp_path, 2, memory_of({1: 2}))  # anew, in a file of its own
    path = tmp_path / "rows-2.bin"
    path.write_bytes(path.read_bytes()[:length])
    assert read(tmp_path).round == 1
    assert same(read(tmp_path).state.clients, memory)


@pytest.mark.parametrize("place", [0, 5, 9, 20, 30, -1])
def test_a_flipped_bit_of_the_last_rows_is_noticed(tmp_path, place):
    memory = memory_of({1: 1})
    write(tmp_path, 1, memory)
    write(tmp_path, 2, memory.replaced({1: some_row(2)}))
    for path in (tmp_path / "rows-2.bin", tmp_path / "rows-1.bin"):
        assert read(tmp_path).round == int(path.stem[-1])
        content = bytearray(path.read_bytes())
        content[place if place < 0 else client_rows.RECORD.size + place] ^= 1
        path.write_bytes(content)
    with pytest.raises(
        UserError, match=r"has lost what clients remember .*; start this run again with --fresh"
    ) as told:
        read(tmp_path)
    assert "\n" not in str(told.value)


def test_rows_of_another_run_are_not_believed(tmp_path):
    for value, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, 1, memory_of({1: value}))
    (tmp_path / "a" / "rows-1.bin").replace(tmp_path / "b" / "rows-1.bin")
    with pytest.raises(UserError, match=r"checksum of rows-1\.bin does not match"):
        read(tmp_path / "b")


def test_a_process_killed_between_rows_and_checkpoint_costs_its_round_alone(tmp_path, monkeypatch):
    memory = memory_of({1: 1, 2: 2})
    write(tmp_path, 1, memory)
    with monkeypatch.context() as broken:
        broken.setattr(checkpoint, "write_atomically", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write(tmp_path, 2, memory.replaced({1: some_row(5)}))
    found = read(tmp_path)
    assert found.round == 1
    assert same(found.state.clients, memory)
    again = found.state.clients.replaced({1: some_row(6), 3: some_row(3)})
    write(tmp_path, 2, again)
    assert same(read(tmp_path).state.clients, again)


def test_half_a_row_at_the_end_does_not_count(tmp_path):
    memory = memory_of({1: 1})
    write(tmp_path, 1, memory)
    with open(tmp_path / "rows-1.bin", "ab") as file:
        file.write(b"half a row")
    assert same(read(tmp_path).state.clients, memory)


class SmallDisk(io.FileIO):
    """A file that takes half of what does not fit."""

    room = 100

    def write(self, content):
        if len(content) > self.room:
            super().write(content[: self.room // 2])
            raise OSError(28, "No space left on device")
        return super().write(content)


def test_a_full_disk_leaves_the_round_before(tmp_path, monkeypatch):
    memory = memory_of({1: 1})
    write(tmp_path, 1, memory)
    later = memory.replaced({1: some_row(2), 2: some_row(3)})
    monkeypatch.setattr(client_rows, "open", lambda path, mode, **_: SmallDisk(path, mode), raising=False)
    with pytest.raises(UserError, match=r"rows-2\.bin: No space left on device; earlier rounds are safe"):
        write(tmp_path, 2, later)
    assert same(read(tmp_path).state.clients, memory)
    monkeypatch.setattr(SmallDisk, "room", math.inf)
    write(tmp_path, 2, later)
    assert same(read(tmp_path).state.clients, later)


def test_rows_out_of_date_do_not_pile_up(tmp_path, monkeypatch):
    monkeypatch.setattr(client_rows, "TOLERATED", 0)
    memory = memory_of({n: n for n in range(4)})
    for round in range(1, 40):
        memory = memory.replaced({round % 4: some_row(round)})
        write(tmp_path, round, memory)
        assert same(read(tmp_path).state.clients, memory)
        live = client_rows.RECORD.size + 4 * RECORD
        assert max(files(tmp_path).values()) <= 2 * live + 2 * RECORD
        previous = checkpoint._named(tmp_path / checkpoint.PREVIOUS)
        current = checkpoint._named(tmp_path / checkpoint.CURRENT)
        assert files(tmp_path).keys() == current | previous
        assert not current & previous
    assert "rows-1.bin" not in files(tmp_path)


def test_a_run_that_goes_on_elsewhere_takes_the_rows_along(tmp_path):
    for name in ("short", "long"):
        (tmp_path / name).mkdir()
    write(tmp_path / "short", 1, memory_of({1: 1, 2: 2}))
    later = read(tmp_path / "short").state.clients.replaced({2: some_row(3)})
    write(tmp_path / "long", 2, later)
    checkpoint.remove(tmp_path / "short", current=True)
    assert files(tmp_path / "short") == {}
    assert same(read(tmp_path / "long").state.clients, later)


def test_a_finished_run_keeps_the_rows_of_its_last_round(tmp_path):
    write(tmp_path, 1, memory_of({1: 1}))
    write(tmp_path, 2, memory_of({1: 2}))
    assert len(files(tmp_path)) == 2
    checkpoint.remove(tmp_path, current=False)
    assert len(files(tmp_path)) == 1
    assert same(read(tmp_path).state.clients, memory_of({1: 2}))


def test_rows_of_another_shape_are_refused(tmp_path):
    write(tmp_path, 1, memory_of({1: 1}))
    other = Snapshot(1, State(some_row(1), some_row(1), ClientMemory.blank({"w": torch.zeros(3)})), {})
    with pytest.raises(UserError, match="does not fit the method"):
        checkpoint.read(tmp_path, "id", other)


def test_rows_that_leave_no_memory_are_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(system_memory, "available", lambda device: 10)
    with pytest.raises(
        UserError, match=r"what 3 more clients remember would take .* and 10 bytes are free; take"
    ) as told:
        memory_of({1: 1, 2: 2, 3: 3})
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", [Scaffold(), Scaffold(niid_bench_init=True), FedCurv(), FedCurv(memory="all")])
def test_a_run_with_a_process_for_every_round_has_the_same_numbers(method, dtype, tmp_path):
    case = ragged(dtype).changed(fraction=0.5, rounds=5)
    expected = final(case.go_on(method))
    start = Snapshot(0, method.init(case.task().initial.params, 5), {})
    now = None
    for number in range(1, 6):
        (record,) = case.changed(rounds=number).go_on(method, resume=now)
        checkpoint.write(tmp_path, "id", record.after)
        now = checkpoint.read(tmp_path, "id", start)
    assert equal_bits(now.state.params, expected)


def test_every_type_of_tensor_comes_back_to_the_bit():
    tree = {
        "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "flag": torch.tensor([True, False, True]),
        "none": torch.empty(0, 3),
        "one": torch.tensor(-0.0, dtype=torch.float64),
        "turned": torch.arange(6).view(2, 3).t(),
    }
    found = client_rows.decoded(bytearray(client_rows.encoded(tree)), tree)
    assert len(client_rows.encoded(tree)) == client_rows.size(tree)
    for name, value in tree.items():
        assert found[name].shape == value.shape
        assert found[name].dtype == value.dtype
        assert client_rows.encoded({"_": found[name]}) == client_rows.encoded({"_": value})


def test_a_file_grows_only_by_what_was_appended(tmp_path):
    file = AppendedFile.create(tmp_path / "x")
    file.append([b"ab", b"c"])
    file.append([b"de"])
    again = AppendedFile.open(tmp_path / "x")
    assert bytes(again.take(5)) == b"abcde"
    assert (again.length, again.checksum) == (file.length, file.checksum)
    with pytest.raises(EOFError, match="ends after 5 bytes"):
        again.take(1)
    with pytest.raises(UserError, match="File exists; earlier rounds are safe"):
        AppendedFile.create(tmp_path / "x")
