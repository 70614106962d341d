# Each target makes the environment it needs; a second run finds it ready.
#
#   make demo          run the traced two-rank MLP (NPROC=4 for a 2-D mesh)
#   make test          run every test
#   make lint          pylint, which must give 10/10
#   make bench         measure against torch's DTensor and hand-written code
#   make environment   only make the environment
#   make clean         remove it

VENV ?= .venv
PYTHON ?= python3
NPROC ?= 2
JSON ?= comm_mode_log.json
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test lint bench environment clean

demo: $(READY)
	$(BIN)/python -m hyper_parallel.demo --nproc $(NPROC) --json $(JSON)

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/pylint --recursive=y hyper_parallel tests benchmarks

bench: $(READY)
	$(BIN)/python -m benchmarks

environment: $(READY)

clean:
	rm -rf $(VENV)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[test]'
	touch $@
