# `make demo`, `make test` (minutes), `make test-all`. Each sets up .venv when needed; a second run installs nothing.
PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
# Where PYTHONDONTWRITEBYTECODE is set, as in many containers, every process that a test starts would compile all of hone again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 10

.PHONY: demo test test-all lint docs clean

demo: .venv/.all
	$(BIN)/hone run recipes/tiny.yaml

# The default tier. `make test-all` is everything that a CPU can run.
test: .venv/.dev
	$(PYTEST) -m "not slow"

# In one process a worker: what is imported, compiled and made for one tier serves the other.
test-all: .venv/.dev
	$(PYTEST)

lint: .venv/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

# The documentation as a site, in build/site. A link that leads nowhere is an error.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

.venv/bin/pip:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "hone needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv || { echo "fix: on Debian or Ubuntu, apt install python3-venv"; rm -rf .venv; exit 1; }

# The stamps change with what is installed, so that an edit of either file installs again.
.venv/.all: .venv/bin/pip pyproject.toml constraints.txt
	$(INSTALL) -e '.[all]'
	touch $@

.venv/.dev: .venv/bin/pip pyproject.toml constraints.txt
	$(INSTALL) -e '.[all,dev]'
	touch .venv/.all $@

.venv/.docs: .venv/bin/pip pyproject.toml constraints.txt
	$(INSTALL) -e '.[docs]'
	touch $@

clean:
	rm -rf .venv work build *.egg-info
