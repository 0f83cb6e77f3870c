/* The memory under chunks: memfds that one process maps writable and everybody else reads; the way
 * to them through the keeper; and this process's read-only mappings of others' chunks. */
#ifndef DRAY_QUEUE_SEGMENT_H
#define DRAY_QUEUE_SEGMENT_H

#include "control/channel.h"

#include <dray/dray.h>

/* Makes a memfd of `bytes`, maps it writable here (pages there already, not inherited by forks),
 * then seals it: nobody can map it writable again, shrink it or grow it. */
int dray__segment_new(uint64_t bytes, void **base, int *fd, dray_error *error);
/* That a descriptor from elsewhere is such a memfd of at least `bytes`: reading its mapping can
 * then never fail. DRAY_EINVALID. */
int dray__segment_check(int fd, uint64_t bytes, dray_error *error);

/* A connection to the keeper, made when first needed. One thread at a time. */
typedef struct dray__keeper_link {
    char *address; /* "unix:..."; NULL: the coordinator named none */
    dray__channel *channel;
    int64_t timeout_ns;
    uint64_t era; /* of the controller that chunks are put for; 0: not known */
} dray__keeper_link;

int dray__keeper_link_init(dray__keeper_link *link, const char *path, int64_t timeout_ns,
                           dray_error *error);
void dray__keeper_link_free(dray__keeper_link *link);
/* The keeper may be another one by now. */
void dray__keeper_link_break(dray__keeper_link *link);
/* DRAY_ECLOSED: the controller of this era is gone, and another has come. */
int dray__keeper_put(dray__keeper_link *link, uint64_t id, uint64_t key, uint64_t bytes, int fd,
                     dray_error *error);
/* Tells it to forget `count` chunks; pairs: the id and the key of each. */
int dray__keeper_forget(dray__keeper_link *link, uint32_t count, const dray__writer *pairs,
                        dray_error *error);
/* Tells the keeper to forget all chunks, and that from now on only those of the link's era come. */
int dray__keeper_reset(dray__keeper_link *link, dray_error *error);

/* A chunk as this process reads it: mapped once, shared by all queues and threads. */
typedef struct dray__mapping {
    uint64_t id;
    uint8_t *base; /* read-only */
    uint64_t size;
    uint32_t users; /* of batches */
    int dropped;    /* unmapped with its last user */
} dray__mapping;

/* Maps the chunk, or finds its mapping; give it back with dray__mapping_put. */
int dray__mapping_get(dray__keeper_link *link, uint64_t id, dray__mapping **out, dray_error *error);
void dray__mapping_put(dray__mapping *mapping);
/* The chunk is gone from the keeper: its memory should not be kept for a mapping's sake. */
void dray__mapping_drop(uint64_t id);
void dray__mapping_drop_unused(void);

#endif
