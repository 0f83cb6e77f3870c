/* A fuzz target: what libFuzzer calls, and what a corpus begins with. Built with replay.c it is an
 * ordinary test: `fuzz_x` runs the seeds and changed seeds; `fuzz_x FILE|DIR...` runs inputs again;
 * `fuzz_x --seeds DIR` writes the seeds. With clang, -DDRAY_FUZZ=ON also makes `libfuzzer_x`. */
#ifndef DRAY_TESTS_FUZZ_H
#define DRAY_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef void (*fuzz_put)(void *user, const void *data, size_t size);
void fuzz_seeds(fuzz_put put, void *user);

#endif
