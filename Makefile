# One verb per need: `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo fmt lint types check assets test test-oldest test-torchrec test-kueue e2e newcomer hooks wheels sdists image chart sbom check-tag sign publish upload bench bench-network bench-operator docs reference site lock crds proto pod-fields

PYTHON ?= python3
BIN := .venv/bin
CODE := operator/src trainer_image/hatch_build.py trainer_image/src tests benchmarks examples tools

# The images that `make image` builds, and their base.
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' operator/src/fleet_operator/__init__.py)
OPERATOR_IMAGE ?= fleet-operator:$(VERSION)
TRAINER_IMAGE ?= fleet-trainer:$(VERSION)
BASE_IMAGE := $(or $(BASE_IMAGE),python:3.11-slim-bookworm)
CA_BUNDLE ?=
DOCKER ?= docker
COSIGN ?= cosign
COSIGN_FLAGS ?=

# Container images often set this, but here Python should keep its bytecode and not compile it in every process.
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

# $(call fill,FOLDER,LOCKS): a separate environment, with the packages in the locks and both distributions.
define fill
$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(1)
$(BIN)/uv pip sync --quiet --python $(1)/bin/python --compile-bytecode --require-hashes $(2)
$(BIN)/uv pip install --quiet --python $(1)/bin/python --no-deps --no-index --no-build-isolation \
  --editable operator --editable trainer_image
@touch $(1)/.installed
endef

# $(call alone,FOLDER,LOCK): a separate environment, with the packages in the lock only.
define alone
$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(1)
$(BIN)/uv pip sync --quiet --python $(1)/bin/python --compile-bytecode --require-hashes $(2)
@touch $(1)/.installed
endef

# The packages of the tests with other frameworks; the project itself does not need them.
.venv-frameworks/.installed: .venv/.installed tools/bootstrap.lock tests/frameworks.lock
	$(call fill,.venv-frameworks,tools/bootstrap.lock tests/frameworks.lock)

# The oldest packages that the two distributions support.
.venv-oldest/.installed: .venv/.installed tests/oldest.lock
	$(call fill,.venv-oldest,tests/oldest.lock)

# TorchRec needs the FBGEMM of its own version, which needs the torch it was built for; that of 1.4 is our oldest.
.venv-torchrec/.installed: .venv/.installed tools/bootstrap.lock tests/torchrec.lock
	$(call fill,.venv-torchrec,tools/bootstrap.lock tests/torchrec.lock)

# Kubeflow's compiler needs older packages than ours, and the site's builder none of ours.
.venv-kfp/.installed: .venv/.installed tests/kfp.lock
	$(call alone,.venv-kfp,tests/kfp.lock)

# Mermaid's script draws the site's diagrams. Its package is for a newer Python, of which nothing is run.
.venv-docs/.installed: .venv/.installed docs/requirements.lock docs/mermaid.lock
	$(BIN)/uv pip install --quiet --target .venv-docs/mermaid --python-version 3.12 --no-deps --require-hashes \
	  --requirements docs/mermaid.lock
	$(call alone,.venv-docs,docs/requirements.lock)

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

assets: setup  ## get the missing programs that the tests start: kube-apiserver, etcd, kwok, kubectl, helm, kind, actionlint
	$(BIN)/python -m tools.assets

# Many tests wait more than they compute, so four processes keep two cores busy.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 5 ? cores * 2 : 8)))
PARALLEL := --numprocesses $(WORKERS) --dist loadscope --no-loadscope-reorder --max-worker-restart 0

check: lint types  ## the first checks of a change, in two minutes: lint, types, and tests that start no programs
	$(BIN)/pytest tests/unit -m "not programs" --quiet $(PARALLEL) $(PYTEST_FLAGS)

# Without Go and the programs that it would build, the tests that need no cluster still run.
test: setup .venv-frameworks/.installed .venv-kfp/.installed .venv-docs/.installed  ## unit, runtime and control-plane tests, beside each other (WORKERS)
	$(BIN)/python -m tools.assets --without-go
	$(BIN)/pytest $(PARALLEL) $(PYTEST_FLAGS)

# Without the tests of wheels, generated code, frameworks, notebooks, reporters, TensorBoard, types, random bytes and
# logins: they need newer or more packages.
OLDEST := tests/unit/fleet tests/unit/fleet_operator tests/runtime --ignore=tests/runtime/wheels \
  --ignore=tests/runtime/recipes/test_frameworks.py --ignore=tests/unit/fleet/parameter_server/test_generated.py \
  --ignore-glob=*/test_reporters.py --ignore-glob=*/test_scalars.py --ignore-glob=*/test_login.py \
  --deselect=tests/runtime/examples/test_alone.py::test_a_notebook_trains_cell_by_cell \
  --deselect=tests/unit/fleet/test_any_bytes.py::test_no_bytes_end_a_reader_by_an_error_that_is_not_ours \
  --deselect=tests/unit/fleet/test_exported_members.py::test_type_checkers_find_mistakes_and_nothing_else

