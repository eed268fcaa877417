# One verb per need: `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo fmt lint types check assets test test-oldest test-torchrec e2e newcomer wheels image bench bench-network bench-operator docs lock crds proto pod-fields

PYTHON ?= python3
BIN := .venv/bin
CODE := operator/src trainer_image/hatch_build.py trainer_image/src tests benchmarks examples tools

# What `make image` builds, and on what.
VERSION := 0.1.0
OPERATOR_IMAGE ?= fleet-operator:$(VERSION)
TRAINER_IMAGE ?= fleet-trainer:$(VERSION)
BASE_IMAGE ?= python:3.11-slim-bookworm
CA_BUNDLE ?=
DOCKER ?= docker

# What Python has compiled once it need not compile in every process, whatever an image says for its own sake.
unexport PYTHONDONTWRITEBYTECODE

help:  ## list the verbs
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 8

# --- the environment ------------------------------------------------------------------------------

setup: .venv/.installed  ## make .venv: uv, every locked package, both distributions editable

# uv comes by pip, pinned by hash; uv installs the rest, pinned by hash too.
.venv/.uv: tools/bootstrap.lock
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "$(PYTHON) is not Python 3.11 or newer with venv ($$($(PYTHON) --version 2>&1)):" \
	    "install it (Debian: python3-venv), or name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r tools/bootstrap.lock
	@touch $@

.venv/.packages: .venv/.uv requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --require-hashes -r requirements.lock
	@touch $@

