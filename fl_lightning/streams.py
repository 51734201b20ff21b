"""Keyed random streams: every random draw is named by what it is for, so no draw depends on another.

A stream is keyed by the run's seed, a purpose and the numbers that distinguish its uses (round, client, epoch).
Results therefore do not depend on the order of clients, on the number of workers, on whether a run was resumed,
or on which other method ran before it in the same process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch

from fl_lightning.system import devices


def key(seed: int, purpose: str, *parts: int) -> int:
    """A 63-bit key that is the same on every machine and in every Python process.

    >>> key(0, "batches", 1, 2) == key(0, "batches", 1, 2)
    True
    >>> key(0, "batches", 1, 2) == key(0, "batches", 2, 1)
    False
    """
    name = f"{seed}/{purpose}/" + "/".join(map(str, parts))
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *parts: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator, mostly on the CPU, so that the numbers are the same for every device."""
    return torch.Generator(device).manual_seed(key(seed, purpose, *parts))


def numpy_generator(seed: int, purpose: str, *parts: int) -> np.random.Generator:
    """A NumPy generator, for the distributions that torch lacks (Dirichlet over many clients)."""
    return np.random.default_rng(key(seed, purpose, *parts))


@contextmanager
def global_noise(seed: int, purpose: str, *parts: int) -> Iterator[None]:
    """Seed torch's global generators for code that we do not own (dropout, weight initialisation), and restore them."""
    number = key(seed, purpose, *parts)
    with undisturbed():
        if devices.in_use() is None:
            torch.default_generator.manual_seed(number)
        else:
            torch.manual_seed(number)  # of every device
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """What is drawn from torch's global generators in this block changes no draw that follows it."""
    # The generators' own methods: `fork_rng` costs more than a small fit takes.
    before = torch.default_generator.get_state()
    module = devices.in_use()
    on_devices = [] if module is None else [module.get_rng_state(index) for index in range(module.device_count())]
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
        if module is not None:
            for index, state in enumerate(on_devices):
                module.set_rng_state(state, index)
