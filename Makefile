# Every target sets itself up in .venv; nothing needs to be installed beforehand but Python and its venv module.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Three on two processors: ranks wait for each other, and SLURM for its clock, for a third of the time.
WORKERS ?= 3

.PHONY: demo check test test-all quick versions faults soak lint docs bench wheel clean

demo: $(READY)
	$(BIN)/python examples/demo.py

# The package on two processes of this machine.
check: $(READY)
	$(BIN)/lightning-sparse check --devices 2

# A worker starts its processes once; one that is done helps the other.
TOGETHER := --numprocesses $(WORKERS) --dist worksteal
test: $(READY)
	$(BIN)/python -m pytest -m "not clock and not exhaustive" $(TOGETHER)

# Everything: after `make test`, every other case of what it samples, and what takes long. What listens to a clock comes
# last and alone.
test-all: test
	$(BIN)/python -m pytest -m "exhaustive and not clock" $(TOGETHER)
	$(BIN)/python -m pytest -m clock

# The loop of a change: functions, doctests, and the laws for every compressor.
quick: $(READY)
	$(BIN)/python -m pytest -m "not clock and not exhaustive" $(TOGETHER) lightning_sparse tests/functional \
		tests/schedule tests/compressors tests/test_architecture.py tests/testing/test_conformance.py

# The long forms: every rank as victim, three ranks, other random inputs, a thousand random trainings.
faults: $(READY)
	LIGHTNING_SPARSE_FAULTS=1 $(BIN)/python -m pytest tests/test_faults.py tests/test_fuzz.py tests/test_trainings.py \
		--timeout 3600

# Minutes: 20 000 steps with all that a long job does; memory, threads, files and replicas are looked at.
soak: $(READY)
	LIGHTNING_SPARSE_SOAK=20000 $(BIN)/python -m pytest tests/test_soak.py -s

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=examples $(BIN)/mypy examples/*.py
	MYPYPATH=examples:examples/benchmarks $(BIN)/mypy examples/benchmarks/*.py
	# A script of a user, as type checkers see it.
	$(BIN)/mypy --strict --config-file= --follow-imports=silent tests/user_script.py
	$(BIN)/pyright --pythonpath $(BIN)/python tests/user_script.py

# The oldest and the newest versions that setup.cfg allows, each in an environment of its own; downloads gigabytes.
WITH_VERSIONS := -m pytest -m "not clock and not exhaustive" $(TOGETHER) tests/functional tests/schedule tests/engine \
	tests/loop tests/strategy tests/callbacks tests/cli
versions: $(READY)
	$(BIN)/python tests/versions.py oldest $(WITH_VERSIONS)
	$(BIN)/python tests/versions.py newest $(WITH_VERSIONS)

# The site, in build/site: every link has to lead somewhere, and every page has to have its place.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Needs root: it makes network namespaces with shaped links.
bench: $(READY)
	$(BIN)/python examples/benchmarks/step.py

# The source's archive, and the wheel, built from that and tried as users have it: in an empty environment, which is not
# left behind. PROJECT_URL=https://host/owner/name makes the README's links and pictures work on a package index.
TRIED := --model pytorch_lightning.demos.boring_classes.BoringModel --trainer.strategy sparse_lags \
	--trainer.accelerator cpu --trainer.devices 2 --trainer.max_steps 20 --trainer.logger false \
	--trainer.enable_checkpointing false --trainer.enable_progress_bar false
wheel: $(READY)
	rm -rf build dist
	$(BIN)/python -m build
	set -e; unset PYTHONPATH; wheel=$$(realpath dist/*.whl); place=$$(mktemp -d); trap 'rm -rf "$$place"' EXIT; \
	$(PYTHON) -m venv "$$place/env"; \
	"$$place/env/bin/pip" install --quiet --constraint constraints.txt torch; \
	"$$place/env/bin/pip" install --quiet --constraint constraints.txt "$$wheel"; \
	cd "$$place"; env/bin/pip check; env/bin/lightning-sparse fit $(TRIED)

clean:
	rm -rf .venv build dist *.egg-info

# torch first and pinned: on its own, pip would choose a build with gigabytes of CUDA libraries.
$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[examples,test,dev,docs]"
	touch $(READY)
