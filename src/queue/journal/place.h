/* A placer fetches the bytes of a journal's records, and puts them into memory when the journal is
 * read. It is a holder of bytes (queue/storage/holder.h) without a client. Each thread has a placer
 * of its own, whose functions `made` and `filled` handle its chunks. */
#pragma once

#include "base/clock.h"
#include "queue/messages.h"
#include "queue/storage/holder.h"
#include "queue/storage/keepers.h"

#define DRAY__KEEPER_PATIENCE (5 * DRAY__SECOND)

typedef struct dray__placer {
    dray__values_holder holder;
    dray__keepers *keepers; /* keepers of other hosts; NULL when there are none */
    uint64_t size;          /* of the last chunk; 0 when there was none */
    /* made: the keeper has a new chunk. filled: nothing more is put into the chunk. Both may be
     * NULL. */
    int (*made)(void *user, uint64_t id, uint64_t key, uint64_t size, dray_error *error);
    void (*filled)(void *user, uint64_t id);
    void *user;
} dray__placer;

/* Opens a placer by the settings, whose space is not 0 when a store holds the bytes. keeper_path is
 * NULL when there is no keeper. The caller frees the placer in any case. */
int dray__placer_open(dray__placer *placer, const dray__settings *settings, uint64_t space,
                      const char *keeper_path, uint64_t era, dray_error *error);
void dray__placer_free(dray__placer *placer);
/* Lets it fetch bytes of other hosts, too. */
void dray__placer_reach(dray__placer *placer, dray__keepers *keepers);
/* Takes the column's bytes from the record. Afterwards the column's extent says where they are. */
int dray__place_column(dray__placer *placer, dray__reader *r, dray__new_column *column,
                       uint64_t items, dray_error *error);
/* Closes the present chunk: later columns are placed into another one. */
void dray__place_close(dray__placer *placer);
/* Returns 0, or DRAY_EGONE when the holder has lost the bytes. */
int dray__placer_get(dray__placer *placer, dray__range *range, dray_error *error);
