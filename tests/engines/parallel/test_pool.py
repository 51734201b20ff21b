"""A worker that dies costs its present client, and no number."""

import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from fl_lightning.engines.functional import Functional
from fl_lightning.engines.parallel.engine import Parallel
from fl_lightning.engines.parallel.pool import ATTEMPTS
from fl_lightning.errors import UserError
from fl_lightning.methods.fola import Fola
from tests.support.cases import equal_bits, final, ragged

pytestmark = pytest.mark.system


@dataclass(frozen=True)
class Deadly(Fola):
    """FOLA that kills the worker at some clients, so often, and writes down who has reported."""

    folder: str = ""
    driver: int = 0
    victims: tuple[int, ...] = ()
    times: int = 1

    def report(self, local, context):
        if os.getpid() != self.driver and local.client in self.victims:
            for number in range(self.times):
                try:
                    Path(self.folder, f"{local.client}-{number}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        with open(Path(self.folder, "reports"), "a") as file:
            file.write(f"{local.plan.round} {local.client}\n")
        return super().report(local, context)


def test_only_the_present_client_is_trained_again(two, tmp_path):
    method = Deadly(folder=str(tmp_path), driver=os.getpid(), victims=(1, 3))
    found = ragged().run(method, Parallel(Functional(chunk=1), two))
    assert {"1-0", "3-0"} <= {path.name for path in tmp_path.iterdir()}, "nobody has died"
    assert equal_bits(final(found), final(ragged().run(Fola(), Functional(chunk=1))))
    reports = Counter((tmp_path / "reports").read_text().splitlines())
    assert reports == {f"{r} {n}": 1 for r in (1, 2, 3) for n in (0, 1, 3, 4)}


def test_a_client_that_kills_every_worker_ends_the_run(two, tmp_path):
    method = Deadly(folder=str(tmp_path), driver=os.getpid(), victims=(3,), times=10 * ATTEMPTS)
    with pytest.raises(UserError, match=rf"{ATTEMPTS} workers have died at client 3, last error: ") as error:
        ragged().run(method, Parallel(Functional(chunk=1), two))
    assert "\n" not in str(error.value)


def test_workers_yield_to_nobody_more_than_their_driver_does(ray_here):
    assert ray_here.get(ray_here.remote(num_cpus=0.1)(lambda: os.nice(0)).remote()) == os.nice(0)
