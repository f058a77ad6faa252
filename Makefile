# Every target sets itself up: `make demo` and `make test` need Python 3.11+ and make, nothing else.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2
SHOWN := plain,rank1,batch_ensemble,implicit,patch,variance,nested,laplace,seed_ensemble
CORRUPTED := gaussian_noise,defocus_blur,zoom_blur,fog,elastic_transform,jpeg_compression
SITE := import sysconfig; print(sysconfig.get_path('purelib'))
export OMP_NUM_THREADS ?= 1

.PHONY: demo test golden mutants check fix slow bench sweep setup clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/ready          ## six methods and their rivals on embedded images: a table, and runs/demo/report.html
	$(BIN)/leanbayes compare --data fashion-demo --methods $(SHOWN) --seeds 0,1,2 --shift-images 300 \
		--shift-corruptions $(CORRUPTED) --shift-severities 2,4 --workers $(WORKERS) --out runs/demo

test: export PYTHONDONTWRITEBYTECODE =  # empty: asserts of tests are rewritten once, not in each run and process
test: check                ## the checks and the fast tests
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup -m "not slow and not gpu"

mutants: .venv/ready       ## plant faults one at a time, and list those that the fast tests do not notice (half an hour)
	$(BIN)/python tools/mutants.py --workers $(WORKERS)

golden: .venv/ready        ## recorded numbers of every method, to the bit (half a minute)
	$(BIN)/python -m tests.golden.record

check: .venv/ready         ## style, types, import order, budgets, language
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/budgets.py
	$(BIN)/python tools/language.py

fix: .venv/ready           ## format and repair what can be repaired
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

slow: .venv/ready          ## tests that train networks for minutes
	$(BIN)/python -m pytest -q -m "slow and not gpu"

sweep: .venv-sweep/ready   ## every layer method on networks of timm, torchvision and transformers; runs/sweep
	.venv-sweep/bin/python -m tools.network_sweep --out runs/sweep --workers $(WORKERS)

# torchvision, without its compiled operators, would break transformers in the main environment: hence one of its own.
.venv-sweep/ready: .venv/ready constraints.txt
	$(PYTHON) -m venv --without-pip .venv-sweep
	site="$$(.venv-sweep/bin/python -c "$(SITE)")" && $(BIN)/python -c "$(SITE)" > "$$site/main.pth" \
		&& echo "$(CURDIR)/src" >> "$$site/main.pth" \
		&& $(BIN)/pip install --quiet --no-deps --upgrade --target "$$site" --constraint constraints.txt timm torchvision
	touch $@

bench: .venv/ready         ## cost ratios against the plain network, as JSON
	$(BIN)/python -m benchmarks.cost

clean:
	rm -rf .venv .venv-sweep build dist *.egg-info src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
