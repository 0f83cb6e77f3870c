/* Filling the caller's dray_error. Each function returns the code, so that a failure is one line:
 *     return dray__fail(error, DRAY_ESHAPE, "tensor %s: expected %s, found %s", ...); */
#ifndef DRAY_BASE_ERROR_H
#define DRAY_BASE_ERROR_H

#include <dray/dray.h>

int dray__fail(dray_error *error, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* DRAY_ESYS (ENOMEM: DRAY_ENOMEM) with errno and its text appended. */
int dray__fail_errno(dray_error *error, int errnum, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
int dray__nomem(dray_error *error);
/* Puts context in front of the message of an error that is already filled ("update of group a: ").
 */
int dray__fail_prefix(dray_error *error, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
