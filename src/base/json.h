/* jansson with this project's errors: exact integers, duplicate keys refused. */
#ifndef DRAY_BASE_JSON_H
#define DRAY_BASE_JSON_H

#include <dray/dray.h>
#include <jansson.h>

/* `what` (a path or a name) is put into the message with the line. DRAY_EFORMAT. */
int dray__json_parse(const char *text, size_t size, const char *what, json_t **out,
                     dray_error *error);
/* Reads a file of at most max_bytes. DRAY_ENOENT, DRAY_ESYS, DRAY_EFORMAT. */
int dray__json_load(const char *path, size_t max_bytes, json_t **out, dray_error *error);

#endif
