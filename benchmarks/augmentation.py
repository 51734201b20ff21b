"""What augmentation costs: against the usual pipeline of one PIL image at a time, and against a training step."""

from collections.abc import Iterator
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from benchmarks.contest import interleave, paired_ratio
from benchmarks.table import Row
from benchmarks.works import seeded
from fl_lightning.data.batches import ClientData, Plan
from fl_lightning.data.dataset import Dataset
from fl_lightning.models.networks.cnn import Cnn
from fl_lightning.training import Training

WORK = "augmentation"
NUM_IMAGES, TURNS = 1024, 8
BATCH_SIZES = (32, 64, 128)


def measure_augmentation() -> list[Row]:
    """A turn is one epoch over the same images; every contestant ends with normalised batches of floats."""
    images = photographs(NUM_IMAGES)
    largest = BATCH_SIZES[-1]
    contest = interleave(
        {
            "pil": endless(DataLoader(PilPipeline(images), batch_size=largest, shuffle=True, num_workers=0)),
            "paper": epochs(images, "paper", largest),
            "standard": epochs(images, "standard", largest),
            "none": epochs(images, "none", largest),
        },
        TURNS,
    )
    per_second = {name: NUM_IMAGES / median(times) for name, times in contest.items()}
    note = (
        f"{per_second['paper']:,.0f} against {per_second['pil']:,.0f} images/s: "
        f"{1 / paired_ratio(contest, 'paper', 'pil'):.0f} times as many"
    )
    rows = [Row(WORK, "paper / PIL pipeline", paired_ratio(contest, "paper", "pil"), "x", 0.2, note)]
    for size in BATCH_SIZES:
        pieces = {name: epochs(images, name, size) for name in ("none", "standard", "paper")}
        seconds = interleave({**pieces, "steps": training(images, size)}, TURNS)
        for name, aim in (("none", None), ("standard", None), ("paper", 100)):
            share = 100 * paired_ratio(seconds, name, "steps")
            rows.append(Row(WORK, f"batches of {name} / cnn steps, B={size}", share, "%", aim))
    return rows


def photographs(number: int) -> Tensor:
    """Smooth colour images with some noise, as bytes."""
    stream = torch.Generator().manual_seed(0)
    coarse = torch.rand(number, 3, 6, 6, generator=stream)
    smooth = nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic")
    noise = 0.03 * torch.randn(smooth.shape, generator=stream)
    return (smooth + noise).mul_(255).clamp_(0, 255).to(torch.uint8)


def epochs(images: Tensor, name: str, batch_size: int) -> Iterator[None]:
    """Epoch after epoch of one client that has all images."""
    labels = torch.zeros(len(images), dtype=torch.long)
    dataset = Dataset(images, labels, images, labels, num_classes=10, mean=(0.5,), std=(0.5,), augment=name)
    data = ClientData(0, dataset, torch.arange(len(images)), torch.float32)
    plan = Plan(data, 0, 1, Training(batch_size=batch_size), num_epochs=1)
    epoch = 0
    while True:
        for _ in plan.examples(epoch):
            pass
        epoch += 1
        yield


def training(images: Tensor, batch_size: int) -> Iterator[None]:
    """The CNN's bare SGD steps over batches that are ready."""
    model = seeded(lambda: Cnn((3, 32, 32), 10))
    parameters = list(model.parameters())
    labels = torch.arange(len(images)) % 10
    x = images.float().div_(255).sub_(0.5).div_(0.5)
    while True:
        for batch, y in zip(x.split(batch_size), labels.split(batch_size), strict=True):
            grads = torch.autograd.grad(nn.functional.cross_entropy(model(batch), y), parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, grads, alpha=-0.01)
        yield


def endless(loader: DataLoader) -> Iterator[None]:
    while True:
        for _ in loader:
            pass
        yield


class PilPipeline(TorchDataset):
    """The paper's pipeline as it is usually written: torchvision's transforms of PIL images, Cutout in NumPy."""

    def __init__(self, images: Tensor) -> None:
        from torchvision import transforms

        self.images = images.permute(0, 2, 3, 1).numpy()
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4, fill=128),
                transforms.RandomHorizontalFlip(),
                transforms.AutoAugment(transforms.AutoAugmentPolicy.CIFAR10, fill=(128, 128, 128)),
                transforms.ToTensor(),
                cut_out,
                transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.images[index])), 0


def cut_out(image: Tensor) -> Tensor:
    """Cutout as its authors wrote it: a mask of ones with a hole."""
    height, width = image.shape[1:]
    mask = np.ones((height, width), np.float32)
    row, column = np.random.randint(height), np.random.randint(width)
    mask[max(0, row - 8) : row + 8, max(0, column - 8) : column + 8] = 0
    return image * torch.from_numpy(mask).expand_as(image)
