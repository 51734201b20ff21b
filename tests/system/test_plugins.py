"""Plug-ins that fail: one line that names file, hook and line, from `run` and from the contract tests alike."""

import json
import pickle
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fl_lightning import discovery
from fl_lightning.__main__ import main
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import PluginError, UserError
from fl_lightning.method import MIXINS
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.metrics.round_metrics import measure
from fl_lightning.runs.load import config_of, load_model
from fl_lightning.system.plugins import plugin_errors
from fl_lightning.testing import __main__ as contract
from fl_lightning.testing import method_checks, outcome_of
from fl_lightning.testing.checks import Broken
from tests.support.cases import ragged

METHOD = '''
"""FedAvg with a fault."""

import sys
from dataclasses import dataclass

import torch

from fl_lightning.method import *
from fl_lightning.methods.fedavg import FedAvg, State
from fl_lightning.penalty import Quadratic


@dataclass(frozen=True)
class Faulty({bases}):
    """FedAvg with a fault."""

    def {signature}:
        {body}
'''
FAULT = METHOD[: METHOD.index("{body}")].count("\n") + 1  # the line of the body

HOOKS = {
    "adapt": "adapt(self, training)",
    "aggregate": "aggregate(self, state, cohort, reports)",
    "broadcast": "broadcast(self, state, cohort)",
    "diagnose": "diagnose(self, before, cohort, reports, after)",
    "frozen": "frozen(self, context)",
    "gather": "gather(self, cohort, data)",
    "init": "init(self, params, num_clients)",
    "local_data": "local_data(self, own, holdout, seed)",
    "local_optimiser": "local_optimiser(self, training, context)",
    "network": "network(self, module)",
    "observe": "observe(self, statistics, step)",
    "penalty": "penalty(self, context)",
    "prepare": "prepare(self, state, server)",
    "report": "report(self, local, context)",
    "traffic": "traffic(self, message)",
}
SMALL = ["--data", "digits", "--data.subset", "0.1", "--data.clients", "3", "--model", "softmax"]
SMALL += ["--federation.rounds", "2", "--quiet", "--json"]


