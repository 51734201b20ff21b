"""A check is one promise with a name; the report names each promise that a part breaks."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from fl_lightning import discovery
from fl_lightning.errors import PluginError, UserError
from fl_lightning.runs.config.schema import fields_of
from fl_lightning.system.plugins import plugin_error


class Broken(AssertionError):  # noqa: N818 - like AssertionError, a finding
    """A part does not keep a promise that the rest relies on. The message says which, and what was found."""


class Check(NamedTuple):
    """One promise of one part.

    Attributes:
        name: What is promised.
        run: Raises `Broken` if the promise is broken, and `UserError` if the part refuses the settings of the check.
    """

    name: str
    run: Callable[[], None]

    def __str__(self) -> str:
        return self.name


class Outcome(NamedTuple):
    """How a check went; the message is empty for a promise that is kept."""

    name: str
    status: Literal["kept", "refused", "broken"]
    message: str = ""


def expect(condition: bool, message: str) -> None:
    """Raise `Broken(message)` unless the condition holds."""
    if not condition:
        raise Broken(message)


def outcome_of(check: Check) -> Outcome:
    """Run a check. A part may refuse settings that do not suit it, in one line as all errors of users are."""
    try:
        check.run()
    except (Broken, PluginError) as finding:
        return Outcome(check.name, "broken", str(finding))
    except UserError as refusal:
        if "\n" in str(refusal):
            return Outcome(check.name, "broken", f"a refusal must be one line, got: {refusal}")
        return Outcome(check.name, "refused", str(refusal))
    except (Exception, SystemExit) as error:  # whatever the part's own code raises; `check.run()` shows where
        named = plugin_error(error)
        return Outcome(check.name, "broken", f"{type(error).__name__}: {error}" if named is error else str(named))
    return Outcome(check.name, "kept")


def insist(checks: Iterable[Check]) -> None:
    """Run all checks and raise `Broken` with all findings, if there are any."""
    outcomes = [outcome_of(check) for check in checks]
    findings = [f"{name}: {message}" for name, status, message in outcomes if status == "broken"]
    expect(not findings, "\n".join(findings))


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
