"""An item of a report: how a figure or a table is made, and for which runs it makes sense."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from analysis.study import Study


class Entry(NamedTuple):
    """A figure or a table.

    Attributes:
        function: Makes it; the report prints the first paragraph of its docstring.
        title: Heading.
        fits: Whether it makes sense for these runs.
        name: On the command line and in names of files; by default that of the function.
        reads: What the function takes of a study; by default the study itself.
        of_chosen: Whether it shows settings that were chosen.
    """

    function: Callable[..., Any]
    title: str
    fits: Callable[[Study], bool] = lambda study: True
    name: str = ""
    reads: Callable[[Study], Sequence[Any]] = lambda study: (study,)
    of_chosen: bool = False

    @property
    def key(self) -> str:
        """On the command line and in names of files."""
        return self.name or self.function.__name__

    @property
    def about(self) -> str:
        """What it shows, for a reader."""
        return " ".join((self.function.__doc__ or "").partition("\n\n")[0].split())

    def make(self, study: Study) -> Any:
        """The figure or the table."""
        return self.function(*self.reads(study))
