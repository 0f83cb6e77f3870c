/* A fuzz target: what libFuzzer calls, and what a corpus begins with. Built with replay.c it is an
 * ordinary test: `fuzz_x` runs the seeds and changed seeds; `fuzz_x FILE|DIR...` runs inputs again;
 * `fuzz_x --seeds DIR` writes the seeds. With clang, -DDRAY_FUZZ=ON also makes `libfuzzer_x`. */
#ifndef DRAY_TESTS_FUZZ_H
#define DRAY_TESTS_FUZZ_H

#include "base/wire.h"

#include <stdio.h>
#include <stdlib.h>

#define MUST(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef void (*fuzz_put)(void *user, const void *data, size_t size);
void fuzz_seeds(fuzz_put put, void *user);

/* A seed whose first byte says what the rest is. */
static inline void fuzz_put_kind(fuzz_put put, void *user, uint8_t kind, const dray__writer *body)
{
    dray__writer all = {0};
    dray__put_u8(&all, kind);
    dray__put_bytes(&all, body->data, body->size);
    put(user, all.data, all.size);
    dray__writer_free(&all);
}

#endif
