"""How a client measures a precision: along the path of local training, or at its end.

A form of curvature has two files: one in `fl_lightning.gaussian` that knows what the precision is (products, prior
losses, traffic), and one here that knows how it is measured. Its name goes into the two lists of `forms.py`, and with
that into the contract tests; a choice of its own is a field of FOLA and of `Measuring`, and among the form's `uses`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from fl_lightning.curvature.fisher import FisherKind
from fl_lightning.curvature.full import EigenOrder
from fl_lightning.curvature.kronecker_factors import GradientKind
from fl_lightning.gaussian.base import Gaussian
from fl_lightning.method import Local, Server, Step, Traits
from fl_lightning.models.task import Task
from fl_lightning.params import Params
from fl_lightning.training import Training

FirstLayer = Literal["same", "average"]
Rest = Literal["average", "diagonal"]


@dataclass(frozen=True)
class Measuring:
    """What a user may choose; a form reads what concerns it.

    Attributes:
        online: Whether earlier rounds count, and curvature is taken along the path where a form can do that.
        fisher: Squared gradients of minibatches or of single samples, where a diagonal is measured.
        eigen_order: Which eigenvalue goes to which parameter, for e_full.
        equal_steps: Whether every step counts 1 along a path, instead of the batch's share of the data.
        mean_over_epochs: Whether curvature along a path is a mean over epochs instead of a sum.
        slopes: Which gradients the factor G is made of; None for what the number of classes allows.
        first_layer: Whether the first layer is averaged instead, so that nothing is sent of the second moments of the
            inputs themselves.
        rest: What becomes of all layers but the last, for last_layer.
    """

    online: bool = True
    fisher: FisherKind = "minibatch"
    eigen_order: EigenOrder = "ascending"
    equal_steps: bool = False
    mean_over_epochs: bool = True
    slopes: GradientKind | None = None
    first_layer: FirstLayer = "same"
    rest: Rest = "average"


@dataclass(frozen=True)
class Form(ABC):
    """One form of curvature, with the user's choices."""

    measuring: Measuring
    # The choices of a method that concern this form; others are refused beside it.
    uses: ClassVar[frozenset[str]] = frozenset()
    # Whether it is made of the likelihood of the outputs, and not of the loss that is trained or of inputs alone.
    needs_likelihood: ClassVar[bool] = True

    def check(self, name: str, training: Training, server: Server) -> None:  # noqa: B027 - nothing to refuse
        """Refuse a model or settings for which the form does not suit, or does not fit in memory or time."""

    def certain_precision(self, server: Server) -> float:
        """A precision that some parameter has whatever the data, such as a bias, whose input is always 1."""
        return 0.0

    @abstractmethod
    def nothing(self, params: Params, task: Task | None = None, x: Tensor | None = None) -> Gaussian:
        """The Gaussian with these parameters as mean and no precision.

        Args:
            params: The mean.
            task: The model whose parameters they are, for forms that must see the network at work.
            x: An input for that.
        """

    @abstractmethod
    def measured(self, local: Local, start: Params) -> Gaussian:
        """The client's model and curvature F_n of this round, to be multiplied by `scale`."""

    def scale(self, num_epochs: int) -> float:
        """What F_n must be multiplied with."""
        return 1.0

    def per_sample(self, training: Training, sizes: Sequence[int]) -> float:
        """What makes of F_n, `scale` included, the mean curvature per sample.

        Args:
            training: How clients train.
            sizes: Numbers of training samples of all clients.
        """
        return 1.0

    def path_statistics(self, start: Params) -> Any:
        """The statistics of an empty path; None where the path does not matter."""
        return None

    def observe(self, statistics: Any, step: Step) -> Any:
        """Fold one step into the statistics."""
        return statistics

    @property
    def traits(self) -> Traits:
        """What the loop and the engines must know of a method that measures curvature in this form."""
        return Traits(extra_passes=1)
