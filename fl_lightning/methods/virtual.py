"""VIRTUAL: variational federated learning, the variational case of expectation propagation with a unit prior.

    q_n = argmin (m_n / T) E_q[L_n] + KL(q || cavity)        prior N(x_0, 1)

Corinzia, Beuret, Buhmann: Variational Federated Multi-Task Learning, 2019.

The shared part of the method alone: no private network of a client. What differs from the published code: clients
train by IVON instead of Bayes by backprop; T stands for the weight of the KL term; factors add up without weights pi_n,
and each moves by 1 / clients of the round. Errors of the code that are not emulated: its KL uses one Gaussian's
precision for the other's mean; its damping is 1 - server_lr, so that a step is s (1 - s) and none at s = 1; with
server_lr other than 1 its server is no product of the factors; the scale of its prior is ignored by its natural layers;
precisions below 1e-6 become 0 and are divided by.

A named setting of `ep`, which says where published codes differ.
"""

from dataclasses import dataclass
from typing import Literal

from fl_lightning.methods.ep import EP


@dataclass(frozen=True)
class Virtual(EP):
    """Variational federated learning: Gaussian factors of all clients, trained variationally, with a unit prior."""

    inference: Literal["vi"] = "vi"
    temperature: float = 0.1
    prior: float = 1.0
