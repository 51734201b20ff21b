"""Finds methods, models, datasets and engines: one public class in one file is enough, no list to keep.

The file's name is the name on the command line: `methods/fola.py` is `--method fola`. Third parties add a folder of
such files with the environment variable FL_LIGHTNING_PLUGINS (see docs/extending.md). What is built in is listed from
its source text, so that a list takes no import of torch, and is imported only when it is asked for.

A class that inherits another one of its kind and changes nothing but defaults is a preset of it: `fedadam` is `fedopt`
with another default. It says what it is made of. Several of them fit into one file, which lists them by name as
`PRESETS`.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import socket
import sys
import traceback
import warnings
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fl_lightning.errors import PLUGIN_PACKAGE, PluginError, UserError, unknown

PLUGINS = "FL_LIGHTNING_PLUGINS"


class Kind(NamedTuple):
    """Something that can be discovered.

    Attributes:
        word: What a user calls it.
        packages: Where those that are built in live.
        base: Module and name of the base class.
    """

    word: str
    packages: tuple[str, ...]
    base: tuple[str, str]


KINDS = {
    "methods": Kind("method", ("fl_lightning.methods", "fl_lightning.contrib"), ("fl_lightning.method", "Method")),
    "models": Kind("model", ("fl_lightning.models.networks",), ("torch.nn", "Module")),
    "data": Kind("dataset", ("fl_lightning.data.sources",), ("fl_lightning.data.dataset", "Source")),
    "engines": Kind("engine", ("fl_lightning.engines",), ("fl_lightning.engines.base", "Engine")),
}


class PluginWarning(UserWarning):
    """A plug-in that cannot be used, while something else was asked for."""


class Found(NamedTuple):
    """What the source says of a class that is built in.

    Attributes:
        module: Where it is.
        cls: Its name there.
        summary: The first line of its docstring.
        display_name: How tables and figures write it, if that is not its name.
        made_of: The name of what it inherits and the defaults that it changes, of a preset; else empty.
    """

    module: str
    cls: str
    summary: str
    display_name: str | None
    made_of: str = ""


def names(kind: str) -> list[str]:
    """The names of a kind, sorted; nothing that is built in is imported."""
    return sorted({*_built_in(kind), *_plugins(kind)})


def summaries(kind: str) -> dict[str, str]:
    """The first line of the docstring of every class of a kind, by name."""
    built_in = _built_in(kind)
    plugins = {name: summary(cls) for name, cls in _plugins(kind).items()}
    return {name: plugins[name] if name in plugins else built_in[name].summary for name in names(kind)}


def display_names(kind: str) -> dict[str, str]:
    """How tables and figures write the classes of a kind that say so in `display_name`; nothing is imported."""
    written = {name: found.display_name for name, found in _built_in(kind).items()}
    written |= {path.stem: _display_name(nodes[-1]) for path in _visible_files() if (nodes := _public_classes(path))}
    return {name: display for name, display in written.items() if display is not None}


def made_of(kind: str, name: str) -> str:
    """What a preset is made of, as it is written on the command line; nothing of what stands for itself.

    >>> made_of("methods", "fedadagrad"), made_of("methods", "fedavg")
    ('fedopt+optimiser=adagrad+server_momentum=0', '')
    """
    if name in (built_in := _built_in(kind)):
        return built_in[name].made_of
    cls = find(kind, name)
    above = inherited(cls)
    if above is None:
        return ""
    changed = [key for key in cls.__annotations__ if getattr(cls, key) != getattr(above, key, None)]
    ingredients = (f"{key}={_as_flag(getattr(cls, key))}" for key in changed)
    return "+".join([next(filter(None, (name_of(one, above) for one in KINDS))), *ingredients])


def inherited(cls: type[Any]) -> type[Any] | None:
    """The class that a preset is made of, None of what stands for itself."""
    above = cls.__mro__[1]
    return above if any(name_of(kind, above) is not None for kind in KINDS) else None


def discover(kind: str) -> dict[str, type[Any]]:
    """All classes of a kind by name, sorted."""
    return {name: find(kind, name) for name in names(kind)}


def _of_torchvision() -> list[str]:
    from torchvision import models  # seconds, which only a wrong name costs

    return list(models.list_models(module=models))


def find(kind: str, name: str) -> type[Any]:
    """The class of this name, or an error that names the nearest one."""
    for path in _plugin_files():
        if path.stem == name and (cls := _usable(path, kind)) is not None:
            return cls
    if name in _built_in(kind):
        return _import_built_in(kind, name)
    plain, plus, option = name.partition("+")
    if kind == "methods" and plus and plain in names(kind):
        raise UserError(
            f"unknown method {name!r}: give the method {plain} and the setting method.{option} apart; compare alone "
            "takes both in one"
        )
    error = unknown(KINDS[kind].word, name, names(kind))
    if kind == "models" and name in _of_torchvision():
        raise UserError(f"unknown model {name!r}: it is one of torchvision's, --model torchvision --model.name {name}")
    if not os.environ.get(PLUGINS) and "did you mean" not in str(error):
        raise UserError(f"{error}; if it is a plug-in, set {PLUGINS} to the folder of {name}.py")
    raise error


def require_plugin(kind: str, name: str, whose: str) -> None:
    """Refuse a name that something saved has, and that is neither built in nor a plug-in here: it was one elsewhere."""
    if name in _built_in(kind) or any(path.stem == name for path in _visible_files()):
        return
    folder = os.environ.get(PLUGINS)
    reason = f"{PLUGINS} is {folder}, which has no {name}.py" if folder else f"{PLUGINS} is not set"
    raise UserError(
        f"the {KINDS[kind].word} {name!r} of {whose} is a plug-in, and {reason}; set it to the folder of {name}.py"
    )


def name_of(kind: str, value: type[Any]) -> str | None:
    """The name under which a class is found, or None if it is not discovered."""
    package, _, name = value.__module__.rpartition(".")
    if package == PLUGIN_PACKAGE:
        return name
    places = {(found.module, found.cls): name for name, found in _built_in(kind).items()}
    return places.get((value.__module__, value.__qualname__))


def plugin_hash(cls: type[Any]) -> str | None:
    """A hash of the file that a plug-in comes from, so that an edited one is a new run; None for what is built in."""
    module = sys.modules[cls.__module__]
    if not module.__name__.startswith(f"{PLUGIN_PACKAGE}.") or module.__file__ is None:
        return None
    return _hash(Path(module.__file__))


def imported_plugins() -> dict[str, str]:
    """The plug-ins that this process has imported, by module, and hashes of their files as they were then."""
    return dict(_imported)


def ensure_imported(module: str, expected: str | None = None) -> None:
    """Import a module if it is a plug-in's: Python alone does not find those, such as when another process names one.

    Args:
        module: Any module.
        expected: The hash of the plug-in's file where it was named, if that is known.

    Raises:
        UserError: If this process does not see the file, or sees another one.
    """
    package, _, name = module.rpartition(".")
    if package != PLUGIN_PACKAGE:
        return
    folder, host = os.environ.get(PLUGINS), socket.gethostname()
    if module not in sys.modules:
        path = next((path for path in _visible_files() if path.stem == name), None)
        if path is None:
            where = f"in {folder}" if folder else f"because {PLUGINS} is not set there"
            raise UserError(f"the plug-in {name}.py is not visible to {host} {where}; keep it where all nodes see it")
        _import_file(path)
    found = _imported.get(module)
    if expected is not None and found != expected:
        raise UserError(
            f"expected the plug-in {name}.py on {host} as it is where the run was started (hash {expected}), got "
            f"another one (hash {found}, in {folder}); keep it where all nodes see it, or copy it there"
        )


def summary(cls: type[Any]) -> str:
    """The first line of a class's docstring."""
    return (inspect.getdoc(cls) or "").partition("\n")[0]


