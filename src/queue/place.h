/* Putting bytes of a journal's records where readers find them: into fresh chunks that the keeper
 * holds and nobody owns, or into a store. Not bound to the table's thread: whoever made the placer
 * says what becomes of its chunks. */
#ifndef DRAY_QUEUE_PLACE_H
#define DRAY_QUEUE_PLACE_H

#include "base/arena.h"
#include "queue/backend.h"
#include "queue/ledger.h"

typedef struct dray__placer {
    dray__keeper_link *link;
    dray__backend *store; /* NULL: the keeper of this host holds the bytes */
    uint32_t client;      /* whose objects they are in the store */
    uint32_t *objects;    /* how many there are */
    /* A chunk that the keeper has; it is filled, and nothing more is put in. NULL: nothing. */
    int (*made)(void *user, uint64_t id, uint64_t key, uint64_t size, dray_error *error);
    void (*filled)(void *user, uint64_t id);
    void *user;
    struct {
        uint64_t id, size, used;
        uint8_t *base;
    } chunk;
} dray__placer;

/* Takes the column's bytes from the record; the column's extent says where they are now. */
int dray__place_column(dray__placer *placer, dray__reader *r, dray__new_column *column,
                       uint64_t items, dray_error *error);
/* What is placed later comes into another chunk. */
void dray__place_close(dray__placer *placer);
/* A record's columns: u32 n, n * {str name, spec, u64 bytes of values}. */
dray__new_column *dray__record_columns(dray__reader *r, dray__arena *arena, uint32_t *count);

#endif
