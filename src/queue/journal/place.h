/* Where the bytes of a journal's records come from, and where they are put when it is read: a
 * holder of bytes (queue/storage/holder.h) that no client has. Not bound to the table's thread: a
 * thread has a placer of its own, and who made it says what becomes of its chunks. */
#pragma once

#include "base/clock.h"
#include "queue/messages.h"
#include "queue/storage/holder.h"
#include "queue/storage/keepers.h"

#define DRAY__KEEPER_PATIENCE (5 * DRAY__SECOND)

typedef struct dray__placer {
    dray__values_holder holder;
    dray__keepers *keepers; /* keepers of other hosts; NULL: there are none */
    uint64_t size;          /* of the last chunk; 0: there was none */
    /* A chunk that the keeper has; it is filled, and nothing more is put in. NULL: nothing. */
    int (*made)(void *user, uint64_t id, uint64_t key, uint64_t size, dray_error *error);
    void (*filled)(void *user, uint64_t id);
    void *user;
} dray__placer;

/* As the settings say, whose space is not 0 where a store holds the bytes. keeper_path: NULL: there
 * is none. To be freed in any case. */
int dray__placer_open(dray__placer *placer, const dray__settings *settings, uint64_t space,
                      const char *keeper_path, uint64_t era, dray_error *error);
void dray__placer_free(dray__placer *placer);
/* Bytes of other hosts can be got, too. */
void dray__placer_reach(dray__placer *placer, dray__keepers *keepers);
/* Takes the column's bytes from the record; the column's extent says where they are now. */
int dray__place_column(dray__placer *placer, dray__reader *r, dray__new_column *column,
                       uint64_t items, dray_error *error);
/* What is placed later comes into another chunk. */
void dray__place_close(dray__placer *placer);
/* DRAY_EGONE: its holder has lost it. */
int dray__placer_get(dray__placer *placer, dray__range *range, dray_error *error);
