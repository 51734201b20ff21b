"""The final round of a run: its posterior, what that is worth, and the files that stay of both.

The numbers join those of the last round, under names with a slash (`probit/NLL`), so that they are wherever those are:
in the result, in MLflow, in `rounds.parquet`, in tables.
"""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client_state import Snapshot
from fl_lightning.data.batches import SERVER, ClientData
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.shares import sizes_of
from fl_lightning.errors import require
from fl_lightning.method import HasPosterior, MethodPosterior, adapted
from fl_lightning.metrics.metric import TIMES, is_final
from fl_lightning.metrics.uncertainty import (
    method_posterior,
    ood_inputs,
    posterior_file,
    predictive,
    prior_precision,
    sample_curvature,
)
from fl_lightning.metrics.uncertainty.evaluate import measure
from fl_lightning.metrics.uncertainty.posterior import Member, Posterior, Scaling, build
from fl_lightning.models.inputs import Inputs, part
from fl_lightning.models.task import Task, Weights
from fl_lightning.runs.config.run_config import RunConfig
from fl_lightning.system.atomic import write_atomically
from fl_lightning.system.text import metric_name

ARRAYS = "uncertainty.npz"
PICTURE = "uncertainty.png"
# Traffic is counted in float32, as in all rounds.
BYTES_PER_NUMBER = 4


class Situation(NamedTuple):
    """A run after its last round.

    Attributes:
        task: The network.
        dataset: Training and test set.
        clients: Whose samples are where.
        holdout: Samples of the server.
        weights: The final model.
        members: The models of the ensemble, possibly none.
        own: The posterior of the method itself, if it has one and the settings ask for it.
    """

    task: Task
    dataset: Dataset
    clients: Sequence[Tensor]
    holdout: Tensor
    weights: Weights
    members: Sequence[Member]
    own: MethodPosterior | None = None


def posterior_of_method(config: RunConfig, now: Snapshot, clients: Sequence[Tensor]) -> MethodPosterior | None:
    """The posterior that the method itself keeps after a round, if it keeps any."""
    if not isinstance(config.method, HasPosterior):
        return None
    training = adapted(config.method, config.training)
    return config.method.posterior(now.state, max(1, now.round), training, sizes_of(clients))


def check(config: RunConfig, now: Situation) -> None:
    """Refuse what cannot be measured after the last round, before the first one begins."""
    settings = config.uncertainty
    if not settings.final_round:
        return
    _strange(config, now)
    sample_curvature.check(now.task, now.weights, _client_data(now)[0], settings.form)
    if settings.source != "final_round":
        method_posterior.check(config.names["method"], now.own, settings)
    held = held_out(now)
    if settings.prior_precision == "holdout" and held is None:
        prior_precision.tuned(
            Posterior(now.task, now.weights, settings.form, (), 1, 0.0), settings, None
        )  # says what is missing
    require(held is not None or "temperature" not in settings.predictive, predictive.NO_TEMPERATURE)


def conclude(config: RunConfig, now: Situation, folder: Path, pictures: bool = True) -> dict[str, float]:
    """Make the posterior, measure it, and write its files; the numbers by name."""
    settings = config.uncertainty
    found, numbers = posterior_at(config, now)
    always = ["map", *(["temperature"] if found.logit_temperature is not None else [])]
    kinds = list(dict.fromkeys([*always, *settings.predictive]))
    findings = measure(found, now.dataset, kinds, _strange(config, now))
    keeps = found if "ensemble" in settings.predictive else replace(found, members=())
    posterior_file.save(keeps, folder / posterior_file.FILE)
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **findings.arrays)
    write_atomically(folder / ARRAYS, content.getvalue())
    if pictures:
        from fl_lightning.runs.plotting import run_figures as draw  # matplotlib: only drawing waits for it

        draw.save(draw.uncertainty(findings.arrays, findings.metrics), folder / PICTURE)
    return numbers | findings.metrics


def posterior_at(config: RunConfig, now: Situation) -> tuple[Posterior, dict[str, float]]:
    """The posterior at a model, with the prior that the settings ask for, and numbers about itself."""
    settings = config.uncertainty
    clients = _client_data(now)
    if settings.source == "final_round":
        pooled = sample_curvature.final_round(now.task, now.weights, clients, settings.form, settings.slopes)
    else:
        method_posterior.check(config.names["method"], now.own, settings)
        assert now.own is not None
        pooled = method_posterior.pooled(now.own, now.task, now.weights, clients)
    one = clients[0].fetch(clients[0].indices[:1])[0]
    found = build(now.task, now.weights, settings.form, pooled, one)
    found = replace(
        found,
        members=tuple(now.members),
        scaling=Scaling(now.dataset.mean, now.dataset.std),
        seed=config.seed,
        draws=settings.draws,
        glm_draws=settings.glm_draws,
        source=settings.source,
    )
    found = prior_precision.tuned(found, settings, held_out(now), now.own.prior if now.own is not None else None)
    numbers = {
        "posterior/prior_precision": found.prior_precision,
        "posterior/train_loss": found.loss,
        "posterior/bytes_up": float(BYTES_PER_NUMBER * pooled.sent),
    }
    if found.prior_precision > 0 and settings.source != "ep":  # whose prior is around the initial weights
        numbers["posterior/log_marginal_likelihood"] = found.log_marginal_likelihood()
    if found.logit_temperature is not None:
        numbers["posterior/logit_temperature"] = found.logit_temperature
    return found, numbers


def held_out(now: Situation) -> ClientData | None:
    """What the prior is chosen on: samples that serve only to choose, or else those of the server; None without any."""
    places = now.dataset.validation if now.dataset.validation is not None else now.holdout
    if places is None or not len(places):
        return None
    return ClientData(SERVER, now.dataset.to(now.task.device), places.to(now.task.device), now.task.dtype)


def without(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a round without those of a final one."""
    return {name: value for name, value in metrics.items() if not is_final(name)}


def measured_again(metrics: Mapping[str, float], new: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a last round with new numbers; what is not measured any more is NaN, for stores never forget."""
    old = {name: math.nan for name in metrics if is_final(name)}
    return without(metrics) | old | dict(new) | {TIMES: metrics.get(TIMES, 0.0) + 1}


def _client_data(now: Situation) -> list[ClientData]:
    dataset, device = now.dataset.to(now.task.device), now.task.device
    return [
        ClientData(n, dataset, places.to(device), now.task.dtype) for n, places in enumerate(now.clients) if len(places)
    ]


def _strange(config: RunConfig, now: Situation) -> dict[str, Inputs]:
    root = getattr(config.source, "root", None)
    dropped = None
    if config.split.drop_classes and ood_inputs.DROPPED in config.uncertainty.ood:
        whole = config.source.load()
        dropped = part(whole.test_x, torch.isin(whole.test_y, torch.tensor(config.split.drop_classes)))
    given: dict[str, str] = {}
    for name in config.uncertainty.ood:
        short = metric_name(Path(name).stem if Path(name).suffix else name)
        require(
            short not in given,
            f"uncertainty.ood names {given.get(short)} and {name}, whose numbers would both be called {short}; rename "
            "the file, or leave one out",
        )
        given[short] = name
    return {
        short: ood_inputs.inputs_of(name, now.dataset, root, dropped, config.seed)
        for short, name in given.items()
        if name != config.names["data"]  # a study names them all; a dataset is not strange to itself
    }


__all__ = ["Situation", "check", "conclude", "held_out", "measured_again", "posterior_at", "without"]
