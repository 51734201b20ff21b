"""What workers cannot do is said in one line, before anything is trained."""

import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import discovery, experiment
from fl_lightning.__main__ import main
from fl_lightning.cli import doctor
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.engines.parallel import executor, ray_cluster, ray_session
from fl_lightning.engines.parallel.code_version import Code
from fl_lightning.engines.parallel.engine import Parallel
from fl_lightning.engines.parallel.executor import Workers
from fl_lightning.engines.parallel.ray_cluster import Resources, slots
from fl_lightning.errors import PluginError, UserError
from fl_lightning.loop import federate
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.runs.config.run_config import configure
from tests.support.cases import equal_bits, final, ragged

pytestmark = pytest.mark.system


PLUGIN = '''
"""FedAvg under another name."""

from dataclasses import dataclass

from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.method import Method


@dataclass(frozen=True)
class Mine(FedAvg):
    """FedAvg under another name."""
'''


def first_round(method=FedAvg(), engine=Functional(chunk=1), workers=1):  # noqa: B008
    case = ragged()
    rounds = federate(method, case.problem(), case.training, case.federation, engine, workers=workers)
    try:
        return next(rounds)
    finally:
        rounds.close()


def check_refused(match, **settings):
    with pytest.raises(UserError, match=match) as refusal:
        first_round(**settings)
    assert "\n" not in str(refusal.value)


def test_more_workers_than_there_is_room_for(ray_here):
    check_refused(r"expected at most 3 workers of 1 CPU and 0 GPU.*: 3 CPU, 2 GPU\), got 4; lower --workers", workers=4)
    wide = Workers(3, resources=Resources(cpu=2))
    check_refused(r"expected at most 1 workers of 2 CPU and 0 GPU", workers=wide)


def test_gpus_that_are_not_there(ray_here):
    check_refused(r"no node .* can offer 1 CPU and 4 GPU", workers=Workers(2, resources=Resources(1, 4)))


@pytest.mark.parametrize(
    ("resources", "held"),
    [
        (Resources(1), 8),
        (Resources(3), 2),
        (Resources(0, 1), 4),
        (Resources(0, 2), 2),
        (Resources(0, 0.5), 8),
        (Resources(0, 0.1), 40),
        (Resources(0, 0.4), 8),  # not ten: two fifths of two GPUs make no worker
        (Resources(0, 0.75), 4),
        (Resources(4, 0.5), 2),
    ],
)
def test_parts_of_different_gpus_make_no_worker(resources, held):
    assert slots([{"Resources": {"CPU": 8.0, "GPU": 4.0}}], resources) == held


def test_ray_starts_as_many_parts_of_gpus_as_are_counted(ray_here):
    nodes = [node for node in ray_here.nodes() if node["Alive"]]
    assert slots(nodes, Resources(0.1, 0.4)) == 4  # of two GPUs

    @ray_here.remote(num_cpus=0.1, num_gpus=0.4, max_restarts=0)
    class Part:
        def here(self):
            return True

    parts = [Part.remote() for _ in range(5)]
    come, waiting = ray_here.wait([part.here.remote() for part in parts], num_returns=4, timeout=300)
    too_many, _ = ray_here.wait(waiting, timeout=0)
    for part in parts:
        ray_here.kill(part)
    assert (len(come), len(waiting), too_many) == (4, 1, [])


@pytest.mark.parametrize("resources", [(0, 0), (-1, 0), (1, -1), (float("nan"), 0), (1, float("nan"))])
def test_sizes_that_no_process_has(resources):
    with pytest.raises(UserError, match=r"must be >= 0 and not both 0, got"):
        Workers(2, resources=Resources(*resources))


def test_one_and_a_half_gpus():
    with pytest.raises(UserError, match=r"part of one GPU or a whole number of them, got 1.5"):
        Workers(2, resources=Resources(1, 1.5))


def test_what_auto_could_never_have_is_refused_before_training(monkeypatch):
    monkeypatch.setattr(executor, "is_connected", lambda: False)  # as if there were no cluster in this process
    check_refused(
        r"no node of the cluster can offer 1 CPU and 4 GPU to one process \(this machine: ",
        workers=Workers("auto", resources=Resources(1, 4)),
    )
    monkeypatch.setattr(ray_cluster, "is_connected", lambda: False)
    check_refused("no Ray cluster answers at 127.0.0.1:1 ", workers=Workers("auto", address="127.0.0.1:1"))


