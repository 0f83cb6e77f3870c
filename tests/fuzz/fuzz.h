/* A fuzz target: the function that libFuzzer calls, and the seeds of its corpus. With replay.c it
 * is an ordinary test: `fuzz_x` runs the seeds, the inputs of corpus/x, and changed inputs; `fuzz_x
 * FILE|DIR...` runs inputs again; `fuzz_x --seeds DIR` writes the seeds. With clang, -DDRAY_FUZZ=ON
 * also makes `libfuzzer_x`. */
#pragma once

#include "base/wire.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

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

/* The number of changed inputs that a test makes of each seed, for a target that is too slow for
 * 300. */
extern const int fuzz_rounds __attribute__((weak));

/* Puts a seed whose first byte is the kind of the rest. */
static inline void fuzz_put_kind(fuzz_put put, void *user, uint8_t kind, const dray__writer *body)
{
    dray__writer all = {0};
    dray__put_u8(&all, kind);
    dray__put_bytes(&all, body->data, body->size);
    put(user, all.data, all.size);
    dray__writer_free(&all);
}

static inline void fuzz_put_text(fuzz_put put, void *user, uint8_t kind, const char *text)
{
    dray__writer body = {0};
    dray__put_bytes(&body, text, strlen(text));
    fuzz_put_kind(put, user, kind, &body);
    dray__writer_free(&body);
}

/* Returns a folder of this process's own, which is removed with its files when the process ends. */
const char *fuzz_folder(void);
/* Returns the path of the folder's file NAME. It is valid until the next call. */
const char *fuzz_path(const char *name);
void fuzz_write(const char *path, const void *data, size_t size);
void fuzz_empty_folder(void);
