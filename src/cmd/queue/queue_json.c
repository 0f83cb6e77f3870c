/* Makes columns from JSON rows, and JSON from columns (queue_json.h). */
#include "cmd/queue/queue_json.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* ---- base64 (RFC 4648, section 4) ------------------------------------------------------------ */

static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/* Returns the bytes, at most text's length * 3 / 4; SIZE_MAX when it is not base64. */
static size_t decode64(const char *text, size_t length, uint8_t *out)
{
    size_t bytes = 0;
    uint32_t bits = 0;
    if (length % 4)
        return SIZE_MAX;
    while (length && text[length - 1] == '=' && length % 4 != 2)
        length--;
    for (size_t i = 0; i < length; i++) {
        const char *at = text[i] ? strchr(digits, text[i]) : NULL;
        if (!at)
            return SIZE_MAX;
        bits = bits << 6 | (uint32_t)(at - digits);
        if (i % 4 != 0)
            out[bytes++] = (uint8_t)(bits >> (6 - 2 * (i % 4)));
    }
    return bytes;
}

static json_t *encode64(const uint8_t *data, size_t size)
{
    char *text = malloc((size + 2) / 3 * 4 + 1), *at = text;
    if (!text)
        return NULL;
    for (size_t i = 0; i < size; i += 3) {
        size_t left = size - i;
        uint32_t bits = (uint32_t)data[i] << 16 | (left > 1 ? (uint32_t)data[i + 1] << 8 : 0) |
                        (left > 2 ? data[i + 2] : 0);
        *at++ = digits[bits >> 18];
        *at++ = digits[bits >> 12 & 63];
        *at++ = left > 1 ? digits[bits >> 6 & 63] : '=';
        *at++ = left > 2 ? digits[bits & 63] : '=';
    }
    *at = 0;
    json_t *object = json_pack("{s:s}", "base64", text);
    free(text);
    return object;
}

/* ---- the types of columns -------------------------------------------------------------------- */

enum shape { SHAPE_NONE, SHAPE_TEXT, SHAPE_BYTES, SHAPE_ONE, SHAPE_LIST };

struct type {
    const char *key; /* the rows' key of the column */
    enum shape shape;
    bool real, truth; /* real: a number is not whole; truth: all are true or false */
    dray_dtype dtype;
};

struct cmd_types {
    const json_t *rows;
    struct type *items;
    uint32_t count;
};

static const json_t *bytes_of(const json_t *value)
{
    const json_t *text = json_object_get(value, "base64");
    return json_object_size(value) == 1 && json_is_string(text) ? text : NULL;
}

/* Adds one number to the type. Returns false when the value is not a number. */
static bool add_number(struct type *type, const json_t *value, bool first)
{
    bool truth = json_is_boolean(value);
    if (!truth && !json_is_number(value))
        return false;
    if (!first && truth != type->truth)
        return false;
    type->truth = truth;
    type->real |= json_is_real(value);
    return true;
}

static bool add_value(struct type *type, const json_t *value)
{
    bool first = type->shape == SHAPE_NONE;
    enum shape shape = json_is_string(value)  ? SHAPE_TEXT
                       : bytes_of(value)      ? SHAPE_BYTES
                       : json_is_array(value) ? SHAPE_LIST
                                              : SHAPE_ONE;
    if (!first && shape != type->shape)
        return false;
    type->shape = shape;
    if (shape == SHAPE_ONE)
        return add_number(type, value, first);
    for (size_t i = 0; shape == SHAPE_LIST && i < json_array_size(value); i++)
        if (!add_number(type, json_array_get(value, i), false) || type->truth)
            return false;
    return true;
}

static int find_type(const json_t *rows, const char *key, struct type *out, dray_error *error)
{
    *out = (struct type){.key = key};
    for (size_t i = 0; i < json_array_size(rows); i++) {
        const json_t *value = json_object_get(json_array_get(rows, i), key);
        if (!value)
            return cmd_error(error, DRAY_EFORMAT, "row %zu has no column '%s', but row 1 has",
                             i + 1, key);
        if (!add_value(out, value))
            return cmd_error(error, DRAY_EFORMAT,
                             "row %zu, column '%s': expected a string, {\"base64\": ...}, a "
                             "number, true or false, or a list of numbers, as in the rows before",
                             i + 1, key);
    }
    return DRAY_OK;
}

