#include "base/options.h"

#include "base/error.h"

#include <stdint.h>
#include <string.h>

enum { MOST = 4096 }; /* more than the size of any struct */

static size_t size_of(const void *given)
{
    size_t size;
    memcpy(&size, given, sizeof size);
    return size;
}

int dray__options_check(const void *given, size_t first, const char *name, dray_error *error)
{
    size_t size = size_of(given);
    if (size < first || size > MOST)
        return dray__fail(error, DRAY_EINVALID,
                          "%s: a size of at least %zu expected, found %zu (start from its _INIT)",
                          name, first, size);
    return DRAY_OK;
}

int dray__options_read(void *out, size_t size, size_t first, const void *given, const char *name,
                       dray_error *error)
{
    if (!given)
        return DRAY_OK;
    int status = dray__options_check(given, first, name, error);
    if (status)
        return status;
    const uint8_t *bytes = given;
    size_t known = size_of(given);
    for (; known > size; known--)
        if (bytes[known - 1])
            return dray__fail(error, DRAY_EVERSION,
                              "%s: byte %zu is set, of which this library (%s) knows nothing", name,
                              known - 1, dray_version());
    memcpy((uint8_t *)out + sizeof(size_t), bytes + sizeof(size_t), known - sizeof(size_t));
    return DRAY_OK;
}

void dray__options_fill(void *given, const void *filled, size_t size)
{
    size_t room = size_of(given), both = room < size ? room : size;
    memcpy((uint8_t *)given + sizeof room, (const uint8_t *)filled + sizeof room,
           both - sizeof room);
    memset((uint8_t *)given + both, 0, room - both);
}
