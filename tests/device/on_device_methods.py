"""Every method on the device has the CPU's numbers, with every engine."""

import pytest

from fl_lightning import discovery
from fl_lightning.methods.fola import Fola
from fl_lightning.methods.fola_extended import FolaExtended
from fl_lightning.methods.parts.forms_by_name import FORMS
from tests.device.runs_on_device import ENGINES, same_numbers

METHODS = sorted(discovery.discover("methods"))
FOLA = {
    **{
        f"fola_extended, {form}": FolaExtended(curvature_form=form, strength=0.1)
        for form in FORMS
        if form != "diagonal"
    },
    "fola, full": Fola(curvature_form="full", strength=0.1),
    "fola, e_full": Fola(curvature_form="e_full", strength=0.1),
    "fola, average": Fola(aggregation="average"),
    "fola, offline": Fola(curvature="offline"),
    "fola, per_sample": Fola(fisher="per_sample"),
    "cavity": FolaExtended(cavity=True),
    "cavity, inputs, trust, backtracking": FolaExtended(
        cavity=True, curvature_form="inputs", strength=0.1, trust=1.0, backtracking=True
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", METHODS)
def test_methods(name, engine):
    same_numbers(discovery.find("methods", name)(), ENGINES[engine])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", FOLA)
def test_fola(name, engine):
    same_numbers(FOLA[name], ENGINES[engine])
