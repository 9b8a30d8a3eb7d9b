# Every target sets itself up: a virtual environment in .venv, installed from constraints.txt.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check bench bench-core soak clean

demo: $(STAMP)
	$(BIN)/uneven demo

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/uneven bench list

# The figures of the exact core on two cores (about 25 minutes; needs `uneven data get mnist` and shakespeare).
EFFICIENCY := $(BIN)/uneven bench efficiency
bench-core: $(STAMP)
	$(EFFICIENCY) --model lenet --batch-size 256 --policy balanced
	$(EFFICIENCY) --model lenet --batch-size 256 --policy torch-ddp
	$(EFFICIENCY) --model gpt-nano --batch-size 8 --policy balanced
	$(EFFICIENCY) --model gpt-nano --batch-size 8 --policy torch-ddp
	$(EFFICIENCY) --model gpt-nano --batch-size 32 --policy balanced
	UNEVEN_SLOW=spin $(EFFICIENCY) --model lenet --batch-size 256 --policy balanced
	$(EFFICIENCY) --model lenet --policy sync --devices cpu,cpu --against-ddp --half-width 0.02
	$(EFFICIENCY) --model mlp --policy sync --devices cpu,cpu --against-ddp --half-width 0.02
	$(EFFICIENCY) --model gpt-nano --batch-size 8 --policy sync --devices cpu,cpu --against-ddp --half-width 0.02

# Long repeats with upper time limits: killed, stopped and interrupted runs.
soak: $(STAMP)
	$(BIN)/python -m pytest -m soak -o timeout=900

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"uneven needs Python 3.10 or newer, this is {sys.version.split()[0]}: make $(MAKECMDGOALS) PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --disable-pip-version-check -q -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