@cache
def _built_in(kind: str) -> dict[str, Found]:
    """What is built in by name, read from the source."""
    base = KINDS[kind].base[1]
    nodes: dict[str, tuple[str, ast.ClassDef]] = {}
    presets: dict[str, tuple[str, ast.ClassDef]] = {}
    for module, path in _files_of(kind).items():
        classes = _public_classes(path)
        if mine := [node for node in classes if base in _bases(node)]:
            nodes[path.stem] = module, mine[-1]
        else:
            by_name = {node.name: node for node in classes}
            presets |= {name: (module, by_name[cls]) for name, cls in _listed_presets(path).items()}
    found = {name: _found(module, node) for name, (module, node) in nodes.items()}
    things = {one.cls: name for name, one in found.items()}
    for name, (module, node) in presets.items():
        above = next(things[base] for base in _bases(node) if base in things)
        found[name] = _found(module, node)._replace(made_of="+".join([above, *_changed_defaults(node)]))
    return found


def _files_of(kind: str) -> dict[str, Path]:
    """The modules of a kind that are built in, and their files."""
    files: dict[str, Path] = {}
    for package in KINDS[kind].packages:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        for folder in map(Path, spec.submodule_search_locations or ()):
            files |= {f"{package}.{path.stem}": path for path in sorted(folder.glob("*.py"))}
    return files


