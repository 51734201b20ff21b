import pytest
import torch

from fl_lightning.errors import UserError
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.methods.fola import Fola, State
from fl_lightning.record import Measurement, Snapshot
from fl_lightning.runs import checkpoint
from tests.cases import equal_bits, ragged


def snapshot(round=1, value=1.0):
    shared = torch.full((2, 3), value)
    return Snapshot(round, State(Diagonal({"w": shared}, {"w": shared})), {"n": torch.tensor(round)})


HISTORY = [Measurement({"GA": 0.1 + 0.2, "LA": float("nan")}, {"client": [0, 3]})]


def test_everything_comes_back_to_the_bit(tmp_path):
    case = ragged(dtype=torch.float32)
    record = case.run(Fola())[-1]
    checkpoint.write(tmp_path, "id", record.after, HISTORY)
    start = Snapshot(0, Fola().init(case.task().initial.params, 5), {})
    saved = checkpoint.read(tmp_path, "id", start)
    assert saved.snapshot.round == 3
    assert equal_bits(saved.snapshot.state.params, record.after.state.params)
    assert equal_bits(saved.snapshot.state.posterior.precision, record.after.state.posterior.precision)
    assert saved.history[0].metrics["GA"] == 0.1 + 0.2
    assert saved.history[0].clients == {"client": [0, 3]}


def test_nothing_saved_is_no_error(tmp_path):
    assert checkpoint.read(tmp_path, "id", snapshot(0)) is None


def test_the_previous_round_is_kept(tmp_path):
    for round in (1, 2):
        checkpoint.write(tmp_path, "id", snapshot(round, float(round)), HISTORY)
    (tmp_path / checkpoint.CURRENT).unlink()
    assert checkpoint.read(tmp_path, "id", snapshot(0)).snapshot.round == 1


@pytest.mark.parametrize("length", [0, 7, 8, 100, -20, -1])
def test_a_truncated_file_falls_back_to_the_previous_one(tmp_path, length):
    for round in (1, 2):
        checkpoint.write(tmp_path, "id", snapshot(round), HISTORY)
    path = tmp_path / checkpoint.CURRENT
    path.write_bytes(path.read_bytes()[:length])
    assert checkpoint.read(tmp_path, "id", snapshot(0)).snapshot.round == 1


def test_a_flipped_bit_is_noticed(tmp_path):
    for round in (1, 2):
        checkpoint.write(tmp_path, "id", snapshot(round), HISTORY)
    path = tmp_path / checkpoint.CURRENT
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert checkpoint.read(tmp_path, "id", snapshot(0)).snapshot.round == 1


def test_nothing_readable_is_one_clear_error(tmp_path):
    (tmp_path / checkpoint.CURRENT).write_bytes(b"garbage")
    (tmp_path / checkpoint.PREVIOUS).write_bytes(b"")
    with pytest.raises(UserError, match="start this run again with --fresh") as caught:
        checkpoint.read(tmp_path, "id", snapshot(0))
    assert "\n" not in str(caught.value)


def test_a_pickle_is_not_executed(tmp_path):
    torch.save({"w": torch.zeros(1)}, tmp_path / checkpoint.CURRENT)
    with pytest.raises(UserError, match="no readable checkpoint"):
        checkpoint.read(tmp_path, "id", snapshot(0))


def test_another_configuration_is_refused(tmp_path):
    checkpoint.write(tmp_path, "mine", snapshot(), HISTORY)
    with pytest.raises(UserError, match="belongs to another configuration"):
        checkpoint.read(tmp_path, "yours", snapshot(0))


def test_another_shape_is_refused(tmp_path):
    checkpoint.write(tmp_path, "id", snapshot(), HISTORY)
    other = Snapshot(0, State(Diagonal({"w": torch.zeros(5)}, {"w": torch.zeros(5)})), {"n": torch.tensor(0)})
    with pytest.raises(UserError, match="does not fit the method"):
        checkpoint.read(tmp_path, "id", other)


@pytest.mark.parametrize(
    ("key", "digits", "others"),
    [
        ("round", b'"round":"2"', b'"round":"1"'),
        ("history", b"0.1", b"0.9"),
        ("numbers", b'"numbers":"{}', b'"numbers":"[]'),
    ],
)
def test_a_changed_digit_of_the_header_is_noticed(tmp_path, key, digits, others):
    for round in (1, 2):
        checkpoint.write(tmp_path, "id", snapshot(round), [Measurement({"GA": 0.1}, {})] * round)
    path = tmp_path / checkpoint.CURRENT
    content = path.read_bytes()
    assert digits in content
    path.write_bytes(content.replace(digits, others, 1))
    assert len(checkpoint.read(tmp_path, "id", snapshot(0)).history) == 1  # the previous round's
    with pytest.raises(UserError, match="checksum of its header"):
        checkpoint.identity_of(tmp_path)


def test_a_changed_shape_is_noticed(tmp_path):
    checkpoint.write(tmp_path, "id", snapshot(), HISTORY)
    path = tmp_path / checkpoint.CURRENT
    path.write_bytes(path.read_bytes().replace(b"[2,3]", b"[3,2]", 1))
    with pytest.raises(UserError, match="checksum of its tensors"):
        checkpoint.read_parts(tmp_path)


def test_a_checkpoint_of_an_earlier_version_is_one_clear_line(tmp_path):
    checkpoint.write(tmp_path, "id", snapshot(), HISTORY)
    path = tmp_path / checkpoint.CURRENT
    path.write_bytes(path.read_bytes().replace(checkpoint.FORMAT.encode(), b"fl_lightning checkpoint 1", 1))
    with pytest.raises(UserError, match=r"another version \(fl_lightning checkpoint 1\); start this run again with"):
        checkpoint.read(tmp_path, "id", snapshot(0))


def test_a_round_of_a_long_run_is_saved_without_the_earlier_ones(tmp_path):
    history = [Measurement({"GA": number / 7}, {"client": [number]}) for number in range(120)]
    for round in range(1, 121):
        checkpoint.write(tmp_path, "id", snapshot(round), history[:round])
        names = sorted(path.name for path in tmp_path.glob("rounds-*"))
        assert len(names) == (round - 1) // 50
        if round == 51:
            first = (tmp_path / "rounds-50.json").stat().st_mtime_ns
    assert (tmp_path / "rounds-50.json").stat().st_mtime_ns == first  # written once
    assert b"GA" in (tmp_path / checkpoint.CURRENT).read_bytes()
    assert checkpoint.read(tmp_path, "id", snapshot(0)).history == history
    (tmp_path / checkpoint.CURRENT).write_bytes(b"garbage")
    saved = checkpoint.read(tmp_path, "id", snapshot(0))
    assert (saved.snapshot.round, saved.history) == (119, history[:119])
    checkpoint.write(tmp_path, "id", snapshot(120), history)  # goes on beside what is left
    assert checkpoint.read(tmp_path, "id", snapshot(0)).history == history


def test_damaged_numbers_of_earlier_rounds_are_not_believed(tmp_path):
    history = [Measurement({"GA": 0.25}, {})] * 60
    for round in (59, 60):
        checkpoint.write(tmp_path, "id", snapshot(round), history[:round])
    path = tmp_path / "rounds-50.json"
    path.write_bytes(path.read_bytes().replace(b"0.25", b"0.95"))
    with pytest.raises(UserError, match=r"lost the numbers of earlier rounds .*rounds-50\.json does not match"):
        checkpoint.read(tmp_path, "id", snapshot(0))
    checkpoint.remove(tmp_path, current=True)
    assert not list(tmp_path.iterdir())
