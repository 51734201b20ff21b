"""What is measured of a run: after every round, where clients were trained, and after the last round."""

from collections.abc import Sequence
from pathlib import Path

from fl_lightning.client_state import Snapshot
from fl_lightning.data.shares import sizes_of
from fl_lightning.loop import Problem, initial
from fl_lightning.method import HasEnsemble, task_of
from fl_lightning.metrics import ridge_scan
from fl_lightning.metrics.metric import Measurement
from fl_lightning.metrics.round_metrics import ClientEvaluator, measure, user_metrics_of
from fl_lightning.metrics.uncertainty.posterior import Member
from fl_lightning.models.task import Weights
from fl_lightning.record import RoundRecord
from fl_lightning.runs import final_round
from fl_lightning.runs.config.run_config import RunConfig
from fl_lightning.runs.final_round import Situation
from fl_lightning.runs.saved_model import load_reference
from fl_lightning.system.plugins import wrong


class Evaluator:
    """Measures the rounds of a run; made before the first one, it refuses what cannot be measured.

    Args:
        config: The run.
        problem: Its data and model.
        folder: Where curves and posteriors are written.
        whole: The same with the whole network, where rounds are measured on features of a frozen part.

    Attributes:
        start: The server before round 1.
        user_metrics: The names of metrics that the model measures itself.
    """

    def __init__(self, config: RunConfig, problem: Problem, folder: Path, whole: Problem | None = None) -> None:
        self._config, self._folder = config, folder
        self._problem = problem._replace(task=task_of(config.method, problem.task))
        self._whole = self._problem if whole is None or whole is problem else whole
        task, dataset, clients = self._problem.task, problem.dataset, problem.clients
        self.start = initial(config.method, task, len(clients), dataset)
        self.user_metrics = user_metrics_of(task, dataset)
        self._reference = load_reference(config.probe, task, dataset, clients)
        ridge_scan.check(config.probe, config.federation, sizes_of(clients))
        if config.uncertainty.final_round:
            final_round.check(config, self._situation(self.start, ()))

    @property
    def evaluate_clients(self) -> ClientEvaluator:
        """What measures clients where they were trained."""
        rounds = self._config.federation.rounds
        return ClientEvaluator(self._problem.task, self._reference, self._config.evaluation, rounds)

    def evaluate(self, record: RoundRecord) -> Measurement:
        """Measure a round: AE, LF and the ridge included, where asked for."""
        config, task, dataset = self._config, self._problem.task, self._problem.dataset
        if record.round in config.probe.ridge_rounds:
            ridge_scan.write(self._folder, ridge_scan.measure(config.method, task, dataset, record))
        rounds = config.federation.rounds
        return measure(config.method, task, dataset, record, self._reference, config.evaluation, rounds)

    def conclude(self, record: RoundRecord, pictures: bool) -> dict[str, float]:
        """Measure the posterior after the last round, where asked for."""
        if not self._config.uncertainty.final_round:
            return {}
        members = self._members(record) if "ensemble" in self._config.uncertainty.predictive else ()
        situation = self._situation(record.after, members)
        return final_round.conclude(self._config, situation, self._folder, pictures)

    def _situation(self, now: Snapshot, members: Sequence[Member]) -> Situation:
        task, dataset, clients, holdout, *_ = self._whole
        own = None
        if self._config.uncertainty.source != "final_round":
            own = final_round.posterior_of_method(self._config, now, clients)
        return Situation(task, dataset, clients, holdout, Weights(now.state.params, now.buffers), members, own)

    def _members(self, record: RoundRecord) -> list[Member]:
        """The method's own ensemble, or the clients' models by their weights."""
        method = self._config.method
        if isinstance(method, HasEnsemble):
            own = method.ensemble(record.before.state, record.cohort, record.reports)
            if not isinstance(own, Sequence) or not own:
                raise wrong(method, "ensemble", "a list of models", type(own).__name__)
            return [Member(Weights(params, record.after.buffers), 1 / len(own)) for params in own]
        models = [Weights(result.local.params, result.local.buffers) for result in record.clients]
        return [Member(weights, share) for weights, share in zip(models, record.cohort.weights, strict=True)]
