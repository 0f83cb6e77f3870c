/* A journal: one file of checked records (record.h), to which threads of its own append. Whoever
 * adds a record goes on at once; two threads take turns: while one waits for the disk to say that
 * what was written is safe, the other fetches, sums and writes what has come meanwhile. One sync
 * answers for everything that was written before it began (dray__journal_fd). A third writes the
 * file anew, or reads it, beside them (aside.c). The journal knows nothing of queues.
 *
 * What a crash left at the end of the file (a record that is not whole, though none after it was
 * known to be safe) is cut off. A broken record before that is DRAY_ECHECKSUM: it was
 * acknowledged.
 *
 * Blocks of a file that were written before are written again twice as fast as new ones, and synced
 * without the file system's own journal. So the file is longer than what is in it, and the one that
 * it replaces when it is written anew is kept beside it, as PATH.new, for the next time. */
#pragma once

#include "base/wire.h"

typedef struct dray__journal dray__journal;

/* Bytes of a record that are fetched when it is written, from where they cannot change place. */
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

/* Another file, to which the journal is written anew. */
typedef struct dray__copy {
    int fd;
    char *label;          /* for messages */
    int folder;           /* -1: the process that opened the file names it; otherwise */
    char *partial, *name; /* what it is called in there, before and once it is whole */
} dray__copy;

void dray__copy_free(dray__copy *copy); /* closes the file; NULL is fine */

typedef struct dray__journal_entry {
    struct dray__journal_entry *next;
    uint64_t seq; /* set when it is added */
    uint64_t at;  /* the journal's own */
    uint16_t kind;
    uint32_t owner; /* whose it is: what compaction keeps or drops; 0: nobody's */
    dray__writer body;
    dray__journal_piece *pieces; /* they follow the body */
    uint32_t piece_count;
    void *user;
    bool
        missing; /* set when it is given back: its pieces could not be fetched, and never will be */
    /* The file is written anew: records of owners in `keep` (sorted), those of nobody that come
     * after the first of them, this one, and what was added since. copy: to another file, which
     * ends with this one, and the journal itself goes on as it is. What came of it is in `error`.
     * The entry is given back when it is done, which may be long after its number was safe. */
    bool compact;
    uint32_t *keep, keep_count;
    dray__copy *copy;
    dray_error error;
    /* Instead: `each` is called, in a thread of the journal's, for every record before this one. */
    dray__journal_each each;
} dray__journal_entry;

void dray__entry_free(dray__journal_entry *entry);

/* What its threads do to files, so that tests can lose power in it. NULL: pwrite, fdatasync. */
typedef struct dray__journal_files {
    /* 0, or -1 with errno. */
    int (*write)(int fd, const void *data, size_t size, int64_t at);
    int (*sync)(int fd);
} dray__journal_files;

typedef struct dray__journal_options {
    const char *path;
    bool sync; /* every group; false: never */
    /* Fetches a piece, or a part of one. Called by one thread at a time. DRAY_EGONE: it is not
     * there any more; another error is tried again. */
    int (*fetch)(void *user, const dray__journal_piece *piece, void *out, dray_error *error);
    void *user;
    const dray__journal_files *files;
} dray__journal_options;

/* Reads a file's whole records; *end: where the last one ends. An error of `each` ends it. */
int dray__journal_read(const char *path, dray__journal_each each, void *user, uint64_t *end,
                       uint64_t *last, dray_error *error);
/* The same of a file that is open; label: for messages. */
int dray__journal_read_open(int fd, const char *label, dray__journal_each each, void *user,
                            uint64_t *end, uint64_t *last, dray_error *error);
/* Starts a journal, mode 0600. end: what dray__journal_read said of the file, which is cut off
 * there; 0: there must be none (DRAY_EEXIST). last: its last sequence number. DRAY_EBUSY: another
 * process has it open. */
int dray__journal_start(const dray__journal_options *options, uint64_t end, uint64_t last,
                        dray__journal **out, dray_error *error);
/* Adds a record; the entry is the journal's until dray__journal_done gives it back. */
void dray__journal_add(dray__journal *journal, dray__journal_entry *entry);
/* Readable when something became safe, or failed. The journal's. */
int dray__journal_fd(const dray__journal *journal);
/* Entries that are safe, in order (NULL: none), and up to which number all is. An error: the
 * journal cannot be written now (DRAY_EFULL, DRAY_ESYS); it tries again by itself, and what waits
 * is kept. */
dray__journal_entry *dray__journal_done(dray__journal *journal, uint64_t *safe, int *code,
                                        dray_error *error);
uint64_t dray__journal_added(const dray__journal *journal); /* the last number */
/* Writes what waits, unless that fails. Returns what was never given back. NULL is fine. */
dray__journal_entry *dray__journal_stop(dray__journal *journal);
