/* The group's shared memory, and the one way to wait that all collectives are built on. */
#pragma once

#include "group/group.h"

#include <stdatomic.h>

#define DRAY__GROUP_TEXT DRAY_ERROR_MESSAGE_MAX

typedef enum dray__group_operation {
    DRAY__GROUP_BARRIER = 1,
    DRAY__GROUP_BROADCAST,
    DRAY__GROUP_ALL_GATHER,
    DRAY__GROUP_ALL_REDUCE,
    DRAY__GROUP_REDUCE_SCATTER
} dray__group_operation;

/* The operation that a rank is in, so that ranks in different operations notice it. */
typedef struct dray__group_call {
    uint64_t operation, size;
} dray__group_call;

typedef struct dray__group_slot {
    _Alignas(64) _Atomic uint64_t arrived; /* the number of rounds that this rank has entered */
    _Atomic uint32_t pid;                  /* 0 before it has joined */
    _Atomic uint32_t left;
    _Atomic uint64_t start_time; /* the process's start in clock ticks since boot; 0 when not
                                  * known */
    dray__group_call call[2];    /* the operation of the round, by the round's parity */
    _Alignas(64) char text[DRAY__GROUP_TEXT]; /* the reason why this rank aborted the group */
} dray__group_slot;

typedef struct dray__group_header {
    uint64_t magic;
    uint32_t version, world;
    uint64_t half_bytes;  /* a rank's scratch is two halves that are used in turns */
    uint64_t total_bytes; /* the size of the whole descriptor */
    /* A futex that changes when sleepers have something to look at. */
    _Alignas(64) _Atomic uint32_t wake;
    _Atomic uint32_t sleepers;
    _Alignas(64) _Atomic uint64_t aborted; /* 0, or -code << 32 | rank */
    dray__group_slot slots[];
} dray__group_header;

struct dray__group {
    dray__group_header *shared;
    unsigned char *scratch; /* world × 2 halves */
    uint32_t rank, world;
    uint64_t round; /* the number of rounds entered, which is the same on all ranks */
    int64_t timeout_ns;
    /* The number of pauses to spin before sleeping, which grows when spinning helped. */
    uint32_t spin, spin_max, sleeps;
    int32_t pidfd[DRAY__GROUP_MAX_WORLD]; /* -1 when not opened */
};

/* Begins a round. Returns this rank's half of the scratch for it. */
unsigned char *dray__group_half(dray__group *group, uint32_t rank, uint64_t round);
/* Enters round group->round + 1, and waits until every rank has entered it. All ranks that leave it
 * see the bytes that this rank wrote into its half. Fails as described in group.h. */
int dray__group_meet(dray__group *group, dray__group_operation operation, uint64_t size,
                     int64_t deadline_ns, dray_error *error);
