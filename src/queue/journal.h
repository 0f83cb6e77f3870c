/* A journal: one file of checked records, to which a thread of its own appends. Whoever adds a
 * record goes on at once; the thread writes what has come meanwhile as one group, syncs it, and
 * says how far the file is safe (dray__journal_fd). It knows nothing of queues.
 *
 * A record: u32 magic "DRJR", u16 kind, u16 format, u64 bytes of the body, u64 sequence number,
 * u64 the number up to which the file was safe when it was written, u32 owner, u32 flags (1: its
 * pieces were gone, and are zeros), u64 XXH3 of
 * all this (with itself 0) and the body; the body; zeros up to a multiple of 8.
 *
 * What a crash left at the end of the file (a record that is not whole, though none after it was
 * known to be safe) is cut off. A broken record before that is DRAY_ECHECKSUM: it was
 * acknowledged. */
#ifndef DRAY_QUEUE_JOURNAL_H
#define DRAY_QUEUE_JOURNAL_H

#include "base/wire.h"

typedef struct dray__journal dray__journal;

/* Bytes of a record that are fetched when it is written, from where they cannot change place. */
typedef struct dray__piece {
    uint64_t source, offset, bytes;
    uint32_t home;
} dray__piece;

typedef struct dray__entry {
    struct dray__entry *next;
    uint64_t seq; /* set when it is added */
    uint16_t kind;
    uint32_t owner; /* whose it is: what compaction keeps or drops; 0: nobody's */
    dray__writer body;
    dray__piece *pieces; /* they follow the body */
    uint32_t piece_count;
    void *user;
    bool
        missing; /* set when it is given back: its pieces could not be fetched, and never will be */
    /* The file is written anew: records of owners in `keep` (sorted), those of nobody that come
     * after the first of them, and then this one. path: to another file, and the journal itself
     * goes on as it is; what came of it is in `error`. */
    bool compact;
    uint32_t *keep, keep_count;
    char *path;
    dray_error error;
} dray__entry;

void dray__entry_free(dray__entry *entry);

/* What the thread does to files, so that tests can lose power in it. NULL: pwrite, fdatasync. */
typedef struct dray__journal_files {
    /* 0, or -1 with errno. */
    int (*write)(int fd, const void *data, size_t size, int64_t at);
    int (*sync)(int fd);
} dray__journal_files;

typedef struct dray__journal_options {
    const char *path;
    bool sync; /* every group; false: never */
    /* Fetches a piece. Called in the journal's thread. DRAY_EGONE: it is not there any more;
     * another error is tried again. */
    int (*fetch)(void *user, const dray__piece *piece, void *out, dray_error *error);
    void *user;
    const dray__journal_files *files;
} dray__journal_options;

typedef struct dray__journal_record {
    uint16_t kind;
    uint32_t owner;
    uint64_t seq, bytes; /* bytes: in the file */
    const void *body;
    size_t size;
    bool missing; /* its pieces are zeros */
} dray__journal_record;

typedef int (*dray__journal_each)(void *user, const dray__journal_record *record,
                                  dray_error *error);

/* Reads a file's whole records; *end: where the last one ends. An error of `each` ends it. */
int dray__journal_read(const char *path, dray__journal_each each, void *user, uint64_t *end,
                       uint64_t *last, dray_error *error);
/* Starts a journal, mode 0600. end: what dray__journal_read said of the file, which is cut off
 * there; 0: there must be none (DRAY_EEXIST). last: its last sequence number. DRAY_EBUSY: another
 * process has it open. */
int dray__journal_start(const dray__journal_options *options, uint64_t end, uint64_t last,
                        dray__journal **out, dray_error *error);
/* Adds a record; the entry is the journal's until dray__journal_done gives it back. */
void dray__journal_add(dray__journal *journal, dray__entry *entry);
/* Readable when something became safe, or failed. The journal's. */
int dray__journal_fd(const dray__journal *journal);
/* Entries that are safe, in order (NULL: none), and up to which number all is. An error: the
 * journal cannot be written now (DRAY_EFULL, DRAY_ESYS); it tries again by itself, and what waits
 * is kept. */
dray__entry *dray__journal_done(dray__journal *journal, uint64_t *safe, int *code,
                                dray_error *error);
uint64_t dray__journal_added(const dray__journal *journal); /* the last number */
/* Writes what waits, unless that fails. Returns what was never given back. NULL is fine. */
dray__entry *dray__journal_stop(dray__journal *journal);

#endif
