"""Every method with each of its choices in turn."""

import json
from typing import Literal, get_args, get_origin

from fl_lightning import discovery
from fl_lightning.config import configure, fields_of
from fl_lightning.method import Method
from tune.comparison import variant_settings


def method_of(variant: str) -> Method:
    """The method that is written `name+option=value`."""
    return configure(variant_settings(variant)).method


def variants() -> list[str]:
    """Every method with each of its choices in turn: the values of its Literal and bool fields."""
    found = []
    for name in discovery.names("methods"):
        for field, item in fields_of(discovery.find("methods", name)).items():
            choices = (True, False) if item.type is bool else ()
            if get_origin(item.type) is Literal:
                choices = get_args(item.type)
            others = [json.dumps(choice).strip('"') for choice in choices if choice != item.default]
            found += [f"{name}+{field}={choice}" for choice in others]
    return found
