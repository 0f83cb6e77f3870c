/* The queue's messages, as client and controller both write and read them.
 *
 * Every request but QUEUE_OPEN begins with a head:
 *     u32 client, u64 drops seen, u32 n, n * u64 chunks that the client closes
 * Replies to INSERT, ROOM, COMMIT, CHUNK and CLAIM begin with
 *     u64 drops so far, u8 forget all, u32 n, n * u64 chunks dropped since
 *
 * OPEN     str name, u32 n tasks, n * {str name, strs needs, strs writes}, u64 rows, u64 bytes,
 * u32 attempts, u32 on loss, u64 provisional tasks (bits in their order),
 *          u32 rows a batch, u32 open batches, u32 batches a checkpoint, u64 bytes a row, u32
 * durability, u32 backend, str its address, u64 identity, str checkpoint to restore (a file, as
 * below; "": none), i64 timeout; with the descriptor of a page of releases (releases.h), or none,
 * and that of a checkpoint
 *          -> u32 client, u32 durability, u64 era (keeper.h), u8 1 if the page is read,
 *             u32 backend, str its address, u64 space, u64 capacity in bytes, the same table of
 *             tasks
 *
 * INSERT   str partition, u32 rows, u32 group size, u8 per group, u64 at slot, u64 row bytes,
 *          u64 refill, u32 ticket, i64 timeout, columns, tags
 *          -> u32 first slot, u32 generation
 *
 * ROOM     str partition, u32 rows, u32 group size, u64 at slot, u64 row bytes, u32 ticket, u64
 *          bytes of values, u64 bytes of new chunks for them, i64 timeout: before they are written;
 *          the INSERT that follows comes before others
 *
 * SEAL     str partition, u32 rows        CLEAR  str partition        END
 *
 * WAIT     str partition, u32 task (NONE: all), i64 timeout
 *
 * REFILL   i64 timeout
 *          -> u64 id, str partition, u32 rows, u32 slot, u32 group, u32 task, u32 attempts,
 *             u32 cause, str reason
 *
 * DECLINE  u64 id        VERSION  u64
 *
 * ADMIT    u32 task (NONE: inserts), u32 rows a batch, u32 staleness, u32 concurrency, u64 version,
 *          u8 resume
 *
 * CURSOR   -> u32 epoch, u64 sequence number
 *
 * COVER    u32 epoch, u64 sequence number
 *
 * RESUME   u32 epoch, u64 sequence number, u64 version -> u32 epoch
 *
 * CLAIM    u32 ticket, u32 columns known, u32 keys known, i64 timeout,
 *          u32 n, n * {u32 task, str partition ("": any), u32 count, u8 up to, i32 policy,
 *          i64 hold, u8 fresh, u32 staleness, u64 version, u8 1 if the following is there: str
 * group, str tag of the cost, u64 epoch, u64 round, u64 token cap, u32 rank, u32 ranks, u32 peer,
 *          u32 peers, u32 rows a micro-batch}
 *          -> u32 which, columns {u32 index, str, spec}, keys {str}, body (below)
 *
 * COMMIT   u32 ticket, u32 generation, outputs
 *
 * NEXT     as COMMIT, then as CLAIM
 *          -> as COMMIT, u32 code, then as CLAIM, or of an error: str message
 *
 * FAIL     u32 ticket, u32 n, n * u32 items, str reason; n = 0 and no reason: given back, which
 *          counts as no attempt
 *
 * LOST     as FAIL, u32 n, n * u64 chunk: who holds bytes of these rows has lost them; n = 0: it is
 *          not known which
 *
 * RELEASE  u32 ticket (a claim, or a CLAIM that still waits; no answer is wanted)
 *
 * HOLD     u32 ticket, i64 ns (0: as long as the session)
 *
 * CHUNK    u32 home (homes.h) of the new one, u32 n, n * {u64 id, u64 key, u64 size, u64 least
 * size} new (at most one), u32 n, n * u64 given up; where a store holds the bytes: u32 0, n objects
 * that were not committed, or maybe were, u32 0
 *          -> u64 chunk given back for writing instead (0: none), u64 size of the new one (0: none)
 *
 * CHECKPOINT  str file: a name in the coordinator's folder, or DRAY__PASSED: the message's last
 *             descriptor, of a regular file. No client says a path.
 *
 * STATUS   -> str JSON                    CLOSE
 *
 * columns: u32 n, n * {str name, spec, extent};  tags: u32 n keys, n * str,
 *          u32 n, n * {u32 item, u32 key of these, f64}
 * outputs: columns, tags, u32 n, n * u32 items that stay open
 * body:    str partition, u32 generation, u32 task,
 *          u32 n rows, n * {u32 slot, u32 attempt, u32 group, u32 generation},
 *          u32 n puts, n * {u32 items, u32 m, m * {u32 column, u32 home, extent}},
 *          u32 n needed columns, n * {u32 column, u32 place},
 * u32 n places, n * (rows * {u32 put (NONE: nothing yet), u32 item}),
 *          u32 n rows of pieces, n * {u32 place, u32 row, u32 m, m * {u32 put, u32 item,
 *              f64 version (-1: not known)}},
 * u32 n tags, n * {u32 row, u32 key, f64},
 *          u32 n micro-batches, n * u32 end, and if n: rows * u8 (0: padding) */
#ifndef DRAY_QUEUE_MESSAGES_H
#define DRAY_QUEUE_MESSAGES_H

#include "queue/schema.h"

#define DRAY__PASSED "/" /* no name is that */
/* A checkpoint's name: what can be one of a file that lies in a folder. DRAY_EINVALID. */
int dray__saved_name_check(const char *name, dray_error *error);

/* A name of 0..DRAY__WORD_MAX bytes inside the message, copied; NULL fails the reader. */
char *dray__get_word(dray__reader *r);
/* As long a text, which may have lines: why a sample failed. */
char *dray__get_reason(dray__reader *r);

typedef struct dray__words { /* strs: u32 n, n * str */
    char **items;
    uint32_t count;
} dray__words;

void dray__put_words(dray__writer *w, const char *const *items, uint32_t count);
int dray__get_words(dray__reader *r, dray__words *out, dray_error *error);
void dray__words_free(dray__words *words);

#endif
