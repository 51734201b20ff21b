"""What is measured after every round: GA, LA and their spread, calibration, losses, traffic, time.

GA is the test accuracy of the aggregated model. LA = sum_n p_n (accuracy of client n's model on the global test set),
after local training and before aggregation; with all clients taking part, p_n = pi_n. Of tasks other than
classification, the metric of the likelihood stands for accuracy, such as R2, and others (RMSE, F1) go by their names.
NLL, Brier and ECE measure the calibration of the aggregated model's probabilities
(`metrics.uncertainty.calibration`); without classes they are left out. GA_validation is the accuracy
of the aggregated model on training samples that belong to no client (`data.validation`), if there are any. AE and LF
are the distances from a reference posterior for which GA and LA stand; see `fl_lightning.metrics.reference`. PA is the
accuracy on the clients' own test sets (`data.client_test`):

    PA_before = 1/n sum_n (accuracy of theta_S on client n's test set), theta_S as the round begins
    PA_after  = 1/n sum_n (accuracy of theta_n on client n's test set), theta_n after local training

Over the members of the cohort that have a test set, all counting the same. `_worst` is the mean of the worst tenth of
them, at least one (Li et al., *Fair Resource Allocation in Federated Learning*, ICLR 2020), `_std` their standard
deviation (of the population, 0 for one client).

Not every round need be measured (`Evaluation`): one that is not due has none of these, but losses, traffic and time.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fl_lightning.data.dataset import Dataset
from fl_lightning.discovery import plugin_hash
from fl_lightning.engines.returned import diagnosed
from fl_lightning.errors import require, unknown
from fl_lightning.method import Method, task_of
from fl_lightning.metrics.metric import GA, LA, METRICS, VALIDATION, Measurement, is_final
from fl_lightning.metrics.reference import Reference
from fl_lightning.metrics.scores import BLOCK, client_score, score, score_at, score_local
from fl_lightning.metrics.settings import Evaluation
from fl_lightning.models.inputs import each, part
from fl_lightning.models.task import Score, Task, Weights
from fl_lightning.record import ClientResult, RoundRecord

# The share of clients that counts as the worst.
WORST = 0.1
# Test samples on which a module's own evaluation is tried out.
FEW = 32
# What takes a pass over data, by the beginning of its name; a round that is not due has none of it.
MEASURED = frozenset(metric.name.partition("_")[0] for metric in METRICS if metric.due == "measured") | {"own"}
# What every round has, measured or not; a module's own metric of such a name goes by another.
ALWAYS = frozenset(metric.name for metric in METRICS if metric.due == "always")
MEASURED_OF_CLIENTS = frozenset({"accuracy", "R2", "distance", "test_samples", "accuracy_before", "accuracy_after"})
SPREAD = (f"LA_{name}" for name in ("min", "q25", "median", "q75", "max"))
KNOWN = frozenset((*(MEASURED - {"own"}), *ALWAYS, VALIDATION, *SPREAD))
# What methods of this package diagnose of a round.
DIAGNOSED = frozenset(
    (
        *("clients_ignored", "clients_spread", "control_norm", "damping_raised", "density", "distilled_distance"),
        *("effective_weight_sum", "matched_layer", "precision_cosine", "precision_cosine_minmax", "precision_max"),
        *("precision_mean", "precision_median", "precision_min", "precision_q25", "precision_q75", "prior_distance"),
        *("prior_stability", "server_clips", "server_step", "shared_bytes", "shift_norm", "solver_iterations"),
        *("solver_residual", "tau_eff", "update_norm", "variate_excess", "warmup_gradient_evaluations"),
        "weight_shift",
    )
)
# The first letters of names with a number or a kind in them.
STARTS = ("PA_", "own_", "units_")


def as_if_not_due(found: Measurement, own: frozenset[str] = frozenset()) -> Measurement:
    """The numbers of a round without those that only a measured one has, the module's own metrics among them."""
    known = {name: value for name, value in found.metrics.items() if name.partition("_")[0] not in MEASURED}
    return Measurement(
        {name: value for name, value in known.items() if name in ALWAYS or name not in own},
        {name: values for name, values in found.clients.items() if name not in MEASURED_OF_CLIENTS},
    )


