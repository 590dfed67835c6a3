# `make` lists the targets. Everything happens in .venv; nothing outside this folder is changed.
# pip follows its usual settings (PIP_INDEX_URL, PIP_FIND_LINKS, …), so you choose where packages come from.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
DOCS_INSTALLED := .venv/.installed-docs
LIBRARY := src/polytempo/native/libpolytempo.so
PYTEST := $(BIN)/python -m pytest
INTEGRATIONS := .venv-integrations
ENGINES := .venv-engines

# Each of the thousands of processes that the tests start would compile all sources anew.
unexport PYTHONDONTWRITEBYTECODE

# Tests of the report need a browser. CI installs one and leaves out nothing; so does a machine that has one.
BROWSER := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome \
	|| ls -d "$${PLAYWRIGHT_BROWSERS_PATH:-$$HOME/.cache/ms-playwright}"/chromium*/ 2>/dev/null | head -n 1)
WITHOUT_BROWSER := $(if $(BROWSER)$(CI),,-m "not browser")

# These tests want the machine for themselves: they keep all cores busy, and one of them takes 6 GB. Of the others two
# files run at a time.
ALONE := $(patsubst %,tests/native/test_%.py,group limit step)

# These compile the native core anew, with sanitizers and as a wheel: minutes.
COMPILED := $(patsubst %,tests/native/test_%.py,sanitizers build)

# These start whole runs to end, kill or move them: agents as on several hosts, elastic runs, SIGTERM, folders at a URL;
# ranks under all launchers and on meshes; commands that are ended while they start; and all examples, one after the other.
# With them are runs that are resumed, replayed or shown in a browser; ranks killed at random moments; searches for planted
# bugs, papers' figures, trainings until something is learned, every loop on two ranks; and the code and commands of all
# pages.
RUNS := $(patsubst %,tests/process/test_%.py,agent_program attacked_runs attach_join attach_loops attach_models attach_resume attach_served backend_ends backend_users bench \
	branch_runs callbacks client_catalogue client_sums codistillation comm_hook comm_hook_ends drift elastic elastic_by_speed elastic_growth elastic_hosts elastic_loop elastic_round elastic_rounds \
	engines faults federated_runs first_failures flexrr_run handed_out held_agent host_mail hybrid init large_batch_runs late_and_private_clients lbfgs_runs live_page live_page_browser local_engine_ends logged_runs loop_callbacks loop_servers \
	lost_launcher mesh_training noise_resumes noise_scale norm_growth not_finite observation one_copy parted_precision \
	parted_runs pipeline_replicas pipeline_runs pipelines placed_runs precision preemption probe profiled_runs progress real_clients remote_engine replay \
	report_browser resume scheduled scripts served_by_rows served_compressed served_faults served_learn served_order \
	served_pipelines served_rates served_reshape served_resume served_stages served_transport simulated_checkpoint slow_rank tutorial \
	split split_by_places split_stage_runs split_stages store_workers stream_data sudden_death trackers url_runs validate warm_start_runs wrong_clients) \
	$(wildcard tests/process/test_horovod*.py) \
	$(patsubst %,tests/commands/test_%.py,cli cli_starts completion examples plan_run predictions) \
	$(patsubst %,tests/virtual/test_%.py,chaos_bugs compressed_training defaults downpour flexrr_training newer_claims parted_jobs \
	pipeline_convergence pipeline_figures precision priced_stages scheduled served_late_stages slow_rank split_choice staleness_laws) \
	$(patsubst %,tests/laws/test_%.py,loops_of_two plateau stand_ins) \
	$(patsubst %,tests/unit/test_%.py,batch_growth calibration cli_sharpness geometric_growth reached readme sweeps tune_batch weight_average)

# `make test` leaves these out. How many cases it looks at of all others is said in tests/some_cases.py.
LATER := $(ALONE) $(COMPILED) $(RUNS)

# Without a C++ compiler everything works, more slowly. CI must have one, and takes a warning for an error.
COMPILER := $(shell command -v $(CXX) || command -v c++ || command -v g++ || command -v clang++)

