#include "base/json.h"
#include "run/page/page.h"

#include <endian.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* RFC 4648, section 4. */
json_t *dray__page_bytes(const void *data, size_t size)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const uint8_t *in = data;
    char *text = malloc((size + 2) / 3 * 4 + 1), *to = text;
    if (!text)
        return NULL;
    for (size_t i = 0; i < size; i += 3) {
        uint32_t all = (uint32_t)in[i] << 16 | (i + 1 < size ? (uint32_t)in[i + 1] << 8 : 0) |
                       (i + 2 < size ? in[i + 2] : 0);
        *to++ = digits[all >> 18];
        *to++ = digits[all >> 12 & 63];
        *to++ = i + 1 < size ? digits[all >> 6 & 63] : '=';
        *to++ = i + 2 < size ? digits[all & 63] : '=';
    }
    json_t *made = json_stringn(text, (size_t)(to - text));
    free(text);
    return made;
}

json_t *dray__page_floats(const double *values, uint32_t count)
{
    bool same = count > 0, any = false;
    for (uint32_t i = 0; i < count; i++) {
        same = same && values[i] == values[0];
        any = any || !isnan(values[i]);
    }
    if (!any)
        return json_null();
    if (same)
        return json_real(values[0]);
    uint32_t *words = malloc(count * sizeof(*words));
    for (uint32_t i = 0; words && i < count; i++) {
        float value = (float)values[i];
        memcpy(&words[i], &value, sizeof(value));
        words[i] = htole32(words[i]);
    }
    json_t *made = words ? dray__page_bytes(words, count * sizeof(*words)) : NULL;
    free(words);
    return made;
}
