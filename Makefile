# Every target makes the virtual environment that it needs. PYTHON names another interpreter.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
DEMO := .venv-demo
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

test: $(VENV)/ready ## the whole test suite, on the versions of constraints.txt
	$(VENV)/bin/python -m pytest

# The oldest environment sees the packages of the first one behind its own, so that they share one torch.
test-oldest: $(VENV)/ready ## the same tests on the oldest supported transformers
	$(PYTHON) -m venv --without-pip $(OLDEST)
	$(VENV)/bin/python -c "import site; print(site.getsitepackages()[0])" \
		> "$$($(OLDEST)/bin/python -c 'import site; print(site.getsitepackages()[0])')/newest.pth"
	$(VENV)/bin/python -m pip --python $(OLDEST)/bin/python install --quiet -e . $(OLDEST_TRANSFORMERS)
	$(OLDEST)/bin/python -c "import transformers; assert transformers.__version__ == '5.16.1', transformers"
	$(OLDEST)/bin/python -m pytest

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
	rm -rf $(VENV) $(OLDEST) $(DEMO) demo build *.egg-info
