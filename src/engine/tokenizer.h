/* Converts text to tokens and back. There are two kinds: bytes (token i is byte i for i < 256,
 * followed by three special tokens), for models that are trained from scratch; and byte-level BPE
 * as a Hugging Face `tokenizer.json` describes it (Qwen2, Llama 3, GPT-2), for models that come
 * with one. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    DRAY__TOKEN_PAD = 256,
    DRAY__TOKEN_BOS = 257,
    DRAY__TOKEN_EOS = 258,
    DRAY__BYTE_VOCABULARY = 259
};

typedef struct dray__tokenizer dray__tokenizer;

/* path is a tokenizer.json or a folder that has one; NULL or "" for bytes. Settings of the file
 * that are not supported (a model other than BPE, a normalizer other than NFC, ...) fail with
 * DRAY_EUNSUPPORTED, which names them. The end token is the eos_token of `tokenizer_config.json` in
 * the same folder, if there is one. Once open, it may be used by many threads. */
int dray__tokenizer_open(const char *path, dray__tokenizer **out, dray_error *error);
void dray__tokenizer_close(dray__tokenizer *tokenizer); /* NULL is fine */

/* Returns 0, or DRAY_EINVALID when no token is this text. */
int dray__tokenizer_set_end(dray__tokenizer *tokenizer, const char *text, dray_error *error);

/* Returns a number that is greater than all ids. */
int64_t dray__tokenizer_size(const dray__tokenizer *tokenizer);
/* Returns the token that ends a response; -1 when the files name none. */
int32_t dray__tokenizer_end(const dray__tokenizer *tokenizer);
/* Returns the token (special or not) that is exactly this text; -1 when there is none. */
int32_t dray__tokenizer_find(const dray__tokenizer *tokenizer, const char *text);

/* text must be UTF-8 for BPE (else DRAY_EFORMAT). With `whole`, BPE adds the tokens that the file's
 * post-processor puts around a text, such as a begin token, and the byte tokenizer puts
 * DRAY__TOKEN_BOS before it. *tokens is malloc'ed. */
int dray__tokenizer_encode(const dray__tokenizer *tokenizer, const char *text, size_t bytes,
                           bool whole, int32_t **tokens, size_t *count, dray_error *error);
/* Gets the bytes of the tokens, which need not be UTF-8. Special tokens and ids without a text are
 * left out. *text is malloc'ed, and ended by a zero that *bytes does not count. */
int dray__tokenizer_decode(const dray__tokenizer *tokenizer, const int32_t *tokens, size_t count,
                           char **text, size_t *bytes, dray_error *error);
