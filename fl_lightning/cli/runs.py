"""fl-lightning runs: list, show and delete runs, or move them between machines in a file."""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.cli.flags import CommandParser, add_runs, chosen_by
from fl_lightning.errors import UserError, require, unknown
from fl_lightning.metrics.metric import GA, LA
from fl_lightning.runs.folder import ATTEMPT_TAG
from fl_lightning.runs.tracking.store import is_server, store_uri
from fl_lightning.runs.tracking.sync import PARENT_TAG
from fl_lightning.system.text import render

if TYPE_CHECKING:
    import pandas as pd

    from analysis.runs import Runs

ACTIONS = ("list", "show", "delete", "export", "import")
EPILOG = """ID is the beginning of a run's id, or the name of its folder.

delete                 removes runs from folders, tables and reports; the same command computes them anew.
                       MLflow has them in its trash until `mlflow gc`.
export FILE [ID ...]   writes settings and numbers of finished runs to one small file.
import FILE            reads such a file; sweeps do not compute its runs again.

examples:
  fl-lightning runs --where method=fola --where data.alpha=0.01
  fl-lightning runs show 3f2a
  fl-lightning runs delete --where status=failed
  fl-lightning runs export demo.zip --where study=demo"""
# So many characters of an id distinguish runs.
SHORT = 8
# Settings beside the usual columns, at most: a line must fit.
MOST_SETTINGS = 6


def main(arguments: Sequence[str]) -> int:
    """List, show, delete, export or import."""
    parser = CommandParser(prog="fl-lightning runs", description=__doc__, epilog=EPILOG)
    parser.add_argument("action", nargs="?", default="list", help=f"{', '.join(ACTIONS)} [list]")
    parser.add_argument("ids", nargs="*", metavar="ID", help="runs to show or delete; after FILE, runs to export")
    parser.add_argument(
        "--where",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="only runs with this setting, status or tag; may be repeated, also with the same key",
    )
    add_runs(parser)
    parser.add_argument("--json", action="store_true", help="print only a JSON array, with one object per run")
    parser.add_argument("--yes", action="store_true", help="delete without confirmation")
    options = parser.parse_args(list(arguments))
    if options.action not in ACTIONS:
        raise unknown("action", options.action, ACTIONS)
    file = _file(options) if options.action in ("export", "import") else None
    require(
        options.action in ("list", "export", "import") or bool(options.ids or options.where),
        f"{options.action} needs the ids of runs, which `fl-lightning runs` lists, or --where key=value",
    )
    require(options.action != "list" or not options.ids, "list takes no ids; `fl-lightning runs show ID` shows one")
    where = chosen_by(options.where)
    if file is not None and options.action == "import":
        return _import(file, options.out)
    from analysis.runs import Runs

    known = Runs(store_uri(options.out) if is_server(store_uri(options.out)) else options.out)
    chosen = _chosen(known, options, where)
    if options.action == "delete":
        return _delete(known, chosen, options)
    if file is not None:
        return _export(known, chosen, file, options.out)
    if options.json:
        print(json.dumps([_described(known, row) for _, row in chosen.iterrows()]))
    elif options.action == "show":
        print("\n\n".join(_page(known, row, options.out) for _, row in chosen.iterrows()))
    else:
        print(render(_rows(chosen)))
        print(f"\n{len(chosen)} runs" if len(chosen) != 1 else "\n1 run")
    return 0


def _chosen(known: "Runs", options: Namespace, where: dict[str, Any]) -> "pd.DataFrame":
    table = known.table
    require(bool(len(table)), f"no runs in {options.out} yet; make some with `fl-lightning run`")
    if options.ids:
        table = table.loc[table["run_id"].isin([_full_id(known, one, options.out) for one in options.ids])]
    table = known.narrowed(table, where)
    conditions = " and ".join(options.where)
    require(bool(len(table)), f"no run has {conditions}; `fl-lightning runs` lists those there are")
    return table


def _full_id(known: "Runs", given: str, out: Path) -> str:
    from fl_lightning.runs.locate import folders

    by_folder = {folder.name: attempt for attempt, folder in folders(out).items()}
    name = Path(given).name
    if name in by_folder:
        matching = [i for i, run in known.known.items() if run.tags.get(ATTEMPT_TAG) == by_folder[name]]
    else:
        matching = [run_id for run_id in known.table["run_id"] if run_id.startswith(given)]
    if not matching:
        raise UserError(f"no run has the id or the folder {given!r}; `fl-lightning runs` lists those there are")
    require(len(matching) == 1, f"{len(matching)} runs have an id that begins with {given!r}; give more of it")
    return str(matching[0])


