/* The keeper: holds a descriptor of every chunk of samples on its host, so that a producer that is
 * killed loses nothing that it committed. It runs in a process of its own beside the coordinator
 * (the supervisor of `dray run`, or `dray serve`), attached to that process's event loop.
 *
 * KEEPER_PUT {u64 id, u64 key, u64 bytes, u64 era} + descriptor: keeps a memfd that is sealed
 * against shrinking, growing and further writable mappings. Returns DRAY_EEXIST when the id is
 * taken, DRAY_EGONE when it was dropped before it came (the last 1,024 such ids are known), or
 * DRAY_ECLOSED when the era is not that of the last reset, because then no controller would ever
 * use or drop the chunk. KEEPER_GET {u64 id} -> {u64 bytes} + a descriptor that cannot be
 * mapped writable. KEEPER_DROP {u64 id, u64 key}: forgets the chunk. Only the producer and the
 * controller know the key. KEEPER_RESET {u64 era}: forgets all chunks, for a controller that is
 * started anew and knows none. An era is the number of one controller's life, or 0 without a
 * journal. With 0, eras are not compared. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>

struct event_base;
typedef struct dray__keeper dray__keeper;

/* Listens at `path` (mode 0600; a socket file left there by a dead keeper is replaced), and serves
 * on base's loop. max_bytes limits all chunks together; 0 means that only memory does. Raises the
 * process's soft limit of open files to the hard one, because every chunk takes a descriptor. */
int dray__keeper_new(struct event_base *base, const char *path, uint64_t max_bytes,
                     dray__keeper **out, dray_error *error);
void dray__keeper_free(dray__keeper *keeper); /* NULL is fine; removes the socket file */
/* ---- for join.h, from any thread ------------------ */

/* Copies a range of a chunk to `out`. Returns 0, DRAY_EGONE when the chunk is not kept here, or
 * ends before, or DRAY_ENOMEM when it cannot be mapped now. */
int dray__keeper_read(dray__keeper *keeper, uint64_t id, uint64_t offset, uint64_t bytes,
                      void *out);
/* As KEEPER_DROP. Returns false when the key is not the chunk's. */
bool dray__keeper_drop(dray__keeper *keeper, uint64_t id, uint64_t key);
void dray__keeper_reset_all(dray__keeper *keeper);
/* As KEEPER_RESET, unless the keeper is in this era already. */
void dray__keeper_enter_era(dray__keeper *keeper, uint64_t era);