def test_gpus_for_workers_that_are_to_compute_on_the_cpu(tmp_path, capsys):
    flags = ["--data", "digits", "--model", "softmax", "--compute.device", "cpu", "--runs", str(tmp_path)]
    assert main(["run", *flags, "--workers", "2", "--resources.gpu", "0.5"]) == 2
    assert "compute.device is cpu, but --resources.gpu asks for GPUs; leave out one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("running", "latest", "closed", "chosen"),
    [
        ({"a:1"}, None, set(), "a:1"),
        ({"a:1", "b:2"}, "b:2", set(), "b:2"),
        ({"a:1", "b:2"}, "b:2", {"b:2"}, "a:1"),
        ({"a:1"}, "killed:9", set(), "a:1"),
        (set(), "elsewhere:9", set(), "elsewhere:9"),
        ({"a:1"}, "a:1", {"a:1"}, None),
        (set(), None, set(), None),
    ],
)
def test_auto_joins_no_private_cluster(monkeypatch, running, latest, closed, chosen):
    from ray._private import services

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: running)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: latest)
    monkeypatch.setattr(ray_cluster, "private_addresses", lambda: closed)
    if chosen is not None:
        assert ray_cluster._joinable() == chosen
        return
    with pytest.raises(UserError, match="this machine belongs to no Ray cluster") as refusal:
        ray_cluster._joinable()
    assert ("are private" in str(refusal.value)) == bool(closed)


