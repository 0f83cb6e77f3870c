/* jansson with this project's errors: exact integers, duplicate keys refused. */
#pragma once

#include <dray/dray.h>
#include <jansson.h>
#include <stdbool.h>

/* Parses JSON. `what` (a path or a name) is put into the message with the line. Returns 0, or
 * DRAY_EFORMAT. */
int dray__json_parse(const char *text, size_t size, const char *what, json_t **out,
                     dray_error *error);
/* Reads a file of at most max_bytes. Returns 0, DRAY_ENOENT, DRAY_ESYS, or DRAY_EFORMAT. */
int dray__json_load(const char *path, size_t max_bytes, json_t **out, dray_error *error);

/* Return a member of an object; 0, NULL or false when there is none, or it has another type. */
static inline double dray__json_number(const json_t *object, const char *key)
{
    return json_number_value(json_object_get(object, key));
}
static inline long long dray__json_integer(const json_t *object, const char *key)
{
    return json_integer_value(json_object_get(object, key));
}
static inline const char *dray__json_string(const json_t *object, const char *key)
{
    return json_string_value(json_object_get(object, key));
}
static inline bool dray__json_true(const json_t *object, const char *key)
{
    return json_is_true(json_object_get(object, key));
}

/* Put a value into an object or an array; the value is always taken. When memory runs out, the
 * object or array is freed, becomes NULL, and stays NULL, so one check after many values is enough.
 * json_pack and json_dumps fail for NULL. */
void dray__json_set(json_t **object, const char *key, json_t *value);
void dray__json_append(json_t **array, json_t *value);
/* As json_dumps, but fails when memory runs out within a key, where json_dumps goes on writing.
 * Returns NULL when out of memory, or when there is no value. */
char *dray__json_text(const json_t *json, size_t flags);
