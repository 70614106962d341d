# Each target makes the environment it needs; a second run finds it ready.
#
#   make demo          run the traced two-rank MLP (NPROC=4 for a 2-D mesh)
#   make test          run every test
#   make opdb          PyTorch's operator database on both libraries; writes docs/operators.md
#   make lint          pylint, which must give 10/10
#   make bench         measure against torch's DTensor and hand-written code
#   make environment   only make the environment
#   make clean         remove it

VENV ?= .venv
PYTHON ?= python3
NPROC ?= 2
JSON ?= comm_mode_log.json
OPDB ?= build/opdb
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test opdb lint bench environment clean

demo: $(READY)
	$(BIN)/python -m hyper_parallel.demo --nproc $(NPROC) --json $(JSON)

test: $(READY)
	$(BIN)/python -m pytest

opdb: $(READY)
	mkdir -p $(OPDB)
	$(BIN)/python -W ignore -m tests.torch.opdb --json $(OPDB)/ours.json
	-$(BIN)/python -W ignore -m tests.torch.opdb --baseline --json $(OPDB)/torch.json
	$(BIN)/python -W ignore -m tests.torch.opdb.page $(OPDB)/ours.json $(OPDB)/torch.json \
		> $(OPDB)/operators.md
	cp $(OPDB)/operators.md docs/operators.md

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
