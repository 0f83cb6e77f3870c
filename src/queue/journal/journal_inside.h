/* The declarations that journal.c and aside.c share. */
#pragma once

#include "base/thread.h"
#include "queue/journal/record.h"

enum { DRAY__JOURNAL_HANDS = 2 };

typedef struct dray__entries {
    dray__journal_entry *first, **last;
} dray__entries;

/* The lock protects everything but `out`. While a thread writes or syncs (has a role), fd, salt and
 * path do not change. */
struct dray__journal {
    dray__journal_options options;
    char *path;
    int fd, wake;
    uint64_t salt;
    dray__output out; /* used by the thread that writes */
    dray__thread hands[DRAY__JOURNAL_HANDS];
    pthread_mutex_t lock;
    pthread_cond_t work; /* for hands */
    pthread_cond_t idle; /* for the thread of aside.c, and for callers that wait for it */
    bool writing, syncing;
    bool alone;    /* a thread has both roles, or waits for them */
    bool broken;   /* a write or sync failed: all records that are not safe are written again */
    bool spinning; /* a hand polls for more records before it sleeps */
    bool stop;
    int64_t retry_at;
    uint64_t size;               /* of the file, as far as it was written */
    uint64_t written, end;       /* the ends of the written records, and of the safe
                                  * ones */
    uint64_t added, taken, safe; /* numbers: the last one; those written; those safe */
    uint64_t spun;               /* the last number after which a hand polled */
    uint64_t most_taken;         /* the largest `taken` so far, before records were written again */
    uint64_t written_record, safe_record; /* the last numbers, without those of jobs */
    dray__entries waiting, unsafe, done, jobs;
    dray_error failure; /* code 0: none */
    dray__thread aside;
    bool aside_runs, abandon;
};

void dray__entries_add(dray__entries *to, dray__journal_entry *first);
/* Under the lock: makes the descriptor readable. */
void dray__journal_wake(const dray__journal *journal);
int dray__journal_sync_folder(const char *path);

/* Both are called under the lock. After begin, the entries in `jobs` will be done (aside.c). */
void dray__aside_begin(dray__journal *journal);
void dray__aside_end(dray__journal *journal);
