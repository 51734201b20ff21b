"""Contract tests for methods, models and data sources of your own: the ones that every built-in part passes.

In a test, either all at once or one by one:

    from fl_lightning.testing import check_method, method_checks

    def test_contract():
        check_method(Median())

    @pytest.mark.parametrize("check", method_checks(Median()), ids=str)
    def test_promise(check):
        check.run()

or without writing any, for a file in the folder of plugins: `python -m fl_lightning.testing --method median`.
"""

from fl_lightning.testing.checks import Broken, Check, Outcome, outcome_of
from fl_lightning.testing.methods import check_method, method_checks
from fl_lightning.testing.models import check_model, model_checks
from fl_lightning.testing.sources import check_source, source_checks

__all__ = [
    "Broken",
    "Check",
    "Outcome",
    "check_method",
    "check_model",
    "check_source",
    "method_checks",
    "model_checks",
    "outcome_of",
    "source_checks",
]
