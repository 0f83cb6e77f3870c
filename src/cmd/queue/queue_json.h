/* Rows of a queue as JSON: an object for each row, with a key for each column.
 *
 *     "text"               a string (UTF-8)
 *     {"base64": "..."}    bytes
 *     3, 0.5, true         one i64, f64, bool
 *     [1, 2], [0.5, 1]     i64, f64 of any length (ragged)
 *
 * A column's type follows from all of its values: one 0.5 among integers makes it f64. Another
 * dtype can be chosen by name; numbers that it cannot hold are refused. In the other direction,
 * elements become numbers (bf16 and f16 through f32), and rows of several dimensions become nested
 * lists. */
#pragma once

#include "cmd/cmd.h"

#include <dray/queue.h>
#include <jansson.h>

/* "tokens=i32": the dtype in which the values of a column are stored. */
typedef struct cmd_dtype {
    char column[64];
    dray_dtype dtype;
} cmd_dtype;

/* The types of the columns of an array of rows. */
typedef struct cmd_types cmd_types;

/* Finds the types of all columns. The rows must be objects with the same keys. Returns 0, or
 * DRAY_EFORMAT, which names row (counted from 1) and column. Borrows the rows until freed. */
int cmd_types_of(const json_t *rows, const cmd_dtype *dtypes, size_t dtype_count, cmd_types **out,
                 dray_error *error);
void cmd_types_free(cmd_types *types); /* NULL is fine */

typedef struct cmd_columns {
    dray_column_data *items;
    uint32_t count;
} cmd_columns;

/* Makes the columns of rows first to first + count - 1. Free them with cmd_columns_free. */
int cmd_columns_of(const cmd_types *types, size_t first, size_t count, cmd_columns *out,
                   dray_error *error);
void cmd_columns_free(cmd_columns *columns);

/* Returns row `index` of a column that was read; NULL when out of memory. */
json_t *cmd_cell_json(const dray_column *column, uint32_t index);
