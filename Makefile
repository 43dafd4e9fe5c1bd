# Every command of the repository. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
# python3.11 where there is one, else python3 (scripts/setup.sh refuses what is older than 3.11).
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# An extra package index for torch, for instance https://download.pytorch.org/whl/cpu: PyPI's own build
# for Linux brings several GB of CUDA libraries.
TORCH_INDEX ?=

# The prompt reaches the demo as an environment variable, never as program text: quotes, dollars and
# newlines in it are only characters. (Exported by make itself it would be expanded first.)
unexport PROMPT
export GALLEY_DEMO_PROMPT := $(value PROMPT)
export PYTHON VENV TORCH_INDEX
# Else each process would compile torch anew when it starts: 6 s of a core.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## print this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  \033[1m%-18s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ------------------------------------------------------------------------------------- environment --

.PHONY: setup setup-run venv-vllm
setup: ## make .venv with all that development needs (a second run is instant)
	@scripts/setup.sh dev

setup-run: ## make .venv with what running Galley needs, and no more
	@scripts/setup.sh all

venv-vllm: setup ## make .venv-vllm, in which vLLM runs on the CPU (2.3 GB; a second run is instant)
	@scripts/venv_vllm.sh

.PHONY: clean
clean: ## remove .venv and every cache
	rm -rf $(VENV) .venv-vllm .galley .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --------------------------------------------------------------------------------------------- run --

.PHONY: demo demo-living
demo: setup-run ## start the four processes, answer a prompt (PROMPT="..."), stop them
	@$(BIN)/galley demo

demo-living: setup ## train drafts on traffic that the shipped one does not know, and show how acceptance rises (half an hour)
	@$(BIN)/python -m bench.living.demo

# ------------------------------------------------------------------------------------ measurements --

# The revision that `make bench-loops` compares this tree with.
BASE ?=
# LONG=1 has `make bench-engines` run 7 pairs in place of 3.
LONG ?=
# Files of prompts in place of the fixed sets, with commas: of throughput, speculation, peers and engines.
PROMPTS ?=
PROMPT_FLAGS = $(if $(PROMPTS),--prompts "$(PROMPTS)")

.PHONY: bench-engine bench-loops bench-throughput bench-speculation bench-structured bench-slow-links
.PHONY: bench-sessions bench-gateway bench-telemetry bench-http bench-latency bench-peers bench-engines bench-same-tokens bench-acceptance
.PHONY: bench-quantization bench-living bench-gpu
bench-engine: setup ## measure a step of the target engine beside transformers and the roofline
	@$(BIN)/python -m bench.engine

bench-loops: setup ## compare this tree with an earlier revision: speed, CPU a token, start-up (BASE=REVISION)
	@$(BIN)/python -m bench.loops base --base "$(BASE)"

bench-throughput: setup ## measure 1 to 64 streams through the gateway, and the engine alone
	@$(BIN)/python -m bench.loops throughput $(PROMPT_FLAGS)

bench-speculation: setup ## measure what speculation gains and costs, 1 to 64 streams, and its acceptance
	@$(BIN)/python -m bench.loops speculation $(PROMPT_FLAGS)

bench-structured: setup ## measure schemas on extractions, predictions on edits, and what masks cost
	@set -e; for part in structured predicted masks; do $(BIN)/python -m bench.loops $$part; done

bench-slow-links: setup ## measure speculation with 20 ms each way before target and draft
	@$(BIN)/python -m bench.loops slow-links

bench-sessions: setup ## measure what the session store costs: throughput, latency, memory
	@$(BIN)/python -m bench.loops sessions

bench-telemetry: setup ## measure what traces and metrics cost at 16 streams: throughput, CPU a token
	@$(BIN)/python -m bench.loops telemetry

bench-gateway: setup ## measure the gateway alone: CPU a token at 10 to 2,000 streams, overload, telemetry, several gateways
	@$(BIN)/python -m bench.gateway

bench-http: setup ## measure HTTP beside gRPC at 1, 16 and 64 streams: the gateway's CPU a token, time to first token
	@$(BIN)/python -m bench.loops http

bench-latency: setup ## measure time to first token and between tokens, beside vLLM if make venv-vllm was run
	@$(BIN)/python -m bench.loops latency

bench-peers: setup venv-vllm ## measure Galley beside vLLM on the CPU
	@$(BIN)/python -m bench.loops peers $(PROMPT_FLAGS)