COMPILED := trainer_image/hatch_build.py $(wildcard trainer_image/src/fleet/tables/kernels/*.c)

.venv/.installed: .venv/.packages operator/pyproject.toml trainer_image/pyproject.toml $(COMPILED)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-index --no-build-isolation \
	  --editable operator --editable trainer_image
	@touch $@

# $(call fill,FOLDER,LOCKS): an environment of its own, with what the locks name, and both distributions.
define fill
$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(1)
$(BIN)/uv pip sync --quiet --python $(1)/bin/python --compile-bytecode --require-hashes $(2)
$(BIN)/uv pip install --quiet --python $(1)/bin/python --no-deps --no-index --no-build-isolation \
  --editable operator --editable trainer_image
@touch $(1)/.installed
endef

# What the tests of other frameworks train with; no part of the project asks for it.
.venv-frameworks/.installed: .venv/.installed tools/bootstrap.lock tests/frameworks.lock
	$(call fill,.venv-frameworks,tools/bootstrap.lock tests/frameworks.lock)

# The oldest packages that the two distributions take.
.venv-oldest/.installed: .venv/.installed tests/oldest.lock
	$(call fill,.venv-oldest,tests/oldest.lock)

# TorchRec wants the FBGEMM of its version, and that the torch that it was built for: 1.4 the oldest that we take.
.venv-torchrec/.installed: .venv/.installed tools/bootstrap.lock tests/torchrec.lock
	$(call fill,.venv-torchrec,tools/bootstrap.lock tests/torchrec.lock)

# --- daily work -----------------------------------------------------------------------------------

demo: setup  ## train the digits example on this machine: 2 parameter servers, 2 trainers
	$(BIN)/fleetjob run -f examples/digits/fleetjob.yaml

fmt: setup  ## format the code
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

lint: setup  ## ruff, its formatting, and the contracts of the imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup  ## mypy --strict
	$(BIN)/mypy $(CODE)

assets: setup  ## get what the tests start and is not there: kube-apiserver, etcd, kwok, kubectl, helm, kind
	$(BIN)/python -m tools.assets

# Many tests wait more than they compute, so that three processes keep two cores busy.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 5 ? cores * 3 / 2 : 8)))
PARALLEL := --numprocesses $(WORKERS) --dist loadscope --no-loadscope-reorder

check: lint types  ## what a change needs first, in two minutes: lint, types, and the tests that start no programs
	$(BIN)/pytest tests/unit -m "not programs" --quiet $(PARALLEL) $(PYTEST_FLAGS)

test: setup assets .venv-frameworks/.installed  ## unit, runtime and control-plane tests, beside each other (WORKERS)
	$(BIN)/pytest $(PARALLEL) $(PYTEST_FLAGS)

# Not the tests of wheels, generated code, other frameworks, TensorBoard and logins, which want newer packages or more.
OLDEST := tests/unit/fleet tests/unit/fleet_operator tests/runtime --ignore=tests/runtime/wheels \
  --ignore=tests/runtime/recipes/test_frameworks.py --ignore=tests/unit/fleet/parameter_server/test_generated.py \
  --ignore-glob=*/test_scalars.py --ignore-glob=*/test_login.py

test-oldest: setup .venv-oldest/.installed  ## unit and runtime tests with the oldest packages that the distributions take
	.venv-oldest/bin/pytest $(OLDEST) $(PARALLEL) $(PYTEST_FLAGS)

test-torchrec: setup .venv-torchrec/.installed  ## TorchRec's DLRM with our tables, in an environment of its own
	$(BIN)/pytest tests/torchrec $(PYTEST_FLAGS)

e2e: setup assets  ## the same jobs on a Kubernetes cluster: KUBECONFIG, else one made by kind
	$(BIN)/pytest tests/e2e --verbose --capture=tee-sys $(PYTEST_FLAGS)

# Any verbs: make newcomer NEWCOMER="setup demo"
NEWCOMER ?= setup demo test

newcomer:  ## the first verbs of somebody new, in a container with git, make, Python, Go and no caches
	BASE_IMAGE=$(BASE_IMAGE) CA_BUNDLE=$(CA_BUNDLE) DOCKER=$(DOCKER) tools/newcomer/run.sh $(NEWCOMER)

bench: setup  ## dense synchronous and collective training beside DDP, torch rpc and grpcio: speed, latency, memory
	$(BIN)/python -m benchmarks.dense_sync
	$(BIN)/python -m benchmarks.dense_latency
	$(BIN)/python -m benchmarks.dense_memory
	$(BIN)/python -m benchmarks.collective

bench-network: setup  ## dense training over links that are the limit, beside DDP: root, iproute2 (BENCH_FLAGS)
	$(BIN)/python -m benchmarks.dense_network $(BENCH_FLAGS)

bench-operator: setup assets  ## the operator beside a bare client on a control plane of this machine (BENCH_FLAGS)
	$(BIN)/python -m benchmarks.operator $(BENCH_FLAGS)

docs: setup  ## write the generated pages of the documentation
	$(BIN)/python -m tools.reference

# --- wheels and images ----------------------------------------------------------------------------

# Where `make wheels` puts them.
WHEELS ?= dist

wheels: setup  ## build the wheels of both distributions, for machines of this kind (WHEELS)
	for part in operator trainer_image; do \
	  (cd $$part && $(CURDIR)/$(BIN)/hatchling build --target wheel --directory $(abspath $(WHEELS))); \
	done

# Proxies and pip's settings of this machine serve the build too, where they are set.
build_args := $(foreach v,HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy PIP_INDEX_URL PIP_TRUSTED_HOST,$(if $(value $v),--build-arg $v))

image:  ## build the images operator and trainer (BASE_IMAGE, CA_BUNDLE)
	mkdir -p .build
	$(if $(CA_BUNDLE),cp $(CA_BUNDLE) .build/ca.crt,rm -f .build/ca.crt)
	export BASE_IMAGE=$(BASE_IMAGE); \
	for target in operator=$(OPERATOR_IMAGE) trainer=$(TRAINER_IMAGE); do \
	  $(DOCKER) build --build-arg BASE_IMAGE $(build_args) --target $${target%%=*} --tag $${target#*=} .; \
	done

# --- what is generated and committed --------------------------------------------------------------

COMPILE := $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-header --python-version 3.11

lock:  ## bring the lock files up to what the pyproject files ask for
	$(COMPILE) --group dev operator/pyproject.toml trainer_image/pyproject.toml --all-extras -o requirements.lock
	$(COMPILE) --no-annotate -c requirements.lock operator/pyproject.toml -o operator/requirements.lock
	$(COMPILE) --no-annotate -c requirements.lock trainer_image/pyproject.toml --extra examples -o trainer_image/requirements.lock
	printf '%s\n' accelerate lightning | $(COMPILE) --no-annotate -c requirements.lock \
	  operator/pyproject.toml trainer_image/pyproject.toml - -o tests/frameworks.lock
	$(COMPILE) --no-annotate --resolution lowest-direct --group test operator/pyproject.toml trainer_image/pyproject.toml \
	  --extra plot --extra examples -o tests/oldest.lock
	printf '%s\n' torchrec==1.4.0 fbgemm-gpu-cpu==1.4.0 | $(COMPILE) --no-annotate -c tests/oldest.lock \
	  --override <(echo 'fbgemm-gpu; python_version < "0"') \
	  operator/pyproject.toml trainer_image/pyproject.toml - -o tests/torchrec.lock
	printf '%s\n' editables hatchling uv | $(COMPILE) --no-annotate -c requirements.lock - -o tools/bootstrap.lock

CRD := crds/fleetjobs.fleetjob.dev.yaml

crds: setup  ## generate the FleetJob definition from the models, for kubectl and for the chart
	$(BIN)/python -m fleet_operator.api.crd >$(CRD)
	cp $(CRD) charts/fleet-operator/files/

proto: setup  ## generate the control protocol's Python modules and their types
	$(BIN)/python -m tools.proto

pod-fields: setup assets  ## generate the fields of pods that `fleetjob validate` knows, from a real API server
	$(BIN)/python -m tools.pod_fields
