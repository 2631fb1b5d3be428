# make demo and make test set everything up by themselves, in .venv, once; a change of the requirements renews it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-spark lint packages clean

demo: $(READY)
	@$(BIN)/tether demo
	@echo "to call tether in this shell: . $(BIN)/activate"

test: lint packages
	@$(BIN)/python -m pytest -n auto --dist worksteal -m 'not (spark or slow)'
	@$(BIN)/python -m pytest -m 'spark and not slow'

test-spark: $(READY)
	@$(BIN)/python -m pytest -m spark

lint: $(READY)
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy

# the model checker and network namespaces, where they can be installed; elsewhere their tests are skipped
packages:
	@(command -v spin && command -v tc) > /dev/null || test "$$(id -u)" != 0 || ! command -v apt-get > /dev/null \
		|| apt-get install --yes -qq spin gcc iproute2 > /dev/null \
		|| echo "spin, gcc and iproute2 could not be installed; their tests are skipped"

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $(READY)

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