bench-engines: setup venv-vllm ## measure the engines, alone and behind the gateway, beside vLLM
	@$(BIN)/python -m bench.loops engines $(if $(LONG),--pairs 7) $(PROMPT_FLAGS)

bench-same-tokens: setup venv-vllm ## measure how often drafts and company change a token, beside vLLM's own rate
	@$(BIN)/python -m bench.peers.same_tokens

bench-acceptance: setup ## measure acceptance of chains, lists and trees beside what the distributions say
	@$(BIN)/python -m bench.acceptance

bench-quantization: setup ## measure what int8 weights cost in perplexity and greedy tokens, and gain in time
	@$(BIN)/python -m bench.quantization

bench-living: setup ## measure what audits, canaries and swaps of draft weights cost running streams
	@$(BIN)/python -m bench.living.costs

bench-gpu: setup ## measure a step on a CUDA device, and how often a batch changes a token there
	@$(BIN)/python -m bench.gpu

# ------------------------------------------------------------------------------------- long proofs --

# The number of schedules that `make simulate` runs, the seed of the first, and its processes (those of `make mutate` too).
SCHEDULES ?= 200000
SEED ?= 1
WORKERS ?= 2
# 1: add schedules to the record of an earlier `make simulate` until it has SCHEDULES.
CONTINUE ?=
# How long `make soak` keeps the load up.
MINUTES ?= 30
# The number of mutants that `make mutate` draws with SEED; 0: all. ONLY: the begin of their keys.
MUTANTS ?= 300
ONLY ?=
# The engine of the targets of `make chaos`: paged or vllm.
ENGINE ?= paged
# The protocol of the second principal of `make prove-attacks`: grpc or http.
PROTOCOL ?= grpc

.PHONY: prove-noise prove-drafting prove-tokens prove-structured prove-engine prove-vllm prove-ray prove-ownership prove-audits prove-attacks prove-http
.PHONY: prove-living prove-shared-answers prove-load-tools prove-boot prove-cluster prove-images prove-scale simulate chaos soak mutate mutate-known
prove-noise: setup ## prove that no noise value is infinite or NaN over 10^8 words
	@$(BIN)/python -m bench.prove_noise

prove-drafting: setup ## prove that AUTO keeps up with the best fixed k, on virtual time
	@$(BIN)/python -m bench.prove_drafting

prove-shared-answers: setup ## prove that drafts that replace killed ones propose as those did
	@$(BIN)/python -m bench.prove_shared_answers

prove-tokens: setup ## prove that tokens are those of transformers, whatever the draft and k
	@$(BIN)/python -m bench.prove_tokens

prove-structured: setup venv-vllm ## prove that structured answers have their form, and the same tokens whatever the draft, k and failures (3,000 answers)
	@$(BIN)/python -m bench.prove_structured

prove-engine: setup ## prove that tokens and logits stay the same over 10^4 fuzzed steps of the engine
	@$(BIN)/python -m bench.prove_engine

prove-vllm: setup venv-vllm ## prove that tokens on vLLM are the model's own: several ranks, the default model, 10,000 random schedules
	@.venv-vllm/bin/python -m pytest -m "vllm and proof" tests/integration/services/target
	@$(BIN)/python -m bench.prove_vllm

prove-ray: setup ## prove that streams survive a killed rank and fewer replicas, and that no process outlives Ray's head
	@$(BIN)/python -m bench.prove_ray

prove-ownership: setup ## let two gateways claim one session at once, 1,000 times; prove that one at a time extends its log
	@$(BIN)/python -m bench.prove_ownership

prove-audits: setup ## plant 20 faults, then audit a million tokens; prove that audits find each, and nothing else
	@$(BIN)/python -m bench.prove_audits

prove-living: setup ## 10,000 sessions whose workloads drift, drafts that learn, three bad ones; prove that no token differs and bad drafts go back
	@$(BIN)/python -m bench.living.prove

prove-attacks: setup ## send 200,000 fuzzed messages, floods, storms and idle streams; prove that nothing crashes, leaks or delays others (PROTOCOL)
	@$(BIN)/python -m bench.prove_attacks --protocol $(PROTOCOL)

prove-http: setup ## send 2,000 cases made from the gateway's OpenAPI description; prove that all responses keep to it
	@$(BIN)/python -m bench.prove_http

prove-load-tools: setup ## run guidellm and aiperf against a stack; prove that no request fails (environments of 1 GB)
	@$(BIN)/python -m bench.prove_load_tools

prove-boot: setup helm ## run the chart as pods: boots, rolls, kills and hangs under load (root, nft, ip, crun)
	@$(BIN)/python -m pytest tests/proofs/boot
	@$(BIN)/python -m tests.proofs.boot

