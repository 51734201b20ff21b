"""How many samples each client holds, where the kind of partition fixes that first."""

import numpy as np

from fl_lightning.data.partitions.dealing import Array, softmax, whole
from fl_lightning.data.partitions.dirichlet import log_dirichlet


def equal(total: int, clients: int) -> Array:
    """The same for all; the first few hold one more if the total is not divisible."""
    sizes = np.full(clients, total // clients)
    sizes[: total % clients] += 1
    return sizes


def dirichlet(total: int, clients: int, alpha: float, rng: np.random.Generator) -> Array:
    """Shares ~ Dir(alpha): quantity skew of NIID-Bench (Li et al. 2022)."""
    return whole(softmax(log_dirichlet(alpha, (clients,), rng)), np.array(total))


def lognormal(total: int, clients: int, sigma: float, rng: np.random.Generator) -> Array:
    """Shares in proportion to exp(sigma z_n), z_n ~ N(0, 1): quantity skew of FedDyn (Acar et al. 2021)."""
    normal = rng.standard_normal(clients)
    with np.errstate(over="ignore"):
        # Relative to the largest, and bounded, so that a sigma of any size gives shares.
        logarithms = np.maximum(sigma * (normal - normal.max()), -1e300)
    return whole(softmax(logarithms), np.array(total))
