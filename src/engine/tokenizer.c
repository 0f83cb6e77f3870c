/* Bytes as tokens, and the merging of byte-level BPE (Sennrich et al., "Neural Machine Translation
 * of Rare Words with Subword Units", 2016; on bytes: Radford et al., GPT-2, 2019). */
#include "engine/tokenizer.h"

#include "base/array.h"
#include "base/error.h"
#include "base/wire.h"
#include "engine/tokenizer_parts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ---- opening --------------------------------------------------------------------------------- */

int dray__tokenizer_open(const char *path, dray__tokenizer **out, dray_error *error)
{
    struct stat st;
    dray__tokenizer *t = calloc(1, sizeof *t);
    if (!t)
        return dray__nomem(error);
    t->bytes = !path || !*path;
    t->end = t->bytes ? DRAY__TOKEN_EOS : -1;
    t->size = t->bytes ? DRAY__BYTE_VOCABULARY : 0;
    int rc = DRAY_OK;
    if (!t->bytes) {
        bool folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
        int length = snprintf(t->path, sizeof t->path, folder ? "%s/tokenizer.json" : "%s", path);
        rc = (size_t)length < sizeof t->path
                 ? dray__tokenizer_load(t, error)
                 : dray__fail(error, DRAY_EINVALID, "the path of a tokenizer is too long");
    }
    if (rc)
        dray__tokenizer_close(t);
    else
        *out = t;
    return rc;
}

void dray__tokenizer_close(dray__tokenizer *t)
{
    if (!t)
        return;
    for (int64_t i = 0; t->tokens && i < t->size; i++)
        free(t->tokens[i].bytes);
    for (size_t i = 0; i < t->added_count; i++)
        free(t->added[i].text);
    for (uint32_t i = 0; i < t->cut_count; i++)
        pcre2_code_free(t->cuts[i].pattern);
    dray__map_free(&t->ids);
    dray__idmap_free(&t->merge_of);
    free(t->tokens);
    free(t->merges);
    free(t->added);
    free(t);
}

int dray__tokenizer_set_end(dray__tokenizer *t, const char *text, dray_error *error)
{
    int32_t end = dray__tokenizer_find(t, text);
    if (end < 0)
        return dray__fail(error, DRAY_EINVALID, "end token '%.64s': no token of %s is this text",
                          text, t->bytes ? "the byte vocabulary" : t->path);
    t->end = end;
    return DRAY_OK;
}

int64_t dray__tokenizer_size(const dray__tokenizer *t)
{
    return t->size;
}

int32_t dray__tokenizer_end(const dray__tokenizer *t)
{
    return t->end;
}

int32_t dray__tokenizer_find(const dray__tokenizer *t, const char *text)
{
    size_t size = strlen(text);
    for (size_t i = 0; i < t->added_count; i++)
        if (t->added[i].size == size && memcmp(t->added[i].text, text, size) == 0)
            return t->added[i].id;
    uint32_t id;
    return !t->bytes && dray__map_get(&t->ids, text, &id) ? (int32_t)id : -1;
}

/* ---- merging --------------------------------------------------------------------------------- */

static int tokens_add(dray__token_list *list, int32_t token, dray_error *error)
{
    return DRAY__PUSH(list->items, list->count, list->room, token) ? DRAY_OK : dray__nomem(error);
}

enum { NONE = -1 };

/* A part of a word: a token, and the indices of its neighbours. */
typedef struct word_part {
    int32_t id, before, after; /* id is NONE when it was merged into the part before */
} word_part;

/* A possible merge. It is valid if its two parts have not changed since. */
typedef struct candidate {
    uint32_t rank;
    int32_t at, left, right;
    int32_t id;
} candidate;

typedef struct merging {
    const dray__tokenizer *t;
    word_part *parts;
    candidate *heap; /* the first has the lowest rank; among equal ranks, it is the leftmost */
    size_t count;
} merging;

static bool goes_first(const candidate *a, const candidate *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

static void push(merging *m, candidate added)
{
    size_t at = m->count++;
    for (; at && goes_first(&added, &m->heap[(at - 1) / 2]); at = (at - 1) / 2)
        m->heap[at] = m->heap[(at - 1) / 2];
    m->heap[at] = added;
}

static candidate pop(merging *m)
{
    candidate first = m->heap[0], last = m->heap[--m->count];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < m->count; at = child) {
        if (child + 1 < m->count && goes_first(&m->heap[child + 1], &m->heap[child]))
            child++;
        if (!goes_first(&m->heap[child], &last))
            break;
        m->heap[at] = m->heap[child];
    }
    m->heap[at] = last;
    return first;
}

static uint64_t pair_key(int32_t left, int32_t right)
{
    return ((uint64_t)(uint32_t)left + 1) << 32 | (uint32_t)right;
}

static void consider(merging *m, int32_t at)
{
    const word_part *left = &m->parts[at];
    if (at == NONE || left->after == NONE)
        return;
    int32_t right = m->parts[left->after].id;
    const dray__merge *merge = dray__idmap_get(&m->t->merge_of, pair_key(left->id, right));
    if (merge)
        push(m, (candidate){merge->rank, at, left->id, right, merge->id});
}

static void merge_all(merging *m, int32_t count)
{
    for (int32_t i = 0; i + 1 < count; i++)
        consider(m, i);
    while (m->count) {
        candidate c = pop(m);
        word_part *left = &m->parts[c.at];
        if (left->id != c.left || left->after == NONE || m->parts[left->after].id != c.right)
            continue;
        word_part *right = &m->parts[left->after];
        left->id = c.id;
        right->id = NONE;
        left->after = right->after;
        if (left->after != NONE)
            m->parts[left->after].before = c.at;
        if (left->before != NONE)
            consider(m, left->before);
        consider(m, c.at);
    }
}

