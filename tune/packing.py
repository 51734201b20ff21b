"""Which runs go together: those that share their first round, and those too short for a Ray trial of their own."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from fl_lightning.config import RunConfig, build
from fl_lightning.runs.identity import identity

# A trial costs Ray 30 to 65 ms; packs of this length make that negligible and still balance well.
PACK_SECONDS = 10.0
# So many packs for every trial that the cluster holds at once, at least, so that none idles at the end.
PACKS_PER_SLOT = 8

Unit = list[RunConfig]
Compact = tuple[dict[str, Any], list[list[dict[str, Any]]]]


def units(configs: Sequence[RunConfig]) -> list[Unit]:
    """Runs of one round that differ in method and epochs alone share a unit; others are on their own."""
    grouped: dict[str, Unit] = {}
    for config in configs:
        grouped.setdefault(_first_round_key(config), []).append(config)
    return list(grouped.values())


def packs(units: Sequence[Unit], slots: int, seconds: Callable[[RunConfig], float]) -> list[list[Unit]]:
    """Units put together to trials, the longest first.

    Args:
        units: What cannot be divided.
        slots: Trials that run at once.
        seconds: About how long a run takes.
    """
    costs = [_cost(unit, seconds) for unit in units]
    target = min(PACK_SECONDS, sum(costs) / (PACKS_PER_SLOT * slots))
    packed: list[tuple[float, list[Unit]]] = []
    room = 0.0
    for unit, cost in zip(units, costs, strict=True):
        if not packed or room < cost:
            packed.append((0.0, []))
            room = target
        total, members = packed[-1]
        packed[-1] = (total + cost, [*members, unit])
        room -= cost
    return [members for _, members in sorted(packed, key=lambda item: -item[0])]


def compact(pack: Sequence[Unit]) -> Compact:
    """A pack as plain settings, for a trial in another process: what all its runs have in common is said once."""
    flat = [[config.flat() for config in unit] for unit in pack]
    runs = [settings for unit in flat for settings in unit]
    common = {key: value for key, value in runs[0].items() if all(key in one and one[key] == value for one in runs)}
    own = [[{k: v for k, v in settings.items() if k not in common} for settings in unit] for unit in flat]
    return common, own


def expand(packed: Compact) -> list[Unit]:
    """The inverse of `compact`."""
    common, own = packed
    return [[build({**common, **settings}) for settings in unit] for unit in own]


def _cost(unit: Unit, seconds: Callable[[RunConfig], float]) -> float:
    """A shared first round costs what its longest run costs; the evaluations come on top, roughly."""
    return max(map(seconds, unit)) * (1 + 0.05 * math.log2(len(unit)))


def _first_round_key(config: RunConfig) -> str:
    if config.federation.rounds != 1:
        return identity(config)
    flat = config.flat()
    shared = {k: v for k, v in flat.items() if k.partition(".")[0] != "method" and k != "training.epochs"}
    return json.dumps(shared, sort_keys=True)
