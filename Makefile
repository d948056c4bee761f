# `make demo` and `make test` make the environment they need; nothing else has to be set up.
#   PYTHON=python3.12   another interpreter (JAX picks the newest release that it has for it)
#   ORACLE=0            without torch and transformers; what needs them is then left out
#   VENV=dir            another place for the environment
PYTHON ?= python3
VENV ?= .venv
ORACLE ?= 1

comma := ,
EXTRAS := test$(if $(filter 1,$(ORACLE)),$(comma)oracle)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(ORACLE)

.PHONY: demo test fuzz golden lint clean

demo: $(STAMP)
	$(BIN)/glm5-jax demo

test: $(STAMP)
	$(BIN)/python -m pytest

# Two hundred random models against the oracle, where `make test` draws about twenty, and with the
# code that users run.
fuzz: $(STAMP)
	XLA_FLAGS= GLM5_JAX_FUZZ=200 $(BIN)/python -m pytest tests/oracle

# The golden vectors that tests compare with where the oracle is not installed.
golden: $(STAMP)
	$(BIN)/python tests/golden/generate.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	touch $@

clean:
	rm -rf $(VENV) demo
