/* The parts of a tokenizer that tokenizer_load.c fills, tokenizer_split.c cuts text with, and
 * tokenizer.c merges. */
#pragma once

#define PCRE2_CODE_UNIT_WIDTH 8
#include "base/hash.h"
#include "engine/tokenizer.h"

#include <jansson.h>
#include <pcre2.h>

/* The text of a token. */
typedef struct dray__token_text {
    char *bytes; /* malloc'ed; NULL when no token has this id */
    uint32_t size;
    bool special; /* not part of decoded text */
} dray__token_text;

/* A token that is searched for in text before anything else. */
typedef struct dray__added_token {
    char *text;
    uint32_t size;
    int32_t id;
    bool normalized; /* searched for after normalization */
} dray__added_token;

typedef struct dray__merge {
    uint32_t rank; /* the lowest rank is merged first */
    int32_t id;    /* of the merged token */
} dray__merge;

/* One step of cutting text into words. With a pattern, each match is a word, and so is the text
 * between two matches. Without a pattern, the step puts a space before each piece that does not
 * begin with one. */
typedef struct dray__text_cut {
    pcre2_code *pattern;
} dray__text_cut;

enum { DRAY__CUTS = 8, DRAY__AROUND = 8 };

struct dray__tokenizer {
    bool bytes;
    int32_t end;
    /* BPE only, from here on. */
    char path[4096];
    dray__map ids;            /* from a token as the file writes it */
    dray__token_text *tokens; /* by id */
    int64_t size;
    dray__merge *merges;
    size_t merge_count;
    dray__idmap merge_of; /* from two tokens to their merge */
    int32_t byte_ids[256];
    bool whole_words; /* a word that is a token is used without merging (ignore_merges) */
    bool nfc;
    dray__added_token *added;
    size_t added_count;
    bool added_first[2][256]; /* first bytes of added tokens, of normalized ones in [1] */
    dray__text_cut cuts[DRAY__CUTS];
    uint32_t cut_count;
    int32_t before[DRAY__AROUND], after[DRAY__AROUND]; /* tokens that the post-processor adds */
    uint32_t before_count, after_count;
};

typedef struct dray__token_list {
    int32_t *items;
    size_t count, room;
} dray__token_list;

/* tokenizer_load.c */
int dray__tokenizer_load(dray__tokenizer *t, dray_error *error);
/* Byte-level BPE writes bytes as characters: printable ones as themselves, the others as those from
 * U+0100 on (bytes_to_unicode of GPT-2's encoder.py). */
size_t dray__byte_letter(uint8_t byte, char out[2]);

/* tokenizer_split.c: cuts the text, and calls `word` for each word, `token` for each added token.
 */
typedef struct dray__splitter {
    int (*word)(void *user, const char *word, size_t size, dray_error *error);
    int (*token)(void *user, int32_t id, dray_error *error);
    void *user;
} dray__splitter;

int dray__tokenizer_split(const dray__tokenizer *t, const char *text, size_t size,
                          const dray__splitter *to, dray_error *error);
/* path is the file's, for errors. pattern is in the dialect of the `regex` crate and Oniguruma, as
 * in tokenizer.json. */
int dray__cut_compile(const char *path, const char *pattern, dray__text_cut *out,
                      dray_error *error);
/* Normalizes text to NFC. *out is malloc'ed. */
int dray__nfc(const char *text, size_t size, char **out, size_t *out_size, dray_error *error);
