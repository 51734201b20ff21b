"""Federated learning on heterogeneous data: FOLA and its rivals on PyTorch Lightning, Ray Tune and MLflow."""

from fl_lightning.system import compatibility

# Before anything else imports Lightning, torchvision or MLflow.
compatibility.silence_telemetry()
compatibility.declare_torchvision_operators()

from fl_lightning.config import RunConfig, configure  # noqa: E402
from fl_lightning.data.dataset import Dataset, Source  # noqa: E402
from fl_lightning.data.partition import Split, partition  # noqa: E402
from fl_lightning.discovery import discover, find  # noqa: E402
from fl_lightning.engines.functional import Functional  # noqa: E402
from fl_lightning.engines.lightning import Lightning  # noqa: E402
from fl_lightning.errors import Diverged, UserError  # noqa: E402
from fl_lightning.experiment import run  # noqa: E402
from fl_lightning.federate import federate  # noqa: E402
from fl_lightning.federation import Federation  # noqa: E402
from fl_lightning.method import Method  # noqa: E402
from fl_lightning.probes.accuracy import measure, score  # noqa: E402
from fl_lightning.record import RoundRecord  # noqa: E402
from fl_lightning.runs.folder import Result  # noqa: E402
from fl_lightning.task import Task, Weights  # noqa: E402
from fl_lightning.trained import trained_model  # noqa: E402
from fl_lightning.training import Training  # noqa: E402

__all__ = [
    "Dataset",
    "Diverged",
    "Federation",
    "Functional",
    "Lightning",
    "Method",
    "Result",
    "RoundRecord",
    "RunConfig",
    "Source",
    "Split",
    "Task",
    "Training",
    "UserError",
    "Weights",
    "configure",
    "discover",
    "federate",
    "find",
    "measure",
    "partition",
    "run",
    "score",
    "trained_model",
]
