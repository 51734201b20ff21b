"""What a finished run leaves in its folder: configuration, tables, pictures."""

import json
import zlib
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from fl_lightning.metrics.metric import GA, Measurement
from fl_lightning.runs.config.run_config import SETTINGS_JSON, SETTINGS_YAML, RunConfig
from fl_lightning.system.atomic import write_atomically

ROUNDS, CLIENTS = "rounds.parquet", "clients.parquet"
CHECKSUM = "fl_lightning.checksum"


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
    files = [folder / SETTINGS_YAML, folder / SETTINGS_JSON]
    for path, content in zip(files, (config.yaml(), json.dumps(config.flat())), strict=True):
        write_atomically(path, content.encode())
    files += write_tables(history, folder)
    if pictures:
        from fl_lightning.runs.plotting import run_figures as draw  # matplotlib: only drawing waits for it

        figure = draw.partition(counts, f"{title}: samples per client and class")
        files.append(draw.save(figure, folder / "partition.png"))
        if any(GA in measurement.metrics for measurement in history):
            rounds = [measurement.metrics for measurement in history]
            figure = draw.learning_curves(config.names["method"], rounds, title)
            files.append(draw.save(figure, folder / "curves.png"))
    return files


def write_tables(history: Sequence[Measurement], folder: Path) -> list[Path]:
    """Write all that was measured as tables of rounds and of clients; the former has the checksum of both."""
    rounds, clients = rounds_table(history), clients_table(history).to_parquet(index=False)
    rounds.attrs[CHECKSUM] = _checksum(folder, rounds, clients)
    contents = {ROUNDS: rounds.to_parquet(index=False), CLIENTS: clients}
    for name, content in contents.items():
        write_atomically(folder / name, content)
    return [folder / name for name in contents]


def read_tables(folder: Path) -> list[Measurement]:
    """All that was measured, from the tables; nothing if they are damaged, another run's, or without a checksum.

    What is NaN in them is left out: a table shows both as not measured.
    """
    try:
        rounds, content = pd.read_parquet(folder / ROUNDS), (folder / CLIENTS).read_bytes()
        if rounds.attrs.get(CHECKSUM) != _checksum(folder, rounds, content):
            return []
        clients = pd.read_parquet(BytesIO(content))
    except Exception:  # a damaged file fails anywhere in pyarrow and pandas
        return []
    metrics = [{str(k): v for k, v in row.items() if v == v and k != "round"} for row in rounds.to_dict("records")]
    rows = {i: part.drop(columns="round").dropna(axis="columns", how="all") for i, part in _by_round(clients)}
    members = [rows[i].to_dict("list") if i in rows else {} for i in range(1, len(metrics) + 1)]
    return [Measurement(one, {str(k): v for k, v in own.items()}) for one, own in zip(metrics, members, strict=True)]


def _by_round(clients: pd.DataFrame) -> Iterable[tuple[Any, pd.DataFrame]]:
    return clients.groupby("round") if len(clients) else ()


def _checksum(folder: Path, rounds: pd.DataFrame, clients: bytes) -> int:
    """Of the tables of the run that lies in this folder."""
    numbers = pd.util.hash_pandas_object(rounds, index=False).to_numpy().tobytes() if len(rounds) else b""
    return zlib.crc32(b"".join([folder.name.encode(), repr(list(rounds)).encode(), numbers, clients]))


def rounds_table(history: Sequence[Measurement]) -> pd.DataFrame:
    """One row per round."""
    return pd.DataFrame([{"round": i, **m.metrics} for i, m in enumerate(history, start=1)])


def clients_table(history: Sequence[Measurement]) -> pd.DataFrame:
    """One row per round and member of its cohort."""
    tables = [pd.DataFrame({"round": i, **m.clients}) for i, m in enumerate(history, start=1)]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
