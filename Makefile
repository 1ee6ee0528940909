# Everything a person types here. `make help` lists it.
SGLANG_VERSIONS := 0.5.16 0.5.23
# Supported releases between: each stands in front of the oldest one's environment, one at a time.
BETWEEN := 0.5.17 0.5.18 0.5.19 0.5.20 0.5.21 0.5.22
SGLANG_VERSION ?= 0.5.16
VENV := .venv-$(SGLANG_VERSION)
OLD := .venv-$(firstword $(SGLANG_VERSIONS))
NEW := .venv-$(lastword $(SGLANG_VERSIONS))

MODEL ?= models/needle
STORE ?= .demo/store
PORT ?= 30000
SPARSE_ATTN_CONFIG ?= @scripts/demo_config.json
# More SGLang flags for `make serve`.
FLAGS ?=

CPU_FLAGS := --device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch \
  --grammar-backend none --disable-overlap-schedule --disable-cuda-graph --max-total-tokens 65536 \
  --max-running-requests 16 --chunked-prefill-size 4096
GPU_FLAGS := --attention-backend flashinfer
DEVICE_FLAGS := $(shell nvidia-smi -L >/dev/null 2>&1 && echo '$(GPU_FLAGS)' || echo '$(CPU_FLAGS)')

# Tests run in two processes of one thread each; a module's tests, or those of one server, stay together. What one process
# compiled of the sources the next one reads, whatever the environment says of it.
PYTEST_ENV := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
SPREAD := -n 2 --dist loadgroup --no-loadscope-reorder
DAY := $(SPREAD) -m 'not full'
ALL := $(SPREAD) --hypothesis-profile=full
# What torch brings on a GPU with the oldest release compiles kernels otherwise than the installed one: Triton 3.6 once
# took a maximum out of the loop that it was of. Where it cannot be fetched, the installed one's kernels are all.
GPU_TRITON := $(OLD)/gpu-triton
COMPILED := $(addprefix tests/prefix_kernels/,test_csa_on_cpu.py test_sm90_on_cpu.py test_triton_compiles.py)
ON_GPU_TRITON = [ ! -f $(GPU_TRITON)/.whole ] || PYTHONPATH=$(CURDIR)/$(GPU_TRITON) $(PYTEST_ENV) $(OLD)/bin/python -m pytest
# Of the newest release by day: one job and one server.
SERVED := tests/server/test_exact.py tests/server/test_faults.py

.DEFAULT_GOAL := help
.PHONY: help demo test test-all models models-small ray chromium serve lint format venv $(SGLANG_VERSIONS:%=venv-%) clean
.PHONY: $(BETWEEN:%=test-%)

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 10

demo: venv-$(SGLANG_VERSION) ## a real server, a shared document, dense against sparse (10 minutes with the install)
	$(VENV)/bin/python scripts/demo.py

$(GPU_TRITON)/.whole: | venv-$(firstword $(SGLANG_VERSIONS))
	-rm -rf $(@D) && $(OLD)/bin/python -m pip install -q --retries 1 --no-deps --target $(@D) triton==3.6.0 && touch $@

test: venv $(GPU_TRITON)/.whole ## what protects a change: some 14 minutes on two cores
	TRITON_INTERPRET=1 $(PYTEST_ENV) $(OLD)/bin/python -m pytest $(DAY) --dist worksteal tests/prefix_kernels/triton
	$(PYTEST_ENV) $(OLD)/bin/python -m pytest $(DAY)
	$(ON_GPU_TRITON) $(DAY) $(COMPILED)
	$(PYTEST_ENV) $(NEW)/bin/python -m pytest $(DAY) tests/compat $(SERVED) tests/server/test_offload.py

$(BETWEEN:%=.releases/%/.whole): .releases/%/.whole: | venv-$(firstword $(SGLANG_VERSIONS))
	-rm -rf $(@D) && $(OLD)/bin/python -m pip install -q --retries 1 --no-deps --target $(@D) sglang==$* && touch $@

$(BETWEEN:%=test-%): test-%: .releases/%/.whole
	@[ -f $< ] || echo "skipped: SGLang $* could not be fetched, nothing was run on it"
	[ ! -f $< ] || PYTHONPATH=$(CURDIR)/$(<D) $(PYTEST_ENV) $(OLD)/bin/python -m pytest $(DAY) tests/compat $(SERVED)

test-all: venv $(GPU_TRITON)/.whole models-small ray chromium ## everything: all of it on the oldest release, seams and servers on the others
	TRITON_INTERPRET=1 $(PYTEST_ENV) $(OLD)/bin/python -m pytest $(ALL) --dist worksteal tests/prefix_kernels/triton
	$(PYTEST_ENV) $(OLD)/bin/python -m pytest $(ALL)
	$(ON_GPU_TRITON) $(ALL) $(COMPILED)
	$(PYTEST_ENV) $(NEW)/bin/python -m pytest $(ALL) tests/compat
	$(PYTEST_ENV) $(NEW)/bin/python -m pytest $(DAY) tests/server
	$(MAKE) -j 1 $(BETWEEN:%=test-%)

models: venv-$(firstword $(SGLANG_VERSIONS)) ## two real language models and RULER, which answers are judged by (600 MB)
	$(OLD)/bin/python scripts/real_models.py .models

# Where nothing can be fetched, the tests of that model say so; all others run.
models-small: venv-$(firstword $(SGLANG_VERSIONS))
	-$(OLD)/bin/python scripts/real_models.py .models --only smollm2-135m-instruct

# The same of jobs on a Ray cluster.
ray: venv-$(firstword $(SGLANG_VERSIONS))
	-$(OLD)/bin/python -m pip install -q --retries 1 'ray>=2.40'
# Where it cannot be fetched and none is installed, the tests of the page say so.
chromium: venv-$(firstword $(SGLANG_VERSIONS))
	-$(OLD)/bin/python -m playwright install chromium-headless-shell

serve: venv-$(SGLANG_VERSION) ## the server with the shipped model and --sparse-attn (STORE, PORT, SPARSE_ATTN_CONFIG, FLAGS)
	@mkdir -p $(STORE)
	SGLANG_EXT_CPU_SHORT_EXTEND=1 $(VENV)/bin/python -m sglang.launch_server --model-path $(MODEL) $(DEVICE_FLAGS) --context-length 32768 \
	  --page-size 16 --port $(PORT) --sparse-attn --sparse-attn-store $(STORE) \
	  --sparse-attn-config '$(SPARSE_ATTN_CONFIG)' $(FLAGS)

lint: venv-$(firstword $(SGLANG_VERSIONS)) ## style, types, import contracts
	$(OLD)/bin/ruff check .
	$(OLD)/bin/ruff format --check .
	$(OLD)/bin/mypy
	$(OLD)/bin/lint-imports

format: venv-$(firstword $(SGLANG_VERSIONS)) ## rewrite the sources in the project's style
	$(OLD)/bin/ruff check --fix .
	$(OLD)/bin/ruff format .

.PHONY: dist
dist: venv-$(firstword $(SGLANG_VERSIONS)) ## dist/: the sdist, and the wheel that is built from it
	rm -rf dist
	$(OLD)/bin/python -m build --outdir dist .

venv: $(SGLANG_VERSIONS:%=venv-%) ## one virtual environment per supported SGLang version

$(SGLANG_VERSIONS:%=venv-%): venv-%:
	@scripts/make_venv.sh $* .venv-$*

clean: ## remove the demo's files and the tools' caches (not the virtual environments)
	rm -rf .demo .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
