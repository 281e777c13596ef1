# Each target is a line or two that could be typed by hand.
.PHONY: help setup setup-all demo test first-hour test-old test-long test-quick torture lint docs lock sbom bench test-gpu bench-gpu clean
help:   ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:[^#]*##/\t/'

setup:  ## what training needs, into .venv (Debian packages as root); repeating it takes a second; docs/install.md
	@bash scripts/setup.sh

setup-all:  ## the same, and what tests, exports, videos and MXNet need
	@ALL=1 bash scripts/setup.sh

demo: setup  ## build the demo data, train on it with two processes, show what was learned
	@bash scripts/demo.sh

test: setup-all  ## all tests, ten minutes on two cores: units, ranks over Gloo, MPI and torchrun, recipes, faults, hosts
	@bash scripts/test.sh

first-hour: setup-all  ## types every line of README.md, in an empty folder with an empty HOME: six minutes; without .venv: `bash tests/recipes/first_hour.sh`
	@bash tests/recipes/first_hour.sh .venv

test-old: setup-all  ## units with numbers in them, as on a processor that has AVX2 and no more
	@bash scripts/test.sh old

test-long: setup-all  ## what enumerates and kills: every failing operation of the disk, every socket that listens, launchers killed
	@bash scripts/test.sh long

test-quick: setup-all  ## two minutes, for people at work: units but the slow ones, two ranks, one recipe
	@bash scripts/test.sh quick

torture: setup-all  ## two hours: changed files for every reader, kills, signals, full disks, every failing operation, lost packets, sanitizers; `scripts/torture.sh bin` one reader
	@bash scripts/torture.sh

lint: setup-all  ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

docs:  ## build/site/index.html: README.md and docs/ as pages for a browser; mkdocs goes into build/mkdocs, not into .venv
	@test -x build/mkdocs/bin/mkdocs || { python3 -m venv build/mkdocs && build/mkdocs/bin/pip install -q mkdocs==1.6.1 mkdocs-material==9.8.2; }
	NO_MKDOCS_2_WARNING=1 build/mkdocs/bin/mkdocs build --strict  # not --quiet, which hides the warnings from --strict

lock:  ## lock/ anew, after a change of constraints.txt or setup.cfg; needs uv (pip install uv)
	python3 scripts/lock.py

sbom:  ## what set-up installs, and what is known against it: build/sbom.cdx.json (CycloneDX)
	@mkdir -p build && python3 scripts/sbom.py >build/sbom.cdx.json && echo build/sbom.cdx.json

bench: setup-all  ## the tables of the head in docs/benchmarks.md, here and with AVX2 only; planned memory; all launchers: 30 minutes
	.venv/bin/python -m benchmarks.head_tables
	.venv/bin/python -m benchmarks.head_tables --instructions avx2
	.venv/bin/python -m benchmarks.plan_memory
	.venv/bin/python -m benchmarks.hosts.launchers

test-gpu: setup-all  ## the GPU's kernel on a CUDA device; without one, everything is skipped
	.venv/bin/python -m pytest tests/gpu tests/parallel/train/test_update.py -m gpu

bench-gpu: test-gpu  ## on one GPU: the tests of its kernel, the head's tables, whole training beside a plain loop, the loader, NCCL
	.venv/bin/python -m benchmarks.gpu
	.venv/bin/python -m benchmarks.gpu_versus
	.venv/bin/python -m benchmarks.networks --networks r50 r100 vit_b timm:vit_base_patch16_224 --image-size 112 --batch-size 128 \
	    --workers 8 --steps 60 --sides partial-fc "plain PyTorch"
	.venv/bin/python -m benchmarks.networks --networks r50 timm:vit_base_patch16_224 --image-size 112 --batch-size 128 \
	    --data device --steps 60 --sides partial-fc "plain PyTorch"
	.venv/bin/python -m benchmarks.feed
	.venv/bin/torchrun --nproc-per-node 1 train.py face --dataset synthetic --num-classes 1000000 --network r50 --batch-size 128 \
	    --max-steps 200 --warmup-epochs 0 --warmup-steps 0 --resume never

clean:  ## remove .venv and what tools left; demo data and runs stay
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