# A context of your kubeconfig for `make prove-cluster`, and the registry of the images that its nodes pull.
CONTEXT ?=
REGISTRY ?=

prove-cluster: setup helm ## install, test, upgrade, scale, kill and uninstall the chart on an API server (CONTEXT, REGISTRY; or kind; or KUBEBUILDER_ASSETS)
	@$(BIN)/python -m tests.proofs.cluster --context "$(CONTEXT)" --registry "$(REGISTRY)"

prove-images: setup ## build the images without a daemon, check their contents, and serve with them (Debian, root)
	@$(BIN)/python -m bench.prove_images

prove-scale: setup ## run 100,000 answers over 100 gateways, 20 drafts and 50 targets on virtual time; compare with galley plan
	@$(BIN)/python -m tests.simulation.scale.run

simulate: setup ## run 200,000 schedules of faults on virtual time (SCHEDULES, SEED, WORKERS, CONTINUE)
	@$(BIN)/python -m tests.simulation.run --schedules $(SCHEDULES) --seed $(SEED) --workers $(WORKERS) $(if $(CONTINUE),--continue)

chaos: setup $(if $(filter vllm,$(ENGINE)),venv-vllm) ## disturb processes, links and the store under 16 streams, with 700 kills and 300 cuts; no token may be lost or doubled (ENGINE)
	@$(BIN)/python -m tests.chaos.run --engine "$(ENGINE)"

mutate: setup ## run the tests against a sample of mutants of core and gateway; list those that no test notices (MUTANTS, SEED, WORKERS, ONLY)
	@$(BIN)/python -m tests.mutation.run --mutants $(MUTANTS) --seed $(SEED) --workers $(WORKERS) --only "$(ONLY)"

mutate-known: setup ## put each defect of tests/mutation/known.toml into a copy; prove that its test fails
	@$(BIN)/python -m tests.mutation.known

soak: setup ## keep the highest sustained load for half an hour, then overload, then look for leaks (MINUTES)
	@$(BIN)/python -m bench.soak --minutes $(MINUTES)

# ------------------------------------------------------------------------------------------ images --

# For `make images`: cpu or cuda, and the images. Draft and gateway take the tokenizer from the target's image.
DEVICE ?= cpu
ROLES ?= target,draft,gateway
# For `make locks`: the wheels of torch's CPU build for x86-64 and arm64, needed once constraints.txt names another version.
TORCH_WHEEL ?=

.PHONY: images locks sbom audit release-dry
images: setup ## build the images with buildah, without a daemon, or print what is missing (Debian, root; DEVICE, ROLES)
	@$(BIN)/python -m scripts.images --device $(DEVICE) --roles $(ROLES)

locks: setup ## write the images' requirements anew, pinned and hashed (TORCH_WHEEL)
	@scripts/locks.sh deploy/locks $(TORCH_WHEEL)

