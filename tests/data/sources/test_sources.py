"""The datasets: what a source gives, and what it says when its files are missing or damaged."""

import gzip
import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fl_lightning  # noqa: F401  (before torchvision, which it makes importable)
from fl_lightning.data.dataset import Dataset, Source
from fl_lightning.data.readers import torchvision_files
from fl_lightning.data.readers.fingerprint import data_root
from fl_lightning.data.sources.digits import Digits
from fl_lightning.data.sources.fashion_mnist import FashionMnist
from fl_lightning.data.sources.mnist import Mnist
from fl_lightning.errors import UserError
from tests.support.web import serving_files

DOWNLOADED = {"MNIST": Mnist, "FashionMNIST": FashionMnist}
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx_bytes(values: Tensor) -> bytes:
    """The IDX format: two zero bytes, the type (8 = byte), the number of dimensions, the sizes, the values."""
    header = bytes([0, 0, 8, values.dim()]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    return header + values.to(torch.uint8).numpy().tobytes()


def small_files() -> dict[str, bytes]:
    noise = torch.Generator().manual_seed(0)
    content = {}
    for prefix, size in (("train", 30), ("t10k", 20)):
        content[f"{prefix}-images-idx3-ubyte"] = idx_bytes(torch.randint(256, (size, 28, 28), generator=noise))
        content[f"{prefix}-labels-idx1-ubyte"] = idx_bytes(torch.arange(size) % 10)
    return content


def write(folder: Path, content: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in content.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(params=sorted(DOWNLOADED))
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each dataset that has files, with mirrors that refuse the connection: no test leaves the machine."""
    from torchvision import datasets

    monkeypatch.setattr(getattr(datasets, request.param), "mirrors", ["http://127.0.0.1:9/"])
    monkeypatch.setenv("no_proxy", "*")
    return str(request.param)


@pytest.fixture
def mirror(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A web server on this machine that has the archives; the folder that it serves."""
    from torchvision import datasets

    packed = {f"{file}.gz": gzip.compress(data) for file, data in small_files().items()}
    folder = write(tmp_path / "mirror", packed)
    checksums = [(file, hashlib.md5(data).hexdigest()) for file, data in packed.items()]
    monkeypatch.setattr(getattr(datasets, name), "resources", checksums)
    with serving_files(folder) as address:
        monkeypatch.setattr(getattr(datasets, name), "mirrors", ["http://127.0.0.1:9/", address])
        yield folder


def source(name: str, root: Path) -> Source:
    return DOWNLOADED[name](root=str(root))


def error_of(name: str, root: Path) -> str:
    with pytest.raises(UserError) as caught:
        source(name, root).load()
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    message = str(caught.value)
    assert "\n" not in message
    return message


def check(data: Dataset, shape: tuple[int, ...]) -> None:
    """What every model and method relies on."""
    assert data.shape == tuple(data.test_x.shape[1:]) == shape
    assert data.num_classes == 10
    for inputs, labels in ((data.train_x, data.train_y), (data.test_x, data.test_y)):
        assert len(inputs) == len(labels)
        assert labels.dtype == torch.int64
        assert labels.unique().tolist() == list(range(10))
        assert inputs.is_contiguous()


def test_digits() -> None:
    data = Digits().load()
    check(data, (1, 8, 8))
    assert (len(data.train_x), len(data.test_x)) == (1438, 359)
    assert data.train_x.dtype == torch.float32
    inputs = data.inputs(data.train_x, torch.float64)
    assert inputs.dtype == torch.float64
    assert float(inputs.mean()) == pytest.approx(0, abs=0.01)
    assert float(inputs.std()) == pytest.approx(1, abs=0.01)


def test_the_test_set_of_digits_is_fixed_and_stratified() -> None:
    data = Digits().load()
    torch.manual_seed(1)
    assert torch.equal(data.test_x, Digits().load().test_x)
    assert data.test_y[:10].tolist() == [0, 2, 7, 8, 2, 6, 8, 1, 8, 3], "changed: older results are not comparable"
    total = data.train_y.bincount() + data.test_y.bincount()
    assert (data.test_y.bincount() - 0.2 * total).abs().max() <= 1
    assert len(torch.cat([data.train_x, data.test_x]).flatten(1).unique(dim=0)) == 1797, "an image is in both"


def test_files_are_read_as_they_are(tmp_path: Path, name: str) -> None:
    write(tmp_path / name / "raw", small_files())
    data = source(name, tmp_path).load()
    check(data, (1, 28, 28))
    assert data.train_x.dtype == torch.uint8
    noise = torch.Generator().manual_seed(0)
    assert torch.equal(data.train_x[:, 0], torch.randint(256, (30, 28, 28), generator=noise).to(torch.uint8))
    assert torch.equal(data.test_y, torch.arange(20) % 10)
    expected = (data.train_x.double() / 255 - data.mean[0]) / data.std[0]
    torch.testing.assert_close(data.inputs(data.train_x, torch.float64), expected)


def test_one_channel_and_many_are_standardised_alike() -> None:
    raw = torch.randint(256, (4, 1, 5, 5), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    x, y = torch.zeros(1, 1, 5, 5), torch.zeros(1, dtype=torch.long)
    grey = Dataset(x, y, x, y, 10, mean=(0.1,), std=(0.3,)).inputs(raw, torch.float32)
    colour = Dataset(x, y, x, y, 10, mean=(0.1,) * 3, std=(0.3,) * 3)
    assert torch.equal(grey.expand(4, 3, 5, 5), colour.inputs(raw.expand(4, 3, 5, 5), torch.float32))
    assert raw.dtype == torch.uint8


def test_the_folder_is_the_setting_then_the_environment_then_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FL_LIGHTNING_DATA", raising=False)
    assert data_root(None) == tmp_path / ".cache/fl_lightning/data"
    monkeypatch.setenv("FL_LIGHTNING_DATA", "~/elsewhere")
    assert data_root(None) == tmp_path / "elsewhere"
    assert data_root("~/here") == tmp_path / "here"


def test_images_are_mapped_from_the_file_itself(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / name / "raw", small_files())
    data = source(name, tmp_path).load()
    kept = data.train_x[0].clone()
    if not Path("/proc/self/maps").exists():
        pytest.skip("only Linux lists what a process has mapped")
    with open("/proc/self/maps") as maps:
        assert str(folder / FILES[0]) in maps.read()
    before = (folder / FILES[0]).read_bytes()
    data.train_x[0] = 7
    assert (folder / FILES[0]).read_bytes() == before, "a write to the tensor reached the file"
    assert torch.equal(source(name, tmp_path).load().train_x[0], kept)
    assert data.to(torch.device("cpu")) is data


def test_missing_files_are_named_with_all_ways_out(tmp_path: Path, name: str) -> None:
    message = error_of(name, tmp_path)
    assert message.startswith(f"{name} not found: expected {', '.join(FILES)}")
    for hint in (str(tmp_path / name / "raw"), "--data.root", "FL_LIGHTNING_DATA", "--data digits", "refused"):
        assert hint in message
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [], "a failed download leaves nothing behind"


def test_one_missing_file_is_enough_to_refuse(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / name / "raw", small_files())
    (folder / FILES[2]).unlink()
    assert f"(missing: {FILES[2]})" in error_of(name, tmp_path)


def test_a_silent_network_does_not_hang(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets

    with socket.create_server(("127.0.0.1", 0)) as never_answers:
        address = f"http://127.0.0.1:{never_answers.getsockname()[1]}/"
        monkeypatch.setattr(getattr(datasets, name), "mirrors", [address])
        monkeypatch.setattr(torchvision_files, "PATIENCE_SECONDS", 0.2)
        assert "the download failed" in error_of(name, tmp_path)


def test_a_download_is_silent_and_whole(
    tmp_path: Path, name: str, mirror: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = source(name, tmp_path / "data").load()
    check(first, (1, 28, 28))
    assert capfd.readouterr() == ("", "")
    folder = tmp_path / "data" / name / "raw"
    assert sorted(file.name for file in folder.iterdir()) == sorted(FILES)
    for archive in mirror.iterdir():
        archive.unlink()
    again = source(name, tmp_path / "data").load()
    assert torch.equal(again.train_x, first.train_x)


def test_a_download_with_another_checksum_is_not_kept(tmp_path: Path, name: str, mirror: Path) -> None:
    (mirror / f"{FILES[0]}.gz").write_bytes(b"<html>please log in</html>")
    assert "File not found or corrupted" in error_of(name, tmp_path / "data")
    assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file()]


def test_an_interrupted_download_leaves_nothing_that_looks_whole(tmp_path: Path, name: str, mirror: Path) -> None:
    missing = mirror / f"{FILES[3]}.gz"
    data = missing.read_bytes()
    missing.unlink()
    assert "HTTP Error 404" in error_of(name, tmp_path / "data")
    assert not (tmp_path / "data").exists()
    missing.write_bytes(data)
    check(source(name, tmp_path / "data").load(), (1, 28, 28))


def test_archives_beside_the_place_are_unpacked_without_a_network(tmp_path: Path, name: str, mirror: Path) -> None:
    folder = write(tmp_path / name / "raw", {file.name: file.read_bytes() for file in mirror.iterdir()})
    for file in mirror.iterdir():
        file.unlink()
    check(source(name, tmp_path).load(), (1, 28, 28))
    assert len(list(folder.iterdir())) == 8, "the archives stay"


def test_a_damaged_archive_is_named(tmp_path: Path, name: str, mirror: Path) -> None:
    folder = write(tmp_path / name / "raw", {file.name: file.read_bytes()[:-9] for file in mirror.iterdir()})
    message = error_of(name, tmp_path)
    assert message.startswith(f"{folder / FILES[0]}.gz is damaged")
    assert "delete it so that it is downloaded again" in message
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("length", [0, 3, 6, 8, 20, -1])
def test_a_truncated_file_is_named(tmp_path: Path, name: str, file: str, length: int) -> None:
    folder = write(tmp_path / name / "raw", small_files())
    (folder / file).write_bytes((folder / file).read_bytes()[:length])
    message = error_of(name, tmp_path)
    assert message.startswith(f"{folder / file} is damaged")
    assert "delete it so that it is downloaded again, or replace it by a good copy" in message


@pytest.mark.parametrize(
    ("file", "content", "what"),
    [
        (FILES[0], b"<html>not found</html>", "not a whole IDX file"),
        (FILES[0], idx_bytes(torch.zeros(30, 8, 8)), "images of (8, 8), not (28, 28)"),
        (FILES[0], idx_bytes(torch.zeros(30)), "not a whole IDX file"),
        (FILES[1], idx_bytes(torch.zeros(29)), "29 labels for 30 images"),
        (FILES[1], idx_bytes(torch.full((30,), 10)), "label 10, not 0 to 9"),
        (FILES[2], idx_bytes(torch.zeros(0, 28, 28)), "not a whole IDX file"),
    ],
    ids=["a web page", "another size", "labels for images", "a label missing", "an unknown label", "nothing"],
)
def test_a_file_with_the_wrong_content_is_named(
    tmp_path: Path, name: str, file: str, content: bytes, what: str
) -> None:
    folder = write(tmp_path / name / "raw", small_files())
    (folder / file).write_bytes(content)
    message = error_of(name, tmp_path)
    assert message.startswith(f"{folder / file} is damaged")
    assert what in message


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, name: str, mirror: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    message = error_of(name, tmp_path / "file")
    assert message.startswith(f"cannot use {tmp_path / 'file' / name / 'raw'} for {name}")


@pytest.mark.parametrize(
    ("name", "ones_of_train", "mean", "std"), [("MNIST", 6742, 0.1307, 0.3081), ("FashionMNIST", 6000, 0.2860, 0.3530)]
)
def test_the_real_files(name: str, ones_of_train: int, mean: float, std: float) -> None:
    folder = os.environ.get("FL_LIGHTNING_DATA")
    if not folder or not (Path(folder) / name / "raw" / FILES[0]).is_file():
        pytest.skip(f"{name} is not at hand: set FL_LIGHTNING_DATA to a folder with {name}/raw")
    data = DOWNLOADED[name]().load()
    check(data, (1, 28, 28))
    assert (len(data.train_x), len(data.test_x)) == (60000, 10000)
    assert int((data.train_y == 1).sum()) == ones_of_train
    # Summed as integers: a float64 copy of all pixels would take 380 MB.
    pixels = data.train_x.flatten().bincount(minlength=256).double()
    values = torch.arange(256).double() / 255
    measured = (pixels @ values) / pixels.sum()
    assert float(measured) == pytest.approx(mean, abs=1e-4) == data.mean[0]
    assert float(((pixels @ values**2) / pixels.sum() - measured**2).sqrt()) == pytest.approx(std, abs=1e-4)
    assert data.std == (std,)