@dataclass(frozen=True)
class ClientEvaluator:
    """LA and LF of clients, and their accuracy on their own test sets, measured where they were trained.

    Attributes:
        task: Model and likelihood.
        reference: The posterior from which models are a distance apart, if there is one.
        evaluation: In which rounds, and on how many samples.
        rounds: Of the run; the last one is always measured. 0 if unknown.
    """

    task: Task
    reference: Reference | None = None
    evaluation: Evaluation = Evaluation()  # noqa: RUF009 - frozen
    rounds: int = 0

    def __call__(self, clients: Sequence[ClientResult]) -> list[ClientResult]:
        if not self.evaluation.is_due(clients[0].local.plan.round, self.rounds):
            return list(clients)
        models = [Weights(client.local.params, client.local.buffers) for client in clients]
        dataset = clients[0].local.data.dataset
        evaluated = [
            client._replace(own=client_score(self.task, model, dataset, client.local.client))
            for client, model in zip(clients, models, strict=True)
        ]
        if not self.evaluation.local:
            return evaluated
        scores = score_local(self.task, models, dataset, self.evaluation)
        distances: Sequence[float | None] = [None] * len(clients)
        if self.reference is not None:
            distances = self.reference.distances([model.params for model in models])
        return [
            client._replace(score=found, distance=distance)
            for client, found, distance in zip(evaluated, scores, distances, strict=True)
        ]


def measure(
    method: Method,
    task: Task,
    dataset: Dataset,
    record: RoundRecord,
    reference: Reference | None = None,
    evaluation: Evaluation = Evaluation(),  # noqa: B008 - frozen
    rounds: int = 0,
) -> Measurement:
    """All numbers of a round.

    Args:
        method: Adds its own diagnostics.
        task: Model and likelihood.
        dataset: With the test set, and whatever else there is to be measured on.
        record: The round.
        reference: A posterior, for AE and LF.
        evaluation: In which rounds, and on how many samples.
        rounds: Of the run; the last one is always measured. 0 if unknown.
    """
    start, task = time.perf_counter(), task_of(method, task)
    due = evaluation.is_due(record.round, rounds)
    quality = _quality(task, dataset, record, reference, evaluation) if due else Quality({}, {}, {}, {})
    costs = _costs(record, seconds_evaluation=time.perf_counter() - start)
    metrics = quality.metrics | costs | quality.further
    clients = {
        "client": list(record.cohort.members),
        "samples": [len(result.local.data) for result in record.clients],
        "steps": [result.local.num_steps for result in record.clients],
        **quality.clients,
        "train_loss": [result.train_loss for result in record.clients],
        "prior_loss": [result.prior_loss for result in record.clients],
        **quality.clients_further,
    }
    diagnosis = method.diagnose(record.before.state, record.cohort, record.reports, record.after.state)
    taken = {*metrics, *clients}
    members = len(record.cohort.members)
    for name, value in diagnosed(method, diagnosis, members, lambda name: name in taken or _is_ours(name)).items():
        if isinstance(value, list):
            clients[name] = value
        else:
            metrics[name] = value
    return Measurement(metrics, clients)


class Quality(NamedTuple):
    """The numbers of a round that take passes over data.

    Attributes:
        metrics: GA, LA and what goes with them.
        clients: The accuracy of each member of the cohort.
        further: On validation data and clients' own test sets, by the module's own evaluation, distances.
        clients_further: The same of each member of the cohort.
    """

    metrics: dict[str, float]
    clients: dict[str, list[Any]]
    further: dict[str, float]
    clients_further: dict[str, list[Any]]


