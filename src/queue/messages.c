#include "queue/messages.h"

#include "base/error.h"

#include <stdlib.h>
#include <string.h>

char *dray__get_word(dray__reader *r)
{
    return dray__get_string(r, DRAY__WORD_MAX);
}

char *dray__get_reason(dray__reader *r)
{
    return dray__get_prose(r, DRAY__WORD_MAX);
}

int dray__saved_name_check(const char *name, dray_error *error)
{
    enum { LONGEST = 200 };
    size_t length = strlen(name);
    if (!length || length > LONGEST || name[0] == '.' || strchr(name, '/') ||
        !dray__utf8_plain(name, length))
        return dray__fail(
            error, DRAY_EINVALID,
            "checkpoint '%.256s': a name of 1 to %d bytes expected, without '/', that "
            "does not begin with '.'",
            name, LONGEST);
    return DRAY_OK;
}

void dray__put_words(dray__writer *w, const char *const *items, uint32_t count)
{
    dray__put_u32(w, count);
    for (uint32_t i = 0; i < count; i++)
        dray__put_string(w, items[i]);
}

int dray__get_words(dray__reader *r, dray__words *out, dray_error *error)
{
    *out = (dray__words){0};
    uint32_t count = dray__get_count(r, 4);
    if (r->failed)
        return dray__reader_finish(r, "list of names", error);
    out->items = calloc(count ? count : 1, sizeof *out->items);
    if (!out->items)
        return dray__nomem(error);
    for (; out->count < count; out->count++) {
        out->items[out->count] = dray__get_word(r);
        if (!out->items[out->count])
            return dray__reader_finish(r, "list of names", error);
    }
    return DRAY_OK;
}

void dray__words_free(dray__words *words)
{
    for (uint32_t i = 0; i < words->count; i++)
        free(words->items[i]);
    free(words->items);
    *words = (dray__words){0};
}
