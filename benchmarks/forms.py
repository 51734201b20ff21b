"""What a round costs with each form of curvature, beside a round of FedAvg, at the paper's five local epochs."""

from dataclasses import replace

from benchmarks.contest import interleave, paired_ratio
from benchmarks.table import Row
from benchmarks.works import Work
from fl_lightning.engines.functional import Functional
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola_extended import FolaExtended

TURNS, EPOCHS = 3, 5
# The most that a round may cost, in rounds of FedAvg.
AIMS = {"diagonal": None, "inputs": 1.3, "kron": 2.5}


def measure_forms(work: Work) -> list[Row]:
    """Clients and server together; without the prior loss, whose cost is that of the diagonal's for all of them."""
    work = replace(work, rounds=TURNS, training=replace(work.training, epochs=EPOCHS))
    pieces = {"fedavg": work.run(FedAvg(), Functional())}
    pieces |= {form: work.run(FolaExtended(curvature_form=form, strength=0.0), Functional()) for form in AIMS}
    seconds = interleave(pieces, TURNS)
    return [
        Row(work.name, f"{form} / fedavg, E = {EPOCHS}", paired_ratio(seconds, form, "fedavg"), "x", aim)
        for form, aim in AIMS.items()
    ]
