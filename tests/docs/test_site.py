"""The documentation site: it is built without a warning, formulas are drawn, and nothing is loaded from elsewhere."""

import inspect
import os
import posixpath
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote
from xml.etree.ElementTree import tostring

import pytest

from fl_lightning import discovery

pytestmark = pytest.mark.system


for name in ("material", "mkdocs", "mkdocstrings"):
    pytest.importorskip(name, reason="the site needs the extra docs: pip install -e '.[docs]'")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


def test_the_site(site):
    """One test for all that is to be seen, because the site is built for it."""
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    for guide in (ROOT / "docs").glob("*.md"):
        assert f"{guide.stem}.html" in pages
    assert {"index.html", "contributing.html", "changelog.html", "benchmarks.html"} <= pages.keys()
    for kind in ("methods", "models", "engines"):
        for cls in discovery.discover(kind).values():
            page = f"reference/{cls.__module__.replace('.', '/')}.html"
            assert page in pages, "a module without a page of its own"
    assert "<math>" in pages["reference/fl_lightning/methods/fola.html"]
    assert "<math>" in pages["methods.html"]
    for page, text in pages.items():
        loaded = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"?([^\"\s>]+)", text)
        assert not [target for target in loaded if "//" in target], f"{page} loads from another host"
        for image in re.findall(r"<img\b[^>]*\bsrc=\"([^\"]+)", text):
            assert (site / page).parent.joinpath(image).exists(), f"{page} shows {image}, which is not there"


def test_every_link_leads_somewhere(site):
    """Relative links of all pages, with their anchors; the page of the error 404 is made for the root of a server."""
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    anchors = {page: set(re.findall(r"\bid=\"([^\"]+)", text)) for page, text in pages.items()}
    dead = []
    for page in pages.keys() - {"404.html"}:
        for link in re.findall(r"<a\b[^>]*\bhref=\"([^\"]+)", pages[page]):
            target, _, anchor = unescape(link).partition("#")
            if "://" in link or link.startswith("mailto:"):
                continue
            there = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(target))) if target else page
            if not (site / there).exists() or (anchor and there in anchors and unquote(anchor) not in anchors[there]):
                dead.append(f"{page}: {link}")
    assert not dead, "\n".join(sorted(dead))


@pytest.fixture
def formulas(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    import formulas

    return formulas


def drawn(formulas, text):
    """Without the tags that every formula has."""
    return re.sub(
        r"</?(?:span|math)>| (?:stretchy|lspace|rspace)=\"\w+\"", "", tostring(formulas.drawn(text), "unicode")
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("theta", "<mi>θ</mi>"),
        ("p_n", "<msub><mi>p</mi><mi>n</mi></msub>"),
        ("P_ik", "<msub><mi>P</mi><mrow><mi>i</mi><mi>k</mi></mrow></msub>"),
        ("g_t^2", "<msubsup><mi>g</mi><mi>t</mi><mn>2</mn></msubsup>"),
        ("S^-1", "<msup><mi>S</mi><mrow><mo>−</mo><mn>1</mn></mrow></msup>"),
        ("A^T", "<msup><mi>A</mi><mo>⊤</mo></msup>"),
        ("rho^T_n", "<msup><mi>ρ</mi><msub><mi>T</mi><mi>n</mi></msub></msup>"),
        ("mu*", "<msup><mi>μ</mi><mo>*</mo></msup>"),
        ("c_n+", "<msubsup><mi>c</mi><mi>n</mi><mo>+</mo></msubsup>"),
        ("c + x", "<mi>c</mi><mo>+</mo><mi>x</mi>"),
        ("sum_n p_n", "<munder><mo>∑</mo><mi>n</mi></munder><msub><mi>p</mi><mi>n</mi></msub>"),
        ("sum_{k<l} x", "<munder><mo>∑</mo><mrow><mi>k</mi><mo>&lt;</mo><mi>l</mi></mrow></munder><mi>x</mi>"),
        ("<a, b>", "<mo>⟨</mo><mi>a</mi><mo>,</mo><mi>b</mi><mo>⟩</mo>"),
        ("a (x) b", "<mi>a</mi><mo>⊗</mo><mi>b</mi>"),
        ("f(x)", "<mi>f</mi><mo>(</mo><mi>x</mi><mo>)</mo>"),
        ("x~_i", '<msub><mover accent="true"><mi>x</mi><mo>~</mo></mover><mi>i</mi></msub>'),
        ("theta_bar", '<mover accent="true"><mi>θ</mi><mo>¯</mo></mover>'),
        ("server_lr", "<mtext>server_lr</mtext>"),
        ("a -> b <= 1", "<mi>a</mi><mo>→</mo><mi>b</mi><mo>≤</mo><mn>1</mn>"),
    ],
)
def test_notation(formulas, text, expected):
    assert drawn(formulas, text) == expected


def test_symbols_in_sentences_are_drawn_and_names_are_not(formulas):
    from markdown import Markdown

    text = Markdown(extensions=[formulas.Formulas()]).convert("L_n is the loss, Lambda_S not `p_n`, x_train or a_b.c.")
    assert (
        re.sub(r"</?(?:math|m\w+|span)>", "", text)
        == "<p>Ln is the loss, ΛS not <code>p_n</code>, x_train or a_b.c.</p>"
    )


def test_sentences_stay_text(formulas):
    assert drawn(formulas, "mean of the iterates of epoch k").replace(formulas.SPACE, " ") == (
        "mean of the iterates of epoch <mi>k</mi>"
    )


@pytest.mark.parametrize(
    "code",
    [
        "fl-lightning run --method fola",
        'METHODS="fedavg"',
        "x = rng.normal(size=(400, 20))",
        "rng = np.random.default_rng(0)",
        "for n in range(3):\n    x = 1",
        "python = 3.11  # a remark",
    ],
)
def test_code_is_no_formula(formulas, code):
    assert not formulas.is_formula(code)


def _text_of(cls):
    is_preset = cls.__module__ == "fl_lightning.methods.presets"
    return inspect.getdoc(cls) if is_preset else sys.modules[cls.__module__].__doc__


def test_every_method_has_formulas_that_can_be_drawn(formulas):
    """The block under the first line of a method's module, or of a preset's class, is drawn, not shown as code."""
    for name, cls in discovery.discover("methods").items():
        blocks = re.findall(r"(?:^    .*\n)+", _text_of(cls), re.MULTILINE)
        assert blocks, f"{name} has no formula in its docstring"
        text = "\n".join(line[4:] for line in blocks[0].splitlines())
        assert formulas.is_formula(text), f"{name}: {text}"
        assert len(formulas.table(text)) == len(text.splitlines())
