/* src/base/: the parts that every other folder uses and that know nothing of dray: errors, the log,
 * the clock, arenas and growable arrays, hashing and hash tables, JSON, options, sockets, TLS,
 * waiting with a deadline, and the encoding of messages. A function belongs here if a program
 * without weights or samples could use it unchanged. Nothing here starts a thread or keeps state
 * between calls, except the log, the clock and the random numbers' seeds. */

/* Fill the caller's dray_error. Each function returns the code, so that a failure is one line:
 *     return dray__fail(error, DRAY_ESHAPE, "tensor %s: expected %s, found %s", ...); */
#pragma once

#include <dray/dray.h>

int dray__fail(dray_error *error, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* As dray__fail, for the error of a library. Its number is put into error->raw, DRAY_ORIGIN_...
 * into error->origin. */
int dray__fail_library(dray_error *error, int code, int origin, int64_t raw, const char *format,
                       ...) __attribute__((format(printf, 5, 6)));
/* Fails with DRAY_ESYS (DRAY_ENOMEM for ENOMEM), with errno and its text appended. */
int dray__fail_errno(dray_error *error, int errnum, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
int dray__nomem(dray_error *error);
/* Puts context before the message of an error that is already filled ("update of group a: "). */
int dray__fail_prefix(dray_error *error, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