@cache
def _public_classes(path: Path) -> list[ast.ClassDef]:
    body = ast.parse(path.read_bytes()).body
    return [node for node in body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def _listed_presets(path: Path) -> dict[str, str]:
    """The classes that a file lists as PRESETS, by name."""
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PRESETS":
            assert isinstance(node.value, ast.Dict)
            pairs = zip(node.value.keys, node.value.values, strict=True)
            return {ast.literal_eval(name): ast.unparse(cls) for name, cls in pairs if name is not None}
    return {}


def _found(module: str, node: ast.ClassDef) -> Found:
    return Found(module, node.name, _summary(node), _display_name(node))


@cache
def _import_built_in(kind: str, name: str) -> type[Any]:
    found = _built_in(kind)[name]
    cls: type[Any] = getattr(importlib.import_module(found.module), found.cls)
    return cls


def _bases(node: ast.ClassDef) -> list[str]:
    """What a class names as its bases, `Module` for `nn.Module`."""
    return [ast.unparse(one).rpartition(".")[2] for one in node.bases]


def _summary(node: ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0]


def _display_name(node: ast.ClassDef) -> str | None:
    """The value of `display_name` in the body of a class."""
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == "display_name" and line.value is not None:
            return str(ast.literal_eval(line.value))
    return None


def _changed_defaults(node: ast.ClassDef) -> list[str]:
    """The defaults that a preset changes, as `key=value`; its version is none of them."""
    return [
        f"{ast.unparse(line.target)}={_as_flag(ast.literal_eval(line.value))}"
        for line in node.body
        if isinstance(line, ast.AnnAssign) and line.value is not None and "ClassVar" not in ast.unparse(line.annotation)
    ]


def _as_flag(value: object) -> str:
    """A default as a user would write it: 0 for 0.0, true for True, null for None."""
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


@cache
def _base(kind: str) -> type:
    module, name = KINDS[kind].base
    cls: type = getattr(importlib.import_module(module), name)
    return cls


def _class_in(module: ModuleType, kind: str) -> type[Any] | None:
    """The last public subclass that the module itself defines: helpers come first, the thing itself last."""
    classes = [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, _base(kind))
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]
    return classes[-1] if classes else None


def _plugins(kind: str) -> dict[str, type[Any]]:
    """The plug-ins of a kind that can be used; of others one is warned, or a broken file would stop everything."""
    found = {}
    for path in _plugin_files():
        try:
            cls = _usable(path, kind)
        except UserError as error:
            warnings.warn(str(error), PluginWarning, stacklevel=1)  # one place, so that each is shown once
            continue
        if cls is not None:
            found[path.stem] = cls
    return found


def _usable(path: Path, kind: str) -> type[Any] | None:
    """The class of this kind in a plug-in's file, None if it is about something else."""
    cls = _class_in(_import_file(path), kind)
    if cls is None:
        return None
    word = KINDS[kind].word
    if path.stem in _built_in(kind):
        raise UserError(f"the plug-in {path} has the name of a built-in {word}; rename the file")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise UserError(f"the plug-in {path} is not a complete {word}: {cls.__name__} lacks {missing}; add it")
    return cls


def _visible_files() -> list[Path]:
    """The plug-ins' files; none where there is no such folder."""
    folder = os.environ.get(PLUGINS)
    return _plugin_files() if folder and Path(folder).is_dir() else []


def _plugin_files() -> list[Path]:
    folder = os.environ.get(PLUGINS)
    if not folder:
        return []
    if not Path(folder).is_dir():
        reason = "is not a folder" if Path(folder).exists() else "does not exist"
        raise UserError(f"{PLUGINS} must name a folder of Python files, got {folder!r}, which {reason}")
    return sorted(Path(folder).glob("*.py"))


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


# Hashes of the plug-ins in `sys.modules`, by module.
_imported: dict[str, str] = {}


def _import_file(path: Path) -> ModuleType:
    name = f"{PLUGIN_PACKAGE}.{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(PLUGIN_PACKAGE, ModuleType(PLUGIN_PACKAGE))  # pickle looks for the folder, too
    sys.modules[name] = module  # dataclasses look their module up while it is executed
    try:
        _imported[name] = _hash(path)
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        _imported.pop(name, None)
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise PluginError(f"the plug-in {path} cannot be imported: {what}{_line_in(path, error)}") from error
    return module


def _line_in(path: Path, error: BaseException) -> str:
    """Where in a file an error arose; a mistake of syntax says so itself."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == str(path)]
    return f" (line {lines[-1]})" if lines else ""