/* ---- storing numbers ------------------------------------------------------------------------- */

static uint16_t bf16_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (isnan(value))
        return 0x7FC0;
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

struct range {
    dray_dtype dtype;
    int64_t min, max;
};

/* Returns the range of an integer dtype; an empty range for others. */
static struct range range_of(dray_dtype dtype)
{
    static const struct range integers[] = {{DRAY_BOOL, 0, 1},
                                            {DRAY_U8, 0, UINT8_MAX},
                                            {DRAY_I8, INT8_MIN, INT8_MAX},
                                            {DRAY_U16, 0, UINT16_MAX},
                                            {DRAY_I16, INT16_MIN, INT16_MAX},
                                            {DRAY_U32, 0, UINT32_MAX},
                                            {DRAY_I32, INT32_MIN, INT32_MAX},
                                            {DRAY_U64, 0, INT64_MAX},
                                            {DRAY_I64, INT64_MIN, INT64_MAX}};
    for (size_t i = 0; i < sizeof integers / sizeof integers[0]; i++)
        if (integers[i].dtype == dtype)
            return integers[i];
    return (struct range){dtype, 0, -1};
}

/* Stores a value. Returns false when the dtype cannot hold it. */
static bool store(const json_t *value, dray_dtype dtype, void *out)
{
    double real = json_is_boolean(value) ? json_is_true(value) : json_number_value(value);
    float single = (float)real;
    uint16_t half;
    switch (dtype) {
    case DRAY_F64:
        memcpy(out, &real, sizeof real);
        return true;
    case DRAY_F32:
        memcpy(out, &single, sizeof single);
        return isfinite(single) || !isfinite(real);
    case DRAY_BF16:
        half = bf16_of(single);
        memcpy(out, &half, sizeof half);
        return isfinite(single) || !isfinite(real);
    default:
        break;
    }
    struct range range = range_of(dtype);
    int64_t whole = json_is_boolean(value) ? json_is_true(value) : json_integer_value(value);
    if (json_is_real(value) || whole < range.min || whole > range.max)
        return false;
    memcpy(out, &whole, dray_dtype_size(dtype)); /* little-endian: the low bytes */
    return true;
}

/* ---- columns of rows ------------------------------------------------------------------------- */

static dray_dtype dtype_for(const struct type *type, const cmd_dtype *dtypes, size_t count)
{
    if (type->shape == SHAPE_TEXT || type->shape == SHAPE_BYTES)
        return DRAY_U8;
    for (size_t i = 0; i < count; i++)
        if (strcmp(dtypes[i].column, type->key) == 0)
            return dtypes[i].dtype;
    return type->truth ? DRAY_BOOL : type->real ? DRAY_F64 : DRAY_I64;
}

/* Returns the number of elements of a row's value; for bytes, an upper bound. */
static size_t elements_of(const json_t *value, enum shape shape)
{
    if (shape == SHAPE_TEXT)
        return json_string_length(value);
    if (shape == SHAPE_BYTES)
        return json_string_length(bytes_of(value)) / 4 * 3;
    return shape == SHAPE_LIST ? json_array_size(value) : 1;
}

/* Returns the elements written; SIZE_MAX for a value that cannot be stored. */
static size_t put_value(const json_t *value, enum shape shape, dray_dtype dtype, uint8_t *out)
{
    size_t size = dray_dtype_size(dtype);
    if (shape == SHAPE_TEXT) {
        memcpy(out, json_string_value(value), json_string_length(value));
        return json_string_length(value);
    }
    if (shape == SHAPE_BYTES) {
        const json_t *text = bytes_of(value);
        return decode64(json_string_value(text), json_string_length(text), out);
    }
    if (shape == SHAPE_ONE)
        return store(value, dtype, out) ? 1 : SIZE_MAX;
    for (size_t i = 0; i < json_array_size(value); i++)
        if (!store(json_array_get(value, i), dtype, out + i * size))
            return SIZE_MAX;
    return json_array_size(value);
}

