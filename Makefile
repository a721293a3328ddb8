# Two commands: `make demo` and `make test`. Each makes .venv with what it needs the first time, from the pinned
# versions in constraints.txt. Another interpreter: make test PYTHON=python3.12

PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$name -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$name; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -c constraints.txt

# The layers that plan without torch are typed strictly.
UPSHIFT := src/upshift
HARDWARE := $(filter-out %/probe.py %/base_process.py, $(wildcard $(UPSHIFT)/hardware/*.py $(UPSHIFT)/hardware/vendors/*.py))
LOADING := $(addprefix loading/, header.py checkpoint.py pickled.py pickled_process.py place.py memory_limits.py speed.py model_folder.py \
	output_folder.py output_lock.py rewriting.py writing.py shard.py)
TYPED := $(addprefix $(UPSHIFT)/, characters.py disk_full.py errors.py installed.py units.py value.py whole_file.py with_parent.py settings.py record.py models/profile.py models/source.py planning $(LOADING)) \
	$(HARDWARE)

.PHONY: help demo test light mutants check docs clean

help:
	@echo "make demo   install the core and run upshift demo"
	@echo "make test   install the core, the extras and the tools; lint, types, every test that this machine can run"
	@echo "make light  only the tests that need no torch"
	@echo "make mutants  change planning in 200 small places; does a light test see each?"
	@echo "make docs   the pages of docs/ as a site that works offline, in build/site"
	@echo "make clean  remove .venv, caches and builds"

demo: $(VENV)/.core
	$(BIN)/upshift demo

# Most tests trace models, which takes one core: a file of tests for each core at a time, each with one thread. In their
# order by folder the many short files come last, so that no core waits long for the other.
test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

light: $(VENV)/.dev
	$(BIN)/python -m pytest tests/light -n auto --dist loadfile

mutants: $(VENV)/.dev
	mkdir -p build
	$(BIN)/python tests/mutation/run.py draw src/upshift/planning --number 200 --seed 30 > build/mutants.json
	$(BIN)/python tests/mutation/run.py run build/mutants.json --tests tests/light --output build/mutants-result.json

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy --follow-imports=silent $(TYPED)

# mkdocs reads the source and runs none of it, so this needs no torch.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "Upshift needs Python 3.11 or newer and found none; name one: make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Upshift needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)" >&2; exit 2; }
	@# Some systems ship pip and venv without ensurepip; then the system's pip installs pip.
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install pip; }
	@touch $@

$(VENV)/.core: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.core $(VENV)/.docs $@

$(VENV)/.docs: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP_INSTALL) mkdocs-material mkdocstrings-python ruff
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
