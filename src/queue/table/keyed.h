/* Keyed partitions: rows that are named by strings, put again and again, and read without claims
 * (dray/queue.h, "rows with keys"). They share the table's chunks, puts, columns' names and limits
 * with the partitions whose rows are claimed, and nothing else.
 *
 * A cell is the place of a row's value of a column: an item of a put. A put counts the cells in
 * each of its columns. The bytes of a column without cells are freed when no claim has them
 * pinned. So a put replaces a row's values by moving cells, and a reader keeps the earlier values.
 *
 * A journal keeps every put, with its bytes, under a number of its own (its owner), and the drops,
 * consumes and resets under the partition's generation. When the journal is rewritten, puts
 * without cells are left out. So are the other records, because the rows themselves are then in
 * the record of the state (dray__image), which follows the puts. */
#pragma once

#include "queue/journal/records.h"
#include "queue/table/table.h"

typedef struct dray__keyed_cell {
    dray__put *put;        /* NULL when the row has no value */
    uint32_t item, column; /* the put's item, and the index among its columns */
} dray__keyed_cell;

typedef struct dray__keyed_row {
    char *key; /* NULL when the row has no key */
    uint64_t hash;
    uint32_t next;       /* the row whose key has the same hash; in a free slot the next free one */
    uint32_t generation; /* the number of the put that made it; 0 when the slot is free */
    uint32_t version;
    uint64_t consumed; /* the consumers that have had the row, one bit each */
    uint64_t mark;     /* the number (table->marks) of the last request that named the row */
    uint8_t *note;     /* NULL when no put gave one */
    uint32_t note_size;
    uint32_t cell_count;
    dray__keyed_cell *cells; /* in the order of the partition's columns */
} dray__keyed_row;

struct dray__keyed {
    dray__keyed *next;
    char *name;
    uint32_t generation;
    dray__keyed_row *rows;
    uint32_t row_count, end, capacity; /* end: the number of slots that were ever used */
    uint32_t free;                     /* the first free slot before the end; DRAY__NONE when there
                                        * is none */
    dray__idmap keys;                  /* hash -> slot + 1 */
    uint32_t *columns;                 /* the numbers of its columns in the table */
    uint32_t *column_rows;             /* [column]: the number of rows that have a value in it */
    uint32_t column_count, column_capacity;
    char *tasks[DRAY__TASKS_MAX]; /* the names of its consumers */
    uint32_t task_count;
    uint64_t memory; /* its bytes in the coordinator's memory */
    uint64_t arrays; /* those of its arrays, which never shrink; they are part of `memory` */
    uint64_t change; /* table->changes when rows were put, dropped or forgotten last */
};

/* The rows and columns of a partition that a get asks for. */
typedef struct dray__picked {
    dray__keyed *partition;
    uint32_t *slots, count;
    uint32_t *columns, column_count; /* indices of the partition's columns; NONE for one that it
                                      * lacks */
    const char **names;              /* the names of the columns */
    dray__claim *claim; /* the claim that pins their puts; mark_index of a put is its pin */
} dray__picked;

dray__keyed *dray__table_keyed(const dray__table *table, const char *name); /* NULL when there is
                                                                             * none */
/* Returns a number that changes whenever a get of the partition may have another result. */
uint64_t dray__keyed_change(const dray__table *table, const char *name);
/* Puts rows. out: an address for each row. */
int dray__keyed_put(dray__table *table, dray__client *client, const dray__putting *m,
                    dray__row_at *out, dray_error *error);
/* Finds the rows and columns of a get. *out is allocated in the arena, and pins nothing. Fails with
 * DRAY_EAGAIN when some are missing; the message names them. */
int dray__keyed_pick(dray__table *table, const dray__getting *m, dray__arena *arena,
                     dray__picked *out, dray_error *error);
/* Makes the client's claim `ticket`, which pins the puts of these rows. */
int dray__keyed_pin(dray__table *table, dray__client *client, uint32_t ticket, dray__picked *picked,
                    dray_error *error);
/* Records that the consumer has had the rows. Fails with DRAY_EFULL when there are too many
 * consumers. */
int dray__keyed_consume(dray__table *table, const dray__picked *picked, const char *task,
                        dray_error *error);
/* Drops the named rows that the partition has; without names, all of its rows. */
int dray__keyed_drop(dray__table *table, const char *partition, const dray__named *named,
                     dray_error *error);
/* Forgets which rows the consumer has had. */
int dray__keyed_reset(dray__table *table, const char *partition, const char *task,
                      dray_error *error);
void dray__keyed_free(dray__table *table); /* frees all keyed partitions */

/* ---- a partition that is read from a journal ------------------------------------------------- */

/* Repeats a put, with rows at `record->at`. Older rows in these slots or with these keys are
 * dropped, because the journal may have been rewritten without the record that dropped them. */
int dray__keyed_again(dray__table *table, dray__client *reader, const dray__keyed_record *record,
                      uint32_t number, dray_error *error);
/* Lists the free slots after the last record, because the records chose the slots of their rows. */
void dray__keyed_list_free(dray__table *table);
/* Returns the numbers of the puts that have cells, and their count; NULL when out of memory. */
uint32_t *dray__keyed_numbers(dray__table *table, uint32_t *count);
/* Returns the state of all keyed partitions, in the arena; NULL when out of memory. */
dray__image *dray__keyed_state(const dray__table *table, dray__arena *arena, uint32_t *count);
/* Sets the rows to a state that was read, with generations up to `most`. Their cells are there
 * already, from the puts. */
int dray__keyed_restore(dray__table *table, const dray__image *kept, uint32_t count, uint32_t most,
                        dray_error *error);