def _rows(table: "pd.DataFrame") -> list[dict[str, str]]:
    """One line per run: how it ended, and the settings in which the runs differ."""
    settings = [name for name in map(str, table) if "." in name and name != "data.root"]
    settings = [name for name in settings if table[name].dropna().map(str).nunique() > 1][:MOST_SETTINGS]
    usual = ["data", *(["study"] if table["study"].notna().any() else []), "seed"]
    rows = []
    for _, run in table.iterrows():
        row = {"id": str(run["run_id"])[:SHORT], "case": str(run["case"]), **{k: _text(run[k]) for k in usual}}
        row |= {name: _text(run[name]) for name in settings}
        row |= {"round": str(run["rounds"]), "GA (%)": _percent(run[GA]), "LA (%)": _percent(run[LA])}
        rows.append(row | {"status": str(run["status"]), "started": f"{run['start']:%Y-%m-%d %H:%M}"})
    return rows


def _page(known: "Runs", run: "pd.Series[Any]", out: Path) -> str:
    """All facts of a run."""
    from fl_lightning.runs.locate import folders

    described = _described(known, run)
    tags = {k: v for k, v in described["tags"].items() if not k.startswith(("mlflow.", "fl_lightning."))}
    folder = folders(out).get(described["tags"].get(ATTEMPT_TAG, ""))
    head = {
        "id": run["run_id"],
        "name": run["name"],
        "status": run["status"],
        "started": f"{run['start']:%Y-%m-%d %H:%M:%S}",
    }
    head |= {"files": folder or "-"}
    parts = {"": head, f"after round {run['rounds']}": described["metrics"], "settings": described["settings"]}
    lines = []
    for title, values in {**parts, "tags": tags}.items():
        lines += [f"\n{title}"] if title else []
        width = max(map(len, values), default=0)
        lines += [f"{'  ' * bool(title)}{key:<{width}}  {_text(value)}" for key, value in values.items()]
    return "\n".join(lines)


def _described(known: "Runs", run: "pd.Series[Any]") -> dict[str, Any]:
    """A run as JSON has it."""
    found, metrics = known.known[run["run_id"]], known.metrics_of(run["run_id"])
    head = {"run_id": run["run_id"], "name": run["name"], "case": run["case"], "status": run["status"]}
    rounds = int(run["rounds"])
    return {**head, "rounds": rounds, "metrics": metrics, "settings": dict(found.settings), "tags": dict(found.tags)}


def _delete(known: "Runs", chosen: "pd.DataFrame", options: Namespace) -> int:
    from fl_lightning.runs.locate import folders, remove

    print(render(_rows(chosen)))
    if not options.yes and not _agreed(len(chosen)):
        print("nothing was deleted")
        return 0
    places = folders(options.out)
    tags = {run_id: known.known[run_id].tags for run_id in chosen["run_id"]}
    removed = [remove(options.out, run_id, places.get(own.get(ATTEMPT_TAG, ""))) for run_id, own in tags.items()]
    left = [run.tags.get(PARENT_TAG) for run_id, run in known.known.items() if run_id not in tags]
    for sweep in {own[PARENT_TAG] for own in tags.values() if PARENT_TAG in own} - set(left):
        remove(options.out, sweep, None)  # a sweep without runs would only be an empty line in the UI
    where = store_uri(options.out) if is_server(store_uri(options.out)) else options.out
    late = removed.count(False)
    others = f"; another process has deleted {late} of those that were chosen" if late else ""
    print(f"deleted {sum(removed)} of {len(known.table)} runs in {where}{others}")
    return 0


def _file(options: Namespace) -> Path:
    """The file to write or read: what is named first."""
    action = options.action
    require(bool(options.ids), f"{action} needs a file, for example: fl-lightning runs {action} runs.zip")
    require(
        action == "export" or (len(options.ids) == 1 and not options.where),
        f"import takes one file and all that is in it, got {' '.join([*options.ids, *options.where])}",
    )
    return Path(options.ids.pop(0))


def _export(known: "Runs", chosen: "pd.DataFrame", file: Path, out: Path) -> int:
    from fl_lightning.runs.archive import pack
    from fl_lightning.runs.locate import folders

    places = folders(out)
    found = [places.get(known.known[run_id].tags.get(ATTEMPT_TAG, "")) for run_id in chosen["run_id"]]
    packed = pack({place for place in found if place is not None}, file)
    left = f"; {len(chosen) - packed} have not ended, or have no files in {out}" if packed < len(chosen) else ""
    require(packed > 0, f"no file was written{left}; finish the runs first")
    print(f"wrote {packed} of {len(chosen)} runs to {file}{left}")
    return 0


def _import(file: Path, out: Path) -> int:
    from fl_lightning.runs.archive import unpack

    new, known = unpack(file, out)
    print(f"{len(new)} runs of {file} are new in {out}, {known} were there")
    studies = {(name.partition(".")[2], scale) for one in new for name, scale in one.tags.items() if "study." in name}
    for study, scale in sorted(studies):
        print(f"for its table  fl-lightning sweep {study} --scale {scale}  (--dry-run: what is left to compute)")
    return 0


def _agreed(number: int) -> bool:
    what = "this run" if number == 1 else f"these {number} runs"
    require(sys.stdin.isatty(), f"add --yes to delete {what} without being asked")
    return input(f"\ndelete {what}? [y/N] ").strip().lower() in ("y", "yes")


def _percent(value: float) -> str:
    return f"{100 * value:.2f}" if value == value else "-"


def _text(value: Any) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