test-oldest: setup .venv-oldest/.installed  ## unit and runtime tests with the oldest packages that the distributions support
	.venv-oldest/bin/pytest $(OLDEST) $(PARALLEL) $(PYTEST_FLAGS)

test-torchrec: setup .venv-torchrec/.installed  ## TorchRec's DLRM with our tables, in an environment of its own
	$(BIN)/pytest tests/torchrec $(PYTEST_FLAGS)

# Kueue takes a quarter of an hour to build, so the usual tests skip what starts it.
test-kueue: setup assets  ## the operator beside a real Kueue and a real coscheduling scheduler
	$(BIN)/python -m tools.assets kueue coscheduling
	$(BIN)/pytest tests/controlplane/test_kueue.py tests/controlplane/test_coscheduling.py $(PYTEST_FLAGS)

e2e: setup assets  ## the examples on a Kubernetes cluster: that of KUBECONFIG, or else one that kind creates
	$(BIN)/pytest tests/e2e --verbose --capture=tee-sys $(PYTEST_FLAGS)

# Any verbs: make newcomer NEWCOMER="setup demo"
NEWCOMER ?= setup demo test

newcomer:  ## the first steps of a newcomer, in a container with git, make, Python, Go and no caches
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

docs: reference site  ## both: the generated pages of the documentation, and its site

reference: setup  ## write the generated pages of the documentation
	$(BIN)/python -m tools.reference

site: setup .venv-docs/.installed  ## build the site of the documentation into .build/site/html; warnings are errors
	$(BIN)/python -m tools.site
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

hooks: setup  ## make git run the checks before each commit and each push (.pre-commit-config.yaml)
	$(BIN)/pre-commit install

# --- wheels and images ----------------------------------------------------------------------------

# Where `make wheels` puts them.
WHEELS ?= dist

# auditwheel checks which system libraries the C code needs, and puts the oldest possible Linux into the file's name.
wheels: setup  ## build the wheels of both distributions, for machines of this kind (WHEELS)
	rm -f $(WHEELS)/fleet_*.whl
	for part in operator trainer_image; do \
	  (cd $$part && $(CURDIR)/$(BIN)/hatchling build --target wheel --directory $(abspath $(WHEELS))); \
	done
	for wheel in $$(find $(WHEELS) -name 'fleet_trainer-*-linux_*.whl'); do \
	  PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair --wheel-dir $(WHEELS) $$wheel && rm $$wheel; \
	done

sdists: setup  ## build the source distributions of both, which are compiled when they are installed (WHEELS)
	for part in operator trainer_image; do \
	  (cd $$part && $(CURDIR)/$(BIN)/hatchling build --target sdist --directory $(abspath $(WHEELS))); \
	done

# The build uses this machine's proxies and pip settings, if they are set.
build_args := $(foreach v,HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy PIP_INDEX_URL PIP_TRUSTED_HOST,$(if $(value $v),--build-arg $v))

# The maximum size of the operator's image, unpacked.
OPERATOR_MB ?= 150

