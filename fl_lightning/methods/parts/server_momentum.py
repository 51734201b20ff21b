"""Momentum of the server, written once for every method that has it.

    u <- momentum u + s        x <- x - rate u        s: the way from where the clients would take the server back to x

Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019.
"""

from fl_lightning.params import Params, cast_like, zeros, zip_map


def at_rest(params: Params, momentum: float) -> Params:
    """The velocity u before the first round; without momentum there is none."""
    return zeros(params) if momentum else {}


def momentum_step(
    params: Params, velocity: Params, gradient: Params, momentum: float, rate: float
) -> tuple[Params, Params]:
    """The server's model and velocity after a step, computed in float64 and rounded once.

    Args:
        params: x.
        velocity: u.
        gradient: s in float64, such as sum_n p_n (x - y_n).
        momentum: How much of the velocity stays, at least 0 and less than 1.
        rate: Step size.
    """
    faster = zip_map(lambda u, s: s.add(u.double(), alpha=momentum), velocity, gradient)
    moved = zip_map(lambda x, u: x.double().sub(u, alpha=rate), params, faster)
    return cast_like(moved, params), cast_like(faster, velocity)
