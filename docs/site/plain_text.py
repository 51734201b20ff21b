"""What docstrings hold besides Markdown: doctests, lists right after a line, and `<` and `>` that are no tags."""

import re
from itertools import groupby
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor
from markdown.util import AMP_SUBSTITUTE

# Everything else in angle brackets is meant as it stands: <c - c_n, y> is a product.
NO_TAG = r"<(?!/?(?:a|br|code|details|em|img|kbd|p|strong|sub|summary|sup)\b|https?:|mailto:|!--)"


class Doctests(Preprocessor):
    """Paragraphs that begin with the prompt are sessions, which Markdown would take for threefold quotations."""

    def run(self, lines: list[str]) -> list[str]:
        result: list[str] = []
        for blank, group in groupby(lines, key=lambda line: not line.strip()):
            paragraph = list(group)
            is_session = not blank and paragraph[0].startswith(">>> ")
            result += ["```pycon", *paragraph, "```"] if is_session else paragraph
        return result


class Lists(Preprocessor):
    """A list may follow a line that ends with a colon; Markdown wants an empty line between them."""

    def run(self, lines: list[str]) -> list[str]:
        result: list[str] = []
        for line in lines:
            if line.startswith("- ") and result and result[-1].endswith(":"):
                result.append("")
            result.append(line)
        return result


class Angles(InlineProcessor):
    """A `<` that opens no tag."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Element | str, int, int]:  # noqa: N802
        return f"{AMP_SUBSTITUTE}lt;", m.start(0), m.end(0)


class PlainText(Extension):
    """Adds all three to a Markdown converter."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - Markdown's name
        md.preprocessors.register(Doctests(md), "doctests", 28)  # before fences are looked for
        md.preprocessors.register(Lists(md), "lists after colons", 27)
        md.inlinePatterns.register(Angles(NO_TAG, md), "angles", 95)  # before HTML is