/* Finds out whether the whole word is a token. */
static bool is_token(const dray__tokenizer *t, const char *word, size_t size, int32_t *id,
                     dray_error *error, int *rc)
{
    char *written = malloc(2 * size + 1);
    uint32_t found = 0;
    *rc = written ? DRAY_OK : dray__nomem(error);
    if (!written)
        return false;
    size_t at = 0;
    for (size_t i = 0; i < size; i++)
        at += dray__byte_letter((uint8_t)word[i], written + at);
    written[at] = 0;
    bool is = dray__map_get(&t->ids, written, &found);
    *id = (int32_t)found;
    free(written);
    return is;
}

typedef struct encoding {
    const dray__tokenizer *t;
    dray__token_list tokens;
} encoding;

static int take_token(void *user, int32_t id, dray_error *error)
{
    encoding *e = user;
    return tokens_add(&e->tokens, id, error);
}

static int take_word(void *user, const char *word, size_t size, dray_error *error)
{
    encoding *e = user;
    int32_t whole;
    int rc = DRAY_OK;
    if (size >= INT32_MAX / 4)
        return dray__fail(error, DRAY_EINVALID, "a word of %zu bytes is too long", size);
    if (e->t->whole_words && is_token(e->t, word, size, &whole, error, &rc))
        return take_token(e, whole, error);
    /* Each merge removes one part and adds at most two candidates. */
    merging m = {.t = e->t,
                 .parts = malloc((size + 1) * sizeof(word_part)),
                 .heap = malloc((3 * size + 1) * sizeof(candidate))};
    if (!rc && (!m.parts || !m.heap))
        rc = dray__nomem(error);
    for (size_t i = 0; i < size && !rc; i++)
        m.parts[i] = (word_part){e->t->byte_ids[(uint8_t)word[i]], (int32_t)i - 1,
                                 i + 1 < size ? (int32_t)i + 1 : NONE};
    if (!rc)
        merge_all(&m, (int32_t)size);
    for (size_t i = 0; i < size && !rc; i++)
        if (m.parts[i].id != NONE)
            rc = take_token(e, m.parts[i].id, error);
    free(m.parts);
    free(m.heap);
    return rc;
}

/* ---- both kinds ------------------------------------------------------------------------------ */

static int encode_bytes(encoding *e, const char *text, size_t size, bool whole, dray_error *error)
{
    int rc = whole ? take_token(e, DRAY__TOKEN_BOS, error) : DRAY_OK;
    for (size_t i = 0; i < size && !rc; i++)
        rc = take_token(e, (uint8_t)text[i], error);
    return rc;
}

static int encode_bpe(encoding *e, const char *text, size_t size, bool whole, dray_error *error)
{
    const dray__tokenizer *t = e->t;
    const dray__splitter to = {.word = take_word, .token = take_token, .user = e};
    int rc = DRAY_OK;
    if (!dray__utf8_valid(text, size))
        return dray__fail(error, DRAY_EFORMAT, "%s: text is expected to be UTF-8", t->path);
    for (uint32_t i = 0; whole && i < t->before_count && !rc; i++)
        rc = take_token(e, t->before[i], error);
    if (!rc)
        rc = dray__tokenizer_split(t, text, size, &to, error);
    for (uint32_t i = 0; whole && i < t->after_count && !rc; i++)
        rc = take_token(e, t->after[i], error);
    return rc;
}

int dray__tokenizer_encode(const dray__tokenizer *t, const char *text, size_t bytes, bool whole,
                           int32_t **tokens, size_t *count, dray_error *error)
{
    encoding e = {.t = t, .tokens = {.items = malloc(sizeof(int32_t)), .room = 1}};
    int rc = e.tokens.items ? DRAY_OK : dray__nomem(error);
    if (!rc)
        rc = (t->bytes ? encode_bytes : encode_bpe)(&e, text, bytes, whole, error);
    if (rc) {
        free(e.tokens.items);
        return rc;
    }
    *tokens = e.tokens.items;
    *count = e.tokens.count;
    return DRAY_OK;
}

/* Gets the bytes that a token adds to a text, and returns their number. */
static uint32_t text_of(const dray__tokenizer *t, int32_t token, char byte[1], const char **bytes)
{
    *bytes = byte;
    if (token < 0 || token >= t->size)
        return 0;
    if (t->bytes) {
        byte[0] = (char)token;
        return token < 256;
    }
    const dray__token_text *of = &t->tokens[token];
    *bytes = of->bytes;
    return of->special ? 0 : of->size;
}

int dray__tokenizer_decode(const dray__tokenizer *t, const int32_t *tokens, size_t count,
                           char **text, size_t *bytes, dray_error *error)
{
    char byte[1];
    const char *from;
    size_t size = 0, at = 0;
    for (size_t i = 0; i < count; i++)
        size += text_of(t, tokens[i], byte, &from);
    char *made = malloc(size + 1);
    if (!made)
        return dray__nomem(error);
    for (size_t i = 0; i < count; i++) {
        uint32_t added = text_of(t, tokens[i], byte, &from);
        if (added)
            memcpy(made + at, from, added);
        at += added;
    }
    made[size] = 0;
    *text = made;
    *bytes = size;
    return DRAY_OK;
}
