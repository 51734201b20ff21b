"""What the project promises about itself: declared dependencies, pinned versions, files that users look for."""

import ast
import dataclasses
import functools
import re
import sys
import tokenize
import tomllib
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import NamedTuple

import grimp
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fl_lightning.method import Method
from fl_lightning.methods.fola import Fola

ROOT = Path(__file__).parent.parent
PACKAGES = ("fl_lightning", "tune", "analysis")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Imported, but not declared.
NOT_OURS_TO_DECLARE = {
    "ipython",  # only where notebooks show something, and it comes with whatever runs them
}
# Declared, but not imported.
USED_BY_NAME: set[str] = set()


def requirements(texts):
    return {canonicalize_name(found.name): found for found in map(Requirement, texts)}


def declared():
    return requirements(PROJECT["dependencies"])


def declared_anywhere():
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(text) for texts in (PROJECT["dependencies"], *extras) for text in texts]


def imported_modules():
    """The first part of every absolute import of the packages, wherever in a file it stands."""
    found = {}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            else:
                continue
            found |= {name.partition(".")[0]: path.relative_to(ROOT) for name in names}
    return {name: path for name, path in found.items() if name not in {*sys.stdlib_module_names, *PACKAGES}}


@functools.cache
def installed():
    """Which distributions a module comes from; reading this of all that is installed takes a while."""
    return packages_distributions()


def private_names(path):
    """What a file takes from torch, Lightning or Ray by a name that begins with an underscore, down to that name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    private = re.compile(r"(torch|nn|pytorch_lightning|pl|lightning_fabric|ray)(\.\w+)*?\._[A-Za-z]\w*")
    return {match[0] for match in map(private.match, found) if match is not None}


# What only private names give, and the modules that use each and say why.
PRIVATE = {
    ("torch.utils._pytree", "fl_lightning/system/trees.py"),
    ("torch._foreach_add_", "fl_lightning/params.py"),
    ("torch._foreach_copy_", "fl_lightning/params.py"),
    ("torch._foreach_lerp_", "fl_lightning/params.py"),
    ("ray._private", "fl_lightning/engines/parallel/ray_cluster.py"),
    ("ray._raylet", "fl_lightning/engines/parallel/ray_cluster.py"),
}


def test_private_names_of_libraries_are_used_where_it_is_said():
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    used = {(name, str(path.relative_to(ROOT))) for path in files for name in private_names(path)}
    assert used == PRIVATE


def distributions_of(module):
    return {canonicalize_name(name) for name in installed().get(module, [module])}


@pytest.mark.slow
def test_every_import_is_declared():
    allowed = set(declared()) | NOT_OURS_TO_DECLARE
    missing = {name: path for name, path in imported_modules().items() if not distributions_of(name) & allowed}
    assert not missing, f"imported, but no dependency of pyproject.toml: {missing}"


def test_every_dependency_is_imported():
    used = {name for module in imported_modules() for name in distributions_of(module)}
    assert set(declared()) - used == USED_BY_NAME


def constraints():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pins = [re.fullmatch(r"([a-z0-9-]+)==([0-9][a-z0-9.]*)", line) for line in lines]
    assert all(pins), [line for line, pin in zip(lines, pins, strict=True) if pin is None]
    return {pin[1]: pin[2] for pin in pins}


def test_the_constraints_satisfy_the_ranges():
    pins = constraints()
    for requirement in declared_anywhere():
        name = canonicalize_name(requirement.name)
        assert name in pins, f"constraints.txt does not pin {name}"
        assert requirement.specifier.contains(pins[name]), f"{name} {pins[name]} is not in {requirement.specifier}"


@pytest.mark.parametrize("package", PACKAGES)
def test_types_are_for_users_too(package):
    """Type checkers look for the marker, which setuptools packs only if it is told to."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert (ROOT / package / "py.typed").exists()
    assert "py.typed" in data[package]


def test_the_licence_is_the_one_that_is_declared():
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / PROJECT["license-files"][0]).read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert PROJECT["urls"]["Paper"].endswith(citation["references"][0]["doi"])


def test_the_changelog_has_this_version():
    headings = re.findall(r"^## \[?([^\]\s]+)\]?", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased" or headings[0] == PROJECT["version"]
    assert PROJECT["version"] in headings


def test_every_make_target_is_explained():
    """CONTRIBUTING.md names the targets that contributors use."""
    makefile, text = (ROOT / "Makefile").read_text(), (ROOT / "CONTRIBUTING.md").read_text()
    targets = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())
    assert {target for target in targets if f"`make {target}`" not in text} == set()


# What must not grow by itself: a limit may be raised, as a decision, with the sentence that says why it is there.


class Measure(NamedTuple):
    count: Callable[[], int]
    limit: int
    why: str


