"""What a finished run leaves in its folder: configuration, tables, pictures."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from torch import Tensor

from fl_lightning.config import RunConfig
from fl_lightning.record import Measurement
from fl_lightning.runs.checkpoint import SETTINGS
from fl_lightning.system.atomic import write_atomically


def write(
    config: RunConfig, counts: Tensor, history: Sequence[Measurement], folder: Path, pictures: bool
) -> list[Path]:
    """Write everything that is needed to repeat a run and to look at it.

    Args:
        config: The run's settings.
        counts: Samples per client and class.
        history: What was measured.
        folder: Of the run.
        pictures: Whether to draw.

    Returns:
        The files.
    """
    title = f"{config.names['method']} on {config.names['data']}"
    files = [folder / SETTINGS]
    write_atomically(files[0], config.yaml().encode())
    files += write_tables(history, folder)
    if pictures:
        from fl_lightning.runs import pictures as draw  # matplotlib: only who draws waits for it

        figure = draw.partition(counts, f"{title}: samples per client and class")
        files.append(draw.save(figure, folder / "partition.png"))
        if any("GA" in measurement.metrics for measurement in history):
            rounds = [measurement.metrics for measurement in history]
            figure = draw.learning_curves(config.names["method"], rounds, title)
            files.append(draw.save(figure, folder / "curves.png"))
    return files


def write_tables(history: Sequence[Measurement], folder: Path) -> list[Path]:
    """Write all that was measured as tables of rounds and of clients."""
    tables = {"rounds.parquet": rounds_table(history), "clients.parquet": clients_table(history)}
    for name, table in tables.items():
        write_atomically(folder / name, table.to_parquet(index=False))
    return [folder / name for name in tables]


def rounds_table(history: Sequence[Measurement]) -> pd.DataFrame:
    """One row per round."""
    return pd.DataFrame([{"round": i, **m.metrics} for i, m in enumerate(history, start=1)])


def clients_table(history: Sequence[Measurement]) -> pd.DataFrame:
    """One row per round and member of its cohort."""
    tables = [pd.DataFrame({"round": i, **m.clients}) for i, m in enumerate(history, start=1)]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
