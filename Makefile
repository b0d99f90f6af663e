# Everything runs in a virtual environment this file makes itself; nothing else is needed
# than Python 3.11+ and make. `make TORCH=torch==2.11.0 test` takes another PyTorch.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
PROCESSES ?= 2
CASES ?= 1
SINCE ?= HEAD
BIN := $(VENV)/bin

.PHONY: results demo test test-most test-all test-nightly slow mutants scatter transformers-oldest bench kernels-check \
	kernels-check-all kernels-check-oldest emulate gpu native-check lint docs format clean first-minutes

# Three installations, each on top of the one before: what the demo needs, what tests and tools need,
# and what the documentation needs. torch goes first and alone: a looser requirement would be
# resolved to the newest CUDA build.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
EDITABLE := GRAPHATTN_NATIVE=0 $(PIP) --no-build-isolation --editable
$(VENV)/.demo: pyproject.toml Makefile
	@echo "New virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing PyTorch (about 200 MB to download; half a minute after that)"
	@$(PIP) "$(TORCH)"
	@echo "Installing graphattn with matplotlib (half a minute)"
	@$(PIP) "setuptools>=77"
	@$(EDITABLE) ".[plots]"
	@touch $@

$(VENV)/.installed: $(VENV)/.demo
	@echo "Installing what the tests need, transformers for instance (a minute)"
	@$(EDITABLE) ".[bio,dev,plots]"
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	@echo "Installing Sphinx for the documentation (half a minute)"
	@$(EDITABLE) ".[bio,dev,docs,plots]"
	@touch $@

# The compiled CPU kernels lie in the tree, where a changed file rebuilds them and nothing else: for
# the best instruction set of this machine, or with EVERY_SET=1 for all. GRAPHATTN_NATIVE=0 builds
# none. Without a C++ compiler this says so and succeeds; after installing one: `make clean`.
NATIVE := build/native$(if $(EVERY_SET),-every-set).built
$(NATIVE): $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h) setup.py $(VENV)/.demo
	@$(if $(filter 0,$(GRAPHATTN_NATIVE)),,env -u GRAPHATTN_NATIVE $(BIN)/python setup.py --quiet \
		build_ext --inplace $(if $(EVERY_SET),--every-set) && mkdir -p build && touch $@)

TESTED := $(VENV)/.installed $(NATIVE)

demo: $(NATIVE)  ## real text through every graph and layer
	$(BIN)/graphattn demo

# Two processes of one thread each take half the time of one with two threads. Bytecode is kept, or
# every start would compile all tests and the library again (half of the time to collect them).
test: $(TESTED)  ## unit tests (a sample of long sweeps), docstring examples, README
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(PROCESSES) --dist worksteal \
		$(if $(filter all,$(CASES)),,--cases $(CASES)) $(if $(LONG),--long)

test-most:  ## the same, three cases of a sweep, and what takes long: continuous integration
	$(MAKE) test CASES=3 LONG=1

test-all:  ## the same, every pair of options of a sweep
	$(MAKE) test CASES=pairs

test-nightly:  ## the same, every case of every sweep, for a night
	$(MAKE) test CASES=all

slow: $(TESTED)  ## long sweeps: does every bug put in by hand fail a test?
	$(BIN)/python -m pytest -q -m slow

mutants: $(TESTED)  ## mistakes made in lines changed since SINCE: do TESTS notice? TESTS=tests/graphs
	$(PIP) "cosmic-ray>=8"
	$(BIN)/python tests/mutations/mutants.py $(SINCE) $(TESTS)

# torch-scatter is built from source, against the torch that is there: minutes, and a compiler.
scatter: $(TESTED)  ## torch-scatter as an independent oracle
	$(PIP) ninja "setuptools>=77"
	PATH="$(abspath $(BIN)):$$PATH" $(PIP) --no-build-isolation "torch-scatter>=2.1"
	$(BIN)/python -c "import torch_scatter"
	$(BIN)/python -m pytest -q tests/ops/test_ops_torch_scatter.py

# The plug-in supports a range of transformers; the newest is in the environment, the oldest here.
OLDEST := build/transformers-oldest
$(OLDEST)/.installed: $(VENV)/.installed
	$(PIP) --target $(OLDEST) \
		"transformers==5.4.0"
	touch $@