def code_files():
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def parsed(path):
    return ast.parse(path.read_text())


def docstring_lines(tree):
    """The lines of all docstrings of a file."""
    holders = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, holders) and ast.get_docstring(node, clean=False) is not None:
            yield from range(node.body[0].lineno, node.body[0].end_lineno + 1)


def code_lines(path):
    """How many lines hold code: docstrings, comments and blanks are left out."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    with tokenize.open(path) as file:
        tokens = [token for token in tokenize.generate_tokens(file.readline) if token.type not in layout]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - set(docstring_lines(parsed(path))))


def functions(without="nothing"):
    return [
        node
        for path in code_files()
        if path.parent.name != without
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def parameters(function):
    """How many a caller may give; those of a network's constructor are its settings."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([one for one in named if one.arg not in ("self", "cls")])


@functools.cache
def import_graph():
    return grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True)


def hidden_imports():
    """Imports of our own modules inside functions, as (module, imported); the command line has them to start fast."""
    modules = import_graph().modules
    for path in code_files():
        importer = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        functions = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef)]
        for node in (inner for function in functions for inner in ast.walk(function)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
                for alias in node.names if path.parent.name != "cli" else ():
                    below = f"{node.module}.{alias.name}"
                    yield importer, below if below in modules else node.module


# Imports inside functions, and the library of which the importing module alone need not wait for seconds.
LAZY = {
    ("fl_lightning.engines.lightning", "fl_lightning.client"): "Lightning",
    ("fl_lightning.engines.lightning", "fl_lightning.engines.placement"): "Lightning",
    ("fl_lightning.engines.lightning", "fl_lightning.engines.user_module"): "Lightning",
    ("fl_lightning.runs.files", "fl_lightning.runs.plotting.run_figures"): "Matplotlib",
    ("fl_lightning.runs.final_round", "fl_lightning.runs.plotting.run_figures"): "Matplotlib",
    ("fl_lightning.runs.folder", "fl_lightning.runs.files"): "pandas",
    ("fl_lightning.runs.open_run", "fl_lightning.runs.files"): "pandas",
    ("tune.sweep", "tune.search"): "Ray",
    ("tune.sweep", "tune.trial"): "Ray",
}


def test_only_slow_libraries_are_imported_late():
    found = {pair: "?" for pair in hidden_imports() if pair not in LAZY}
    assert not found, "an import inside a function needs a line in LAZY with the library that takes seconds"


def hidden_cycles():
    """Imports inside functions of modules that import the importer themselves."""
    graph = import_graph()
    return [pair for pair in set(hidden_imports()) if graph.chain_exists(importer=pair[1], imported=pair[0])]


def longest_chain():
    """How many modules the longest chain of imports has."""
    graph = import_graph()
    lengths = {}

    def length(module):
        if module not in lengths:
            lengths[module] = 1  # were there a cycle, it would end here
            lengths[module] += max(map(length, graph.find_modules_directly_imported_by(module)), default=0)
        return lengths[module]

    return max(map(length, graph.modules))


MEASURES = {
    "modules in the root": Measure(
        lambda: len([path for path in (ROOT / "fl_lightning").glob("*.py") if not path.stem.startswith("__")]),
        13,
        "the root is what a newcomer reads first: what is used by one package lies in it",
    ),
    "modules": Measure(lambda: len(code_files()), 296, "each is a name to learn"),
    "lines of code": Measure(lambda: sum(map(code_lines, code_files())), 26_470, "each is read and maintained"),
    "members of a method": Measure(
        lambda: len({name for name in vars(Method) if name[0] != "_"} - {"version", "revised", "display_name"}),
        9,
        "who writes a method reads them all; the rest is opt-in",
    ),
    "settings of FOLA": Measure(lambda: len(dataclasses.fields(Fola)), 7, "they are the paper's"),
    "lines of FOLA": Measure(lambda: code_lines(ROOT / "fl_lightning/methods/fola.py"), 150, "it is read on one page"),
    "longest function": Measure(
        lambda: max(node.end_lineno - node.lineno + 1 for node in functions()), 60, "a function is seen at once"
    ),
    "most parameters": Measure(
        lambda: max(map(parameters, functions(without="networks"))), 7, "more of them want a noun of their own"
    ),
    "imports that hide a cycle": Measure(
        lambda: len(hidden_cycles()), 0, "what imports each other is one module, or stands in the wrong order"
    ),
    "longest chain of imports": Measure(longest_chain, 20, "so many modules a reader may have to know for one"),
}


@pytest.mark.parametrize("name", MEASURES)
def test_nothing_grows_unnoticed(name):
    count, limit, why = MEASURES[name]
    found = count()
    assert found <= limit, f"{name}: {found}, at most {limit}, because {why}"
