"""What a finished run has left: its model, and its posterior."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fl_lightning import discovery
from fl_lightning.client_state import Snapshot
from fl_lightning.data.preparation import Preparation
from fl_lightning.errors import UserError, require
from fl_lightning.loop import Problem, initial
from fl_lightning.method import task_of
from fl_lightning.metrics.uncertainty import posterior_file
from fl_lightning.metrics.uncertainty.posterior import Member, Posterior
from fl_lightning.metrics.uncertainty.settings import Uncertainty
from fl_lightning.models import lora
from fl_lightning.models.inputs import Inputs, each, shown, split
from fl_lightning.models.likelihoods.base import Likelihood
from fl_lightning.runs import checkpoint, files, final_round, frozen_weights, rounds_file, saved_model
from fl_lightning.runs.config.run_config import RunConfig, chosen_names, configure, read_settings
from fl_lightning.runs.config.schema import PARTS
from fl_lightning.runs.final_round import Situation
from fl_lightning.runs.folder import Result, read_result, write_result
from fl_lightning.runs.identity import identity
from fl_lightning.runs.locate import folder_of_run
from fl_lightning.runs.problem import problem_of
from fl_lightning.runs.tracking.sync import sync_ended

# Samples that a model is shown at once.
BLOCK = 1000


def load_model(run: Result | Path | str, out: Path | str = "runs") -> nn.Module:
    """The aggregated model after the last round, in evaluation mode, on the device that its settings name.

    Where that device is not here, the model is on the one that `compute.device auto` takes.

    It is the network that was trained: of a method with an `OwnNetwork`, that one. `model(x)` takes inputs
    as they are prepared in training, `model.predict(raw)` as the data have them (`Predictor`). A network with a
    `predict` of its own keeps that.

    Args:
        run: A finished run: its result, its folder (what `fl-lightning run` calls its files), or its MLflow id.
        out: Folder of all runs, whose store knows the id.

    Raises:
        UserError: If there is no such run, or it has kept no model, as most sweeps do.
    """
    folder = _folder(run, out)
    problem = _problem(config_of(folder), folder)
    task = problem.task
    task.load(saved_model.read(folder, task))
    lora.merge(task.model)
    model = task.model.eval()
    if not hasattr(model, "predict"):
        saved = saved_model.preparation_of(folder)
        preparation = problem.dataset.preparation if saved is None else saved
        object.__setattr__(model, "predict", Predictor(model, task.likelihood, preparation, saved is not None))
    return model


@dataclass(frozen=True)
class Predictor:
    """What a model says of raw inputs.

    Attributes:
        model: The network.
        likelihood: What its outputs mean.
        preparation: What inputs go through before it.
        is_saved: Whether the run has saved the preparation; otherwise it is that of the data as they are now.
    """

    model: nn.Module
    likelihood: Likelihood
    preparation: Preparation
    is_saved: bool = True

    def __call__(self, raw: Inputs) -> Tensor:
        """Probabilities of classes or labels, or the values of a regression in the units of its targets.

        Args:
            raw: A batch as the user's data have it: images as bytes, tokens, numbers, several inputs as a tuple or
                dict; of a table, a DataFrame with its columns.
        """
        if not self.is_saved:
            warnings.warn(
                "this run has not saved how its inputs are prepared (an earlier version, or a checkpoint alone): the "
                "preparation is that of the data as they are now",
                stacklevel=2,
            )
        like = next(self.model.parameters())
        x = each(lambda one: one.to(like.device), self.preparation.inputs(raw, like.dtype))
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                outputs = torch.cat([shown(self.model, block) for block in split(x, BLOCK)])
        finally:
            self.model.train(was_training)
        match self.likelihood.task:
            case "classification" | "tokens":
                return outputs.softmax(-1)
            case "binary" | "multilabel":
                return outputs.sigmoid()
        return self.preparation.outputs(outputs)


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
    problem = _problem(config, folder)
    if settings is None and (folder / posterior_file.FILE).exists():
        return posterior_file.load(folder / posterior_file.FILE, problem.task)
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
        f"the run in {folder} has {result.status} before its last round, so it has no final model to measure",
    )
    config = replace(config_of(folder), uncertainty=replace(settings, final_round=True))
    problem = _problem(config, folder)
    now = _situation(folder, problem, config)
    final_round.check(config, now)
    numbers = final_round.conclude(config, now, folder)
    last = result.history[-1]
    history = [*result.history[:-1], last._replace(metrics=final_round.measured_again(last.metrics, numbers))]
    tags = {**result.tags, "uncertainty": _in_words(config)}
    result = replace(result, history=history, tags=tags, unsent=True)
    rounds_file.write(folder, result.identity, history)
    files.write_tables(history, folder)
    write_result(result)
    return sync_ended(folder.parent, result)


def config_of(folder: Path) -> RunConfig:
    """The settings of a finished run."""
    settings = read_settings(folder)
    for part, name in chosen_names(settings).items():
        discovery.require_plugin(PARTS[part][0], name, f"the run in {folder}")
    return configure(settings)


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


def _problem(config: RunConfig, folder: Path) -> Problem:
    """Data and the network that was really trained; on this machine's device where that of the run is not here.

    The weights that it started from are not read again where all that it did not train is kept beside the runs.
    """
    if not config.compute.is_here:
        config = replace(config, compute=replace(config.compute, device="auto", precision=config.compute.unmixed))
    tuning, rest = config.model.tuning, frozen_weights.frozen(folder)
    is_kept = rest is not None or tuning.train == "all"
    if tuning.weights is not None and is_kept:
        tuning = replace(tuning, weights=None)
        config = replace(config, model=replace(config.model, tuning=tuning))
    problem = problem_of(config)
    if rest is not None:
        problem.task.model.load_state_dict({**rest, **frozen_weights.trained(folder)}, strict=False)
    return problem._replace(task=task_of(config.method, problem.task))


def _situation(folder: Path, problem: Problem, config: RunConfig) -> Situation:
    members: tuple[Member, ...] = ()
    if (folder / posterior_file.FILE).exists():  # the only place where an ensemble is kept
        members = posterior_file.load(folder / posterior_file.FILE, problem.task).members
    weights = saved_model.read(folder, problem.task)
    own = None
    if config.uncertainty.source != "final_round":
        own = final_round.posterior_of_method(config, _snapshot(folder, problem), problem.clients)
    return Situation(problem.task, problem.dataset, problem.clients, problem.holdout, weights, members, own)


def _snapshot(folder: Path, problem: Problem) -> Snapshot:
    """The server after the last round, of which the model is a part."""
    config = config_of(folder)
    blank = initial(config.method, problem.task, len(problem.clients), problem.dataset)
    result = read_result(folder)  # computed anew, the identity would be that of the weights as they are now
    saved = checkpoint.read(folder, identity(config) if result is None else result.identity, blank)
    if saved is None:
        raise UserError(
            f"uncertainty.source expected the checkpoint of the run in {folder}, got its model alone, as sweeps keep; "
            "use --source final_round, or give their study keep_checkpoints: true"
        )
    return saved


def _in_words(config: RunConfig) -> str:
    settings = config.uncertainty
    slopes = f"{settings.slopes} slopes" if settings.source == "final_round" else f"source {settings.source}"
    return f"{settings.form}, {slopes}, prior precision {settings.prior_precision}"