static int fill_column(const json_t *rows, size_t first, size_t count, const struct type *type,
                       dray_column_data *out, dray_error *error)
{
    const char *key = type->key;
    dray_dtype dtype = type->dtype;
    size_t most = 0, size = dray_dtype_size(dtype), used = 0;
    for (size_t i = 0; i < count; i++)
        most += elements_of(json_object_get(json_array_get(rows, first + i), key), type->shape);
    uint64_t *offsets = calloc(count + 1, sizeof *offsets);
    uint8_t *values = malloc((most + 1) * size);
    char *name = strdup(key);
    *out = (dray_column_data){.name = name,
                              .dtype = (int32_t)dtype,
                              .content = type->shape == SHAPE_TEXT    ? DRAY_CONTENT_STRING
                                         : type->shape == SHAPE_BYTES ? DRAY_CONTENT_BYTES
                                                                      : DRAY_CONTENT_TENSOR,
                              .ndim = type->shape != SHAPE_ONE,
                              .offsets = offsets,
                              .values = values};
    if (!offsets || !values || !name)
        return cmd_error(error, DRAY_ENOMEM, "out of memory");
    for (size_t i = 0; i < count; i++) {
        const json_t *value = json_object_get(json_array_get(rows, first + i), key);
        size_t got = put_value(value, type->shape, dtype, values + used * size);
        if (got == SIZE_MAX)
            return cmd_error(error, DRAY_EFORMAT, "row %zu, column '%s': %s", first + i + 1, key,
                             type->shape == SHAPE_BYTES ? "not base64"
                                                        : "a number that its dtype cannot hold");
        used += got;
        offsets[i + 1] = used;
    }
    out->bytes = used * size;
    if (type->shape == SHAPE_ONE) {
        out->offsets = NULL;
        free(offsets);
    }
    return DRAY_OK;
}

static int check_rows(const json_t *rows, const cmd_dtype *dtypes, size_t dtype_count,
                      dray_error *error)
{
    const json_t *head = json_array_get(rows, 0);
    for (size_t i = 0; i < json_array_size(rows); i++) {
        const json_t *row = json_array_get(rows, i);
        if (!json_is_object(row) || json_object_size(row) == 0)
            return cmd_error(error, DRAY_EFORMAT, "row %zu: an object with columns expected",
                             i + 1);
        if (json_object_size(row) != json_object_size(head))
            return cmd_error(error, DRAY_EFORMAT, "row %zu has %zu columns, row 1 has %zu", i + 1,
                             json_object_size(row), json_object_size(head));
    }
    for (size_t i = 0; i < dtype_count; i++)
        if (!json_object_get(head, dtypes[i].column))
            return cmd_error(error, DRAY_EINVALID, "--dtype %s: the rows have no such column",
                             dtypes[i].column);
    return DRAY_OK;
}

int cmd_types_of(const json_t *rows, const cmd_dtype *dtypes, size_t dtype_count, cmd_types **out,
                 dray_error *error)
{
    json_t *head = json_array_get(rows, 0), *value;
    const char *key;
    int rc = check_rows(rows, dtypes, dtype_count, error);
    if (rc)
        return rc;
    cmd_types *types = calloc(1, sizeof *types);
    if (types)
        types->items = calloc(json_object_size(head) + 1, sizeof *types->items);
    if (!types || !types->items) {
        free(types);
        return cmd_error(error, DRAY_ENOMEM, "out of memory");
    }
    types->rows = rows;
    json_object_foreach(head, key, value)
    {
        struct type *type = &types->items[types->count++];
        rc = find_type(rows, key, type, error);
        if (rc)
            break;
        type->dtype = dtype_for(type, dtypes, dtype_count);
    }
    if (rc)
        cmd_types_free(types);
    else
        *out = types;
    return rc;
}

void cmd_types_free(cmd_types *types)
{
    if (!types)
        return;
    free(types->items);
    free(types);
}

