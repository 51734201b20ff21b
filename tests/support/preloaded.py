"""What the parent of all processes of `tests.support.processes` imports, once: all that a run needs."""

# ruff: noqa: F401

import fl_lightning  # before Lightning: it repairs torchvision beside a CPU-only torch

# isort: split
import matplotlib.backends.backend_agg
import mlflow.store.tracking.sqlalchemy_store
import pandas
import pyarrow.parquet
import pytest
import pytorch_lightning
import sklearn.datasets
import torch
from alembic import command

import fl_lightning.cli.run
import fl_lightning.client
import fl_lightning.engines.user_module
import fl_lightning.experiment
import fl_lightning.runs.plotting.run_figures
import fl_lightning.runs.tracking.sync
import fl_lightning.testing.__main__

torch.set_num_threads(1)
