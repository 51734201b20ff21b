"""What a finished run has left: its model, and its posterior."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from fl_lightning.config import RunConfig, parse, read_yaml
from fl_lightning.errors import UserError, require
from fl_lightning.experiment import Problem, build
from fl_lightning.loop import initial
from fl_lightning.method import task_of
from fl_lightning.record import Snapshot
from fl_lightning.runs import checkpoint, files, final_round, model_file
from fl_lightning.runs.final_round import Situation
from fl_lightning.runs.folder import Result, read_result, write_result
from fl_lightning.runs.identity import identity
from fl_lightning.runs.locate import folder_of_run
from fl_lightning.runs.recording import tell
from fl_lightning.system.atomic import write_atomically
from fl_lightning.uncertainty import file
from fl_lightning.uncertainty.posterior import Member, Posterior
from fl_lightning.uncertainty.settings import Uncertainty


def load_model(run: Result | Path | str, out: Path | str = "runs") -> nn.Module:
    """The aggregated model after the last round, in evaluation mode, on the device that its settings name.

    It is the network that was trained: of a method with its own (`Method.network`), that one.

    Args:
        run: A finished run: its result, its folder (what `fl-lightning run` calls its files), or its MLflow id.
        out: Folder of all runs, whose store knows the id.

    Raises:
        UserError: If there is no such run, or it has kept no model, as most sweeps do.
    """
    folder = _folder(run, out)
    task = _problem(config_of(folder)).task
    task.load(model_file.read(folder, task))
    return task.model.eval()


def posterior_of(run: Result | Path | str, settings: Uncertainty | None = None, out: Path | str = "runs") -> Posterior:
    """The posterior of a finished run: the one that it has saved, or else one more round for it.

    Args:
        run: Its result, its folder, or its MLflow id.
        settings: Form, prior and so on; with them the posterior is made anew. None takes what the run has saved, or
            what its own settings say.
        out: Folder of all runs, whose store knows the id.

    Raises:
        UserError: If there is no such run, or it has kept no model.
    """
    folder = _folder(run, out)
    config = config_of(folder)
    problem = _problem(config)
    if settings is None and (folder / file.FILE).exists():
        return file.load(folder / file.FILE, problem.task)
    config = replace(config, uncertainty=settings or config.uncertainty)
    return final_round.posterior_at(config, _situation(folder, problem, config))[0]


def measure_posterior(run: Result | Path | str, settings: Uncertainty, out: Path | str = "runs") -> Result:
    """Give a finished run its final round: the posterior, its numbers and pictures, in its folder and in MLflow.

    Args:
        run: Its result, its folder, or its MLflow id.
        settings: What to measure.
        out: Folder of all runs, whose store knows the id.

    Returns:
        The run, with the new numbers among those of its last round.
    """
    folder = _folder(run, out)
    result = read_result(folder)
    if result is None:
        raise UserError(f"the run in {folder} has no result, only a model; measure it where it was computed")
    require(
        result.status == "finished" or bool(result.message and result.status == "stopped"),  # by a rule of its own
        f"the run in {folder} has {result.status} before its last round, so there is no final model to measure",
    )
    config = replace(config_of(folder), uncertainty=replace(settings, final_round=True))
    problem = _problem(config)
    now = _situation(folder, problem, config)
    final_round.check(config, now)
    numbers = final_round.conclude(config, now, folder)
    last = result.history[-1]
    history = [*result.history[:-1], last._replace(metrics=final_round.measured_again(last.metrics, numbers))]
    tags = {**result.tags, "uncertainty": _in_words(config)}
    result = replace(result, history=history, tags=tags, unsent=True)
    write_atomically(folder / "rounds.parquet", files.rounds_table(history).to_parquet(index=False))
    write_result(result)
    return tell(folder.parent, result, tags)


def config_of(folder: Path) -> RunConfig:
    """The settings of a finished run."""
    return parse(read_yaml(str(folder / checkpoint.SETTINGS)))


def _folder(run: Result | Path | str, out: Path | str) -> Path:
    """Where a run is, if its model is still that of the round after which it ended: one that was stopped may go on."""
    folder = folder_of_run(run, out)
    now = read_result(folder)
    if now is not None and (isinstance(run, Result) or now.status == "stopped"):
        wanted = len((run if isinstance(run, Result) else now).history)
        there = checkpoint.round_of(folder) or len(now.history)
        require(
            there == wanted,
            f"the run in {folder} has gone on to round {there}, and its model after round {wanted} is gone; compute it "
            "again with --fresh",
        )
    return folder


def _problem(config: RunConfig) -> Problem:
    """Data and the network that was really trained."""
    problem = build(config)
    return problem._replace(task=task_of(config.method, problem.task))


def _situation(folder: Path, problem: Problem, config: RunConfig) -> Situation:
    members: tuple[Member, ...] = ()
    if (folder / file.FILE).exists():  # the only place where an ensemble is kept
        members = file.load(folder / file.FILE, problem.task).members
    weights = model_file.read(folder, problem.task)
    own = None
    if config.uncertainty.source != "final_round":
        own = final_round.kept_by_method(config, _snapshot(folder, problem), problem.clients)
    return Situation(problem.task, problem.dataset, problem.clients, problem.holdout, weights, members, own)


def _snapshot(folder: Path, problem: Problem) -> Snapshot:
    """The server after the last round, of which the model is a part."""
    config = config_of(folder)
    blank = initial(config.method, problem.task, len(problem.clients), problem.dataset)
    saved = checkpoint.read(folder, identity(config), blank)
    if saved is None:
        raise UserError(
            f"uncertainty.source expected the checkpoint of the run in {folder}, got its model alone, as sweeps keep; "
            "use --source final_round, or give their study keep_checkpoints: true"
        )
    return saved.snapshot


def _in_words(config: RunConfig) -> str:
    settings = config.uncertainty
    slopes = f"{settings.slopes} slopes" if settings.source == "final_round" else f"source {settings.source}"
    return f"{settings.form}, {slopes}, prior precision {settings.prior_precision}"
