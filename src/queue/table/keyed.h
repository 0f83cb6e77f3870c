/* Keyed partitions: rows that are named by strings, put again and again, and read without claims
 * (dray/queue.h, "rows with keys"). They share the table's chunks, puts, columns' names and limits
 * with the partitions whose rows are claimed, and nothing else.
 *
 * A cell is where a row's value of a column lies: an item of a put. A put counts the cells that lie
 * in each of its columns; what no cell is in any more is freed when nobody has it pinned. So a put
 * replaces a row's values by moving cells, and who reads keeps what was there.
 *
 * What a journal keeps: every put, with its bytes, under a number of its own (its owner), so that
 * those that no cell is in are left out when the journal is written anew; and under the partition's
 * generation what was dropped, consumed and forgotten. That is left out then, as the rows
 * themselves are in the record of the state (dray__image), which comes behind the puts. */
#pragma once

#include "queue/journal/records.h"
#include "queue/table/table.h"

typedef struct dray__keyed_cell {
    dray__put *put;        /* NULL: the row has no value */
    uint32_t item, column; /* of the put */
} dray__keyed_cell;

typedef struct dray__keyed_row {
    char *key; /* NULL: none */
    uint64_t hash;
    uint32_t next;       /* row whose key has the same hash; of a free slot: the next one */
    uint32_t generation; /* the number of the put that made it; 0: the slot is free */
    uint32_t version;
    uint64_t consumed; /* consumers, one bit each */
    uint64_t mark;     /* table->marks, of the request that named it last */
    uint8_t *note;     /* NULL: never given */
    uint32_t note_size;
    uint32_t cell_count;
    dray__keyed_cell *cells; /* as the partition's columns */
} dray__keyed_row;

struct dray__keyed {
    dray__keyed *next;
    char *name;
    uint32_t generation;
    dray__keyed_row *rows;
    uint32_t row_count, end, capacity; /* end: slots that were ever used */
    uint32_t free;                     /* slot; NONE: there is none before the end */
    dray__idmap keys;                  /* hash -> slot + 1 */
    uint32_t *columns, *column_rows;   /* of the table; rows that have a value in it */
    uint32_t column_count, column_capacity;
    char *tasks[DRAY__TASKS_MAX]; /* consumers */
    uint32_t task_count;
    uint64_t memory, arrays; /* bytes; of them those of arrays, which never shrink */
    uint64_t change;         /* table->changes, when rows were put, dropped or forgotten last */
};

/* Rows and columns that were asked for, of a partition that is there. */
typedef struct dray__picked {
    dray__keyed *partition;
    uint32_t *slots, count;
    uint32_t *columns, column_count; /* the partition's; NONE: it has none of the name */
    const char **names;              /* of the columns */
    dray__claim *claim;              /* what holds their bytes: a put's mark_index is its pin */
} dray__picked;

dray__keyed *dray__table_keyed(const dray__table *table, const char *name); /* NULL: none */
/* A number that is another one whenever a get of the partition may find something else. */
uint64_t dray__keyed_change(const dray__table *table, const char *name);
/* out: as many addresses as rows. */
int dray__keyed_put(dray__table *table, dray__client *client, const dray__putting *m,
                    dray__row_at *out, dray_error *error);
/* DRAY_EAGAIN says what is missing. What is picked is in the arena; nothing is held yet. */
int dray__keyed_pick(dray__table *table, const dray__getting *m, dray__arena *arena,
                     dray__picked *out, dray_error *error);
/* The client's claim `ticket` has the puts pinned. */
int dray__keyed_pin(dray__table *table, dray__client *client, uint32_t ticket, dray__picked *picked,
                    dray_error *error);
/* The consumer has had the rows. DRAY_EFULL: there are too many consumers. */
int dray__keyed_consume(dray__table *table, const dray__picked *picked, const char *task,
                        dray_error *error);
/* Rows that are there are dropped; no names: all of the partition's. */
int dray__keyed_drop(dray__table *table, const char *partition, const dray__named *named,
                     dray_error *error);
int dray__keyed_reset(dray__table *table, const char *partition, const char *task,
                      dray_error *error);
void dray__keyed_free(dray__table *table); /* all of them */

/* ---- as a journal has it --------------------------------------------------------------------- */

/* A put that counted, whose rows are `record->at`. Rows that are older and in its way are dropped:
 * the journal was written anew without what dropped them. */
int dray__keyed_again(dray__table *table, dray__client *reader, const dray__keyed_record *record,
                      uint32_t number, dray_error *error);
/* At the end: rows were made in slots of the records' choice. */
void dray__keyed_list_free(dray__table *table);
/* Numbers of the puts that cells are in, and how many. NULL: out of memory. */
uint32_t *dray__keyed_numbers(dray__table *table, uint32_t *count);
/* All partitions, in the arena. NULL: out of memory, where there are some. */
dray__image *dray__keyed_state(const dray__table *table, dray__arena *arena, uint32_t *count);
/* Rows are what the state says, of generations up to `most`; their cells are there already. */
int dray__keyed_restore(dray__table *table, const dray__image *kept, uint32_t count, uint32_t most,
                        dray_error *error);
