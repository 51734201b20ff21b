"""What every part owes to the help text of the command line."""

from typing import Any

from fl_lightning import discovery
from fl_lightning.config import fields_of
from fl_lightning.testing.checks import expect


def explained(cls: type[Any]) -> None:
    """The first line of the docstring and the explanation of every setting are sentences."""
    expect(
        discovery.summary(cls).endswith("."),
        f"the docstring of {cls.__name__} must begin with a sentence that ends with a full stop in its first line",
    )
    for name, item in fields_of(cls).items():
        expect(
            item.help.endswith("."),
            f"{cls.__name__}.{name} has no explanation; write a sentence under Attributes: (or Args:) of the docstring",
        )
