/* src/queue/journal/: the record that a durable queue keeps of its table. journal.c appends records
 * to a file in threads of its own, record.c is the file's format, aside.c rewrites it. ledger.c
 * makes a record of each change of the table, replay.c rebuilds a table from records, restore.c
 * reads lost bytes from them again, and place.c stores such bytes for readers. */

/* A ledger writes every change of a queue's table as a record of a journal (ledger.c), and rebuilds
 * a table from the records (replay.c). The table calls these functions where it changes, with a
 * ledger that is NULL for a queue without a journal. */
#pragma once

#include "base/clock.h"
#include "queue/journal/journal.h"
#include "queue/journal/place.h"
#include "queue/journal/records.h"
#include "queue/table/table.h"

enum { DRAY__LEFT = 4096 * DRAY__TOLD };

struct dray__ledger {
    dray__table *table;
    dray__journal *journal; /* NULL while it is being read */
    dray__placer bytes;     /* used by the journal's thread, which reads bytes */
    dray__placer own;       /* used by the controller */
    uint64_t former_space;  /* the previous controller's space, from the journal, or 0 */
    /* dray__ledger_poll calls it for a record with bytes that were lost before they were in the
     * journal. May be NULL. */
    void (*gone)(void *user, uint64_t record);
    void *user;
    char *path;    /* NULL when it has no name */
    bool sync;     /* answers wait until the records are safe */
    uint64_t safe; /* all records up to this number are safe */
    int failed;    /* DRAY_E code while the journal cannot be written */
    dray_error why;
    dray__idmap sizes;   /* partition's generation -> bytes of its records */
    uint64_t live, dead; /* bytes of all records: compaction would drop the dead ones */
    bool compacting;
    struct dray__restoring *restoring; /* while bytes are being put back; else NULL */
    bool restored;                     /* set when bytes were put back since the controller looked;
                                        * bytes that are lost now stay lost */
    bool lost;                         /* a change could not be recorded: no further changes are */
    bool copying;
    dray_error copied; /* the result of the last dray__ledger_copy */

    /* While it is being read: */
    bool replaying;
    uint64_t record;      /* its number */
    uint32_t number;      /* the next generation number; 0 when the table counts */
    dray__client *reader; /* owns the chunks into which bytes are put */
    uint64_t *filled;     /* those chunks that are full, closed when the record is replayed */
    uint32_t filled_count;
    uint64_t filled_capacity;

    /* While a request is done that counts once (dray__counts_once): */
    dray__client *asker; /* else NULL */
    uint32_t ticket;
    bool written; /* a record of it was written */

    /* The requests of clients that are gone: key of (identity, ticket) -> dray__told. Only the last
     * ones are kept, of clients that left and of those in the journal that was read. Their keys are
     * in `left`. */
    dray__idmap told;
    uint64_t left[DRAY__LEFT];
    uint32_t left_count;
};

/* ---- for the table --------------------------------------------------------------------------- */

/* Returns true when a put must be pinned until its bytes are in the journal. */
bool dray__ledger_keeps(const dray__ledger *ledger);
/* Writes a record without bytes (records.h). owner: a partition's generation, or 0. */
void dray__ledger_write(dray__ledger *ledger, uint16_t kind, uint32_t owner, const void *body);
void dray__ledger_insert(dray__ledger *ledger, dray__client *client, const dray__new_rows *rows,
                         const dray__partition *p, uint32_t first, dray__put *put);
void dray__ledger_commit(dray__ledger *ledger, const dray__claim *claim, const dray__outputs *o,
                         dray__put *put);
void dray__ledger_put(dray__ledger *ledger, dray__client *client, const dray__putting *m,
                      const dray__keyed *p, uint32_t number, const dray__row_at *at,
                      dray__put *put);
void dray__ledger_loss(dray__ledger *ledger, const dray__partition *p, const dray__death *death,
                       uint64_t demand);
void dray__ledger_clear(dray__ledger *ledger, const dray__partition *p);
/* The owner's records are not needed any more. NULL is fine. */
void dray__ledger_uncount(dray__ledger *ledger, uint32_t owner);
/* Call when a change of the table could not be recorded: the queue refuses all further changes. */
void dray__ledger_lose(dray__ledger *ledger);
/* Returns the generation number for a new partition or demand. */
uint32_t dray__ledger_number(dray__table *table);
/* Returns the result of a request whose client has come back since; NULL when the request did not
 * count. */
