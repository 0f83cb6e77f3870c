/* Functions that the files of keyed partitions (keyed.c, keyed_put.c, keyed_kept.c) share. */
#pragma once

#include "queue/table/keyed.h"
#include "queue/table/table_inside.h"

uint64_t dray__key_hash(const char *key);
/* Returns the slot of the row with the key, or DRAY__NONE. */
uint32_t dray__key_find(const dray__keyed *p, const char *key, uint64_t hash);
bool dray__keyed_is_row(const dray__keyed *p, const dray__row_at *at);
/* Checks that rows are named by keys or by addresses, not both, and that there are `rows` names or
 * none. `what` begins the error message. */
int dray__named_check(const char *what, const char *partition, const dray__named *named,
                      uint32_t rows, dray_error *error);
/* Adds `bytes` to the coordinator's memory that the partition takes. */
void dray__keyed_count(dray__table *table, dray__keyed *p, int64_t bytes);
/* Returns the bytes of the partition's arrays with room for so many rows, keys and columns. */
uint64_t dray__keyed_arrays(const dray__keyed *p, uint64_t rows, uint64_t keys, uint64_t columns);
/* Has requests that wait for the partition's rows tried again. */
void dray__keyed_changed(dray__table *table, dray__keyed *p);
/* Adds a row in this slot, or (DRAY__NONE) in a free one. key NULL: the row has no key. */
int dray__keyed_add_row(dray__table *table, dray__keyed *p, uint32_t slot, const char *key,
                        uint32_t generation, uint32_t *out, dray_error *error);
void dray__keyed_drop_row(dray__table *table, dray__keyed *p, uint32_t slot);
/* Returns the partition's index of the table's column, which is added if it is new. */
int dray__keyed_add_column(dray__table *table, dray__keyed *p, uint32_t column, uint32_t *out,
                           dray_error *error);
int dray__keyed_add_task(dray__keyed *p, const char *task, uint32_t *out, dray_error *error);
/* Makes a partition, which is not in a table yet. Returns NULL when out of memory. */
dray__keyed *dray__keyed_new(const char *name);
/* Adds a partition to the table. */
void dray__keyed_link(dray__table *table, dray__keyed *p);
void dray__keyed_free_one(dray__table *table, dray__keyed *p);
void dray__keyed_end(dray__table *table, dray__keyed *p);
/* Makes the row of a record from a journal in its slot. Older rows in the slot or with the key are
 * dropped. mark: a number (table->marks) for the rows of this record; most: the largest generation
 * that a row may have. */
int dray__keyed_place(dray__table *table, dray__keyed *p, const dray__row_at *at, const char *key,
                      uint64_t mark, uint32_t most, dray_error *error);