def bases_for(hook):
    return ", ".join(["FedAvg", *(mixin.__name__ for mixin in MIXINS if hasattr(mixin, hook))])


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Writes a method with a fault; the name of the method."""
    monkeypatch.setenv(discovery.PLUGINS, str(tmp_path))

    def write(hook, body):
        (tmp_path / "faulty.py").write_text(METHOD.format(bases=bases_for(hook), signature=HOOKS[hook], body=body))
        return discovery.find("methods", "faulty")()

    yield write
    sys.modules.pop(f"{discovery.PLUGIN_PACKAGE}.faulty", None)


RETURNED = [
    *((hook, "return None", "") for hook in HOOKS if hook != "penalty"),
    ("aggregate", "return State({k: v for k, v in state.params.items() if k != '0.bias'})", "one without 0.bias"),
    ("aggregate", "return State({**state.params, 'more': torch.ones(1)})", "one with more"),
    ("aggregate", "return State(dict(reversed(state.params.items())))", "in the network's order"),
    ("aggregate", "return State({k: v[None] for k, v in state.params.items()})", r"got .* of shape \(1, 6, 5\)"),
    ("aggregate", "return State({k: v.float() for k, v in state.params.items()})", "got torch.float32 of shape"),
    ("aggregate", "return state.params", "got dict"),
    ("init", "return [params]", "a NamedTuple with params, got list"),
    ("init", "return State(list(params.values()))", "a state whose params is a dict of tensors, got list"),
    ("broadcast", "return state.params", "a Context, got dict"),
    ("broadcast", "return Context({})", "a Context whose start has all parameters"),
    ("broadcast", "return Context(state.params, own=torch.ones(9))", "a row for each of the 4 members"),
    ("penalty", "return 0.5", "a Penalty or None, got float 0.5"),
    ("frozen", "return {'nothing'}", "names of parameters of the network, never all, got nothing"),
    ("frozen", "return frozenset(context.start)", "never all"),
    ("gather", "return cohort, ", "a tuple of a Cohort and the data"),
    ("local_data", "return own[:1]", "each of the 5 clients, got 1 of them"),
    ("traffic", "return -1.0", "from 0 on, got float -1.0"),
    ("diagnose", "return {'GA': 3.0}", "got GA, which the run itself measures"),
    ("diagnose", "return {'PA_after': 3.0}", "got PA_after, which the run itself measures"),
    ("diagnose", "return {'train_loss': [3.0] * len(reports)}", "got train_loss, which the run itself measures"),
    ("diagnose", "return {'round': 3.0}", "got round, which the run itself measures"),
    ("diagnose", "return {'size': 10**400}", "for size a number, .* got int 1000"),
    ("diagnose", "return {'size': 'large'}", "for size a number, .* got str 'large'"),
    ("diagnose", "return {'size': torch.ones(1, 2)}", r"for size a number, .* got torch.float32 of shape \(1, 2\)"),
    ("diagnose", "return {'size': [1.0]}", "one for each of the 4 members, got 1 numbers"),
    ("diagnose", "return {3: 1.0}", "whose names are text, got int 3"),
    ("diagnose", "return {'a?': 1.0}", r"names of letters, digits and _ - \. : /, got 'a\?'"),
]


def a_round(method, engine=None):
    case = ragged().changed(rounds=1)
    try:
        (record,) = case.run(method, engine)
    except Broken as finding:
        raise finding.__cause__ from None
    with plugin_errors():  # as a run does
        return measure(method, case.task(), case.dataset, record)


@pytest.mark.parametrize(("hook", "body", "message"), RETURNED)
def test_what_a_hook_returns_is_refused_in_its_name(plugin, tmp_path, hook, body, message):
    method = plugin(hook, body)
    with pytest.raises(PluginError, match=rf"Faulty\.{hook} must return .*{message}") as caught:
        a_round(method)
    assert str(caught.value).startswith(f"{tmp_path / 'faulty.py'}, line {FAULT - 1}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("hook", "body", "message"), [one for one in RETURNED if one[0] in ("aggregate", "diagnose")])
def test_contract_tests_find_what_a_run_refuses(plugin, hook, body, message):
    checks = {check.name: check for check in method_checks(plugin(hook, body))}
    outcome = outcome_of(checks["what is measured are numbers"])
    assert outcome.status == "broken"
    assert f"Faulty.{hook} must return" in outcome.message


@pytest.mark.parametrize("hook", sorted({*HOOKS} - {"local_data"}))
@pytest.mark.parametrize("body", ["sys.exit(0)", "raise RuntimeError('two\\n        lines')"], ids=["exit", "error"])
def test_what_a_hook_raises_names_file_hook_and_line(plugin, tmp_path, hook, body):
    method = plugin(hook, body)
    reason = "SystemExit: 0" if "exit" in body else "RuntimeError: two lines"
    with pytest.raises(PluginError) as caught:
        a_round(method)
    assert str(caught.value).startswith(f"{tmp_path / 'faulty.py'}, line {FAULT}, in Faulty.{hook}: {reason}; fix ")
    assert "\n" not in str(caught.value)
    assert "faulty.py" in caught.value.__notes__[0]


@pytest.mark.parametrize("kind", ["BaseException", "GeneratorExit"])
def test_errors_that_are_no_exceptions_are_named_too(plugin, kind):
    with pytest.raises(PluginError, match=f"in Faulty.report: {kind}: gone; fix "):
        a_round(plugin("report", f"raise {kind}('gone')"))


@pytest.mark.parametrize("hook", ["observe", "report"])
def test_the_lightning_engine_says_the_same(plugin, hook):
    with pytest.raises(PluginError, match=f"in Faulty.{hook}: SystemExit: 3"):
        a_round(plugin(hook, "sys.exit(3)"), Lightning())


@pytest.mark.parametrize(
    "value", ["torch.tensor(2.0)", "torch.ones(len(reports))", "2", "[torch.tensor(1)] * len(reports)"]
)
def test_numbers_in_tensors_are_numbers(plugin, value):
    found = a_round(plugin("diagnose", f"return {{'size': {value}}}"))
    several = "reports" in value
    assert (found.clients if several else found.metrics)["size"] == ([1] * 4 if several else 2)
    assert not isinstance(found.metrics.get("size"), torch.Tensor)


def test_an_error_at_what_a_hook_returned_is_said_to_be_the_plugins(plugin):
    """Whatever is not looked at where it is returned: a statistic of the wrong kind meets the library first."""
    method = plugin("observe", "return 'text'")
    with pytest.raises(PluginError, match=r"the plug-in faulty, at what a hook of Faulty returned: ValueError: .*str"):
        a_round(method, Functional(chunk=4))


def test_an_error_of_ours_stays_what_it_is():
    with pytest.raises(ZeroDivisionError), plugin_errors(object()):
        1 / 0  # noqa: B018


def test_ctrl_c_in_a_hook_is_ctrl_c(plugin):
    with pytest.raises(KeyboardInterrupt):
        a_round(plugin("report", "raise KeyboardInterrupt"))


def test_the_error_travels_with_its_traceback():
    """From workers and trials it comes pickled."""
    error = PluginError("a line")
    error.add_note("its traceback")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.__notes__) == ("a line", ["its traceback"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "body"), [("aggregate", "sys.exit(0)"), ("diagnose", "sys.exit(0)"), ("aggregate", "return None")]
)
def test_a_run_says_it_in_one_line(plugin, out, capsys, hook, body):
    plugin(hook, body)
    assert main(["run", "--method", "faulty", *SMALL, "--runs", str(out)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert f"faulty.py, line {FAULT - ('return' in body)}" in printed.err
    assert f"Faulty.{hook}" in printed.err
    assert main(["run", "--method", "faulty", *SMALL, "--runs", str(out), "--verbose"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["list", "methods"], ["run", "--method", "fedavg", "--print_config"]])
def test_a_plugin_that_ends_the_program_at_import_harms_nothing_else(tmp_path, monkeypatch, command, capsys):
    (tmp_path / "leaving.py").write_text("import sys\n\nsys.exit(3)\n")
    monkeypatch.setenv(discovery.PLUGINS, str(tmp_path))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert main(command) == 0
    said = [str(one.message) for one in caught]
    assert all("leaving.py cannot be imported: SystemExit: 3 (line 3)" in one for one in said)
    assert main(["run", "--method", "leaving"]) == 1
    assert "leaving.py cannot be imported: SystemExit: 3 (line 3)" in capsys.readouterr().err


def test_the_contract_command_says_a_reason_once(plugin, capsys):
    plugin("aggregate", "return None")
    assert contract.main(["--method", "faulty"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("Faulty.aggregate must return the next state, a State, got None") == 1
    assert "broken   hooks change no inputs: " in printed


def test_a_method_that_ends_the_program_does_not_end_the_contract_tests(plugin, capsys):
    plugin("report", "sys.exit(0)")
    assert contract.main(["--method", "faulty"]) == 1
    assert f"faulty.py, line {FAULT}, in Faulty.report: SystemExit: 0" in capsys.readouterr().out


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_pull_by_a_number_in_a_tensor_is_a_pull(plugin, chunk):
    method = plugin("penalty", "return Quadratic(context.start, torch.tensor(0.5))")
    found = a_round(method, Functional(chunk=chunk))
    assert found.metrics["prior_loss"] > 0


class Counted(NamedTuple):
    params: dict
    count: torch.Tensor


class Counting(FedAvg):
    """A counter that begins as float32, whatever the model is."""

    def init(self, params, num_clients):
        return Counted(params, torch.zeros(()))

    def aggregate(self, state, cohort, reports):
        return Counted(
            super().aggregate(state, cohort, reports).params,
            state.count + cohort.server.task.initial.params["0.bias"].sum(),
        )


def test_types_of_states_follow_those_of_the_parameters():
    with pytest.raises(
        PluginError, match=r"types of a state follow .*, state\.count torch.float32 .*, got torch.float64"
    ):
        a_round(Counting())


@pytest.mark.slow
def test_a_run_of_a_plugin_that_is_not_here_says_what_is_missing(plugin, out, tmp_path, monkeypatch, capsys):
    plugin("traffic", "return 1")
    assert main(["run", "--method", "faulty", *SMALL, "--runs", str(out)]) == 0
    folder = json.loads(capsys.readouterr().out)["folder"]
    assert config_of(Path(folder)).names["method"] == "faulty"
    monkeypatch.delenv(discovery.PLUGINS)
    with pytest.raises(
        UserError, match=r"the method 'faulty' of the run in .* is a plug-in, and FL_LIGHTNING_PLUGINS is "
    ):
        load_model(folder)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv(discovery.PLUGINS, str(tmp_path / "empty"))
    with pytest.raises(UserError, match=r"empty, which has no faulty\.py; set it to the folder of faulty\.py"):
        load_model(folder)


def test_an_unknown_name_may_be_that_of_a_plugin(monkeypatch):
    monkeypatch.delenv(discovery.PLUGINS, raising=False)
    with pytest.raises(UserError, match=r"if it is a plug-in, set FL_LIGHTNING_PLUGINS to the folder of mine\.py"):
        discovery.find("models", "mine")
    with pytest.raises(UserError, match=r"did you mean 'mlp'") as caught:
        discovery.find("models", "mpl")
    assert discovery.PLUGINS not in str(caught.value)
    with pytest.raises(UserError, match=r"--model torchvision --model\.name resnet18"):
        discovery.find("models", "resnet18")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass", "line 9: Faulty.load must return a Dataset, got NoneType"),
        ("1 / 0", "line 10, in Faulty.load: ZeroDiv"),
    ],
)
def test_a_dataset_that_fails_is_named(tmp_path, monkeypatch, out, capsys, body, message):
    (tmp_path / "faulty.py").write_text(
        "from dataclasses import dataclass\n\nfrom fl_lightning.data.dataset import Source\n\n\n"
        "@dataclass(frozen=True)\n"
        f"class Faulty(Source):\n    'Fails.'\n    def load(self):\n        {body}\n"
    )
    monkeypatch.setenv(discovery.PLUGINS, str(tmp_path))
    assert main(["run", "--data", "faulty", "--quiet", "--runs", str(out)]) == 1
    printed = capsys.readouterr().err
    sys.modules.pop(f"{discovery.PLUGIN_PACKAGE}.faulty", None)
    assert f"{tmp_path / 'faulty.py'}, {message}" in printed
    assert printed.endswith("; --verbose shows the traceback\n")
    assert len(printed.splitlines()) == 1
