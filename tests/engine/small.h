/* A small model, and rows of tokens for it. Include cmocka.h before this header. */
#pragma once

#include "engine/sampler.h"
#include "engine/tokenizer.h"

#include <math.h>

static inline dray_model_config small_config(void)
{
    return (dray_model_config){.family = "qwen2",
                               .vocab_size = DRAY__BYTE_VOCABULARY,
                               .hidden_size = 32,
                               .intermediate_size = 48,
                               .layers = 2,
                               .heads = 4,
                               .kv_heads = 2,
                               .head_dim = 8,
                               .max_positions = 40,
                               .rms_norm_eps = 1e-6,
                               .rope_theta = 10000,
                               .qkv_bias = 1,
                               .tied = 1,
                               .dtype = DRAY_F32};
}

/* Fills a generator's memory with finite values that vary. Any bytes would do. */
static inline void fill(dray__generator *g)
{
    dray_region *region = dray__generator_regions(g)[0];
    float *values = dray_region_base(region);
    for (uint64_t i = 0; i < dray_region_bytes(region) / sizeof *values; i++)
        values[i] = 0.15f * sinf(0.7f * (float)i + 0.3f * (float)(i % 97));
}

static inline dray__generator *open_filled(dray__group *group)
{
    dray_model_config config = small_config();
    dray__generator *g;
    dray_error why;
    if (dray__generator_open(&config, group, &g, &why) != DRAY_OK)
        fail_msg("%s", why.message);
    fill(g);
    return g;
}

enum { ROWS = 9 };

/* Makes rows of 1 to 9 tokens. */
static inline void make_rows(int32_t *tokens, uint64_t *offsets)
{
    uint64_t at = 0;
    for (uint32_t row = 0; row < ROWS; row++) {
        offsets[row] = at;
        for (uint32_t i = 0; i <= row; i++)
            tokens[at++] = (int32_t)((row * 37 + i * 11) % 256);
    }
    offsets[ROWS] = at;
}

/* The options and the rows of a generation of whole responses. */
typedef struct generating {
    dray__sampler_options how;
    dray__sampler_rows what;
} generating;

#define ANY_TOKENS                                                                                 \
    {                                                                                              \
        .how = {.temperature = 1, .eos_token = -1 }                                                \
    }

static inline int generate(dray__generator *g, const generating *o, dray__generation *out,
                           dray_error *why)
{
    return dray__generate(g, &o->how, &o->what, out, why);
}