const dray__told *dray__ledger_told(const dray__ledger *ledger, uint64_t identity, uint32_t ticket);
/* Call before and after a request that counts once is done: the records in between say who asked.
 * counted: the request succeeded, and is remembered even if it changed nothing. NULL is fine. */
void dray__ledger_ask(dray__ledger *ledger, dray__client *client, uint32_t ticket);
void dray__ledger_asked(dray__ledger *ledger, bool counted);
/* Call when a client has left; it may come back and repeat its last request. */
void dray__ledger_left(dray__ledger *ledger, const dray__client *client);

/* ---- for the controller ---------------------------------------------------------------------- */

typedef struct dray__ledger_options {
    const char *path; /* of the journal */
    const char *keeper_path;
    uint64_t era; /* of the controller (keeper.h) */
    bool sync;
    bool kept;       /* later changes are added to the journal; false when it is only read */
    bool checkpoint; /* the file is a checkpoint (dray__ledger_copy), and must be whole */
    const int
        *from; /* an open file to be read instead, whose name is `path`; NULL when there is none */
    /* Is called with the user of `make` when all was read, before the journal is opened at `path`;
     * NULL when there is nothing to do. */
    int (*ready)(void *user, const dray__table *table, dray_error *error);
    const dray__journal_files *files;
} dray__ledger_options;

/* Begins the ledger of a new table. opening is the QUEUE_OPEN message that made the table. */
int dray__ledger_new(dray__table *table, const dray__ledger_options *options, const void *opening,
                     size_t size, dray_error *error);
/* `make` makes an empty table from the OPEN record of a journal. */
typedef int (*dray__ledger_make)(void *user, dray__reader *opening, dray__table **out,
                                 dray_error *error);
/* Rebuilds a table from a journal's records. *out is NULL when the file has none yet. Returns 0, or
 * DRAY_EFORMAT for a checkpoint that does not end with the record that every checkpoint ends with:
 * a journal may have a torn end, a checkpoint may not. */
int dray__ledger_recover(const dray__ledger_options *options, dray__ledger_make make, void *user,
                         dray__table **out, dray_error *error);
/* Writes the waiting records and frees the ledger. The table has none afterwards. */
void dray__ledger_end_of(dray__table *table);
int dray__ledger_fd(const dray__ledger *ledger);
/* Handles records that became safe, or failed: unpins their puts. Compacts the journal when that is
 * worth it. */
void dray__ledger_poll(dray__ledger *ledger);
/* Returns DRAY_EFULL or DRAY_ESYS while changes cannot be recorded, and must be refused. NULL is
 * fine. */
int dray__ledger_check(const dray__ledger *ledger, dray_error *error);
/* Returns the number of the last record; 0 for NULL. */
uint64_t dray__ledger_added(const dray__ledger *ledger);
/* Returns the number that must be safe before an answer may be sent; 0 when it may be sent now.
 * NULL is fine. */
uint64_t dray__ledger_pending(const dray__ledger *ledger);
/* Lets the ledger's thread read from keepers of other hosts. */
void dray__ledger_reach(dray__ledger *ledger, dray__keepers *keepers);
/* Puts lost bytes (dray__chunk.lost) back from the journal where that is possible. This reads the
 * whole journal, in the background. Until `restored`, rows that wait for it are neither ready nor
 * lost. NULL is fine. */
void dray__ledger_restore(dray__ledger *ledger);
/* Writes the table's records to another file. This is done once the last number that was added is
 * safe, and `copied` has the result. Takes `copy` over. Returns 0, or DRAY_EBUSY when a copy is
 * under way already. */
int dray__ledger_copy(dray__ledger *ledger, dray__copy *copy, dray_error *error);

/* ---- between ledger.c and replay.c ----------------------------------------------------------- */

/* Remembers the requests that a STATE record lists. */
int dray__ledger_recall(dray__ledger *ledger, const dray__counted *counted, uint32_t count,
                        dray_error *error);
/* Of several results for one request, the first stays. */
int dray__ledger_remember(dray__ledger *ledger, uint64_t identity, const dray__told *told,
                          dray_error *error);
void dray__ledger_count(dray__ledger *ledger, uint32_t owner, uint64_t bytes);
int dray__replay_record(dray__ledger *ledger, const dray__journal_record *record,
                        dray_error *error);
void dray__restore_done(dray__ledger *ledger, dray__journal_entry *entry);
int dray__replay_begin(dray__ledger *ledger, dray_error *error);
void dray__replay_end(dray__ledger *ledger);
