"""Gates that close hidden units: hard-concrete variables, and a network whose weights they multiply.

    s = sigmoid((ln u - ln(1 - u) + a) / beta)    u uniform in (0, 1), beta = 2/3
    z = clip(s (hi - lo) + lo, 0, 1)              (lo, hi) = (-0.1, 1.1): z is often exactly 0 or 1
    P(z != 0) = sigmoid(a - beta ln(-lo / hi))
    z at test time = clip(sigmoid(a) (hi - lo) + lo, 0, 1)

Louizos, Welling, Kingma: Learning Sparse Neural Networks through L0 Regularization, ICLR 2018.
"""

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_lightning.errors import require
from fl_lightning.params import Params

BETA, LOW, HIGH = 2 / 3, -0.1, 1.1
SHIFT = BETA * math.log(-LOW / HIGH)
# Log-odds are limited to this, as in the authors' code: a gate can always come back.
LARGEST = math.log(100)
# The parameters of a gated network: those of the inner one, and one log-odds per hidden unit.
INNER, GATES = "inner.", "gates."


def probability_open(log_odds: Tensor) -> Tensor:
    """P(z != 0), which plays the probability of a closed or open gate."""
    return torch.sigmoid(log_odds - SHIFT)


def log_odds_of(probability: Tensor) -> Tensor:
    """The inverse of `probability_open`, at most `LARGEST` in size."""
    return (torch.logit(probability) + SHIFT).clamp(-LARGEST, LARGEST)


def stretched(share: Tensor) -> Tensor:
    """From (0, 1) to [0, 1], ends included."""
    return (share * (HIGH - LOW) + LOW).clamp(0, 1)


def sampled(log_odds: Tensor) -> Tensor:
    """The gates of a training step, from torch's global generator."""
    u = torch.rand(log_odds.shape, dtype=log_odds.dtype, device=log_odds.device)
    tiny = torch.finfo(u.dtype).eps
    return stretched(torch.sigmoid((torch.logit(u, eps=tiny) + log_odds) / BETA))


class Gated(nn.Module):
    """A network in which a gate multiplies the weights into each hidden unit or filter; biases and outputs have none.

    One draw of the gates per forward pass in training, the same for the whole batch; none in evaluation.

    Args:
        inner: The network; its last linear layer is the output.
        log_odds: Of all gates at the beginning; infinity leaves them open for good.
        scale: Log-odds per unit of the stored parameter; the learning rate of log-odds is larger by its square.
    """

    def __init__(self, inner: nn.Module, log_odds: float, scale: float = 1.0) -> None:
        super().__init__()
        layers = [name for name, layer in inner.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
        require(
            len(layers) > 1,
            "fedsparse closes hidden units, expected a model with a hidden layer, got one without; use --model mlp",
        )
        self.inner, self.scale, self.open = inner, scale, log_odds == math.inf
        start = 0.0 if self.open else log_odds / scale
        weights = {f"{name}.weight" if name else "weight": inner.get_submodule(name).weight for name in layers[:-1]}
        self.gates = nn.ParameterDict(
            {name.replace(".", "/"): torch.full((len(w),), start, dtype=w.dtype) for name, w in weights.items()}  # type: ignore[arg-type]
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.open:
            plain: Tensor = self.inner(x)
            return plain
        weights = {}
        for key, parameter in self.gates.items():
            name = key.replace("/", ".")
            weight: Tensor = self.inner.get_submodule(name.rpartition(".")[0]).weight  # type: ignore[assignment]
            weights[name] = weight * per_unit(self._gate(parameter), weight)
        output: Tensor = functional_call(self.inner, weights, (x,))
        return output

    def _gate(self, parameter: Tensor) -> Tensor:
        log_odds = self.scale * parameter
        # The gradient goes through the clamp, or a gate that went beyond it would never come back.
        log_odds = log_odds + (log_odds.clamp(-LARGEST, LARGEST) - log_odds).detach()
        return sampled(log_odds) if self.training else stretched(torch.sigmoid(log_odds))


def weight_of(gate: str) -> str:
    """The name of the weights that a gate parameter multiplies.

    >>> weight_of("gates.layers/1/weight")
    'inner.layers.1.weight'
    """
    return INNER + gate.removeprefix(GATES).replace("/", ".")


def split(params: Params) -> tuple[Params, Params]:
    """The parameters of the inner network, and those of the gates."""
    weights = {name: value for name, value in params.items() if name.startswith(INNER)}
    return weights, {name: value for name, value in params.items() if name.startswith(GATES)}


def per_unit(values: Tensor, weight: Tensor) -> Tensor:
    """One value per output unit, shaped so that it multiplies the unit's weights."""
    return values.view(-1, *[1] * (weight.dim() - 1))
