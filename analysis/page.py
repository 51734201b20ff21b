"""The report as one HTML page without scripts, fonts or pictures from elsewhere."""
# ruff: noqa: E501 - lines of a page

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment

from analysis import style, tables
from analysis.claims import VERDICTS, Checked, origin, overview
from fl_lightning.runs import palette


class Item(NamedTuple):
    """A figure or a table on the page.

    Attributes:
        key: Of its files and its anchor.
        title: Heading.
        about: What it shows, in a sentence.
        body: HTML: inline SVG, or a table.
        notes: What a reader must know.
        basis: The runs behind it, in words.
        files: Beside the page.
    """

    key: str
    title: str
    about: str
    body: str
    notes: list[str]
    basis: str
    files: list[Path]


@dataclass
class Section:
    """A study at one scale, or the runs without a study.

    Attributes:
        key: Anchor.
        title: Heading.
        about: The study in its own words.
        commands: How to make these runs again.
        summary: Findings, one sentence each.
        figures: Those that the runs allow.
        tables: Likewise.
        absent: What they do not allow, and why.
    """

    key: str
    title: str
    about: str
    commands: list[str]
    summary: list[str] = field(default_factory=list)
    figures: list[Item] = field(default_factory=list)
    tables: list[Item] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)


TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>fl_lightning report</title>
<style>
:root { color-scheme: light dark; {{ light }} --panel: #f5f5f7; --link: #0b5cad; }
@media (prefers-color-scheme: dark) { :root { {{ dark }} --panel: #202026; --link: #7cb7ff; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body { margin: 0; background: var({{ paper }}); color: var({{ ink }}); font: 16px/1.55 system-ui, sans-serif; }
a { color: var(--link); }
nav { padding: 1.2rem; border-bottom: 1px solid var({{ grid }}); font-size: .88rem; }
nav h1 { font-size: 1.05rem; margin: 0 0 .6rem; }
nav ul { list-style: none; margin: 0; padding: 0; }
nav ul ul { padding-left: .9rem; margin-bottom: .5rem; }
nav li { margin: .15rem 0; }
nav a { text-decoration: none; }
main { padding: 1.5rem clamp(1rem, 3vw, 3rem) 4rem; max-width: 76rem; }
@media (min-width: 64rem) {
  body { display: grid; grid-template-columns: 17rem minmax(0, 1fr); }
  nav { position: sticky; top: 0; height: 100vh; overflow-y: auto; border-right: 1px solid var({{ grid }}); border-bottom: 0; }
}
h2 { margin: 2.6rem 0 .4rem; font-size: 1.5rem; border-top: 1px solid var({{ grid }}); padding-top: 1.6rem; }
section:first-of-type h2 { border-top: 0; padding-top: 0; margin-top: .4rem; }
h3 { margin: 0 0 .3rem; font-size: 1.05rem; }
p, li { max-width: 46rem; }
.lead, .about, .note, .basis { color: var({{ faint }}); }
.about, .note, .basis { font-size: .86rem; margin: .3rem 0; }
.summary { background: var(--panel); border-radius: .6rem; padding: .7rem 1.2rem .7rem 2rem; }
.summary li { margin: .35rem 0; }
pre { background: var(--panel); border-radius: .5rem; padding: .6rem .9rem; overflow-x: auto; font-size: .84rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(26rem, 100%), 1fr)); gap: 1.6rem 2rem; margin: 1.4rem 0; }
figure { margin: 0; }
figure svg { width: 100%; max-width: 32rem; height: auto; display: block; margin: .5rem 0; }
.table { overflow-x: auto; margin: .5rem 0; }
article { margin: 1.6rem 0; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .8rem .28rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var({{ grid }}); white-space: nowrap; }
th { font-weight: 600; border-bottom: 2px solid var({{ faint }}); }
.prose td { white-space: normal; }
details { font-size: .86rem; margin: .6rem 0; }
summary { cursor: pointer; color: var({{ faint }}); }
@media print { nav { display: none; } body { display: block; } article, figure { break-inside: avoid; } }
</style>
</head>
<body>
<nav>
<h1>Report</h1>
<ul>
{% for section in sections %}<li><a href="#{{ section.key }}">{{ section.title }}</a>
<ul>{% for item in section.figures + section.tables %}<li><a href="#{{ item.key }}">{{ item.title }}</a></li>{% endfor %}</ul></li>
{% endfor %}{% if claims %}<li><a href="#claims">The paper's claims</a>
<ul>{% for one in claims %}<li><a href="#claim-{{ loop.index }}">{{ one.claim.title }}</a></li>{% endfor %}</ul></li>
{% endif %}<li><a href="#background">Background</a></li>
</ul>
</nav>
<main>
<p class="lead">Runs in <code>{{ place }}</code>{% if only %}, only those with {{ only }}{% endif %}, read on {{ date }}. GA is the test accuracy of the server's model, LA the
mean test accuracy of the clients' models before aggregation, weighted by their data.</p>
{% for section in sections %}
<section id="{{ section.key }}">
<h2>{{ section.title }}</h2>
{% if section.about %}<p class="lead">{{ section.about }}</p>{% endif %}
<ul class="summary">{% for sentence in section.summary %}<li>{{ sentence }}</li>{% endfor %}</ul>
{% if section.commands %}<pre>{{ section.commands | join("\n") }}</pre>{% endif %}
<div class="figures">
{% for item in section.figures %}
<figure id="{{ item.key }}">
<h3>{{ item.title }}</h3>
{{ item.body | safe }}
<figcaption>{{ small(item, section.commands) }}</figcaption>
</figure>
{% endfor %}
</div>
{% for item in section.tables %}
<article id="{{ item.key }}">
<h3>{{ item.title }}</h3>
<div class="table">{{ item.body | safe }}</div>
{{ small(item, section.commands) }}
</article>
{% endfor %}
<p class="basis">All runs of this section with all their settings: <a href="tables/{{ section.key }}-runs.csv">runs.csv</a></p>
{% if section.absent %}<details><summary>What these runs do not allow</summary>
<ul>{% for reason in section.absent %}<li>{{ reason }}</li>{% endfor %}</ul></details>{% endif %}
</section>
{% endfor %}
{% if claims %}
<section id="claims">
<h2>The paper's claims</h2>
<p class="lead">{{ verdicts }} At a scale other than <code>paper</code> a yes or a no is about fewer data, rounds and
seeds, or about other data altogether.</p>
<div class="table prose">{{ overview | safe }}</div>
{% for one in claims %}
<article id="claim-{{ loop.index }}">
<h3>{{ one.claim.title }}</h3>
<p>{{ one.verdict[0] | upper }}{{ one.verdict[1:] }} ({{ origin(one.part) }}){% if one.finding.why %}: {{ one.finding.why }}{% endif %}. The paper: {{ one.claim.paper }}</p>
<p class="about">The rule: {{ one.claim.rule }}</p>
<ul>{% for part in one.finding.held %}<li>{{ part.answer }}: {{ part.text }}</li>{% endfor %}</ul>
{% if one.finding.table | length %}<div class="table">{{ html(one.finding.table) | safe }}</div>{% endif %}

</article>
{% endfor %}
<p class="basis">As Markdown: <a href="claims.md">claims.md</a></p>
</section>
{% endif %}
<section id="background">
<h2>Background</h2>
<div class="figures"><figure id="{{ background.key }}"><h3>{{ background.title }}</h3>
{{ background.body | safe }}
<figcaption>{{ small(background, []) }}</figcaption></figure></div>
</section>
</main>
</body>
</html>
"""

SMALL = """{% macro small(item, commands) %}
<p class="about">{{ item.about }}</p>
{% for note in item.notes %}<p class="note">{{ note[0] | upper }}{{ note[1:] }}.</p>{% endfor %}
<p class="basis">{% for file in item.files %}<a href="{{ file.as_posix() }}">{{ kind(file) }}</a> {% endfor %}</p>
{% if item.basis %}<details><summary>Made from {{ item.basis.partition(":")[0] }}</summary>
<p class="basis">{{ item.basis.partition(":")[2] }}</p>
{% if commands %}<pre>{{ commands | join("\\n") }}</pre>{% endif %}</details>{% endif %}
{% endmacro %}"""


def render(
    sections: Sequence[Section], claims: Sequence[Checked], background: Item, place: str, date: str, only: str = ""
) -> str:
    """The page.

    Args:
        sections: Studies.
        claims: Of the paper, those that the runs can check.
        background: The picture that explains the idea.
        place: Where the runs are.
        date: Of the report.
        only: What the runs were chosen by, in words.
    """
    environment = Environment(autoescape=True, trim_blocks=True)
    environment.globals |= {"kind": _kind, "html": tables.html, "origin": origin}
    template = environment.from_string(SMALL + TEMPLATE)
    names = {name: variable(getattr(style.LIGHT, name)) for name in ("paper", "ink", "faint", "grid")}
    pairs = palette.pairs()
    return template.render(
        sections=sections,
        claims=claims,
        overview=tables.html(overview(claims)),
        verdicts=VERDICTS,
        only=only,
        background=background,
        place=place,
        date=date,
        light=" ".join(f"{variable(light)}: {light};" for light in pairs),
        dark=" ".join(f"{variable(light)}: {dark};" for light, dark in pairs.items()),
        **names,
    )


def variable(colour: str) -> str:
    """The name under which the style sheet has a colour.

    >>> variable("#d55e00")
    '--c-d55e00'
    """
    return f"--c-{colour.removeprefix('#')}"


def _kind(path: object) -> str:
    name = str(path)
    return "SVG (dark)" if name.endswith("-dark.svg") else name.rpartition(".")[2].upper()
