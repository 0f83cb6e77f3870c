/* What a column holds, and where a put of it lies: the words that client and controller share. */
#ifndef DRAY_QUEUE_SCHEMA_H
#define DRAY_QUEUE_SCHEMA_H

#include "base/wire.h"

#include <dray/queue.h>

#define DRAY__WORD_MAX 255u /* bytes of a queue's, partition's, task's, column's or tag's name */
#define DRAY__TASKS_MAX 64u /* of a queue: one bit each in a u64 */
#define DRAY__COLUMNS_MAX 4096u  /* of a queue */
#define DRAY__TAG_KEYS_MAX 1024u /* of a queue */
#define DRAY__ROWS_MAX (1u << 26)
#define DRAY__REASON_MAX 200u                /* bytes kept of why a row failed */
#define DRAY__ADDRESS_MAX 4096u              /* bytes of a backend's address */
#define DRAY__OBJECT_MAX (UINT64_C(1) << 40) /* bytes of an object */
#define DRAY__ALIGN 64u                      /* of values within a chunk */

typedef struct dray__column_spec {
    int32_t dtype, content;
    uint32_t ndim;
    bool ragged;
    int64_t shape[DRAY_MAX_DIMS]; /* of one row; shape[0] = 0 where ragged */
} dray__column_spec;

/* One column of one put: where its values lie. Fixed: items * row bytes at `values`. Ragged: u64
 * offsets[items + 1] at `offsets`, in slices of shape[1..]. */
typedef struct dray__extent {
    uint64_t chunk;
    uint64_t values, bytes; /* offset in the chunk; bytes of values */
    uint64_t offsets;       /* offset in the chunk; ragged only, else 0 */
} dray__extent;

/* From what a caller gave; refuses unknown dtypes, contents and impossible shapes. */
int dray__spec_of(const dray_column_data *column, dray__column_spec *out, dray_error *error);
int dray__spec_check(const dray__column_spec *spec, const char *name, dray_error *error);
/* DRAY_EDTYPE or DRAY_ESHAPE, naming both. */
int dray__spec_same(const dray__column_spec *column, const dray__column_spec *found,
                    const char *name, dray_error *error);
/* Elements and bytes of one row's value (ragged: of one slice of it). Checked specs only. */
uint64_t dray__spec_elements(const dray__column_spec *spec);
uint64_t dray__spec_bytes(const dray__column_spec *spec);
/* That the extent holds `items` items and lies within a chunk of `size` bytes. DRAY_EFORMAT. */
int dray__extent_check(const dray__extent *extent, const dray__column_spec *spec, uint64_t items,
                       uint64_t size, const char *name, dray_error *error);
/* Bytes of the extent's offsets and values. Checked extents only. */
uint64_t dray__extent_bytes(const dray__extent *extent, const dray__column_spec *spec,
                            uint64_t items);

void dray__put_spec(dray__writer *w, const dray__column_spec *spec);
dray__column_spec dray__get_spec(dray__reader *r);
void dray__put_extent(dray__writer *w, const dray__extent *extent);
dray__extent dray__get_extent(dray__reader *r);
#define DRAY__EXTENT_WIRE 32u /* bytes */
#define DRAY__SPEC_WIRE 45u

/* A name is 1..DRAY__WORD_MAX bytes of UTF-8. `what` is for the message. */
int dray__name_check(const char *name, const char *what, dray_error *error);

#endif
