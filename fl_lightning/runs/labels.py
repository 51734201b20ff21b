"""Labels of pictures that are a user's words: what looks like a formula and is none is shown as it is written."""

from matplotlib.figure import Figure
from matplotlib.mathtext import MathTextParser
from matplotlib.text import Text


def take_literally(figure: Figure) -> None:
    r"""Let matplotlib take every text of a figure that it cannot read as mathematics as plain letters.

    Two dollars make a formula, and a broken one (`$\frac{$`) stops the drawing of everything.
    """
    parser = MathTextParser("path")
    texts = {id(text): text for text in figure.findobj(Text)}
    for panel in figure.axes:
        # Asking for the labels of ticks writes them; until then they are empty.
        texts |= {id(text): text for axis in (panel.xaxis, panel.yaxis) for text in axis.get_ticklabels(which="both")}
    for text in texts.values():
        words = text.get_text()
        if words.count("$") > 1 and text.get_parse_math():
            try:
                for line in words.split("\n"):
                    parser.parse(line)
            except ValueError:
                text.set_parse_math(False)
