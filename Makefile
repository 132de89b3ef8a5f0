# What can be done with this tree. The work is in scripts/, where versions.env
# names the tools; they are installed under $(MARU_CACHE), by default
# ~/.cache/maru. Needed beforehand: Go 1.26, Python 3.11 to 3.13, gcc, make, git.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help build wheel check test demo bench soak vmlab fuzz fmt generate clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## the programs and libmaru.so, into bin/
	@bash scripts/build.sh

wheel: ## the Python wheel with libmaru.so and the vLLM connector, into dist/
	@bash python/build_wheel.sh

check: ## the fast lane: format, vet, lint, short tests (under 3 minutes warm)
	@bash scripts/check.sh

test: ## everything that CI runs; installs what is missing
	@bash scripts/test.sh

demo: ## two real vLLM engines sharing a prefix; ENGINE=none for one without Python
	@bash scripts/demo.sh $(ARGS)

bench: ## every table of `maru bench`; ARGS=--quick for a short one
	@bash scripts/bench.sh $(ARGS)

soak: ## what takes longer than CI may; TORTURE_MINUTES=30 of it are the torture
	@bash scripts/soak.sh

vmlab: ## the tests on a real /dev/dax0.0, in QEMU
	@bash scripts/vmlab.sh $(ARGS)

fuzz: ## every fuzz target; FUZZTIME=1m for longer
	@bash scripts/fuzz.sh $(FUZZTIME)

fmt: ## format Go and Python
	@bash scripts/fmt.sh

generate: ## the Go code of api/**/*.proto
	@bash scripts/generate.sh

clean: ## what was built here; the installed tools stay
	rm -rf bin build dist .cache python/maru/lib python/build python/dist
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
