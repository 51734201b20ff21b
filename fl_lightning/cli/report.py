"""fl-lightning report: a page with the findings, figures and tables of all runs, and the files for a paper."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from fl_lightning.cli.flags import CommandParser, chosen_by
from fl_lightning.errors import require

EPILOG = """The page index.html opens without a network. Beside it: figures/ (SVG, PDF, PNG) and tables/ (CSV, LaTeX).

examples:
  fl-lightning report
  fl-lightning report --study demo --where data.alpha=0.01 --where method=fola --where method=fedavg"""


def main(arguments: Sequence[str]) -> int:
    """Write the report."""
    parser = CommandParser(prog="fl-lightning report", description=__doc__, epilog=EPILOG)
    parser.add_argument("--study", help="only this study or comparison [all]")
    parser.add_argument("--scale", help="only this scale of the study [all]")
    parser.add_argument(
        "--where",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="only runs with this setting, such as federation.rounds=12; may be repeated, also with the same key",
    )
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder of the report [report]")
    parser.add_argument(
        "--runs", "--store", metavar="FOLDER", help="folder of runs, or MLflow URI [$MLFLOW_TRACKING_URI or runs]"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    options = parser.parse_args(list(arguments))
    require(options.scale is None or options.study is not None, "--scale needs --study, the study that has the scale")
    require(
        not (options.out / "mlflow.db").exists(),
        f"--out is the folder of the report, and {options.out} is a folder of runs; use --runs {options.out}",
    )
    where = chosen_by(options.where)
    from analysis import report  # imports what only a report needs

    start = time.monotonic()
    with tqdm(bar_format="{desc}", leave=False, disable=options.quiet or None, file=sys.stderr) as line:
        path, findings = report.write(
            options.out, options.runs, options.study, options.scale, line.set_description_str, where
        )
    print(f"report   {path} ({path.stat().st_size / 1e6:.1f} MB, {time.monotonic() - start:.0f} s)")
    print(f"figures  {options.out / 'figures'} (SVG, PDF, PNG)")
    print(f"tables   {options.out / 'tables'} (CSV, LaTeX)")
    for sentence in findings:
        if sentence.startswith(report.FAILED):
            print(sentence, file=sys.stderr)
    return 0
