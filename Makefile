# Every target makes the virtual environment that it needs. PYTHON names another interpreter.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
DEMO := .venv-demo
FORMER := .venv-transformers4
OLDEST_TRANSFORMERS := transformers==5.16.1 'huggingface_hub>=1.31,<2'

.PHONY: demo test test-oldest lint format tiny clean

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
PYTEST := MINIMIND_PYTHON_457=$(CURDIR)/$(FORMER)/bin/python

test: $(VENV)/ready $(FORMER)/ready ## the whole test suite, on the versions of constraints.txt
	$(PYTEST) $(VENV)/bin/python -m pytest

test-oldest: $(VENV)/ready $(FORMER)/ready ## the same tests on the oldest supported transformers
	$(PYTHON) -m venv --without-pip $(OLDEST)
	$(call see_newest,$(OLDEST))
	$(VENV)/bin/python -m pip --python $(OLDEST)/bin/python install --quiet -e . $(OLDEST_TRANSFORMERS)
	$(OLDEST)/bin/python -c "import transformers; assert transformers.__version__ == '5.16.1', transformers"
	$(PYTEST) $(OLDEST)/bin/python -m pytest

$(FORMER)/ready: $(VENV)/ready
	$(PYTHON) -m venv --without-pip $(FORMER)
	$(VENV)/bin/python -m pip --python $(FORMER)/bin/python install --quiet transformers==4.57.6
	$(call see_newest,$(FORMER))
	touch $@

# Let an environment see the packages of the newest one behind its own, so that they share one torch.
define see_newest
$(VENV)/bin/python -c "import site; print(site.getsitepackages()[0])" \
	> "$$($(1)/bin/python -c 'import site; print(site.getsitepackages()[0])')/newest.pth"
endef

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/codespell

format: $(VENV)/ready
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

tiny: $(VENV)/ready ## train the tiny checkpoint of assets/ again
	$(VENV)/bin/python examples/train_tiny.py --output assets/minimind-tiny --overwrite

$(VENV)/ready: setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(FORMER) $(DEMO) demo build *.egg-info