def _quality(
    task: Task, dataset: Dataset, record: RoundRecord, reference: Reference | None, evaluation: Evaluation
) -> Quality:
    """The numbers of a round that is due."""
    weights, server = record.cohort.weights, Weights(record.after.state.params, record.after.buffers)
    scores = _scores(task, server, dataset, record, evaluation)
    metrics, clients = _accuracies(scores, weights, task.likelihood.metric)
    personal, clients_further = _client_tests(task, dataset, record)
    further = _validation(task, server, dataset) | personal
    taken = {*metrics, *further, *ALWAYS}
    for name, number in _user_metrics(task, server, dataset).items():
        further[f"own_{name}" if name in taken or is_final(name) else name] = number
    if reference is not None:
        distances = _distances(reference, server, record, evaluation)
        further["AE"] = distances[0]
        if len(distances) > 1:
            further["LF"] = _mean(distances[1:], weights)
            clients_further["distance"] = distances[1:]
    return Quality(metrics, clients, further, clients_further)


def _costs(record: RoundRecord, seconds_evaluation: float) -> dict[str, float]:
    """Losses, traffic and time, which every round has."""
    weights = record.cohort.weights
    costs = {
        "train_loss": _mean([result.train_loss for result in record.clients], weights),
        "prior_loss": _mean([result.prior_loss for result in record.clients], weights),
        "bytes_down": float(record.bytes_down),
        "bytes_up": float(record.bytes_up),
        "gradient_evaluations": float(record.gradient_evaluations),
        "seconds_local": record.seconds_local,
        "seconds_server": record.seconds_server,
        "seconds_evaluation": seconds_evaluation,
        "seconds": record.seconds_local + record.seconds_server + seconds_evaluation,
    }
    return costs if record.workers_idle is None else costs | {"workers_idle": record.workers_idle}


def _is_ours(name: str) -> bool:
    """Whether a name is that of a number of ours, also of one that this round has not."""
    always = name in ALWAYS or name in MEASURED_OF_CLIENTS or name in ("round", "workers_idle")
    return always or name.partition("_")[0] in MEASURED or is_final(name)


def _trust(server: Score) -> dict[str, float]:
    """What else is measured of the server's model."""
    calibration = {} if server.brier is None or server.ece is None else {"Brier": server.brier, "ECE": server.ece}
    return {"NLL": server.nll, **calibration, **(server.others or {})}


def _scores(task: Task, server: Weights, dataset: Dataset, record: RoundRecord, evaluation: Evaluation) -> list[Score]:
    """Of the server's model, then of the clients', if they are wanted; those that are known are not measured again."""
    known = [result.score for result in record.clients if result.score is not None]
    models = [Weights(result.local.params, result.local.buffers) for result in record.clients]
    if not evaluation.local:
        return score(task, [server], dataset, calibrated=1)
    if len(known) == len(models):
        return [*score(task, [server], dataset, calibrated=1), *known]
    if evaluation.local_share < 1:
        return [*score(task, [server], dataset, calibrated=1), *score_local(task, models, dataset, evaluation)]
    return score(task, [server, *models], dataset, calibrated=1)


def _accuracies(
    scores: Sequence[Score], weights: Sequence[float], metric: str
) -> tuple[dict[str, float], dict[str, list[Any]]]:
    """GA, LA and its spread, calibration; and the accuracy, or the metric of the task, of every client's model."""
    local = [one.accuracy for one in scores[1:]]
    metrics = {GA: scores[0].accuracy}
    if local:
        quantiles = torch.tensor(local, dtype=torch.float64).quantile(torch.linspace(0, 1, 5, dtype=torch.float64))
        metrics[LA] = _mean(local, weights)
        metrics |= zip(("LA_min", "LA_q25", "LA_median", "LA_q75", "LA_max"), quantiles.tolist(), strict=True)
    return metrics | _trust(scores[0]), {metric: local} if local else {}


def _distances(reference: Reference, server: Weights, record: RoundRecord, evaluation: Evaluation) -> list[float]:
    """Of the server's model, then of the clients', if they are wanted; those that are known are not measured again."""
    if not evaluation.local:
        return reference.distances([server.params])
    known = [result.distance for result in record.clients if result.distance is not None]
    if len(known) == len(record.clients):
        return [*reference.distances([server.params]), *known]
    return reference.distances([server.params, *(result.local.params for result in record.clients)])