def test_the_cluster_of_a_session_is_known_by_the_commands_of_its_servers():
    """Even one of another user, whose folders are closed."""
    words = [
        f"--temp_dir=/tmp/{ray_session.PREFIX}1/r",
        "python worker.py --gcs-address=a:1 --more",
        "--gcs-address=b:2",
    ]
    command = [sys.executable, "-c", "print(flush=True); input()", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        server.stdout.readline()
        assert {"a:1", "b:2"} <= ray_session.private_addresses()
        server.communicate(b"\n")


def test_gpus_that_torch_does_not_see(ray_here):
    """Ray's word is taken up to the point where torch needs one: the worker was given one of the two."""
    check_refused(r"was given GPU [01], but torch sees none there", workers=Workers(2, resources=Resources(0.5, 1)))


def test_a_trial_does_not_take_the_cpu_for_its_gpu(out):
    """Nor does a node that joins late: the trial itself looks."""
    config = configure({"data": "digits", "model": "softmax", "federation.rounds": 1})
    with pytest.raises(UserError, match=r"was given GPU .*, but torch sees none there; install"):
        experiment.run(config, out, workers=Workers(1, resources=Resources(1, 0.5)))


def test_the_doctor_asks_nodes_whether_torch_sees_what_ray_counts(ray_here):
    counted, unseen = doctor.ray_nodes("auto")
    assert counted.found.endswith(": 3 CPU, 2 GPU")
    assert unseen.found.startswith("torch sees 0 GPU on ")
    assert "install a CUDA build of torch" in unseen.remedy


def test_an_engine_that_needs_the_driver(ray_here):
    engine = Lightning(callbacks=(pl.Callback(),))
    check_refused("the engine Lightning trains in this process only, because its callbacks", engine=engine, workers=2)


@dataclass(frozen=True)
class Locked(FedAvg):
    lock: Any = field(default_factory=threading.Lock, compare=False)


def test_a_method_that_cannot_be_sent(two):
    check_refused(
        "the method, the model or the engine cannot be sent to workers .*cannot pickle '_thread.lock'",
        method=Locked(),
        engine=Parallel(Functional(chunk=1), two),
    )


def test_plugins_must_be_visible_to_workers(two, plugins):
    methods = []
    for name in ("mine_of_workers", "gone_for_workers"):
        (plugins / f"{name}.py").write_text(PLUGIN)
        methods.append(discovery.find("methods", name)())
    (plugins / "gone_for_workers.py").unlink()
    engine = Parallel(Functional(chunk=1), two)
    here = ragged().run(FedAvg(), Functional(chunk=1))
    assert equal_bits(final(ragged().run(methods[0], engine)), final(here))
    match = rf"the plug-in gone_for_workers.py is not visible to .* in {plugins}; keep it where all nodes see it"
    check_refused(match, method=methods[1], engine=engine)


def test_plugins_must_be_the_same_for_workers(two, plugins):
    file = plugins / "other_for_workers.py"
    file.write_text(PLUGIN)
    method = discovery.find("methods", "other_for_workers")()
    file.write_text(PLUGIN + "\n# somebody has edited it since\n")
    check_refused(
        r"expected the plug-in other_for_workers.py on .* \(hash \w{12}\), got another one \(hash \w{12}, in "
        rf"{plugins}\); keep it where all nodes see it, or copy it there",
        method=method,
        engine=Parallel(Functional(chunk=1), two),
    )


@pytest.mark.parametrize("fault", ["sys.exit(0)", "raise KeyboardInterrupt", "raise ValueError('no')"])
def test_what_a_hook_raises_in_a_worker_is_one_line(two, plugins, fault):
    """It neither ends the worker nor the run of another method that comes after it."""
    name = f"raising_{len(fault)}_for_workers"
    hook = f"\n    def report(self, local, context):\n        import sys\n        {fault}\n"
    (plugins / f"{name}.py").write_text(PLUGIN + hook)
    method = discovery.find("methods", name)()
    engine = Parallel(Functional(chunk=1), two)
    with pytest.raises(PluginError, match=rf"{name}\.py, line \d+, in Mine\.report: (System|Keyb|Value)") as caught:
        first_round(method=method, engine=engine)
    assert "\n" not in str(caught.value)
    assert "Traceback" in caught.value.__notes__[0]
    assert equal_bits(first_round(engine=engine).after.state.params, first_round().after.state.params)


def test_an_engine_must_be_visible_to_workers(two, plugins):
    """Although an engine travels with every round anew, it is looked for before the first."""
    file = plugins / "engine_for_workers.py"
    file.write_text(
        "from dataclasses import dataclass\n\nfrom fl_lightning.engines.base import Engine\n"
        "from fl_lightning.engines.functional import Functional\n\n\n"
        "@dataclass(frozen=True)\nclass Mine(Functional):\n    pass\n"
    )
    inner = discovery.find("engines", "engine_for_workers")(chunk=1)
    file.unlink()
    case = ragged()
    with pytest.raises(UserError, match=r"the plug-in engine_for_workers.py is not visible to .*; keep it where"):
        Parallel(inner, two).prepare(FedAvg(), case.task(), case.dataset, iter)


def test_workers_compute_with_the_same_code(two, monkeypatch):
    mine = Code.here()
    monkeypatch.setattr(Code, "here", lambda: mine._replace(files="0" * 8))
    check_refused(
        r"expected fl_lightning \S+ \(files 00000000\) and torch \S+ on .*, got fl_lightning .*; install the same",
        engine=Parallel(Functional(chunk=1), two),
    )


def test_a_class_of_a_notebook_travels_with_its_code(two):
    @dataclass(frozen=True)
    class Halved(FedAvg):
        def report(self, local, context):
            moved = {name: (value + context.start[name]) / 2 for name, value in local.params.items()}
            return super().report(local._replace(params=moved), context)

    here, there = (
        ragged().run(Halved(), engine) for engine in (Functional(chunk=1), Parallel(Functional(chunk=1), two))
    )
    assert equal_bits(final(here), final(there))
    assert not equal_bits(final(here), final(ragged().run(FedAvg(), Functional(chunk=1))))


def test_errors_of_a_hook_arrive_as_they_are(two):
    @dataclass(frozen=True)
    class Broken(FedAvg):
        def report(self, local, context):
            if local.client >= 1:
                raise ZeroDivisionError(f"client {local.client}")
            return super().report(local, context)

    with pytest.raises(ZeroDivisionError, match="client 1") as error:
        ragged().run(Broken(), Parallel(Functional(chunk=1), two))
    assert any("in a worker" in note for note in error.value.__notes__)
    assert equal_bits(
        *(final(ragged().run(FedAvg(), e)) for e in (Functional(chunk=1), Parallel(Functional(chunk=1), two)))
    )


@pytest.mark.parametrize("flags", [["--workers", "0"], ["--workers", "many"], ["--address", "auto"]])
def test_flags(flags, capsys, tmp_path):
    assert main(["run", *flags, "--runs", str(tmp_path)]) == 2
    assert "workers" in capsys.readouterr().err


def test_a_model_on_a_gpu_needs_workers_with_one(two):
    case, meta = ragged(), torch.device("meta")
    task = case.task()
    task.initial = task.initial._replace(params={name: p.to(meta) for name, p in task.initial.params.items()})
    with pytest.raises(UserError, match=r"the model is on meta, but workers were given no GPU; --resources.gpu 0.5"):
        Parallel(Functional(), two).prepare(FedAvg(), task, case.dataset, iter)
