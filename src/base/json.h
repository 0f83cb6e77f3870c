/* jansson with this project's errors: exact integers, duplicate keys refused. */
#pragma once

#include <dray/dray.h>
#include <jansson.h>
#include <stdbool.h>

/* Parses JSON. `what` (a path or a name) is put into the message with the line. Returns 0, or
 * DRAY_EFORMAT. */
int dray__json_parse(const char *text, size_t size, const char *what, json_t **out,
                     dray_error *error);
/* Reads a file of at most max_bytes. DRAY_ENOENT, DRAY_ESYS, DRAY_EFORMAT. */
int dray__json_load(const char *path, size_t max_bytes, json_t **out, dray_error *error);

/* A member of an object; 0, NULL or false where there is none, or one of another type. */
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

/* Put a value, which is taken in any case, into an object or an array. One that cannot take it, as
 * memory ran out, is freed and becomes NULL, and stays that: so many values need one look at the
 * end. Neither json_pack nor json_dumps makes anything of NULL. */
void dray__json_set(json_t **object, const char *key, json_t *value);
void dray__json_append(json_t **array, json_t *value);
/* As json_dumps, which goes on writing when memory runs out within a key. Returns NULL when out of
 * memory, or when there is no value. */
char *dray__json_text(const json_t *json, size_t flags);
