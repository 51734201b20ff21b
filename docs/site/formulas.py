"""Formulas as they stand in docstrings and guides, drawn: an indented block of plain text becomes MathML.

    mu_S <- sum_n p_n Lambda_n mu_n / sum_n p_n Lambda_n        p_n: weight of client n

Sources stay readable in an editor, and browsers draw MathML without any script. The notation is small: names of Greek
letters, `_` and `^` with one symbol, a number or a group, `<-`, `(x)` for the Kronecker product, `<a, b>`, `||a||`,
`x~` and `theta_bar`, `sum`, `grad`. Words stay words. What follows three spaces is a remark.
"""

import re
from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement

from markdown import Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.util import AtomicString

SMALL = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho ? sigma tau upsilon phi"
)
GREEK = {name: chr(0x3B1 + place) for place, name in enumerate((*SMALL.split(), "chi", "psi", "omega"))}
GREEK |= {name.capitalize(): chr(ord(letter) - 0x20) for name, letter in GREEK.items()}
OPERATORS = {
    "<-": "←", "->": "→", "!=": "≠", "<=": "≤", ">=": "≥", "||": "‖", "(x)": "⊗", "..": "…", "*": "·", "-": "−",
    "~": "∼", "sum": "∑", "grad": "∇",
}  # fmt: skip
RELATION = re.compile(r"(?:^|(?<=\s))(<-|=|~)\s")
TOKEN = re.compile(
    r"""(?P<space>\s+)
    | (?P<number>\d+(?:[.,]\d+)*)
    | (?P<name>[^\W\d_]{2,}(?:[-.][^\W\d_]{2,})+ | [^\W\d_]+(?:'[^\W\d_]+)?)  # burn-in, data.holdout; client's
    | (?P<operator><-|->|!=|<=|>=|\|\||\.\.|(?<=\s)\(x\)(?=\s)|[^\w\s]|_)
    """,
    re.VERBOSE,
)
# What is in no formula, but in code and commands.
FOREIGN = re.compile(r"[\"#$`\\@]|--|\w\.\w+\(|\w=|^(?:import|from|for|def) ", re.MULTILINE)
# A symbol with an index in a sentence, such as L_n or Lambda_S; longer names are settings.
SYMBOL = rf"(?<![\w.])((?:[A-Za-z]|{'|'.join(GREEK.keys() - {'?'})})_(?:[A-Za-z]{{1,2}}|\d))(?![A-Za-z0-9_(]|\.\w)"
MOST_WORDS = 3  # in a formula; more make a sentence
SPACE = "\N{FOUR-PER-EM SPACE}"  # MathML drops ordinary ones
OPENING, CLOSING = "([{⟨", ")]}⟩"


class Token(str):
    """A piece of a formula; it knows what kind it is, and whether a space stands before it."""

    kind: str
    apart: bool

    def __new__(cls, text: str, kind: str, apart: bool = False) -> "Token":
        token = super().__new__(cls, text)
        token.kind, token.apart = kind, apart
        return token


def is_formula(text: str) -> bool:
    """Whether a block of plain text is formulas rather than code or commands."""
    lines = text.splitlines()
    return bool(lines) and not FOREIGN.search(text) and RELATION.search(lines[0]) is not None


def table(text: str) -> Element:
    """The lines of a block as rows: left side, relation and right side, remark."""
    root = Element("table", {"class": "formulas"})
    for line in text.splitlines():
        row = SubElement(root, "tr")
        found = RELATION.search(line)
        left, right = (line[: found.start()], line[found.start() :]) if found else (line, "")
        formula, *remarks = re.split(r"\s{3,}", right.strip())
        for name, parts in (("left", [left.strip()]), ("right", [formula]), ("remark", remarks)):
            cell = SubElement(row, "td", {"class": name})
            cell.extend(drawn(part) for part in parts)
    return root


