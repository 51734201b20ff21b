"""Tables go into a paper as they are: balanced, escaped, aligned, the best bold, with the columns that one asks for."""

import io
import re

import pandas as pd
import pytest

from analysis import findings, formats, tables
from analysis.study_records import Spec
from fl_lightning.__main__ import main
from fl_lightning.errors import UserError
from tests.support.synthetic import as_study, last_rounds, rounds_table
from tune.study import Range


def accuracy(**options):
    rounds = rounds_table(**{"seeds": 3, **options})
    return tables.accuracy_and_rounds(as_study(rounds).asked((0.5, 0.99)))


def body(text):
    """The cells of the rows between the rules."""
    inside = text.partition("\\midrule\n")[2].partition("\\bottomrule")[0]
    return [[cell.strip() for cell in line.removesuffix(" \\\\").split(" & ")] for line in inside.splitlines()]


def check_latex(text):
    """What TeX would complain about."""
    begun, ended = (re.findall(rf"\\{word}{{([\w*]+)}}", text) for word in ("begin", "end"))
    assert begun == ended[::-1]
    bare = re.sub(r"\\[&%$#_{}]", "", "\n".join(line for line in text.splitlines() if not line.startswith("%")))
    assert bare.count("{") == bare.count("}")
    assert bare.count("$") % 2 == 0
    assert not set("%#~^_") & set(bare)
    assert bare.isascii()
    columns = re.search(r"\\begin{tabular}{([lr]+)}", text)[1]
    assert all(line.count("&") == len(columns) - 1 for line in bare.splitlines() if line.endswith("\\\\"))
    return columns


@pytest.mark.parametrize("spread", formats.SPREADS)
@pytest.mark.parametrize("seeds", [1, 3, 6])
def test_latex_is_well_formed(spread, seeds):
    table = accuracy(seeds=seeds, alphas=(0.01, 1), lrs=(0.1, 1))
    table["case"] = table["case"].replace("FedAvg", "A & B_c 100% {x} #1 ~ ^ \\ $ λ ± –")
    text = formats.latex(table, formats.caption_of("GA & LA", table, spread), "tab:x", spread)
    assert check_latex(text).startswith("rllrr")
    assert "\\label{tab:x}" in text
    assert text.index("\\caption") < text.index("\\begin{tabular}")
    assert "\\begin{table}" not in formats.latex(table)
    assert check_latex(formats.latex(table, "two columns", wide=True))


def test_n_is_in_the_caption_or_in_the_table_and_minus_is_no_hyphen():
    table = accuracy()
    assert " & n " not in formats.latex(table, formats.caption_of("A", table, "std"), spread="std")
    assert " & n " in formats.latex(table, "Of my own")
    loser = tables.paired_comparison(as_study(rounds_table()), "FedAvg", "FOLA")
    assert loser["difference (points)"].iloc[0] < 0
    text = formats.latex(loser, "Pairs")
    check_latex(text)
    assert not re.search(r"(?<!\$)-\d", text)


def test_a_mean_and_its_spread_share_a_cell():
    table = accuracy(cases=("FOLA",))
    mean, std = table.loc[0, "GA (%)"], table.loc[0, "GA (%) std"]
    rounds = rounds_table(cases=("FOLA",), seeds=3)
    assert std == pytest.approx(100 * last_rounds(rounds)["GA"].std())
    assert formats.readable(table, "std").loc[0, "GA (%)"] == f"{mean:.1f} ± {std:.1f}"
    assert formats.readable(table, "none").loc[0, "GA (%)"] == f"{mean:.1f}"
    low, high = table.loc[0, "GA (%) low"], table.loc[0, "GA (%) high"]
    assert formats.readable(table).loc[0, "GA (%)"] == f"{mean:.1f} ({low:.1f} to {high:.1f})"
    assert "[" in formats.readable(accuracy(cases=("FOLA",), seeds=6)).loc[0, "GA (%)"]
    assert formats.readable(table).loc[0, "rounds to 99%"] == "never"
    assert not {"reached 50%", "GA (%) std", "GA (%) low"} & set(formats.readable(table))


def test_the_best_of_every_contest_is_bold_but_not_who_has_all_data():
    table = accuracy(cases=("FedAvg", "FOLA", "SCAFFOLD"), alphas=(0.01, 1))
    table.loc[table["case"].eq("SCAFFOLD"), ["case", "GA (%)"]] = ["centralised", 99.0]
    rows = body(formats.latex(table, spread="none"))
    best = {(row[0], row[1]) for row in rows if row[2].startswith("\\textbf")}
    means = table.loc[table["case"].ne("centralised")].groupby("α")["GA (%)"].idxmax()
    assert best == {(f"{table.loc[i, 'α']:g}", table.loc[i, "case"]) for i in means}
    assert "textbf" not in formats.latex(table, bold=False)
    alone = table.loc[table["case"].eq("FOLA")]
    assert "textbf" not in formats.latex(alone)  # nobody to be better than


