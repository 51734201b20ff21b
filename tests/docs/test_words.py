"""Documents stay short and plain: words per page, long sentences, and habits that slow readers down."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
# Words outside of code blocks for each page; ALL_PAGES counts code, too.
LIMITS = {"methods": 3_200, "results": 5_400, "claims": 1_750, "data": 1_700, "extending": 1_650, "fola": 1_700}
ANY_PAGE, ALL_PAGES, README = 1_000, 25_000, 700
HABITS_IN_CODE = 0
# Private words for known things in docstrings, comments and messages; lower a limit when you replace some.
PRIVATE_WORDS = {
    r"contest(?:ant)?s?": ("comparison, case", 0),
    r"crews?|hired?": ("executor", 0),
    r"experts?": ("posteriors", 0),
    r"judged?|judges": ("evaluate, compare", 0),
    r"outbox|retelling|clues?|lore": ("sync", 0),
    r"parcels?": ("serialized object", 0),
    r"pulls?|pulled|pulling": ("prior loss, penalty", 0),
    r"slopes?": ("gradient", 2),
    r"strengths?": ("lambda, prior weight", 28),
    r"(?<!control )variates?": ("control variate", 0),
    r"who": ("the part that acts", 3),
}
LONGEST = 25  # words of a sentence; more are allowed in one sentence of twenty
HABITS = {
    "a person in place of code": r"\b(?:nobody|whoever|somebody|everybody|anybody)\b",
    "'told' in place of what happens": r"\btold\b",
    "'one can' in place of what acts": r"\bone can\b",
    "'mend' for fix or repair": r"\bmend(?:s|ed|ing)?\b",
    "a negated noun": r"(?<!there )\b(?:is|are|be) no (?!such|longer|more|less|later|sooner|better|worse|larger)\w+",
}

TEXTS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
# Settings, identifiers and single words in quotes are names, not prose.
NAMES = r"(?m)`[^`\n]*`|\"[\w./-]+\"|[\w.]*(?:\w[._]\w)[\w.]*|\{[^{}\n]*\}|^ +\w+: "


def prose(text: str) -> str:
    """A page without code blocks, inline code and addresses of links."""
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(?:(?<=\n\n)|\A)(?: {4}.*\n(?:\n(?= {4}))?)+", "", text)
    text = re.sub(r"`[^`\n]*`|<[^>\n]+>", "x", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def words(text: str) -> list[str]:
    return [word for word in text.split() if re.search(r"\w", word)]


def sentences(text: str) -> list[str]:
    """Paragraphs and bullets of a page, cut at full stops and semicolons; tables and headings have no sentences."""
    lines = [line for line in text.splitlines() if not re.match(r"\s*[|#!]", line)]
    blocks = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", "\n".join(lines))
    return [s for block in blocks for s in re.split(r"(?<=[.!?;:])\s+(?=[^a-z]|[a-z])", " ".join(block.split())) if s]


def habits(text: str) -> list[str]:
    return [f"{what}: {match.group()}" for what, found in HABITS.items() for match in re.finditer(found, text, re.I)]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_a_page_is_short_and_plain(page):
    text = prose(page.read_text())
    limit = README if page.stem == "README" else LIMITS.get(page.stem, ANY_PAGE)
    assert len(words(text)) <= limit
    assert not habits(text)
    found = sentences(text)
    long = [sentence for sentence in found if len(words(sentence)) > LONGEST]
    assert len(long) <= len(found) / 20, long


def test_habits_leave_the_code():
    files = [path for package in ("fl_lightning", "tune", "analysis") for path in (ROOT / package).rglob("*.py")]
    found = [f"{path.relative_to(ROOT)}: {habit}" for path in files for habit in habits(path.read_text())]
    assert len(found) <= HABITS_IN_CODE, "\n".join(found)


def texts(path: Path) -> str:
    """The comments and strings of a file, docstrings included."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return "\n".join(token.string for token in tokens if token.type in TEXTS)


@pytest.fixture(scope="module")
def prose_of_code():
    """Docstrings, comments and messages without the names in them: in backticks, quoted, dotted or with underscores."""
    files = [path for package in ("fl_lightning", "tune", "analysis") for path in (ROOT / package).rglob("*.py")]
    return {str(path.relative_to(ROOT)): re.sub(NAMES, " ", texts(path)) for path in files}


@pytest.mark.parametrize("word", PRIVATE_WORDS)
def test_private_words_leave_the_code(word, prose_of_code):
    instead, limit = PRIVATE_WORDS[word]
    found = [
        (name, m.group()) for name, text in prose_of_code.items() for m in re.finditer(rf"\b(?:{word})\b", text, re.I)
    ]
    assert len(found) <= limit, f"write {instead} in place of {found}"


def test_all_pages_together():
    assert sum(len(words(page.read_text())) for page in PAGES) <= ALL_PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_begins_with_its_question_and_the_answer(page):
    question, blank, answer = page.read_text().splitlines()[:3]
    assert question.startswith("# ")
    assert question.endswith("?")
    assert not blank
    assert re.match(r"[A-Z`]", answer)


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        ("Whoever consumes it measures.", 1),
        ("The client is told what others know.", 1),
        ("It told the database, which one can mend.", 3),
        ("The ground is no sample.", 1),
        ("It is no longer there, and no larger than before.", 0),
        ("There is no such file; there are no runs.", 0),
    ],
)
def test_habits_are_found(sentence, found):
    assert len(habits(sentence)) == found


def test_code_is_not_counted():
    text = "One two.\n\n    three four\n\n```bash\nfive\n```\n\n`six seven` [eight](nine.md)\n"
    assert words(prose(text)) == ["One", "two.", "x", "[eight]"]
