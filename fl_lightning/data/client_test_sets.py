"""Test sets of the clients' own: what is split off from each client's samples, and never trained on."""

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.shares import Shares
from fl_lightning.errors import require
from fl_lightning.streams import numpy_generator


def own_tests(labels: Tensor, clients: Shares, share: float, seed: int) -> tuple[Shares, Shares]:
    """What each client trains on, and its own test set; both in increasing order.

    A client's samples, by class and at random within a class, are drawn at equal distances: so its test set has
    share * samples of them, rounded, and of each class its share up to one sample.

    Raises:
        UserError: If no client has enough samples for a test set.

    >>> train, test = own_tests(torch.tensor([0, 0, 1, 1]), Shares(torch.arange(4), [4]), 0.5, 0)
    >>> len(train[0]), sorted(torch.tensor([0, 0, 1, 1])[test[0]].tolist())
    (2, [0, 1])
    """
    sizes = np.array(clients.sizes, dtype=np.int64)
    numbers = np.minimum(np.floor(share * sizes + 0.5).astype(np.int64), np.maximum(sizes - 1, 0))
    require(
        bool(numbers.any()),
        f"data.client_test {share:g} leaves nobody a test sample: the largest client has {sizes.max()} "
        "samples; raise it, or lower data.clients",
    )
    rng = numpy_generator(seed, "client test")
    places, owners = clients.places.numpy(), clients.owners().numpy()
    order = np.lexsort((rng.random(len(places)), labels.cpu().numpy()[places], owners))
    starts = np.cumsum(sizes) - sizes
    taker = np.repeat(np.arange(len(sizes)), numbers)
    turn = np.arange(len(taker)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    steps = (turn + rng.random(len(sizes))[taker]) * sizes[taker] / numbers[taker]
    is_test = np.zeros(len(places), bool)
    is_test[order[starts[taker] + np.minimum(steps.astype(np.int64), sizes[taker] - 1)]] = True
    return (
        Shares(torch.from_numpy(places[~is_test]), (sizes - numbers).tolist()),
        Shares(torch.from_numpy(places[is_test]), numbers.tolist()),
    )
