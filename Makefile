# Everything runs in a virtual environment of its own; nothing outside this folder is changed but the model cache.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test quality style clean

demo: $(READY)  ## set up from nothing, write an answer, compare plain with tree decoding
	$(BIN)/bastion models fetch smollm2-135m
	$(BIN)/bastion demo

test: $(READY)  ## set up from nothing, and pass the tests; those of the embedded model skip where it cannot be fetched
	-$(BIN)/bastion models fetch smollm2-135m
	$(BIN)/python -m pytest $(PYTEST_ARGS)

quality: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

style: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e ".[dev]"
	touch $@