transformers-oldest: CASES = 3
transformers-oldest: $(OLDEST)/.installed $(NATIVE)  ## the plug-in with the oldest transformers it supports
	PYTHONPATH=$(OLDEST) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(PROCESSES) \
		--dist worksteal $(if $(filter all,$(CASES)),,--cases $(CASES)) \
		tests/integrations graphattn/integrations

first-minutes:  ## what a newcomer waits for, in a fresh clone: a table
	$(PYTHON) tests/first_minutes.py

# Experiments about the papers' claims; they continue where they were stopped. DATA= is a folder.
# Without NAME=, all of them, for about twenty hours of one core; some read the runs of the first.
DATA ?= data
FIRST := consensus_text_causal consensus_ablation gka_vision
EXPERIMENTS := $(FIRST) $(filter-out $(FIRST),$(basename $(notdir $(wildcard docs/results/*.json))))
results: $(TESTED)  ## experiments about claims of papers: NAME=consensus_dna DATA=FOLDER
	@for name in $(or $(NAME),$(EXPERIMENTS)); do OMP_NUM_THREADS=1 $(BIN)/python \
		examples/papers/$$name.py --data $(DATA) --processes $(PROCESSES) || exit 1; done

bench: $(TESTED)  ## every operation beside its peers
	$(BIN)/graphattn bench

kernels-check: $(TESTED)  ## every Triton kernel compiled for sm_90, without a GPU
	env -u TRITON_INTERPRET $(BIN)/python -m graphattn.kernels.check

# Times that a GPU has measured, if there are some, stand beside the predictions.
MEASURED := $(lastword $(sort $(wildcard docs/benchmarks/visits/*.json)))
kernels-check-all: $(TESTED)  ## for every architecture; writes the table that is kept
	env -u TRITON_INTERPRET $(BIN)/python -m graphattn.kernels.check --all \
		--markdown docs/benchmarks/kernels.md $(if $(MEASURED),--measured $(MEASURED))

# The same compiled code, executed by an emulator of GPUs and watched for races. `CASES=all` takes
# out every barrier, wait and mask of every kernel, too, for hours. `LAUNCHES=50` takes a sample.
emulate: $(TESTED)  ## compiled kernels executed on the CPU
	env -u TRITON_INTERPRET OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(PROCESSES) --dist worksteal \
		--device emulator --emulated build/emulated.md \
		$(if $(filter all,$(CASES)),,-m "not long and not slow") \
		$(if $(LAUNCHES),--cases $(LAUNCHES)) tests/kernels/emulator

OLDEST_TRITON := build/triton-oldest
$(OLDEST_TRITON)/.installed: $(VENV)/.installed
	$(PIP) --no-deps \
		--target $(OLDEST_TRITON) "triton==3.4.0"
	touch $@

# Older compilers spill more registers: this fails, and lists where.
kernels-check-oldest: $(OLDEST_TRITON)/.installed $(NATIVE)  ## for sm_90, with the oldest Triton it supports
	env -u TRITON_INTERPRET PYTHONPATH=$(OLDEST_TRITON) $(BIN)/python -m graphattn.kernels.check

# The day a GPU is there (CONTRIBUTING.md). `make gpu PYTHON=python3 VENV=` takes a Python that has
# everything already; DEVICE=emulator rehearses.
DEVICE ?= cuda
gpu: $(if $(VENV),$(TESTED))  ## parity, sanitizer, benchmark, tuning and a report; STEP= for one
	@env -u TRITON_INTERPRET OMP_NUM_THREADS=1 PYTHONPATH=tests/kernels \
		$(if $(VENV),$(BIN)/python,$(PYTHON)) -m gpu --device $(DEVICE) \
		$(if $(STEP),--step $(STEP)) $(if $(SIZE),--size $(SIZE)) $(if $(ARCH),--arch $(ARCH)) \
		$(if $(LIMIT),--limit $(LIMIT)) $(if $(OUT),--out $(OUT)) $(if $(RETRY),--retry) \
		$(if $(PLAN),--plan)

# Like kernels-check a look at kernels that tests cannot have; it takes a C++ compiler.
native-check: $(TESTED)  ## compiled CPU kernels under the address, behaviour and thread sanitizers
	$(BIN)/python tests/native/sanitizers.py $(if $(BEST),--best)

lint: $(TESTED)  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.docs $(NATIVE)  ## the documentation, in docs/_build/html
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

format: $(TESTED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) kernels/cpu/_native_* docs/_build docs/_figures build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
