"""The examples for clusters and GPUs: their syntax, and their commands as the program reads them."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from fl_lightning.__main__ import main
from fl_lightning.cli import doctor, sweep

DOCS = Path(__file__).parents[2] / "docs"
COMMAND = re.compile(r"(?:^|[ /'])fl-lightning ((?:run|sweep|compare|doctor|report) (?:[^\n#\\>]|\\\n)*)", re.MULTILINE)


def commands(name):
    """The program's commands in code, with their flags; `...` stands for more of them."""
    text = (DOCS / name).read_text()
    if name.endswith(".md"):
        text = "\n".join(line for line in text.splitlines() if line.startswith("    "))
    for found in COMMAND.findall(text):
        words = [word for word in shlex.split(found.replace("\\\n", " ")) if word not in ("&", "...")]
        yield ["mnist_curves" if word == "$study" else word for word in words]


@pytest.mark.parametrize("name", ["gpu.md", "scaling.md", "ray-slurm.sbatch"])
def test_commands(name, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "show", lambda study, how, options: how.resources.check() or 0)
    monkeypatch.setattr(doctor, "checks", lambda options: [])
    read = 0
    for words in commands(name):
        if words[0] in ("run", "sweep", "doctor"):
            more = ["--print-config"] if words[0] == "run" else []
            assert main([*words, *more]) == 0, (words, capsys.readouterr().err)
            read += 1
    assert read


def test_the_script_for_slurm():
    script = DOCS / "ray-slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    head, _, rest = script.read_text().partition("set -euo pipefail")
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", head, re.MULTILINE))
    assert {"nodes", "cpus-per-task", "gpus-per-node", "time"} <= asked.keys()
    assert asked["ntasks-per-node"] == "1"  # one Ray node on each
    assert "#SBATCH" not in rest  # Slurm stops reading at the first command


def test_the_cluster_for_kubernetes():
    text = (DOCS / "ray-kubernetes.yaml").read_text()
    cluster = yaml.safe_load(text)
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = cluster["spec"]
    assert spec.keys() == {"rayVersion", "authOptions", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"}
    assert spec["authOptions"] == {"mode": "token"}
    (workers,) = spec["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    assert spec["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    pods = [group["template"]["spec"] for group in (spec["headGroupSpec"], workers)]
    for pod in pods:
        (container,) = pod["containers"]
        assert {one["name"] for one in container["env"]} >= {"FL_LIGHTNING_DATA", "MLFLOW_TRACKING_URI"}
        assert all(isinstance(one["value"], str) for one in container["env"])
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert container["resources"]["limits"] == container["resources"]["requests"]
    assert pods[0]["containers"][0]["image"] == pods[1]["containers"][0]["image"]  # the same code everywhere
    assert "nvidia.com/gpu" in pods[1]["containers"][0]["resources"]["limits"]
    name = cluster["metadata"]["name"]
    assert f"ray.io/cluster={name}," in (DOCS / "scaling.md").read_text()


def test_the_cluster_by_ssh():
    cluster = yaml.safe_load((DOCS / "ray-cluster.yaml").read_text())
    starts = cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"]
    assert sum("RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=" in line for line in starts) == 2
