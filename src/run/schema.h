/* The job file's schema (libcyaml) and what its values must be. */
#ifndef DRAY_RUN_SCHEMA_H
#define DRAY_RUN_SCHEMA_H

#include "run/job.h"
#include "run/tree.h"

#include <cyaml/cyaml.h>

extern const cyaml_schema_value_t dray__job_schema;

/* Types, unknown keys (with the nearest right one), words, ranges. DRAY_EINVALID with file and
 * line. Whatever passes is loaded by libcyaml without loss. */
int dray__schema_check(const dray__node *root, dray_error *error);
/* DRAY_EINVALID about the value at `path`: "FILE:LINE: path: message". */
int dray__schema_fail(dray__node *root, const char *path, dray_error *error, const char *format,
                      ...) __attribute__((format(printf, 4, 5)));

#endif
