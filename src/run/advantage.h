/* Advantages from the rewards of one prompt's samples. One row of the table a method. */
#ifndef DRAY_RUN_ADVANTAGE_H
#define DRAY_RUN_ADVANTAGE_H

#include <stdbool.h>
#include <stdint.h>

typedef struct dray__advantage {
    const char *name;
    uint32_t least_samples; /* a group needs */
    /* advantages[i] of rewards[i], one group of `count` samples. */
    void (*compute)(const float *rewards, uint32_t count, bool divide, float *advantages);
} dray__advantage;

extern const dray__advantage dray__advantages[];
enum { DRAY__ADVANTAGE_GRPO = 0, DRAY__ADVANTAGE_RLOO };

#endif
