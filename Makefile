# Two commands do all the set-up: `make demo` and `make test`. Both share `make install`.
# PIP_ARGS is passed to pip, for example an extra index that carries CPU builds of torch.
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
STAGES := core quantize compile ops evaluate serve pipeline
TYPES := build/types/bitsmith

# Byte code is written by the first run, for the modules that are used: pip would compile every file of every package.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo gpu-check test asan lint types clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@command -v c++ >/dev/null || { echo "A C++ compiler is needed: install g++ (Debian: apt-get install g++)."; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: install
	$(BIN)/bitsmith run examples/quickstart.yaml

# Under ten minutes; a second call goes on where the first one was.
gpu-check: install
	$(BIN)/bitsmith doctor --gpu

# Two processes, each file's tests in one of them; threads that wait must not take the other's core.
test: lint types
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile

# Operators built with sanitizers, under the tests of operators. Python itself is built without, so their
# runtime comes first in the process (beside the C++ library, whose exceptions it must find); Python's own
# memory at exit is no leak of ours.
asan: install
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_WAIT_POLICY=passive \
	$(BIN)/python -m pytest -q --sanitize tests/ops

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy needs the folders under the name they are imported by.
types: install
	@mkdir -p $(TYPES)
	@for stage in $(STAGES); do ln -sfn ../../../$$stage $(TYPES)/$$stage; done
	$(BIN)/mypy

clean:
	rm -rf build .mypy_cache .pytest_cache .ruff_cache .hypothesis
