# `make test` and `make demo` set up $(VENV) by themselves; a second run installs nothing.

PYTHON ?= python3
VENV ?= .venv
# Test processes. Each runs torch on one thread, so this is also the number of busy cores.
JOBS ?= 2
# Not in the lock file: torch for Linux pins a Triton of its own, and a different pin beside it
# cannot be resolved. It is installed afterwards, without dependencies.
TRITON ?= 3.8.0
# The oldest that the Gluon kernels support; its compiler orders less by itself. The Gluon tests
# run under it as well, on one schedule each: a folder that Python looks into before it looks into
# the environment.
OLDEST_TRITON := 3.6.0

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-triton-$(TRITON)
OLDEST := $(abspath $(VENV)/triton-$(OLDEST_TRITON))
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Triton exists only for Linux; elsewhere its tests skip themselves.
ifeq ($(shell uname),Linux)
TESTS := test-newest test-oldest
else
TESTS := test-newest
endif

.PHONY: demo test test-newest test-oldest lint types bench clean

demo: $(STAMP)
	$(BIN)/anyflash demo

test: lint types $(TESTS)

test-newest: $(STAMP)
	$(PYTEST)

test-oldest: $(OLDEST)/.installed
	PYTHONPATH=$(OLDEST) $(BIN)/python -c "import triton; assert triton.__version__ == '$(OLDEST_TRITON)', triton"
	PYTHONPATH=$(OLDEST) $(PYTEST) --gluon-seeds 1 tests/test_gluon_*.py $(wildcard tests/test_hopper*.py)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(STAMP)
	$(BIN)/anyflash bench cpu

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch must come from the lock file's pin: asked for without a version, by us or by another
# package, it is the newest CUDA build, several gigabytes. The lock file brings the build backend
# as well, so the editable install needs no build environment. Compiling everything to bytecode
# would double the time; Python does it on first import for what is used.
$(STAMP): requirements-dev.lock pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --no-compile -r requirements-dev.lock
	$(PIP) install --no-compile --no-deps --no-build-isolation "triton==$(TRITON); sys_platform == 'linux'" -e .
	rm -f $(VENV)/.installed-triton-*
	touch $@

$(OLDEST)/.installed: | $(STAMP)
	$(PIP) install --no-compile --no-deps --upgrade --target $(OLDEST) triton==$(OLDEST_TRITON)
	touch $@