def drawn(text: str) -> Element:
    """One formula as MathML; of what is mostly words, only the symbols, since lines break in text alone."""
    root, row = Element("span"), _row(_tokens(text))
    if sum(element.tag == "mtext" and element.text != SPACE for element in row) <= MOST_WORDS:
        SubElement(root, "math").extend(row)
        return root
    root.text = AtomicString("")
    for element in row:
        last = root[-1] if len(root) else None
        if element.tag == "mtext":
            if last is None:
                root.text = AtomicString(root.text + str(element.text))
            else:
                last.tail = AtomicString((last.tail or "") + str(element.text))
        else:
            if last is None or last.tail:
                last = SubElement(root, "math")
            last.append(element)
    return root


def _tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    apart = False
    for found in TOKEN.finditer(text):
        kind, piece = str(found.lastgroup), found.group()
        if kind != "space":
            before, after = text[: found.start()][-1:], text[found.end() :][:1]
            if piece == "<" and before in (" ", "[", "(", "") and after.isalpha():
                piece = "⟨"
            elif piece == ">" and before not in (" ", "") and tokens.count("⟨") > tokens.count("⟩"):
                piece = "⟩"
            tokens.append(Token(piece, kind, apart))
        apart = kind == "space"
    return tokens


def _row(tokens: Sequence[Token]) -> list[Element]:
    """Symbols with what hangs on them, from left to right."""
    row: list[Element] = []
    place = 0
    while place < len(tokens):
        token = tokens[place]
        symbol, place = _symbol(tokens, place)
        if row and token.apart and "mtext" in (_kind(row[-1]), _kind(symbol)):
            row.append(_leaf("mtext", SPACE))
        row.append(symbol)
    return row


def _symbol(tokens: Sequence[Token], place: int) -> tuple[Element, int]:
    """A symbol with its marks: hats, indices and powers."""
    token, parts = tokens[place], list[tuple[str, Element]]()
    if _is_word(tokens, place):
        return _word(tokens, place)
    base, place = _base(token), place + 1
    while place < len(tokens) and not tokens[place].apart:
        mark = tokens[place]
        if mark == "~" and token.kind == "name":
            base = _over(base, "~")
        elif mark == "_" and tokens[place + 1 : place + 2] == ["bar"]:
            base, place = _over(base, "¯"), place + 1
        elif mark in ("_", "^") and place + 1 < len(tokens):
            hung, place = _hung(tokens, place + 1)
            parts.append((mark, hung))
            continue
        elif mark in ("+", "*") and token.kind == "name" and _ends_word(tokens, place):
            parts.append(("^", _leaf("mo", mark)))
        else:
            break
        place += 1
    return _with_marks(base, parts), place


def _ends_word(tokens: Sequence[Token], place: int) -> bool:
    """Whether a sign stands at the end of its symbol, as in c_n+ and mu*, rather than between two."""
    following = tokens[place + 1 : place + 2]
    return not following or following[0].apart or following[0] in CLOSING


def _hung(tokens: Sequence[Token], place: int) -> tuple[Element, int]:
    """An index or a power: a group without its brackets, a sign with a number, or one symbol."""
    if tokens[place] in ("(", "{"):
        depth, end = 1, place + 1
        while end < len(tokens) and depth:
            depth += (tokens[end] in OPENING) - (tokens[end] in CLOSING)
            end += 1
        return _grouped(_row(tokens[place + 1 : end - 1])), end
    if tokens[place] == "-" and place + 1 < len(tokens):
        return _grouped([_base(tokens[place]), _base(tokens[place + 1])]), place + 2
    nested = tokens[place + 1 : place + 2] == ["_"] and tokens[place - 1] == "^"  # rho^T_n: the power has an index
    if nested:
        index, end = _hung(tokens, place + 2)
        return _with_marks(_base(tokens[place]), [("_", index)]), end
    if tokens[place] == "T" and tokens[place - 1] == "^":
        return _leaf("mo", "⊤"), place + 1
    name = tokens[place]
    if name.kind == "name" and name not in GREEK and 1 < len(name) <= 2:  # P_ik has two indices, not one word
        return _grouped([_leaf("mi", letter) for letter in name]), place + 1
    return _base(name), place + 1


