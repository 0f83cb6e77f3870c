/* Finds the nearest known word (words.h). */
#include "base/words.h"

#include "base/error.h"
#include "base/wire.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LONGEST = 96 };

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

size_t dray__word_distance(const char *a, const char *b)
{
    size_t n = strlen(a), m = strlen(b);
    if (n > LONGEST || m > LONGEST)
        return DRAY__WORD_FAR;
    size_t rows[3][LONGEST + 1];
    size_t *before = rows[0], *last = rows[1], *now = rows[2];
    for (size_t j = 0; j <= m; j++)
        last[j] = j;
    for (size_t i = 1; i <= n; i++) {
        now[0] = i;
        int ai = tolower((unsigned char)a[i - 1]);
        for (size_t j = 1; j <= m; j++) {
            int bj = tolower((unsigned char)b[j - 1]);
            size_t cost = ai != bj;
            now[j] = smaller(smaller(last[j] + 1, now[j - 1] + 1), last[j - 1] + cost);
            if (i > 1 && j > 1 && ai == tolower((unsigned char)b[j - 2]) &&
                bj == tolower((unsigned char)a[i - 2]))
                now[j] = smaller(now[j], before[j - 2] + 1);
        }
        size_t *spare = before;
        before = last;
        last = now;
        now = spare;
    }
    return last[m];
}

long dray__word_nearest(const char *word, const char *const *words, size_t count)
{
    long best = -1;
    bool best_begun = false;
    /* Near enough means that at most about a third of the letters differ. */
    size_t least = 1 + strlen(word) / 3;
    for (size_t i = 0; i < count; i++) {
        size_t distance = dray__word_distance(word, words[i]);
        if (distance == DRAY__WORD_FAR)
            continue;
        /* The word is typed except for its end. */
        bool begun = strncmp(word, words[i], strlen(word)) == 0;
        if (distance < least || (distance == least && (best < 0 || (begun && !best_begun)))) {
            least = distance;
            best = (long)i;
            best_begun = begun;
        }
    }
    return best;
}

char *dray__word_hint(const char *word, const char *const *words, size_t count, char *out,
                      size_t capacity)
{
    long i = dray__word_nearest(word, words, count);
    if (capacity)
        out[0] = 0;
    if (i >= 0)
        snprintf(out, capacity, "; did you mean '%s'?", words[i]);
    return out;
}

char *dray__word_hint_or_all(const char *word, const char *const *words, size_t count, char *out,
                             size_t capacity)
{
    dray__word_hint(word, words, count, out, capacity);
    for (size_t i = 0, at = 0; (i > 0 || !out[0]) && i < count && at < capacity; i++)
        at += (size_t)snprintf(out + at, capacity - at, "%s%s%s", i ? ", " : " (one of: ", words[i],
                               i + 1 == count ? ")" : "");
    return out;
}

int dray__word_of_variable(const char *variable, const char *const *words, const char **out,
                           dray_error *error)
{
    char hint[128];
    size_t count = 0;
    const char *text = getenv(variable);
    *out = text && text[0] ? text : NULL;
    while (words[count]) {
        if (*out && strcmp(*out, words[count]) == 0)
            return DRAY_OK;
        count++;
    }
    return *out ? dray__fail(error, DRAY_EINVALID, "$%s: unknown word '%.40s'%s", variable, *out,
                             dray__word_hint_or_all(*out, words, count, hint, sizeof hint))
                : DRAY_OK;
}

bool dray__ends_with(const char *text, const char *end)
{
    size_t size = strlen(text), tail = strlen(end);
    return size >= tail && strcmp(text + size - tail, end) == 0;
}

char *dray__take_line(char *out, size_t capacity, const char *text)
{
    size_t length = text ? strnlen(text, capacity - 1) : 0;
    while (length && !dray__utf8_valid(text, length))
        length--;
    for (size_t i = 0; i < length; i++) {
        unsigned char c = (unsigned char)text[i];
        bool wide = c == 0xc2 && (unsigned char)text[i + 1] < 0xa0; /* U+0080 to U+009F */
        out[i] = wide || c < 0x20 || c == 0x7f ? ' ' : text[i];
        if (wide)
            out[++i] = ' ';
    }
    out[length] = 0;
    return out;
}

void dray__words_differ(const char *ours, const char *theirs, char *out, size_t capacity)
{
    uint32_t line = 1;
    while (*ours && *ours == *theirs) {
        size_t a = strcspn(ours, "\n"), b = strcspn(theirs, "\n");
        if (a != b || strncmp(ours, theirs, a) != 0)
            break;
        ours += a + (ours[a] == '\n');
        theirs += b + (theirs[b] == '\n');
        line++;
    }
    ours += strspn(ours, " ");
    theirs += strspn(theirs, " ");
    snprintf(out, capacity, "line %u as resolved: `%.*s` expected, found `%.*s`", line,
             (int)(strcspn(ours, "\n") < 80 ? strcspn(ours, "\n") : 80), ours,
             (int)(strcspn(theirs, "\n") < 80 ? strcspn(theirs, "\n") : 80), theirs);
}

char *dray__take_text(char *out, size_t capacity, const char *text)
{
    size_t at = 0, step;
    for (; *text; text += step) {
        bool whole = false;
        for (step = 1; !(whole = dray__utf8_valid(text, step)) && step < 4 && text[step];)
            step++;
        step = whole ? step : 1;
        if (at + step >= capacity)
            break;
        memcpy(out + at, whole ? text : "?", step);
        at += step;
    }
    out[at] = 0;
    return out;
}
