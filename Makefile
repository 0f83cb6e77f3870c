# What people type. `make demo` and `make check` are all that a newcomer needs; both name and
# install the missing packages first (DRAY_NO_INSTALL=1: only name them).
JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
# Warnings are errors for those who change the code (the presets, make check), not for those who
# only build it with a compiler that we have not seen; a build that is there stays as it is.
BUILD = { test -f build/release/build.ninja || \
	cmake --preset release -DDRAY_WERROR=OFF >/dev/null; } && \
	cmake --build --preset release -j$(JOBS) --target
PRODUCT = dray_product

.PHONY: help demo build check frameworks wheel bench soak install format lint clean

help:
	@echo 'make demo     install what is missing, build, train a small model with GRPO (minutes)'
	@echo 'make check    build with -Werror; all tests, plain and under sanitizers; lint'
	@echo 'make frameworks  the wheel, and dray with the frameworks themselves, a line a part'
	@echo 'make wheel    build/wheel/dist/*.whl, for any Linux'
	@echo 'make build    build/release/dray and the library, nothing else'
	@echo 'make bench    measure, against limits measured in the same run'
	@echo 'make soak     the tests with many more random cases, also under sanitizers, and planted faults (hours)'
	@echo 'make install  to PREFIX (/usr/local), under DESTDIR'
	@echo 'make format   format the C code;  make lint: formatting, clang-tidy, cppcheck'
	@echo 'make clean    remove build/ (runs/ stays)'

demo:
	@scripts/deps.sh build
	@$(BUILD) $(PRODUCT)
	@scripts/demo.sh

build:
	@scripts/deps.sh build
	@$(BUILD) $(PRODUCT)

check:
	@JOBS=$(JOBS) scripts/check.sh

frameworks:
	@scripts/deps.sh frameworks
	@$$(scripts/python.sh) tests/frameworks/run.py $(FRAMEWORKS_FLAGS)

wheel:
	@scripts/deps.sh frameworks
	@scripts/wheel.sh

bench:
	@scripts/deps.sh build
	@$(BUILD) dray_benchmarks dray_program
	@scripts/bench.sh $(BENCH_FLAGS)

soak:
	@JOBS=$(JOBS) scripts/soak.sh

install: build
	cmake --install build/release --prefix $(PREFIX)

format:
	@scripts/lint.sh fix

lint:
	@scripts/deps.sh check
	@cmake --preset release >/dev/null
	@JOBS=$(JOBS) scripts/lint.sh

clean:
	rm -rf build
