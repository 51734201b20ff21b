"""What is made again from the settings of runs."""

import pandas as pd

from analysis import run_arrays
from analysis.study import Study
from fl_lightning.data.shares import class_counts
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.problem import problem_of


def test_partitions_hold_what_clients_train_on():
    """Their own test sets are left out, as in the run itself."""
    settings = {"data": "digits", "seed": 3, "data.clients": 4}
    shares = (0.0, 0.25)
    table = pd.DataFrame([settings | {"data.client_test": share, "partition": f"of {share}"} for share in shares])
    found = run_arrays.partitions(Study(table, table))
    for share, (title, counts) in zip(shares, found.items(), strict=True):
        problem = problem_of(configure(settings | {"data.client_test": share}))
        dataset = problem.dataset
        assert title == f"client_test {share}"
        assert counts.tolist() == class_counts(dataset.strata, problem.clients, dataset.num_strata).tolist()
