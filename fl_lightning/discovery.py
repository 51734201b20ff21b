"""Finds methods, models, datasets and engines: one public class in one file is enough, no list to keep.

The file's name is the name on the command line: `methods/fola.py` is `--method fola`. Third parties add a folder of
such files with the environment variable FL_LIGHTNING_PLUGINS (see docs/extending.md).
"""

import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fl_lightning.data.dataset import Source
from fl_lightning.engines.engine import Engine
from fl_lightning.errors import UserError, unknown
from fl_lightning.method import Method

PLUGINS = "FL_LIGHTNING_PLUGINS"
PLUGIN_PACKAGE = "fl_lightning_plugins"

# What a user calls it, the folder, the base class.
KINDS: dict[str, tuple[str, str, type]] = {
    "methods": ("method", "fl_lightning.methods", Method),
    "models": ("model", "fl_lightning.models", nn.Module),
    "data": ("dataset", "fl_lightning.data.sources", Source),
    "engines": ("engine", "fl_lightning.engines", Engine),
}


@cache
def discover(kind: str) -> dict[str, type[Any]]:
    """All classes of a kind by name, sorted."""
    _, folder, base = KINDS[kind]
    package = importlib.import_module(folder)
    found = {}
    for info in pkgutil.iter_modules(package.__path__):
        if (cls := _class_in(importlib.import_module(f"{package.__name__}.{info.name}"), base)) is not None:
            found[info.name] = cls
    for path in _plugin_files():
        if (cls := _class_in(_import_file(path), base)) is not None:
            if path.stem in found:
                raise UserError(f"the plugin {path} has the name of a built-in {KINDS[kind][0]}; rename the file")
            found[path.stem] = cls
    return dict(sorted(found.items()))


def find(kind: str, name: str) -> type[Any]:
    """The class of this name, or an error that names the nearest one."""
    classes = discover(kind)
    if name not in classes:
        raise unknown(KINDS[kind][0], name, classes)
    return classes[name]


def name_of(kind: str, value: type[Any]) -> str | None:
    """The name under which a class is found, or None if it is not discovered."""
    return next((name for name, cls in discover(kind).items() if cls is value), None)


def plugin_hash(cls: type[Any]) -> str | None:
    """A hash of the file that a plugin comes from, so that an edited plugin is a new run; None for what is built in."""
    module = sys.modules[cls.__module__]
    if not module.__name__.startswith(f"{PLUGIN_PACKAGE}.") or module.__file__ is None:
        return None
    return hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()[:12]


def summary(cls: type[Any]) -> str:
    """The first line of a class's docstring."""
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def _class_in(module: ModuleType, base: type) -> type[Any] | None:
    """The last public subclass that the module itself defines: helpers come first, the thing itself last."""
    classes = [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, base)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
        and not name.startswith("_")
    ]
    return classes[-1] if classes else None


def _plugin_files() -> list[Path]:
    folder = os.environ.get(PLUGINS)
    if not folder:
        return []
    if not Path(folder).is_dir():
        raise UserError(f"{PLUGINS} must name a folder of Python files, got {folder!r}, which is no folder")
    return sorted(Path(folder).glob("*.py"))


def _import_file(path: Path) -> ModuleType:
    name = f"{PLUGIN_PACKAGE}.{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it is executed
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"the plugin {path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
