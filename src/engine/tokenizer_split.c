/* Cuts text before merging, in the order of Hugging Face's `tokenizers`: finds added tokens in the
 * original text; normalizes; finds the added tokens that are searched for after normalization; then
 * applies the pre-tokenizer's patterns, one after the other. */
#include "base/error.h"
#include "engine/tokenizer_parts.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

int dray__nfc(const char *text, size_t size, char **out, size_t *out_size, dray_error *error)
{
    utf8proc_uint8_t *made = NULL;
    utf8proc_ssize_t length =
        utf8proc_map((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)size, &made,
                     (utf8proc_option_t)(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    if (length < 0)
        return dray__fail(error, length == UTF8PROC_ERROR_NOMEM ? DRAY_ENOMEM : DRAY_EFORMAT,
                          "normalization of %zu bytes: %s", size, utf8proc_errmsg(length));
    *out = (char *)made;
    *out_size = (size_t)length;
    return DRAY_OK;
}

/* ---- patterns -------------------------------------------------------------------------------- */

/* Translates a pattern for PCRE2. Oniguruma's \s is Unicode's White_Space; PCRE2's also has
 * U+180E. */
static int translate(const char *pattern, char **out, dray_error *error)
{
    static const char space[] = "\\p{White_Space}", other[] = "\\P{White_Space}";
    char *made = malloc(strlen(pattern) * sizeof space + 1), *to = made;
    if (!made)
        return dray__nomem(error);
    for (const char *at = pattern; *at; at++) {
        if (*at != '\\' || !at[1]) {
            *to++ = *at;
            continue;
        }
        at++;
        if (*at == 's' || *at == 'S') {
            memcpy(to, *at == 's' ? space : other, sizeof space - 1);
            to += sizeof space - 1;
        } else {
            *to++ = '\\';
            *to++ = *at;
        }
    }
    *to = 0;
    *out = made;
    return DRAY_OK;
}

int dray__cut_compile(const char *path, const char *pattern, dray__text_cut *out, dray_error *error)
{
    char *translated;
    int rc = translate(pattern, &translated, error);
    if (rc)
        return rc;
    int number;
    PCRE2_SIZE at;
    /* \C would cut characters, and the next pattern takes its text for UTF-8 unseen. */
    uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_NO_UTF_CHECK | PCRE2_NEVER_BACKSLASH_C;
    out->pattern =
        pcre2_compile((PCRE2_SPTR)translated, PCRE2_ZERO_TERMINATED, options, &number, &at, NULL);
    if (!out->pattern) {
        PCRE2_UCHAR why[160] = "";
        pcre2_get_error_message(number, why, sizeof why);
        rc = dray__fail(error, DRAY_EUNSUPPORTED, "%s: pattern %.200s: %s", path, pattern,
                        (const char *)why);
    }
    free(translated);
    return rc;
}

/* ---- cutting --------------------------------------------------------------------------------- */

typedef struct cutting {
    const dray__tokenizer *t;
    const dray__splitter *to;
} cutting;

static int cut(const cutting *c, uint32_t step, const char *text, size_t size, dray_error *error);

static int cut_by_pattern(const cutting *c, uint32_t step, const char *text, size_t size,
                          dray_error *error)
{
    const pcre2_code *pattern = c->t->cuts[step].pattern;
    pcre2_match_data *match = pcre2_match_data_create_from_pattern(pattern, NULL);
    if (!match)
        return dray__nomem(error);
    size_t done = 0, at = 0;
    int rc = DRAY_OK;
    while (!rc && at < size) {
        int found =
            pcre2_match(pattern, (PCRE2_SPTR)text, size, at, PCRE2_NO_UTF_CHECK, match, NULL);
        if (found == PCRE2_ERROR_NOMATCH)
            break;
        if (found < 0) {
            PCRE2_UCHAR why[160] = "";
            pcre2_get_error_message(found, why, sizeof why);
            rc = dray__fail(error, DRAY_EFORMAT, "%s: cutting %zu bytes of text: %s", c->t->path,
                            size, (const char *)why);
            break;
        }
        const PCRE2_SIZE *ends = pcre2_get_ovector_pointer(match);
        if (ends[1] == ends[0]) { /* an empty match: goes one character on */
            at = ends[1] + 1;
            while (at < size && ((uint8_t)text[at] & 0xC0) == 0x80)
                at++;
            continue;
        }
        if (ends[0] > done)
            rc = cut(c, step + 1, text + done, ends[0] - done, error);
        if (!rc)
            rc = cut(c, step + 1, text + ends[0], ends[1] - ends[0], error);
        done = at = ends[1];
    }
    pcre2_match_data_free(match);
    return rc || done == size ? rc : cut(c, step + 1, text + done, size - done, error);
}

static int cut_with_space(const cutting *c, uint32_t step, const char *text, size_t size,
                          dray_error *error)
{
    if (*text == ' ')
        return cut(c, step + 1, text, size, error);
    char *longer = malloc(size + 1);
    if (!longer)
        return dray__nomem(error);
    longer[0] = ' ';
    memcpy(longer + 1, text, size);
    int rc = cut(c, step + 1, longer, size + 1, error);
    free(longer);
    return rc;
}

/* Applies the steps from `step` on. */
static int cut(const cutting *c, uint32_t step, const char *text, size_t size, dray_error *error)
{
    if (step == c->t->cut_count)
        return c->to->word(c->to->user, text, size, error);
    return (c->t->cuts[step].pattern ? cut_by_pattern : cut_with_space)(c, step, text, size, error);
}

/* ---- added tokens ---------------------------------------------------------------------------- */

/* Returns the longest added token that begins at `text`; NULL when none does. */
static const dray__added_token *added_at(const dray__tokenizer *t, bool normalized,
                                         const char *text, size_t size)
{
    const dray__added_token *best = NULL;
    if (!t->added_first[normalized][(uint8_t)*text])
        return NULL;
    for (size_t i = 0; i < t->added_count; i++) {
        const dray__added_token *a = &t->added[i];
        if (a->normalized == normalized && a->size <= size && (!best || a->size > best->size) &&
            memcmp(a->text, text, a->size) == 0)
            best = a;
    }
    return best;
}

typedef int (*piece_fn)(const cutting *c, const char *text, size_t size, dray_error *error);

/* Finds the added tokens, and calls `piece` for the text between them. */
static int find_added(const cutting *c, bool normalized, const char *text, size_t size,
                      piece_fn piece, dray_error *error)
{
    size_t done = 0, at = 0;
    int rc = DRAY_OK;
    while (at < size && !rc) {
        const dray__added_token *added = added_at(c->t, normalized, text + at, size - at);
        if (!added) {
            at++;
            continue;
        }
        if (at > done)
            rc = piece(c, text + done, at - done, error);
        if (!rc)
            rc = c->to->token(c->to->user, added->id, error);
        done = at += added->size;
    }
    return rc || done == size ? rc : piece(c, text + done, size - done, error);
}

static int cut_piece(const cutting *c, const char *text, size_t size, dray_error *error)
{
    return cut(c, 0, text, size, error);
}

static int normalize_piece(const cutting *c, const char *text, size_t size, dray_error *error)
{
    char *made = NULL;
    int rc = c->t->nfc ? dray__nfc(text, size, &made, &size, error) : DRAY_OK;
    if (!rc)
        rc = find_added(c, true, made ? made : text, size, cut_piece, error);
    free(made);
    return rc;
}

int dray__tokenizer_split(const dray__tokenizer *t, const char *text, size_t size,
                          const dray__splitter *to, dray_error *error)
{
    cutting c = {t, to};
    return find_added(&c, false, text, size, normalize_piece, error);
}