# Where the searches of `make soak` begin: another number, other searches.
SEED ?= 1

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-device test-gpu mutations test-integrations test-engines test-torch docs check lint fmt bench bench-night soak clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(firstword $(MAKEFILE_LIST)) | while IFS='|' read -r name what; do \
		printf 'make %-17s %s\n' "$$name" "$$what"; done

install: $(INSTALLED) $(LIBRARY) ## make .venv with everything (needs Python 3.11 or newer)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Polytempo needs Python 3.11 or newer, and $(PYTHON) is {sys.version.split()[0]}: make install PYTHON=python3.12")'
	@echo 'installing into .venv; the first time this takes a minute or more'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --editable .
	touch $@

# The old library goes first: a failed build must not leave it behind, and those who have it open keep theirs.
$(LIBRARY): $(wildcard native/*.*) $(INSTALLED)
	@rm -f $@
ifeq ($(COMPILER)$(CI),)
	@echo 'note: no C++ compiler here, so the native core is not built; everything works without it, more slowly'
else
	@echo 'building the native core'
	@$(BIN)/cmake -S native -B build/native -G Ninja \
		-DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DPOLYTEMPO_WERROR=$(if $(CI),ON,OFF) >/dev/null
	@$(BIN)/cmake --build build/native -- --quiet
	@$(BIN)/cmake --install build/native --prefix src >/dev/null
endif

demo: install ## train digits with seven strategies and two real workers each; prints where the report lies
	@$(BIN)/polytempo compare digits --workers 2

test: install lint ## lint, types and every law on some of its cases (aims at five minutes)
	BUDGET=test $(PYTEST) -q -n 2 --dist loadfile $(addprefix --ignore=,$(LATER))

# all: every case of every test; ci: some of them, where a test has more than six.
CASES ?= all

test-all: install lint ## everything: all cases, whole runs, the native core with sanitizers and as a wheel (an hour); CASES=ci as CI does it
ifneq ($(WITHOUT_BROWSER),)
	@echo 'note: no Chromium here, so the tests marked "browser" are left out (with CI=1 they would fail)'
endif
	BUDGET=$(CASES) $(PYTEST) -q -n 2 --dist loadfile $(WITHOUT_BROWSER) $(addprefix --ignore=,$(ALONE))
	BUDGET=$(CASES) $(PYTEST) -q $(ALONE)
	BUDGET=$(CASES) $(PYTEST) -q -n 2 --dist loadfile tests/device

test-device: install $(LIBRARY) ## the catalogue on a pretend accelerator, which needs a C++ compiler and is built once (five minutes)
	$(PYTEST) -q -n 2 --dist loadfile tests/device

# Which tier: check, test or all. MUTATION is a part of the paths that are changed.
TIER ?= test

# The device of test-gpu: cuda, xpu, mps, …; auto: the one that torch finds.
DEVICE ?= auto

test-gpu: install $(LIBRARY) ## on a machine with a GPU: the same tests there, then speed and memory into build/gpu (a quarter of an hour)
	$(BIN)/python benchmarks/gpu/main.py --device $(DEVICE)

mutations: install ## how many of 40 planted bugs the tests of a tier find: TIER=check, test or all (an hour)
	$(BIN)/python tests/mutations.py --tier $(TIER) --only '$(MUTATION)' --later $(LATER)

# Triton reads TRITON_INTERPRET when it is imported, so these have a process of their own.
INTERPRETED := tests/integrations/test_triton_kernels.py

test-integrations: $(INTEGRATIONS)/.installed $(LIBRARY) ## examples/integrations print on polytempo what they print on gloo, and Triton's kernels (minutes)
	$(INTEGRATIONS)/bin/python -m pytest -q $(WITHOUT_BROWSER) --ignore=$(INTERPRETED) tests/integrations tests/unit/test_stream_sources.py tests/unit/test_repeated_reads.py
	TRITON_INTERPRET=1 $(INTEGRATIONS)/bin/python -m pytest -q $(INTERPRETED)

$(INTEGRATIONS)/.installed: pyproject.toml constraints.txt
	test -x $(INTEGRATIONS)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(INTEGRATIONS)/bin/python -m pip install --quiet --constraint constraints.txt --group integrations --editable .
	touch $@

# Engines whose programs are not installed (Slurm, Open MPI, MPICH, Java for Spark) say so by failing; choose by TESTS=.
TESTS ?= tests/engines

test-engines: $(ENGINES)/.installed $(LIBRARY) ## engines on real Slurm, MPI, Ray, dask, Spark; one of them: TESTS=tests/engines/test_mpi.py (half an hour)
	PYTHONPATH=tests $(ENGINES)/bin/python -m pytest -q -p no:kmock $(TESTS)

$(ENGINES)/.installed: pyproject.toml constraints.txt
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(ENGINES)/bin/python -m pip install --quiet --constraint constraints.txt --group engines --editable .
	touch $@

# Tests of another torch or another Python, in a venv of their own: what they share with torch, and what starts processes.
VERSION ?= 2.15.0
OTHER = .venv-torch-$(VERSION)-$(notdir $(PYTHON))
OTHER_TESTS := $(patsubst %,tests/process/test_%.py,process_world init) tests/native/test_group.py \
	$(wildcard $(patsubst %,tests/process/test_%*.py,backend local_engine comm_hook attach))

test-torch: $(LIBRARY) ## process, backend and attach tests with another torch: VERSION=2.9.1, PYTHON=python3.12
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(OTHER)/bin/python -m pip install --quiet --group test 'torch==$(VERSION)' --editable .
	$(OTHER)/bin/python -m pytest -q -n 2 --dist loadfile -p no:cacheprovider $(OTHER_TESTS)

docs: $(DOCS_INSTALLED) ## build the documentation into build/docs; warnings and broken links are errors (half a minute)
	$(BIN)/python -m sphinx -q -W --keep-going -b html -d build/docs-doctrees docs build/docs
	$(BIN)/python docs/extensions/check_links.py build/docs
	@echo 'open build/docs/index.html'

# Small packages beside the rest: Sphinx imports the library, and a venv of its own would hold torch once more.
$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group docs
	touch $@

check: install lint ## what to run before every commit: lint, types, architecture, and tests that the change reaches (aims at two minutes)
	BUDGET=check $(PYTEST) -q -n 2 --dist loadfile tests/test_architecture.py $$($(BIN)/python tests/reached.py --later $(LATER))

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src/polytempo examples

fmt: install ## format, mend what can be mended, and write the keywords' types from the table of options
	PYTHONPATH=tests $(BIN)/python tests/option_keywords.py
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install ## run every benchmark (longer)
	@for main in $(filter-out benchmarks/gpu/main.py,$(wildcard benchmarks/*/main.py)); do echo "== $$main"; $(BIN)/python "$$main" || exit 1; done

