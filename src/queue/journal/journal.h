/* A journal: one file of checksummed records (record.h), to which threads of its own append. Adding
 * a record does not block. Two threads take turns: while one syncs the written records, the other
 * fetches, sums and writes the records added meanwhile. One sync makes everything safe that was
 * written before it began (dray__journal_fd). A third thread rewrites the file, or reads it, at the
 * same time (aside.c). The journal knows nothing of queues.
 *
 * A crash may leave an incomplete record at the end of the file, which was never reported as safe.
 * It is cut off. A broken record before that is DRAY_ECHECKSUM, because it was acknowledged.
 *
 * Blocks of a file that were written before are written again twice as fast as new ones, and synced
 * without the file system's own journal. So the file is longer than its records, and the file that
 * a new one replaces is kept beside it, as PATH.new, for the next time. */
#pragma once

#include "base/wire.h"

typedef struct dray__journal dray__journal;

/* Bytes of a record that are fetched when it is written. Until then they must not be moved. */
typedef struct dray__journal_piece {
    uint64_t source, offset, bytes;
    uint32_t keeper;
} dray__journal_piece;

typedef struct dray__journal_record {
    uint16_t kind;
    uint32_t owner;
    uint64_t seq, at, bytes; /* at, bytes: in the file */
    const void *body;
    size_t size;
    bool missing; /* its pieces are zeros */
} dray__journal_record;

typedef int (*dray__journal_each)(void *user, const dray__journal_record *record,
                                  dray_error *error);

/* Another file, to which the journal's records are copied. */
typedef struct dray__copy {
    int fd;
    char *label;          /* for messages */
    int folder;           /* -1 when the process that opened the file names it; otherwise */
    char *partial, *name; /* its names in that folder, before and after it is complete */
} dray__copy;

void dray__copy_free(dray__copy *copy); /* closes the file; NULL is fine */

typedef struct dray__journal_entry {
    struct dray__journal_entry *next;
    uint64_t seq; /* set when it is added */
    uint64_t at;  /* the journal's own */
    uint16_t kind;
    uint32_t owner; /* compaction keeps or drops it by its owner; 0 when it has none */
    dray__writer body;
    dray__journal_piece *pieces; /* they follow the body */
    uint32_t piece_count;
    void *user;
    bool missing; /* set when it is given back if its pieces do not exist any more */
    /* With compact, the file is rewritten with the records of owners in `keep` (sorted), records
     * without an owner that come after the first of them, this entry, and all later ones. With
     * copy, such records are written to another file, which ends with this entry, and the journal
     * itself is not changed. The result is in `error`. The entry is given back when the job is
     * done, which may be long after its number was safe. */
    bool compact;
    uint32_t *keep, keep_count;
    dray__copy *copy;
    dray_error error;
    /* When it is set, a thread of the journal calls it for every record before this one. */
    dray__journal_each each;
} dray__journal_entry;

void dray__entry_free(dray__journal_entry *entry);

/* The journal's calls on files, so that tests can lose power in them. NULL means pwrite and
 * fdatasync. */
typedef struct dray__journal_files {
    /* 0, or -1 with errno. */
    int (*write)(int fd, const void *data, size_t size, int64_t at);
    int (*sync)(int fd);
} dray__journal_files;

typedef struct dray__journal_options {
    const char *path;
    bool sync; /* sync after every group of records, or never */
    /* Fetches a piece, or a part of one. Called by one thread at a time. Returns 0, or DRAY_EGONE
     * when the bytes do not exist any more. The journal tries again after any other error. */
    int (*fetch)(void *user, const dray__journal_piece *piece, void *out, dray_error *error);
    void *user;
    const dray__journal_files *files;
} dray__journal_options;

/* Reads a file's complete records. *end is the end of the last one, *last its number. Stops at an
 * error of `each`. */
int dray__journal_read(const char *path, dray__journal_each each, void *user, uint64_t *end,
                       uint64_t *last, dray_error *error);
/* The same for an open file; label is its name in messages. */
int dray__journal_read_open(int fd, const char *label, dray__journal_each each, void *user,
                            uint64_t *end, uint64_t *last, dray_error *error);
/* Starts a journal with mode 0600. end is the end that dray__journal_read found; the file is cut
 * off there. With 0, no such file may exist. last is its last sequence number. Returns 0,
 * DRAY_EEXIST when a file exists that should not, or DRAY_EBUSY when another process has it
 * open. */
int dray__journal_start(const dray__journal_options *options, uint64_t end, uint64_t last,
                        dray__journal **out, dray_error *error);
/* Adds a record; the entry is the journal's until dray__journal_done gives it back. */
void dray__journal_add(dray__journal *journal, dray__journal_entry *entry);
/* Returns a descriptor that becomes readable when records became safe, or failed. The journal owns
 * it. */
int dray__journal_fd(const dray__journal *journal);
/* Returns the entries that are safe, in order (NULL when there are none). *safe is the last number
 * up to which all records are safe. *code is an error while the journal cannot be written
 * (DRAY_EFULL, DRAY_ESYS). The journal tries again by itself, and keeps the waiting entries. */
dray__journal_entry *dray__journal_done(dray__journal *journal, uint64_t *safe, int *code,
                                        dray_error *error);
uint64_t dray__journal_added(const dray__journal *journal); /* the last number */
/* Writes the waiting records, unless that fails. Returns the entries that were never given back.
 * NULL is fine. */
dray__journal_entry *dray__journal_stop(dray__journal *journal);
