/* Public structs that begin with `size_t size`, the size that the caller was compiled with. Structs
 * only grow, at their end and never into their padding, so that a caller and a library of different
 * versions work together: members that an older caller lacks have their defaults, and members that
 * this library does not know must be zero. */
#pragma once

#include <dray/dray.h>
#include <stddef.h>

/* The size of the struct in its first version, which ended with this member. Every caller has that
 * much. */
#define dray__end_of(type, member) (offsetof(type, member) + sizeof(((type *)0)->member))

/* Overwrites *out (`size` bytes, initialised with the defaults) with the given struct; out's own
 * size stays. given may be NULL for the defaults. first is a dray__end_of. name is the struct's,
 * for messages. Returns 0; DRAY_EINVALID when the given size is smaller than `first`, or
 * implausibly large; or DRAY_EVERSION when a member is set that this library does not know. */
int dray__options_read(void *out, size_t size, size_t first, const void *given, const char *name,
                       dray_error *error);
/* The same for a struct of `type` that ended with member `last` in its first version. */
#define DRAY__OPTIONS_READ(type, last, out, given, error)                                          \
    dray__options_read(out, sizeof(type), dray__end_of(type, last), given, #type, error)
/* Checks only the size, for a struct that will be filled. */
int dray__options_check(const void *given, size_t first, const char *name, dray_error *error);
#define DRAY__OPTIONS_CHECK(type, last, given, error)                                              \
    dray__options_check(given, dray__end_of(type, last), #type, error)
/* Fills the caller's struct, as far as it goes, with `filled` of `size` bytes, and the rest with
 * zeros. The caller's size stays; it was checked before. */
void dray__options_fill(void *given, const void *filled, size_t size);
