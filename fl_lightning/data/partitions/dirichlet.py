"""Label skew by Dirichlet draws: how many samples of each class each client receives, clients x classes.

`supply` holds the number of samples of each class that occurs.
"""

import numpy as np

from fl_lightning.data.partitions.dealing import Array, log_dirichlet, softmax, whole


def by_class(supply: Array, clients: int, alpha: float, rng: np.random.Generator) -> Array:
    """Per class k over clients: p_k ~ Dir(alpha), and client n receives p_kn of the samples of class k.

    Yurochkin et al. (2019), Bayesian nonparametric federated learning of neural networks, without their balancing.
    """
    return whole(softmax(log_dirichlet(alpha, (len(supply), clients), rng)), supply).T


def by_class_balanced(supply: Array, clients: int, alpha: float, rng: np.random.Generator) -> Array:
    """The same, but a client that holds its fair share, total / N samples, receives nothing of the classes to come.

    The classes are handed out in increasing order, as in the code of Yurochkin et al. (2019), of FedMA (Wang et al.
    2020) and of NIID-Bench (Li et al. 2022).
    """
    wishes = log_dirichlet(alpha, (len(supply), clients), rng)
    counts = np.zeros((clients, len(supply)), dtype=np.int64)
    for k, number in enumerate(supply):
        # Some client always has room: as long as samples are left, not all clients can hold their fair share.
        has_room = counts.sum(axis=1) * clients < supply.sum()
        counts[:, k] = whole(softmax(np.where(has_room, wishes[k], -np.inf)), number)
    return counts


def by_client(supply: Array, sizes: Array, alpha: float, rng: np.random.Generator) -> Array:
    """Per client n over classes: q_n ~ Dir(alpha, ..., alpha), with given sizes, as far as each class lasts.

    All clients ask at once for q_n of their size. A class that is asked for more than it has is shared out in
    proportion to the requests and is then used up; the clients ask again for what they lack, with q_n restricted to
    the classes that are left. Each turn uses up a class or serves all clients, so there are at most K turns, the order
    of the clients plays no part, and every sample is assigned.

    Hsu et al. (2019), Measuring the effects of non-identical data distribution for federated visual classification.
    Their concentration is that of the whole, Dir(alpha p) with p uniform over K classes: it is K times the alpha here,
    which is that of each class, as in the code of FedDyn (Acar et al. 2021).
    """
    wishes = log_dirichlet(alpha, (len(sizes), len(supply)), rng)
    lacking = sizes
    counts = np.zeros_like(wishes, dtype=np.int64)
    while supply.any():
        requests = whole(softmax(np.where(supply > 0, wishes, -np.inf)), lacking)
        asked = requests.sum(axis=0)
        rationed = whole((requests / np.maximum(asked, 1)).T, np.minimum(asked, supply)).T
        counts += rationed
        supply = supply - rationed.sum(axis=0)
        lacking = lacking - rationed.sum(axis=1)
    return counts
