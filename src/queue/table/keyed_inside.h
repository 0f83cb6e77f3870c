/* What the files of keyed partitions say to each other: keyed.c, keyed_put.c, keyed_kept.c. */
#pragma once

#include "queue/table/keyed.h"
#include "queue/table/table_inside.h"

uint64_t dray__key_hash(const char *key);
/* The row's slot; NONE: there is none. */
uint32_t dray__key_find(const dray__keyed *p, const char *key, uint64_t hash);
bool dray__keyed_is_row(const dray__keyed *p, const dray__row_at *at);
/* Rows by keys, or by addresses: as many as `rows`, or none. */
int dray__named_check(const char *what, const char *partition, const dray__named *named,
                      uint32_t rows, dray_error *error);
/* The partition takes so many bytes more here. */
void dray__keyed_count(dray__table *table, dray__keyed *p, int64_t bytes);
/* What its arrays take with room for so many. */
uint64_t dray__keyed_arrays(const dray__keyed *p, uint64_t rows, uint64_t keys, uint64_t columns);
/* Requests that wait for its rows are tried again. */
void dray__keyed_changed(dray__table *table, dray__keyed *p);
/* In the slot, or (NONE) where there is room. key NULL: none. */
int dray__keyed_add_row(dray__table *table, dray__keyed *p, uint32_t slot, const char *key,
                        uint32_t generation, uint32_t *out, dray_error *error);
void dray__keyed_drop_row(dray__table *table, dray__keyed *p, uint32_t slot);
/* The partition's number of the table's column, which it has then. */
int dray__keyed_add_column(dray__table *table, dray__keyed *p, uint32_t column, uint32_t *out,
                           dray_error *error);
int dray__keyed_add_task(dray__keyed *p, const char *task, uint32_t *out, dray_error *error);
/* One that the table does not have yet: NULL: out of memory. It has it; it is gone. */
dray__keyed *dray__keyed_new(const char *name);
void dray__keyed_link(dray__table *table, dray__keyed *p);
void dray__keyed_free_one(dray__table *table, dray__keyed *p);
void dray__keyed_end(dray__table *table, dray__keyed *p);
/* The row of a record, where it is now; what is older and in its way is dropped. mark: of the rows
 * of this record; most: of generations. */
int dray__keyed_place(dray__table *table, dray__keyed *p, const dray__row_at *at, const char *key,
                      uint64_t mark, uint32_t most, dray_error *error);
