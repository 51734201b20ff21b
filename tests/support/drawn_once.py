"""The pictures of a run take longer than all else of a small one: one drawing stands for all runs of its kind."""

from contextlib import contextmanager

import pytest


@contextmanager
def drawn_once():
    """Each kind of run (method, data, number of rounds) draws once in this block; others get copies of its files."""
    from fl_lightning.runs import files  # with it come torch and pandas, which the controller of workers never needs

    drawn = {}

    def write(config, counts, history, folder, pictures):
        kind = config.names["method"], config.names["data"], len(history)
        if pictures and kind in drawn:
            made = original(config, counts, history, folder, pictures=False)
            for name, content in drawn[kind].items():
                (folder / name).write_bytes(content)
            return [*made, *(folder / name for name in drawn[kind])]
        made = original(config, counts, history, folder, pictures)
        if pictures:
            drawn[kind] = {path.name: path.read_bytes() for path in made if path.suffix == ".png"}
        return made

    original = files.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write", write)
        yield
