/* The declarations that the trainer's files share. */
#pragma once

#include "engine/model.h"
#include "engine/trainer.h"

/* One parameter: its offset among whole parameters, that of this rank's piece, and the lengths of
 * all ranks' pieces. Offsets and lengths are in floats. */
typedef struct dray__shard_piece {
    uint32_t tensor; /* index in the layout of the shards */
    uint64_t whole, shard;
    uint64_t start; /* of this rank's piece within the parameter */
    uint64_t counts[DRAY__GROUP_MAX_WORLD];
} dray__shard_piece;

struct dray__trainer {
    dray_model_config config;
    dray__trainer_options options;
    dray__group *group; /* NULL for one rank */
    uint32_t rank, world;

    dray_layout *layout; /* the shards */
    dray_region **regions;
    uint32_t region_count;
    uint64_t shard_floats;
    /* [shard_floats] each, with the same offsets. */
    float *shard, *gradient, *moment, *moment_square;

    dray_layout *whole_layout; /* all parameters, as the model computes with them */
    dray_region *whole_region;
    float *whole_gradient;
    uint64_t whole_floats;
    bool gathered; /* the whole equals the shards */

    dray__shard_piece *pieces;
    uint32_t piece_count;

    dray__model model;
    dray__weights gradients;
    dray__state inference, training;
    dray__backward backward;

    uint64_t steps;
    bool begun;             /* a response token was accumulated by some rank */
    uint64_t tokens;        /* that count, of all ranks */
    double divisor;         /* of the sums */
    dray__policy_sums sums; /* of this rank's tokens */
};

/* Returns whether it is a parameter of a value model's head. */
bool dray__is_score(const char *name);
/* Makes `whole` (whole_floats long) of shards laid out like t->shard. */
int dray__trainer_gather(dray__trainer *t, const float *shard, float *whole, dray_error *error);
/* Makes all ranks return alike, with the error of the first rank that failed. */
int dray__trainer_agree(dray__trainer *t, int code, dray_error *error);
