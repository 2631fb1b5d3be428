# make demo and make test set everything up by themselves, in .venv, once; a change of the requirements renews it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WATSON := $(VENV)/.watson
# one more than there are cores: tests of processes wait about as much as they compute
PROCESSES := $(shell expr $$(nproc) + 1)

.PHONY: demo test test-spark lint packages clean

demo: $(READY)
	@$(BIN)/tether demo
	@echo "to call tether in this shell: . $(BIN)/activate"

test: lint packages $(WATSON)
	@$(BIN)/python -m pytest -n $(PROCESSES) --dist worksteal -m 'not (spark or ray or slow)'
	@$(BIN)/python -m pytest -m '(spark or ray) and not slow'

test-spark: $(READY)
	@$(BIN)/python -m pytest -m spark

lint: $(READY)
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy

# the model checker, network namespaces, a browser, npm and PostgreSQL, where they can be installed; elsewhere their tests
# are skipped. An ssh server, which would listen from then on, only where CI is set
packages:
	@for needed in spin:spin tc:iproute2 gcc:gcc chromium:chromium npm:npm \
			pg_ctlcluster:postgresql $${CI:+sshd:openssh-server}; do \
		command -v $${needed%:*} > /dev/null || test "$$(id -u)" != 0 || ! command -v apt-get > /dev/null \
			|| apt-get install --yes -qq $${needed#*:} > /dev/null \
			|| echo "$${needed#*:} could not be installed; its tests are skipped"; \
	done

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $(READY)

# IBM's clients, for the tests of the service. The one for Python has an environment of its own: it needs an older
# python-dateutil than constraints.txt has, and its build an older setuptools
$(WATSON): $(READY) | packages
	@test -x $(VENV)/watson/bin/python || $(PYTHON) -m venv $(VENV)/watson
	@echo 'setuptools<81' > $(VENV)/watson/build-constraints.txt
	@PIP_CONSTRAINT=$(VENV)/watson/build-constraints.txt $(VENV)/watson/bin/pip install --quiet \
		--disable-pip-version-check ibm-watson==5.3.1 || echo "ibm-watson for Python could not be installed; its test fails"
	@! command -v npm > /dev/null || npm install --silent --no-audit --no-fund --prefix $(VENV)/node ibm-watson@6.2.2 \
		|| echo "ibm-watson for Node could not be installed; its test is skipped"
	@touch $(WATSON)

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