int cmd_columns_of(const cmd_types *types, size_t first, size_t count, cmd_columns *out,
                   dray_error *error)
{
    cmd_columns columns = {.items = calloc((size_t)types->count + 1, sizeof *columns.items)};
    int rc = columns.items ? DRAY_OK : cmd_error(error, DRAY_ENOMEM, "out of memory");
    while (rc == DRAY_OK && columns.count < types->count) {
        uint32_t i = columns.count++;
        rc = fill_column(types->rows, first, count, &types->items[i], &columns.items[i], error);
    }
    if (rc)
        cmd_columns_free(&columns);
    else
        *out = columns;
    return rc;
}

void cmd_columns_free(cmd_columns *columns)
{
    for (uint32_t i = 0; i < columns->count; i++) {
        free((char *)columns->items[i].name);
        free((uint64_t *)columns->items[i].offsets);
        free((void *)columns->items[i].values);
    }
    free(columns->items);
    *columns = (cmd_columns){0};
}

/* ---- JSON of columns ------------------------------------------------------------------------- */

static double half_value(uint16_t bits)
{
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double value = exponent == 31  ? (fraction ? NAN : INFINITY)
                   : exponent == 0 ? ldexp(fraction, -24)
                                   : ldexp(1024 + fraction, exponent - 25);
    return bits >> 15 ? -value : value;
}

static json_t *real_json(double value)
{
    return isfinite(value) ? json_real(value)
                           : json_string(isnan(value) ? "NaN"
                                         : value > 0  ? "Infinity"
                                                      : "-Infinity");
}

static json_t *element_json(const uint8_t *at, dray_dtype dtype)
{
    int64_t whole = 0;
    uint32_t word;
    float single;
    double real;
    memcpy(&whole, at, dray_dtype_size(dtype)); /* little-endian: the low bytes */
    switch (dtype) {
    case DRAY_F64:
        memcpy(&real, at, sizeof real);
        return real_json(real);
    case DRAY_F32:
    case DRAY_BF16:
        word = dtype == DRAY_BF16 ? (uint32_t)whole << 16 : (uint32_t)whole;
        memcpy(&single, &word, sizeof single);
        return real_json((double)single);
    case DRAY_F16:
        return real_json(half_value((uint16_t)whole));
    case DRAY_BOOL:
        return json_boolean(whole != 0);
    default: /* integers, and bits of dtypes that JSON has no numbers for */
        break;
    }
    if (dtype == DRAY_U64 && whole < 0) { /* larger than jansson's numbers */
        char text[24];
        snprintf(text, sizeof text, "%" PRIu64, (uint64_t)whole);
        return json_string(text);
    }
    int above = 64 - 8 * (int)dray_dtype_size(dtype);
    if (range_of(dtype).min < 0)
        whole = (int64_t)((uint64_t)whole << above) >> above;
    return json_integer(whole);
}

static json_t *nested_json(const uint8_t **at, dray_dtype dtype, const int64_t *shape,
                           uint32_t ndim)
{
    if (ndim == 0) {
        json_t *value = element_json(*at, dtype);
        *at += dray_dtype_size(dtype);
        return value;
    }
    json_t *list = json_array();
    for (int64_t i = 0; list && i < shape[0]; i++)
        if (json_array_append_new(list, nested_json(at, dtype, shape + 1, ndim - 1))) {
            json_decref(list);
            return NULL;
        }
    return list;
}

json_t *cmd_cell_json(const dray_column *column, uint32_t index)
{
    const uint8_t *at = column->cells[index];
    uint64_t elements = column->lengths[index];
    if (column->content == DRAY_CONTENT_STRING) {
        json_t *text = json_stringn((const char *)at, elements);
        return text ? text : encode64(at, elements);
    }
    if (column->content == DRAY_CONTENT_BYTES)
        return encode64(at, elements);
    int64_t shape[DRAY_MAX_DIMS], rest = 1;
    memcpy(shape, column->shape, sizeof shape);
    for (uint32_t d = 1; d < column->ndim; d++)
        rest *= shape[d];
    if (column->ndim && shape[0] < 0)
        shape[0] = rest ? (int64_t)elements / rest : 0;
    return nested_json(&at, (dray_dtype)column->dtype, shape, column->ndim);
}
