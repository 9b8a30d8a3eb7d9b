# Every target sets itself up: a virtual environment in .venv, installed from constraints.txt. With TORCH=2.15.0 it is
# one beside it, with that torch in place of the pinned one: `make test TORCH=2.15.0`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-cuda test-frameworks check docs bench bench-core bench-seeds bench-strategies soak clean

demo: $(STAMP)
	$(BIN)/uneven demo

# One process more than cores, since many tests wait for processes of their own: two on two cores left a sixth of them
# idle. Compiled files are kept whatever the shell says: the processes of pytest would compile all tests each time.
WORKERS := $(shell echo $$(( $$(nproc) < 3 ? $$(nproc) + 1 : 4 )))
test: $(STAMP)
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 10

# The tests that nothing runs without a GPU have their types checked, too.
check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --follow-imports silent tests/*/test_*_cuda.py

# The site with the API reference, in site/: open site/index.html. It is read without a network.
docs: $(VENV)/.docs-installed
	$(BIN)/python -m mkdocs build --quiet
	@echo "site/index.html"

$(VENV)/.docs-installed: $(STAMP)
	PIP_CONSTRAINT=$(VENV)/constraints.txt $(BIN)/python -m pip install --disable-pip-version-check -q -e '.[docs]'
	@touch $@

bench: $(STAMP)
	$(BIN)/uneven bench list

# The figures of the exact and the local core on two cores (about 40 minutes; needs `uneven data get mnist` and
# shakespeare). The quality of five seeds is `make bench-seeds`.
EFFICIENCY := $(BIN)/uneven bench efficiency
PAIR := balanced cadence async torch-ddp
bench-core: $(STAMP)
	for policy in balanced torch-ddp; do $(EFFICIENCY) --model lenet --batch-size 256 --policy $$policy || exit 1; done
	for policy in $(PAIR); do $(EFFICIENCY) --model lenet --batch-size 64 --policy $$policy || exit 1; done
	for policy in $(PAIR); do $(EFFICIENCY) --model gpt-nano --batch-size 8 --policy $$policy || exit 1; done
	$(EFFICIENCY) --model gpt-nano --batch-size 32 --policy balanced
	UNEVEN_SLOW=spin $(EFFICIENCY) --model lenet --batch-size 256 --policy balanced
	for policy in cadence async; do UNEVEN_SLOW=spin $(EFFICIENCY) --model lenet --policy $$policy || exit 1; done
	$(EFFICIENCY) --model lenet --policy sync --devices cpu,cpu --against-ddp --half-width 0.02
	$(EFFICIENCY) --model mlp --policy sync --devices cpu,cpu --against-ddp --half-width 0.02
	$(EFFICIENCY) --model gpt-nano --batch-size 8 --policy sync --devices cpu,cpu --against-ddp --half-width 0.02

# LeNet, full MNIST, 5 epochs, 5 seeds in every mode, and the demo's set (about an hour and a half on two slow cores).
bench-seeds: $(STAMP)
	$(BIN)/python tools/seeds.py

# Every strategy: memory against the formula, traffic, parity; then speed against PyTorch's, in turn (20 minutes).
bench-strategies: $(STAMP)
	$(BIN)/uneven bench strategies
	$(BIN)/uneven bench strategies --shares 15,6 --only zero1,zero2,fsdp,tensor,sequence
	$(BIN)/uneven bench strategies --paired --pairs 60

# What needs a CUDA device; elsewhere all of it is skipped with the reason. Within 8 minutes on one GPU.
test-cuda: $(STAMP)
	$(BIN)/python -m pytest -m "cuda and not alone" -n 4
	$(BIN)/python -m pytest -m "cuda and alone"

# What needs other people's frameworks, with these in an environment of their own. Elsewhere it is skipped.
FRAMEWORKS := .venv-frameworks
EXTRAS := dev,diffusers,lightning,trl
WITH_FRAMEWORKS := tests/integrations tests/parallel/test_sharded_init.py tests/bench/models/test_large.py
WITH_FRAMEWORKS += tests/step/test_loss.py tests/step/test_token_mean.py tests/api/test_lora.py
test-frameworks: $(FRAMEWORKS)/.installed
	$(FRAMEWORKS)/bin/python -m pytest $(WITH_FRAMEWORKS)

$(FRAMEWORKS)/.installed: pyproject.toml constraints.txt constraints-frameworks.txt
	test -x $(FRAMEWORKS)/bin/python || $(PYTHON) -m venv $(FRAMEWORKS)
	cat constraints.txt constraints-frameworks.txt > $(FRAMEWORKS)/constraints.txt
	PIP_CONSTRAINT=$(FRAMEWORKS)/constraints.txt $(FRAMEWORKS)/bin/python -m pip install --disable-pip-version-check -q -e '.[$(EXTRAS)]'
	@touch $@

# Long repeats with upper time limits: killed, stopped and interrupted runs.
soak: $(STAMP)
	$(BIN)/python -m pytest -m soak -o timeout=900
	$(BIN)/python -m pytest -m 'hypothesis and not cuda' --hypothesis-profile soak

# Another torch brings what it needs itself in its own versions; everything else stays as it is pinned.
TORCHS := torch|filelock|fsspec|Jinja2|MarkupSafe|mpmath|networkx|sympy|typing_extensions
PIN := $(if $(TORCH),{ echo torch==$(TORCH); grep -vE '^($(TORCHS))==' constraints.txt; },cat constraints.txt)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"uneven needs Python 3.10 or newer, this is {sys.version.split()[0]}: make $(MAKECMDGOALS) PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIN) > $(VENV)/constraints.txt
	PIP_CONSTRAINT=$(VENV)/constraints.txt $(BIN)/python -m pip install --disable-pip-version-check -q -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv .venv-torch-* .venv-frameworks build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
