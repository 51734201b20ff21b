"""A check is one promise with a name; a part that keeps none of them silently is told which one it broke."""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from fl_lightning.errors import UserError


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
    except Broken as finding:
        return Outcome(check.name, "broken", str(finding))
    except UserError as refusal:
        if "\n" in str(refusal):
            return Outcome(check.name, "broken", f"a refusal must be one line, got: {refusal}")
        return Outcome(check.name, "refused", str(refusal))
    except Exception as error:  # whatever the part's own code raises; `check.run()` shows where
        return Outcome(check.name, "broken", f"{type(error).__name__}: {error}")
    return Outcome(check.name, "kept")


def insist(checks: Iterable[Check]) -> None:
    """Run all checks and raise `Broken` with all findings, if there are any."""
    outcomes = [outcome_of(check) for check in checks]
    findings = [f"{name}: {message}" for name, status, message in outcomes if status == "broken"]
    expect(not findings, "\n".join(findings))
