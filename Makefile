# The same commands for people and for CI.
PYTHON ?= python3
BIN := .venv/bin
# pytest rewrites every test file, in each of its processes, unless it may keep what it made of it.
UNIT := PYTHONDONTWRITEBYTECODE= PYTHONHASHSEED=0 $(BIN)/pytest -n 4 --dist loadfile
export PYTHON

.PHONY: install demo test test-unit soak check fmt bench-cpu docs docs-adapt docs-batching docs-bench \
	docs-bench-tools docs-reproduction docs-search docs-search-suite docs-validation model accuracy random-models clean

install: .venv/cpu  ## the virtual environment with the CPU engines
	@$(BIN)/easerve --version

.venv/cpu: pyproject.toml scripts/install
	scripts/install cpu,dev
	@touch .venv/cpu .venv/dev

# Enough for unit tests and checks; no vLLM, no torch.
.venv/dev: pyproject.toml scripts/install
	scripts/install dev
	@touch .venv/dev

demo: .venv/cpu  ## E, P and D on this CPU answer a question about a picture
	@$(BIN)/easerve demo

test: .venv/cpu  ## every test, with real engines
	$(UNIT) -m "not engines" --cov --cov-report=term
	$(BIN)/pytest -m engines

test-unit: .venv/dev  ## what needs no engine and is not long
	$(UNIT) -m "not engines and not long"

MINUTES ?= 30
soak: .venv/cpu  ## load with offload for MINUTES=30: nothing fails, answers right, nothing grows
	$(BIN)/python -m tests.real.soak --minutes $(MINUTES)

check: .venv/dev  ## lint, format, types, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --cache-dir .import_linter_cache

fmt: .venv/dev  ## put the code in form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: .venv/dev  ## what is generated from the code
	@mkdir -p build
	$(BIN)/python scripts/lifecycle_diagram.py
	$(BIN)/python -m scripts.costs_tables > build/costs-tables.md
	mv build/costs-tables.md docs/costs-tables.md

# A torchvision that does not fit torch needs the fixes that the engines get.
WITH_FIXES := PYTHONPATH=src/easerve/engines/vllm/site

docs-batching: .venv/dev  ## docs/batching-tables.md: the batching rules in virtual time (minutes)
	@mkdir -p build
	$(BIN)/python -m scripts.batching_tables > build/batching-tables.md
	mv build/batching-tables.md docs/batching-tables.md

docs-adapt: .venv/dev  ## docs/adapt-tables.md: adapt on and off under loads that drift, in virtual time (minutes)
	@mkdir -p build
	$(BIN)/python -m scripts.adapt_tables > build/adapt-tables.md
	mv build/adapt-tables.md docs/adapt-tables.md

SEARCHED := llava-34b-rtx6000ada qwen2.5-vl-32b-rtx6000ada ultravox-27b-rtx6000ada
GRID := --space paper --set workload.num_requests=300 --seeds 1,2,3 --compare --storage build/search.db
docs-search: .venv/dev  ## docs/search-results.md: every configuration tried, and the methods in that (half an hour)
	@mkdir -p build
	for name in $(SEARCHED); do \
		$(BIN)/easerve search scenarios/$$name.yaml $(GRID) --json > build/search-$$name.json || exit 1; done
	$(BIN)/python -m scripts.bench_page $(SEARCHED:%=build/search-%.json) docs/search-results.md

docs-search-suite: .venv/dev  ## docs/search-suite.json: goodput of allocations by share, which pruning is tested with
	$(BIN)/python -m scripts.search_suite

docs-reproduction: .venv/dev  ## docs/reproduction.md: the published experiments in virtual time (minutes)
	$(BIN)/easerve reproduce

docs-validation: .venv/cpu  ## docs/validation.md: simulated beside served, on this CPU (minutes, nothing else running)
	@mkdir -p build
	$(BIN)/easerve bench twin --rates 2,5,10,20,30 --requests 200 --rounds 2 --json > build/twin.json
	$(BIN)/python -m scripts.validation_table build/twin.json docs/validation.md

ROUNDS ?= 3
bench-cpu: .venv/cpu  ## plain vLLM, a passthrough proxy and EAServe on this CPU (17 minutes, nothing else running)
	@mkdir -p build
	$(BIN)/easerve bench cpu --rounds $(ROUNDS) --out build/bench-cpu.json --html build/bench-cpu.html

ROUTER ?= vllm-router
docs-bench: bench-cpu  ## docs/bench-results.md: what benches find on this CPU (40 minutes with ROUNDS=6; ROUTER=vLLM's router)
	$(BIN)/easerve bench control --router $(ROUTER) --json > build/control.json
	$(BIN)/python -m scripts.bench_page build/bench-cpu.json build/control.json docs/bench-results.md

AIPERF ?= aiperf
docs-bench-tools: .venv/cpu  ## docs/bench-tools.md: three benches ask one server (10 minutes; AIPERF=the executable)
	$(BIN)/python -m scripts.bench_tools --aiperf $(AIPERF) docs/bench-tools.md

model: .venv/cpu  ## train the tiny model anew, into build/tiny-llava
	$(WITH_FIXES) $(BIN)/python -m scripts.tiny_llava.train build/tiny-llava

accuracy: .venv/cpu  ## how often the tiny model is right
	$(WITH_FIXES) $(BIN)/python -m scripts.tiny_llava.accuracy

random-models: .venv/cpu  ## LLaVA-NeXT, Pixtral and Mistral 3 with random weights, into models/
	$(WITH_FIXES) $(BIN)/python -m scripts.random_models next pixtral mistral3

clean:  ## remove the virtual environment and caches
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
