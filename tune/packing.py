"""Which runs go together: those that are too short for a Ray trial of their own."""

from collections.abc import Callable, Sequence
from typing import Any

from fl_lightning.runs.config.run_config import RunConfig, build

# A trial costs Ray 30 to 65 ms; packs of this length make that negligible and still balance well.
PACK_SECONDS = 10.0
# So many packs for every trial that the cluster holds at once, at least, so that none idles at the end.
PACKS_PER_SLOT = 8

Pack = list[RunConfig]
Compact = tuple[dict[str, Any], list[dict[str, Any]]]


def packs(configs: Sequence[RunConfig], slots: int, seconds: Callable[[RunConfig], float]) -> list[Pack]:
    """Runs put together to trials, the longest first.

    Args:
        configs: The runs.
        slots: Trials that run at once.
        seconds: About how long a run takes.
    """
    costs = [seconds(config) for config in configs]
    target = min(PACK_SECONDS, sum(costs) / (PACKS_PER_SLOT * slots))
    packed: list[tuple[float, Pack]] = []
    room = 0.0
    for config, cost in zip(configs, costs, strict=True):
        if not packed or room < cost:
            packed.append((0.0, []))
            room = target
        total, members = packed[-1]
        packed[-1] = (total + cost, [*members, config])
        room -= cost
    return [members for _, members in sorted(packed, key=lambda item: -item[0])]


def compact(pack: Pack) -> Compact:
    """A pack as plain settings, for a trial in another process: what all its runs have in common is said once."""
    runs = [config.flat() for config in pack]
    common = {key: value for key, value in runs[0].items() if all(key in one and one[key] == value for one in runs)}
    return common, [{k: v for k, v in settings.items() if k not in common} for settings in runs]


def expand(packed: Compact) -> Pack:
    """The inverse of `compact`."""
    common, own = packed
    return [build({**common, **settings}) for settings in own]
