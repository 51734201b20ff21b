"""What the project promises about itself: declared dependencies, pinned versions, files that users look for."""

import ast
import functools
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
