from dataclasses import replace

import pytest
import torch

from fl_lightning.client_state import Snapshot
from fl_lightning.errors import UserError
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.loop import initial
from fl_lightning.methods.fola import Fola, State
from fl_lightning.methods.fola_extended import FolaExtended
from fl_lightning.methods.parts.forms_by_name import FORMS
from fl_lightning.runs import checkpoint
from fl_lightning.system import trees
from tests.support.cases import equal_bits, ragged


def snapshot(round=1, value=1.0):
    shared = torch.full((2, 3), value)
    return Snapshot(round, State(Diagonal({"w": shared}, {"w": shared})), {"n": torch.tensor(round)})


def test_everything_comes_back_to_the_bit(tmp_path):
    case = ragged(dtype=torch.float32)
    record = case.run(Fola())[-1]
    checkpoint.write(tmp_path, "id", record.after)
    start = Snapshot(0, Fola().init(case.task().initial.params, 5), {})
    saved = checkpoint.read(tmp_path, "id", start)
    assert saved.round == 3
    assert equal_bits(saved.state.params, record.after.state.params)
    assert equal_bits(saved.state.posterior.precision, record.after.state.posterior.precision)


def wide():
    """In float32, with layers of odd sizes: tensors begin at odd places in a file."""
    case, stream = ragged(torch.float32), torch.Generator().manual_seed(1)
    train, test = (torch.randn(len(y), 37, generator=stream) for y in (case.dataset.train_y, case.dataset.test_y))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(37, 17), torch.nn.Tanh(), torch.nn.Linear(17, 3))
    return case._replace(model=model, dataset=replace(case.dataset, train_x=train, test_x=test))


def tensors_of(snapshot):
    return [leaf for leaf in trees.leaves(snapshot.state) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("cavity", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_run_that_goes_on_is_the_same_to_the_bit(tmp_path, form, cavity):
    """Whatever the length of the header, and with it the place of every tensor in the file."""
    method, case = FolaExtended(curvature_form=form, strength=0.01, damping=0.1, cavity=cavity), wide()
    records = case.run(method)
    for identity in ("i", "a much longer one", "a longer one that is odd"):
        checkpoint.write(tmp_path, identity, records[0].after)
        start = initial(method, case.task(), len(case.clients), case.dataset)
        saved = checkpoint.read(tmp_path, identity, start)
        assert not any(tensor.data_ptr() % 64 for tensor in tensors_of(saved))  # as torch allocates them
        again = case.go_on(method, saved)[-1].after
        assert all(map(torch.equal, tensors_of(again), tensors_of(records[-1].after)))


def test_nothing_saved_is_no_error(tmp_path):
    assert checkpoint.read(tmp_path, "id", snapshot(0)) is None


def test_the_previous_round_is_kept(tmp_path):
    for round in (1, 2):
        checkpoint.write(tmp_path, "id", snapshot(round, float(round)))
    (tmp_path / checkpoint.CURRENT).unlink()
    assert checkpoint.read(tmp_path, "id", snapshot(0)).round == 1


@pytest.mark.parametrize("length", [0, 7, 8, 100, -20, -1])
def test_a_truncated_file_falls_back_to_the_previous_one(tmp_path, length):
    for round in (1, 2):
        checkpoint.write(tmp_path, "id", snapshot(round))
    path = tmp_path / checkpoint.CURRENT
    path.write_bytes(path.read_bytes()[:length])
    assert checkpoint.read(tmp_path, "id", snapshot(0)).round == 1


def test_a_flipped_bit_is_noticed(tmp_path):
    for round in (1, 2):
        checkpoint.write(tmp_path, "id", snapshot(round))
    path = tmp_path / checkpoint.CURRENT
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert checkpoint.read(tmp_path, "id", snapshot(0)).round == 1


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
    checkpoint.write(tmp_path, "mine", snapshot())
    with pytest.raises(UserError, match="belongs to another configuration"):
        checkpoint.read(tmp_path, "yours", snapshot(0))


def test_another_shape_is_refused(tmp_path):
    checkpoint.write(tmp_path, "id", snapshot())
    other = Snapshot(0, State(Diagonal({"w": torch.zeros(5)}, {"w": torch.zeros(5)})), {"n": torch.tensor(0)})
    with pytest.raises(UserError, match="does not fit the method"):
        checkpoint.read(tmp_path, "id", other)


@pytest.mark.parametrize(
    ("key", "digits", "others"),
    [
        ("round", b'"round":"2"', b'"round":"1"'),
        ("numbers", b'"numbers":"{}', b'"numbers":"[]'),
    ],
)
def test_a_changed_digit_of_the_header_is_noticed(tmp_path, key, digits, others):
    for round in (1, 2):
        checkpoint.write(tmp_path, "id", snapshot(round))
    path = tmp_path / checkpoint.CURRENT
    content = path.read_bytes()
    assert digits in content
    path.write_bytes(content.replace(digits, others, 1))
    assert checkpoint.read(tmp_path, "id", snapshot(0)).round == 1  # the previous one
    with pytest.raises(UserError, match="checksum of its header"):
        checkpoint.identity_of(tmp_path)


def test_a_changed_shape_is_noticed(tmp_path):
    checkpoint.write(tmp_path, "id", snapshot())
    path = tmp_path / checkpoint.CURRENT
    path.write_bytes(path.read_bytes().replace(b"[2,3]", b"[3,2]", 1))
    with pytest.raises(UserError, match="checksum of its tensors"):
        checkpoint.read_parts(tmp_path)


def test_a_checkpoint_of_an_earlier_version_is_one_clear_line(tmp_path):
    checkpoint.write(tmp_path, "id", snapshot())
    path = tmp_path / checkpoint.CURRENT
    path.write_bytes(path.read_bytes().replace(checkpoint.FORMAT.encode(), b"fl_lightning checkpoint 1", 1))
    with pytest.raises(UserError, match=r"another version \(fl_lightning checkpoint 1\); start this run again with"):
        checkpoint.read(tmp_path, "id", snapshot(0))
