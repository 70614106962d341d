# Each target makes the environment it needs; a second run finds it ready.
#
#   make demo          run the traced two-rank MLP (NPROC=4 for a 2-D mesh)
#   make test          run every test
#   make demo-mindspore, make test-mindspore
#                      the MLP, and the tests, on MindSpore, in an environment of its own
#   make platforms     test both platforms; writes docs/platforms.md
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
MS_VENV ?= .venv-mindspore
MS_BIN := $(MS_VENV)/bin
MS_READY := $(MS_VENV)/ready

.PHONY: demo test platforms demo-mindspore test-mindspore environment-mindspore opdb lint bench environment clean

demo: $(READY)
	$(BIN)/python -m hyper_parallel.demo --nproc $(NPROC) --json $(JSON)

test: $(READY)
	$(BIN)/python -m pytest

demo-mindspore: $(MS_READY)
	$(MS_BIN)/python -m hyper_parallel.demo_mindspore --json $(JSON)

test-mindspore: $(MS_READY)
	GLOG_v=3 $(MS_BIN)/python -m pytest tests/mindspore

# Both results stand in one folder; a test that fails is a "no" in the table.
platforms: $(READY) $(MS_READY)
	mkdir -p build/platforms
	-$(BIN)/python -m pytest -q --junitxml build/platforms/torch.xml tests/torch --ignore tests/torch/opdb
	-GLOG_v=3 $(MS_BIN)/python -m pytest -q --junitxml build/platforms/mindspore.xml tests/mindspore
	$(BIN)/python -m tests.mindspore.page build/platforms/torch.xml build/platforms/mindspore.xml \
		> build/platforms/platforms.md
	cp build/platforms/platforms.md docs/platforms.md

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

environment-mindspore: $(MS_READY)

clean:
	rm -rf $(VENV) $(MS_VENV)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[test]'
	touch $@

$(MS_READY): pyproject.toml tests/mindspore/constraints.txt
	$(PYTHON) -m venv $(MS_VENV)
	$(MS_BIN)/pip install --quiet --disable-pip-version-check \
		--constraint tests/mindspore/constraints.txt --editable '.[test-mindspore]'
	touch $@
