# `make demo` and `make test` make the environment they need; nothing else has to be set up.
#   PYTHON=python3.12   another interpreter (JAX picks the newest release that it has for it)
#   ORACLE=0            without torch and transformers; what needs them is then left out
#   AOT=1               with what compiles the GPU kernels for an H200 (Python 3.12; 240 MB)
#   WORKERS=2           how many processes share the tests; one core each
#   VENV=dir            another place for the environment
PYTHON ?= python3
VENV ?= .venv
ORACLE ?= 1
AOT ?= 0
WORKERS ?= 2

comma := ,
EXTRAS := test$(if $(filter 1,$(ORACLE)),$(comma)oracle)$(if $(filter 1,$(AOT)),$(comma)aot)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(ORACLE)-$(AOT)

.PHONY: demo test notebooks fuzz golden lint clean

demo: $(STAMP)
	$(BIN)/glm5-jax demo

# A file's tests stay in one process, which makes its fixtures once.
test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

# Runs every notebook; `--overwrite` in PYTEST_ADDOPTS keeps what they print.
notebooks: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --nbmake --nbmake-timeout=120 notebooks

# Two hundred random models against the oracle, where `make test` draws about twenty, and with the
# code that users run; on JAX 0.11 also the GPU kernels, interpreted, with every input at every size.
fuzz: $(STAMP)
	XLA_FLAGS= GLM5_JAX_FUZZ=200 $(BIN)/python -m pytest tests/oracle \
		tests/pallas_kernels/test_kda_mosaic.py tests/pallas_kernels/sparse_mla

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
