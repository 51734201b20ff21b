"""What the parent of all workers imports, once."""

import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
from alembic import command  # noqa: F401

import fl_lightning.runs.track  # noqa: F401
