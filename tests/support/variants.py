"""Every method with each of its choices in turn."""

import dataclasses

from fl_lightning import discovery
from fl_lightning.method import Method
from fl_lightning.methods.fola import Fola
from fl_lightning.methods.fola_extended import FolaExtended
from fl_lightning.runs.config.run_config import configure
from fl_lightning.testing.methods import choices_of
from tune.comparison import variant_settings


def method_of(variant: str) -> Method:
    """The method that is written `name+option=value`."""
    return configure(variant_settings(variant)).method


def in_full(method: Method) -> Method:
    """FOLA with all settings of the extended method, which brute force reads."""
    return FolaExtended(**dataclasses.asdict(method)) if isinstance(method, Fola) else method


def variants() -> list[str]:
    """Every method with each of its choices in turn: the values of its Literal and bool fields."""
    return [
        f"{name}+{choice}"
        for name in discovery.names("methods")
        for choice in choices_of(discovery.find("methods", name))
    ]
