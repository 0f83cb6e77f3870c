/* The input of test_kernels_python.py's programs. Numbers are arguments. Elements come on stdin, up
 * to its end, or up to filter_size bytes where one process answers many requests. */
#pragma once

#include "mover/kernels/quant.h"

#include <dray/model.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static size_t filter_size = SIZE_MAX;

static inline uint8_t *filter_read(size_t *size)
{
    size_t capacity = filter_size < SIZE_MAX ? filter_size + 1 : 1 << 20;
    uint8_t *data = malloc(capacity);
    for (*size = 0; data;) {
        size_t wanted = capacity - *size, most = filter_size - *size;
        size_t n = fread(data + *size, 1, wanted < most ? wanted : most, stdin);
        *size += n;
        if (!n)
            return data;
        if (*size == capacity)
            data = realloc(data, capacity *= 2);
    }
    abort();
}

/* Parses numbers such as "3,4,5". Returns how many there are. */
static inline uint32_t filter_numbers(const char *text, int64_t *out)
{
    uint32_t n = 0;
    char *end;
    for (; *text && n < DRAY_MAX_DIMS; text = *end ? end + 1 : end)
        out[n++] = strtoll(text, &end, 10);
    return n;
}

/* Returns the box that the words describe: dtype, dtype of quantised elements, format of scales,
 * start, extent, cell. */
static inline dray__quant_box filter_box(char **words, uint32_t *ndim)
{
    dray__quant_box box = {.dtype = (int32_t)dray_dtype_parse(words[0]),
                           .quant_dtype = (int32_t)dray_dtype_parse(words[1])};
    *ndim = filter_numbers(words[3], box.start);
    filter_numbers(words[4], box.extent);
    filter_numbers(words[5], box.cell);
    for (uint32_t d = *ndim; d < DRAY_MAX_DIMS; d++)
        box.extent[d] = box.cell[d] = 1;
    return box;
}