def _with_marks(base: Element, parts: Sequence[tuple[str, Element]]) -> Element:
    below = [part for mark, part in parts if mark == "_"]
    above = [part for mark, part in parts if mark == "^"]
    if not parts:
        return base
    name = "msub" if not above else "msup" if not below else "msubsup"
    if base.text == "∑":
        name = {"msub": "munder", "msup": "mover", "msubsup": "munderover"}[name]
    element = Element(name)
    element.extend([base, *([_grouped(below)] if below else []), *([_grouped(above)] if above else [])])
    return element


def _is_word(tokens: Sequence[Token], place: int) -> bool:
    token = tokens[place]
    if token.kind != "name" or token in GREEK or token in OPERATORS:
        return False
    if len(token) > 1:
        return True
    following = tokens[place + 1 : place + 2]
    return token == "a" and bool(following) and following[0].apart and _is_word(tokens, place + 1)


def _word(tokens: Sequence[Token], place: int) -> tuple[Element, int]:
    """A word; mean_k has an index, server_lr is one word."""
    text, place = str(tokens[place]), place + 1
    while tokens[place : place + 1] == ["_"] and place + 1 < len(tokens):
        if len(tokens[place + 1]) == 1:
            hung, end = _hung(tokens, place + 1)
            return _with_marks(_leaf("mtext", text), [("_", hung)]), end
        text, place = f"{text}_{tokens[place + 1]}", place + 2
    return _leaf("mtext", text), place


def _base(token: Token) -> Element:
    if token.kind == "number":
        return _leaf("mn", token)
    if token.kind == "name" and token not in OPERATORS:
        return _leaf("mi", GREEK.get(token, token)) if token in GREEK or len(token) == 1 else _leaf("mtext", token)
    element = _leaf("mo", OPERATORS.get(token, token))
    if token in ("|", "||", "/") or token in OPENING + CLOSING:
        element.set("stretchy", "false")
    if token in ("|", "||") or (token == "/" and not token.apart):
        element.attrib |= {"lspace": "0", "rspace": "0"}
    return element


def _over(base: Element, mark: str) -> Element:
    element = Element("mover", {"accent": "true"})
    element.extend([base, _leaf("mo", mark)])
    return element


def _grouped(elements: Sequence[Element]) -> Element:
    if len(elements) == 1:
        return elements[0]
    group = Element("mrow")
    group.extend(elements)
    return group


def _leaf(name: str, text: str) -> Element:
    element = Element(name)
    element.text = AtomicString(text)  # no Markdown inside
    return element


def _kind(element: Element) -> str:
    """What a symbol is without its marks."""
    return element[0].tag if element.tag in ("msub", "msup", "msubsup") else element.tag


class FormulaBlocks(BlockProcessor):
    """Indented blocks that are formulas, before Markdown takes them for code."""

    def test(self, parent: Element, block: str) -> bool:
        continues_code = len(parent) > 0 and parent[-1].tag == "pre"
        inside = all(line.startswith("    ") for line in block.splitlines())
        return inside and not continues_code and is_formula(self._text(block))

    def run(self, parent: Element, blocks: list[str]) -> None:
        parent.append(table(self._text(blocks.pop(0))))

    def _text(self, block: str) -> str:
        return self.looseDetab(block).rstrip()


class Symbols(InlineProcessor):
    """Symbols in sentences, drawn as in the formulas above them."""

    def handleMatch(self, m: "re.Match[str]", data: str) -> tuple[Element, int, int]:  # noqa: N802 - Markdown's name
        return drawn(m[1]), m.start(0), m.end(0)


class Formulas(Extension):
    """Adds `FormulaBlocks` and `Symbols` to a Markdown converter."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - Markdown's name
        md.parser.blockprocessors.register(FormulaBlocks(md.parser), "formulas", 85)
        md.inlinePatterns.register(Symbols(SYMBOL, md), "symbols", 55)  # after code, links and emphasis
