# `make demo` and `make test` do everything on a fresh machine that has Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
# Python 3.12 and later can tell which lines run at almost no cost.
COVERAGE := COVERAGE_CORE=$(shell $(PYTHON) -c 'import sys; print("sysmon" if sys.version_info >= (3, 12) else "ctrace")')

# Compiled tests are kept, also where the environment says otherwise: to compile all anew takes 6 s of each worker.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile

.PHONY: setup demo test unit system exhaustive mutants quick coverage check docs golden bench chaos format clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fl_lightning needs Python 3.11 or newer; try make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	@echo "installing PyTorch, Lightning, Ray and MLflow into .venv: about 2 GB, a few minutes"
	$(BIN)/pip install --disable-pip-version-check --editable '.[dev,docs]'
	touch $@

demo: setup
	$(BIN)/fl-lightning demo

# The checks take one core for more than a minute where mypy has no cache yet, so they run beside the tests.
test: setup
	$(MAKE) --no-print-directory --jobs=2 check unit

unit: setup
	$(PYTEST) -m 'not system and not exhaustive'

# Whole programs and studies: on clusters, in browsers, with servers; killed, with lost nodes and full disks.
system: setup
	$(PYTEST) -m 'system and not exhaustive'

# Tests that start no process, write to no store and take no time.
quick: setup check
	$(PYTEST) -m 'not slow and not system and not exhaustive'

# Before a release: the whole products of methods, settings, tasks and engines, of which the other tests draw some.
exhaustive: setup
	$(PYTEST) -m exhaustive

# Before a release: small mistakes in the formulas, one after the other, each of which the fast tests must notice.
mutants: setup
	$(BIN)/python -m tests.mutants

coverage: setup
	$(COVERAGE) $(PYTEST) -m 'not system and not exhaustive' --cov --cov-report=
	$(BIN)/coverage report --skip-covered

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

golden: setup
	$(BIN)/python -m tests.golden

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html; for the search box: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site"

bench: setup
	$(BIN)/python -m benchmarks

# Longer and random: kills, damage, settings by chance. The seed is printed.
chaos: setup
	$(BIN)/python -m tests.faults.chaos --minutes 10

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build site .coverage *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