def test_arriving_more_often_comes_before_arriving_sooner():
    table = pd.DataFrame(
        {
            "case": ["a", "b", "c", "d"],
            "rounds to 80%": [2.0, 5.0, 4.0, float("nan")],
            "rounds to 80% std": [float("nan"), 1.0, 1.0, float("nan")],
            "reached 80%": [1, 3, 3, 0],
            "n": [3, 3, 3, 3],
        }
    )
    cells = [row[1] for row in body(formats.latex(table, spread="std"))]
    assert cells == ["2.0 (1/3)", "5.0 $\\pm$ 1.0", "\\textbf{4.0 $\\pm$ 1.0}", "never"]


def test_columns_are_chosen_by_the_names_that_one_knows():
    table = accuracy(alphas=(0.01, 1))
    chosen = formats.chosen(table, ["case", "data.alpha", "ga", "rounds to 50%"])
    assert list(formats.readable(chosen)) == ["case", "α", "GA (%)", "rounds to 50%"]
    assert "±" in formats.readable(chosen, "std").loc[0, "GA (%)"]
    again = pd.read_csv(io.StringIO(formats.csv(chosen)))
    assert again["GA (%)"].to_list() == pytest.approx(table["GA (%)"].to_list())
    assert "n" not in again
    assert "n = 3 runs" in formats.caption_of("A", chosen, "std")
    with pytest.raises(UserError, match="unknown column 'case_': did you mean 'case'"):
        formats.chosen(table, ["case_"])


def call(capsys, *arguments):
    code = main([*map(str, arguments)])
    return code, *capsys.readouterr()


@pytest.mark.system
def test_the_command(smoke_store, tmp_path, capsys):
    some = ["table", "accuracy", "--study", "demo", "--runs", smoke_store, "--thresholds", "0.1"]
    code, text, _ = call(capsys, *some, "--columns", "case,GA,rounds to 10%", "--latex")
    assert code == 0
    assert check_latex(text) == "lrr"
    assert "\\label{tab:demo-accuracy}" in text
    assert "\\caption{GA and rounds to 10\\%. Mean" in text
    assert len(body(text)) == 3
    code, text, _ = call(capsys, *some, "--where", "method=fola", "--csv")
    assert pd.read_csv(io.StringIO(text))["case"].to_list() == ["FOLA"]
    code, text, _ = call(capsys, *some, "--markdown", "--out", tmp_path / "t.md")
    assert (code, text) == (0, "")
    assert (tmp_path / "t.md").read_text().startswith("| case ")
    assert "rounds to 10%" in call(capsys, *some)[1].splitlines()[0]


@pytest.mark.system
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["acuracy"], "unknown table 'acuracy': did you mean 'accuracy'"),
        (["--thresholds", "80"], "--thresholds must lie in (0, 1], got 80"),
        (["--thresholds", "a"], "--thresholds must be numbers with commas"),
        (["--spread", "sdt"], "unknown --spread 'sdt': did you mean 'std'"),
        (["--latex", "--csv"], "not allowed with argument"),
        (["--columns", "GAA", "--study", "demo"], "unknown column 'GAA'"),
        (["--scale", "smoke"], "--scale needs --study"),
        ([], "choose by --study, --scale or --where"),
        (["--where", "method=nobody", "--study", "demo"], "no run of the study demo has method = nobody"),
        (["--study", "demo", "--out", "/nowhere/table.tex"], "cannot write to /nowhere/table.tex"),
    ],
)
def test_mistakes_are_told_in_one_line(smoke_store, capsys, flags, message):
    code, _, error = call(capsys, "table", *flags, "--runs", smoke_store)
    assert code == 2
    assert message in error
    assert len(error.splitlines()) == 1


def test_settings_at_the_edge_are_one_finding_with_all_cases():
    best = pd.DataFrame({"case": ["A", "A", "B", "C"], "training.lr": [1.0, 0.5, 1.0, 0.1]})
    largest, smallest = {"training.lr": "largest"}, {"training.lr": "smallest"}
    beyond = "a better one may lie beyond"
    assert findings.edge_remarks(best, [largest, {}, largest, smallest]) == [
        f"the best lr is the largest that was tried for A (1 under 1 of 2 conditions), B (1): {beyond}",
        f"the best lr is the smallest that was tried for C (0.1): {beyond}",
    ]


def test_settings_at_the_edge_of_what_was_tried_are_said_to_be_there():
    runs = last_rounds(rounds_table(lrs=(0.1, 1), epochs=(2, 5, 20)))
    row = tables.best_settings(as_study(runs)).iloc[0]
    assert row["lr"] == 0.1
    assert row["at the edge"] == "lr (smallest)"
    tried = Spec(spaces={"FedAvg": {}, "FOLA": {"training.lr": Range("grid", (0.01, 0.1, 1))}})
    assert (
        tables.best_settings(as_study(runs, spec=tried))["at the edge"] == ""
    ).all()  # the study tried more than these runs