sbom: setup ## write what each lock installs, as CycloneDX, into build/sbom
	@mkdir -p build/sbom
	@for lock in deploy/locks/*.txt; do PYTHONWARNINGS=ignore $(BIN)/cyclonedx-py requirements --pyproject pyproject.toml \
		--output-reproducible --output-file "build/sbom/$$(basename "$$lock" .txt).cdx.json" "$$lock"; done

audit: setup ## look for known vulnerabilities in what the locks install; fail if a package cannot be looked up
	@mkdir -p build
	@for lock in deploy/locks/*.txt; do sed 's/+cpu / /' "$$lock" >build/audit.txt; \
		$(BIN)/pip-audit --strict --no-deps --disable-pip --requirement build/audit.txt; done

release-dry: helm ## run all of a release that needs no registry: wheel, locks, SBOM, chart, checks of workflow and images (TAG)
	@scripts/release/dry.sh

# ------------------------------------------------------------------------------------------- check --

# How many processes run the tests; a file's tests stay together. Most integration tests wait a part of their time.
TEST_WORKERS ?= 3

.PHONY: test clients vllm-packages unit integration vllm e2e
# Each of the processes would otherwise start as many threads as there are cores.
unit integration vllm e2e: export OMP_NUM_THREADS := 1
test: helm ## run all that CI runs
	@$(MAKE) --jobs 2 --output-sync lint check-generated helm-lint unit clients vllm-packages
	@$(MAKE) integration vllm e2e

clients: setup ## install the clients of other people that tests call the HTTP API with (600 MB in .galley)
	@scripts/clients.sh

vllm-packages: setup
	@scripts/venv_vllm.sh || [[ $$? == 3 ]]

unit: setup ## run the tests in memory: no sockets, no model (under a minute)
	@echo "== unit tests"
	@$(BIN)/python -m pytest -n $(TEST_WORKERS) -m "not vllm" tests/unit

integration: helm clients ## run the tests of real servers and processes with tiny models, and of chart and repository
	@echo "== integration tests"
	@scripts/run_tests.sh $(BIN)/python integration -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder \
		-m "not vllm" \
		tests/integration tests/simulation tests/attack tests/deploy tests/repo

vllm: vllm-packages ## run the tests that need vLLM, in .venv-vllm; they are skipped where its packages cannot be had
	@echo "== tests with vLLM"
	@python=.venv-vllm/bin/python; [[ -x $$python ]] || python=$(BIN)/python; \
		scripts/run_tests.sh "$$python" vllm -n 2 --dist loadfile -m "vllm and not proof" tests/integration/services/target

e2e: setup ## run the tests of whole stacks, with the default model, and while their parts fail
	@echo "== end-to-end tests"
	@scripts/run_tests.sh $(BIN)/python e2e -n 2 --dist loadfile tests/e2e tests/chaos

# The checks of bandit that ruff's rules S lack.
BANDIT := B613,B614,B615,B703

.PHONY: lint
lint: setup ## check style, types, imports between packages, words and the proto file
	@echo "== ruff"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@echo "== bandit, hadolint"
	@$(BIN)/bandit --quiet --recursive --tests $(BANDIT) galley services scripts bench
	@$(BIN)/hadolint services/*/Dockerfile
	@echo "== mypy"
	@$(BIN)/mypy
	@echo "== import walls"
	@$(BIN)/lint-imports
	@echo "== words"
	@$(BIN)/python scripts/words.py
	@echo "== buf"
	@$(BIN)/buf lint

.PHONY: helm helm-lint checkov
helm: setup
	@scripts/get_helm.sh

helm-lint: helm ## lint the chart
	@echo "== helm lint"
	@$(BIN)/helm lint --strict --quiet helm/galley $(foreach values,$(wildcard helm/galley/examples/*.yaml),\
		&& $(BIN)/helm lint --strict --quiet helm/galley --values $(values))

checkov: helm ## run checkov on what the chart renders (makes an environment of 300 MB for it)
	@scripts/checkov.sh

# --------------------------------------------------------------------------------- generated files --

.PHONY: proto manifests chart-schema chart-readme metrics configuration monitoring trace-picture top-picture page-picture dashboard-pictures check-generated
proto: setup ## write the stubs in galley/pb anew
	@scripts/proto.sh .

manifests: helm ## render deploy/k8s from the chart
	@$(BIN)/python scripts/manifests.py deploy/k8s

chart-schema: setup ## write the services' settings into the chart's schema
	@$(BIN)/python -m scripts.chart_schema helm/galley/values.schema.json

chart-readme: setup ## write the table of the chart's values into its README anew
	@$(BIN)/python -m scripts.chart_readme helm/galley/README.md

trace-picture: setup ## draw docs/images/trace.png from the committed sample of a trace (needs chromium)
	@$(BIN)/python -m tests.unit.galley.trace.picture

page-picture: setup ## draw docs/images/page.png anew: the page of a stack with the default model (needs chromium)
	@$(BIN)/python -m tests.e2e.page_picture

dashboard-pictures: setup ## draw docs/images/dashboard-*.png anew, from a stack and a Prometheus (2 minutes)
	@$(BIN)/python -m tests.e2e.dashboard_pictures

top-picture: setup ## draw docs/images/top.svg anew, from the sample in tests/unit/galley/top/recording
	@$(BIN)/python -m tests.unit.galley.top.picture

metrics: setup ## write the tables of metrics into docs/observe/metrics.md anew
	@$(BIN)/python -m scripts.metrics_table docs/observe/metrics.md

configuration: setup ## write the tables of settings into docs/configuration.md anew
	@$(BIN)/python -m scripts.configuration_page docs/configuration.md

monitoring: helm ## write the dashboards of the chart, and its rules for Prometheus outside Kubernetes, anew
	@$(BIN)/python -m scripts.monitoring helm/galley/files/dashboards deploy/prometheus

check-generated: helm ## fail if committed stubs, manifests, schema, tables, dashboards or locks are out of date
	@echo "== generated files"
	@scripts/check_generated.sh