image:  ## build the images operator and trainer (BASE_IMAGE, CA_BUNDLE)
	mkdir -p .build
	$(if $(CA_BUNDLE),cp $(CA_BUNDLE) .build/ca.crt,rm -f .build/ca.crt)
	export BASE_IMAGE=$(BASE_IMAGE) VERSION=$(VERSION); \
	REVISION=$$(git rev-parse HEAD 2>/dev/null || true) CREATED=$$(git log -1 --format=%cI 2>/dev/null || true); \
	export REVISION CREATED; \
	for target in operator=$(OPERATOR_IMAGE) trainer=$(TRAINER_IMAGE); do \
	  $(DOCKER) build --build-arg BASE_IMAGE --build-arg VERSION --build-arg REVISION --build-arg CREATED \
	    $(build_args) --target $${target%%=*} --tag $${target#*=} .; \
	done
	$(DOCKER) image inspect --format '{{.Size}}' $(OPERATOR_IMAGE) | awk '$$1 > $(OPERATOR_MB) * 1e6 { \
	  printf "the operator image has %d MB unpacked, expected at most %d (OPERATOR_MB): see tools/image/root.py\n", \
	    $$1 / 1e6, $(OPERATOR_MB) >"/dev/stderr"; exit 1 }'

# --- releases -------------------------------------------------------------------------------------

# An OCI registry and the path in it, such as registry.example.com/team.
REGISTRY ?=

chart: .venv/.uv  ## package the chart; with REGISTRY, to run the image from there (WHEELS, REGISTRY)
	rm -rf .build/chart && mkdir -p .build/chart && cp -r charts/fleet-operator .build/chart/
	$(if $(REGISTRY),sed -i 's|^  repository: .*|  repository: $(REGISTRY)/fleet-operator|' .build/chart/fleet-operator/values.yaml)
	helm=$$($(BIN)/python -m tools.assets --path helm); \
	  "$$helm/helm" package .build/chart/fleet-operator --destination $(abspath $(WHEELS))

sbom: setup  ## list the Python packages of each image in the CycloneDX format (WHEELS)
	mkdir -p $(WHEELS)
	for part in operator=operator trainer=trainer_image; do \
	  $(BIN)/cyclonedx-py requirements $${part#*=}/requirements.lock --pyproject $${part#*=}/pyproject.toml \
	    --output-reproducible --output-file $(WHEELS)/fleet-$${part%%=*}-$(VERSION).cdx.json; \
	done

check-tag:  ## fail unless TAG is the tag of this version
	@[ "$(TAG)" = "v$(VERSION)" ] || { \
	  echo "the tag is '$(TAG)', but the version in the packages is $(VERSION): tag v$(VERSION), or change the version" >&2; exit 1; }

sign:  ## sign the files in WHEELS by cosign (COSIGN_FLAGS)
	for file in $(WHEELS)/*.whl $(WHEELS)/*.tar.gz $(WHEELS)/*.tgz $(WHEELS)/*.cdx.json; do \
	  $(COSIGN) sign-blob --yes $(COSIGN_FLAGS) --bundle $$file.sigstore.json $$file; \
	done

publish: .venv/.uv  ## push the images and the chart to REGISTRY, sign them, and attach their SBOMs (COSIGN_FLAGS)
	helm=$$($(BIN)/python -m tools.assets --path helm); \
	  PATH="$$helm:$$PATH" DOCKER=$(DOCKER) COSIGN=$(COSIGN) COSIGN_FLAGS="$(COSIGN_FLAGS)" \
	  tools/release/publish.sh "$(REGISTRY)" $(VERSION) $(WHEELS) $(OPERATOR_IMAGE) $(TRAINER_IMAGE)

upload: .venv/.uv  ## upload the wheels and the source distributions to the Python index at UV_PUBLISH_URL
	$(BIN)/uv publish $(WHEELS)/*.whl $(WHEELS)/fleet_*.tar.gz

# --- what is generated and committed --------------------------------------------------------------

COMPILE := $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-header --python-version 3.11 $(LOCK_FLAGS)

# LOCK_FLAGS=--upgrade takes the newest packages; without it, a pin moves only if it must.
lock:  ## update the lock files for the requirements in the pyproject files
	$(COMPILE) --group dev operator/pyproject.toml trainer_image/pyproject.toml --all-extras -o requirements.lock
	$(COMPILE) --no-annotate -c requirements.lock operator/pyproject.toml -o operator/requirements.lock
	$(COMPILE) --no-annotate -c requirements.lock trainer_image/pyproject.toml --extra examples -o trainer_image/requirements.lock
	printf '%s\n' accelerate ipykernel lightning mlflow-skinny nbclient wandb | $(COMPILE) --no-annotate -c requirements.lock \
	  operator/pyproject.toml trainer_image/pyproject.toml - -o tests/frameworks.lock
	$(COMPILE) --no-annotate --resolution lowest-direct --group test operator/pyproject.toml trainer_image/pyproject.toml \
	  --extra plot --extra examples -o tests/oldest.lock
	printf '%s\n' torchrec==1.4.0 fbgemm-gpu-cpu==1.4.0 | $(COMPILE) --no-annotate -c tests/oldest.lock \
	  --override <(echo 'fbgemm-gpu; python_version < "0"') \
	  operator/pyproject.toml trainer_image/pyproject.toml - -o tests/torchrec.lock
	printf '%s\n' 'kfp>=2.17' | $(COMPILE) --no-annotate - -o tests/kfp.lock
	printf '%s\n' mkdocs-material 'mkdocstrings[python]' ruff | $(COMPILE) --no-annotate -c requirements.lock - -o docs/requirements.lock
	printf '%s\n' editables hatchling uv | $(COMPILE) --no-annotate -c requirements.lock - -o tools/bootstrap.lock

CRD := crds/fleetjobs.fleetjob.dev.yaml

crds: setup  ## generate the FleetJob definition from the models, for kubectl and for the chart
	$(BIN)/python -m fleet_operator.api.crd >$(CRD)
	cp $(CRD) charts/fleet-operator/files/

proto: setup  ## generate the control protocol's Python modules and their types
	$(BIN)/python -m tools.proto

pod-fields: setup assets  ## generate the fields of pods that `fleetjob validate` knows, from a real API server
	$(BIN)/python -m tools.pod_fields
