# Every target sets up what it needs: a virtual environment in .venv with the pinned versions.
# Another interpreter:  make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Touched when the last installation went through; newer setup.cfg or pins install again.
STAMP := $(VENV)/installed.stamp

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow bench clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP)  ## train PPO on CartPole-v1 (a minute or two), evaluate it, draw runs/ppo_cartpole.png
	$(BIN)/python examples/ppo.py --env-id CartPole-v1 --curve runs/ppo_cartpole.png

test: $(STAMP)  ## the test suite without what is marked slow
	$(BIN)/python -m pytest

test-slow: $(STAMP)  ## the tests marked slow: the examples must learn (minutes)
	@# Exit status 5 is pytest's "nothing was collected", which is no failure here.
	$(BIN)/python -m pytest -m slow || [ $$? -eq 5 ]

bench: $(STAMP)  ## steps per second against a plain loop and gymnasium's Sync and Async
	$(BIN)/python benchmarks/throughput.py

clean:  ## remove the virtual environment, build leftovers and runs/
	rm -rf $(VENV) build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): setup.cfg setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "envrunner needs Python 3.10 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1 | head -n 1)" >&2; \
	  echo "Name another interpreter:  make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu it comes with: apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,plot,bench]'
	@touch $@
