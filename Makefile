# Each target sets itself up in .venv. Other interpreter: make PYTHON=python3.12; versions of your own: make CONSTRAINTS=
PYTHON ?= python3
CONSTRAINTS ?= -c constraints.txt
# torch goes first and by its exact version: a bare requirement may bring a build for accelerators, of several gigabytes
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo test test-kernels lint clean

demo: $(VENV)/.demo
	$(BIN)/python experiments/demo.py --output out

test: $(VENV)/.test
	$(BIN)/python -m pytest

# the suite once more for each way a processor may round: kernels without vectors, with AVX2, with and without the widest of
# the matrix library, one thread and two
test-kernels: $(VENV)/.test
	ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=2 $(BIN)/python -m pytest
	ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=2 $(BIN)/python -m pytest
	MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=2 $(BIN)/python -m pytest
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) out

$(VENV)/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(CONSTRAINTS) $(TORCH)
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) $(CONSTRAINTS) -e '.[demo]'
	touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(PIP) $(CONSTRAINTS) -e '.[test]'
	touch $@

$(VENV)/.lint: $(VENV)/.test
	$(PIP) $(CONSTRAINTS) -e '.[lint]'
	touch $@