# Each line is there as soon as its run has ended, so that a night that is cut short keeps what it found.
bench-night: install ## tables of federated papers, whose runs take hours; data lie in POLYTEMPO_DATA, results in build/night
	@mkdir -p build/night
	$(BIN)/python benchmarks/federated/main.py --raw --rates 0.05 0.1 0.2 0.5 --workers 2 --out build/night/mcmahan-2017 | tee build/night/mcmahan-2017.md
	$(BIN)/python benchmarks/federated/niid.py --resume | tee build/night/niid-bench.md

soak: install ## long searches: 10,000 seeds of chaos, a million hostile frames, hundreds of killed processes (hours)
	$(BIN)/python benchmarks/attacks/attacks.py --seed $(SEED) --minutes 60
	$(BIN)/polytempo chaos --seeds 10000 --first $(SEED)
	$(BIN)/python benchmarks/parameter_server/faults.py --points 20 --seed $(SEED)
	$(BIN)/python benchmarks/one_host/kills.py --kills 200 --seed $(SEED)
	$(BIN)/python benchmarks/elastic/horovod.py --kills 20 --rooms 6 --seed $(SEED)
	README_ALL=1 $(PYTEST) -q --timeout 1800 tests/unit/test_readme.py -k one_after_the_other
	$(BIN)/python benchmarks/drift/flips.py --flips 1000 --seed $(SEED)

clean: ## remove what make has made; runs/ stays
	rm -rf $(LIBRARY) .venv $(INTEGRATIONS) $(ENGINES) docs/generated .venv-torch-* .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
