"""What there is, found by file; own plug-ins beside it, of which a broken one harms nobody else."""

import subprocess
import sys

import pytest

from fl_lightning import discovery
from fl_lightning.errors import UserError

pytestmark = pytest.mark.system


BROKEN = "import nothing_of_this_name\n"
INCOMPLETE = """
from dataclasses import dataclass
from fl_lightning import Method

@dataclass(frozen=True)
class Half(Method):
    '''Half a method.'''

    def init(self, params, num_clients): ...
    def report(self, local, context): ...
    def agregate(self, state, cohort, reports): ...
"""


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "half.py").write_text(INCOMPLETE)
    monkeypatch.setenv(discovery.PLUGINS, str(tmp_path))
    yield tmp_path
    for name in ("broken", "half"):
        sys.modules.pop(f"{discovery.PLUGIN_PACKAGE}.{name}", None)


@pytest.mark.parametrize("kind", discovery.KINDS)
def test_what_the_source_says_is_what_is_imported(kind):
    classes = discovery.discover(kind)
    assert list(classes) == discovery.names(kind) == sorted(classes)
    assert {name: discovery.summary(cls) for name, cls in classes.items()} == discovery.summaries(kind)
    for name, cls in classes.items():
        assert discovery.find(kind, name) is cls
        assert discovery.name_of(kind, cls) == name


def test_engines_are_told_from_what_they_are_made_of():
    assert discovery.names("engines") == ["functional", "lightning"]


def test_a_broken_plugin_harms_nobody_else(plugins):
    assert discovery.find("methods", "fedavg").__name__ == "FedAvg"
    with pytest.warns(discovery.PluginWarning) as caught:
        assert "fedavg" in discovery.names("methods")
    messages = [str(one.message) for one in caught]
    assert any("broken.py cannot be imported: ModuleNotFoundError" in message for message in messages)
    assert any("half.py is not a complete method: Half lacks aggregate; add it" in message for message in messages)


def test_a_broken_plugin_that_is_asked_for_is_refused_with_its_reason(plugins):
    with pytest.raises(UserError, match=r"broken.py cannot be imported: ModuleNotFoundError: No module named"):
        discovery.find("methods", "broken")
    with pytest.raises(UserError, match=r"half.py is not a complete method: Half lacks aggregate; add it"):
        discovery.find("methods", "half")


@pytest.mark.parametrize("command", [["--version"], ["--help"], ["list", "methods"], ["list", "studies"]])
def test_what_needs_no_torch_does_not_import_it(command):
    """Importing torch takes longer than anybody waits for a list."""
    code = f"import sys; from fl_lightning.__main__ import main; main({command!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_lightning_can_be_imported_after_the_package():
    """The remedy for torchvision beside a CPU-only torch comes when torchvision is imported, not before."""
    code = "import fl_lightning, sys; assert 'torch' not in sys.modules; import pytorch_lightning"
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_display_names_stand_in_the_classes_and_are_read_from_the_source(tmp_path, monkeypatch):
    written = discovery.display_names("methods")
    for name, cls in discovery.discover("methods").items():
        assert vars(cls).get("display_name") == written.get(name)
    text = "class Mine:\n    '''Mine.'''\n\n    display_name: ClassVar[str] = 'FedMine'\n\nraise SystemExit\n"
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.setenv(discovery.PLUGINS, str(tmp_path))
    assert discovery.display_names("methods") == {**written, "mine": "FedMine"}