def _user_metrics(task: Task, server: Weights, dataset: Dataset) -> dict[str, float]:
    """What the evaluation of a LightningModule logs of the server's model."""
    if task.step is None:
        return {}
    places = torch.split(torch.arange(len(dataset.test_y), device=dataset.test_y.device), BLOCK)
    x, y = each(lambda one: one.to(task.device), dataset.test_x), dataset.test_y.to(task.device)
    batches = ((dataset.inputs(part(x, i), task.dtype), dataset.targets(y[i], task.dtype)) for i in places)
    with task.evaluating():
        return task.step.metrics({**server.params, **server.buffers}, batches)


def user_metrics_of(task: Task, dataset: Dataset) -> frozenset[str]:
    """The names of what a LightningModule's evaluation logs, tried out before training on a few test samples.

    Raises:
        UserError: If it asks for something that evaluation does not offer.
    """
    if task.step is None:
        return frozenset()
    places = torch.linspace(0, len(dataset.test_y) - 1, min(FEW, len(dataset.test_y))).long()
    x = each(lambda one: one.to(task.device), part(dataset.test_x, places))
    y = dataset.test_y[places].to(task.device)
    return task.step.logged(dataset.inputs(x, task.dtype), dataset.targets(y, task.dtype))


def _validation(task: Task, server: Weights, dataset: Dataset) -> dict[str, float]:
    """Of the server's model alone; settings are not chosen by the clients' models."""
    if dataset.validation is None:
        return {}
    return {"GA_validation": score_at(task, server, dataset, dataset.validation).accuracy}


def _client_tests(task: Task, dataset: Dataset, record: RoundRecord) -> tuple[dict[str, float], dict[str, list[Any]]]:
    """The numbers of a round, and those of each member of its cohort, NaN without a test set; nothing without tests."""
    if dataset.client_tests is None:
        return {}, {}
    start = Weights(record.before.state.params, record.before.buffers)
    before = [client_score(task, start, dataset, n) for n in record.cohort.members]
    after = [
        result.own or client_score(task, Weights(result.local.params, result.local.buffers), dataset, n)
        for n, result in zip(record.cohort.members, record.clients, strict=True)
    ]
    numbers: dict[str, float] = {}
    clients: dict[str, list[Any]] = {"test_samples": [len(dataset.client_tests[n]) for n in record.cohort.members]}
    for name, scores in (("before", before), ("after", after)):
        known = [score.accuracy for score in scores if score is not None]
        numbers |= {f"PA_{name}{ending}": value for ending, value in summary(known).items()}
        clients[f"accuracy_{name}"] = [math.nan if score is None else score.accuracy for score in scores]
    return numbers, clients


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean, worst tenth and spread over clients, by the ending of their names; empty without clients.

    >>> summary([0.5, 1.0])
    {'': 0.75, '_worst': 0.5, '_std': 0.25}
    """
    if not values:
        return {}
    known = torch.tensor(values, dtype=torch.float64).sort().values
    worst = known[: math.ceil(WORST * len(known))]
    return {"": float(known.mean()), "_worst": float(worst.mean()), "_std": float(known.std(correction=0))}


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def check_metric(setting: str, metric: str, classes: Mapping[str, type[Any]], validation: float) -> None:
    """Refuse the name of a metric that a run cannot have; methods and models of plug-ins have metrics of their own.

    Args:
        setting: That gives the name, for the error message.
        metric: The name.
        classes: Of its parts, by section.
        validation: The share of its samples that serve only to choose.

    Raises:
        UserError: If the run lacks it, or needs data that are not there.
    """
    require(
        metric != VALIDATION or validation > 0,
        f"{setting} {VALIDATION} needs data that belong to no client, got data.validation 0; set data.validation, "
        "0.1 for instance, for all runs, or choose another metric",
    )
    is_of_user = any(plugin_hash(classes[part]) is not None for part in ("method", "model"))
    known = KNOWN | DIAGNOSED if classes["method"].diagnose is not Method.diagnose else KNOWN
    if not (is_of_user or metric in known or "/" in metric or metric.startswith(STARTS)):
        raise unknown(setting, metric, KNOWN)
