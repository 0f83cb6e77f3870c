/* The byte-level tokenizer of models that are trained from scratch: token i is byte i for i < 256,
 * followed by three special tokens. */
#ifndef DRAY_ENGINE_TOKENIZER_H
#define DRAY_ENGINE_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

enum {
    DRAY__TOKEN_PAD = 256,
    DRAY__TOKEN_BOS = 257,
    DRAY__TOKEN_EOS = 258,
    DRAY__BYTE_VOCABULARY = 259
};

/* Writes one token a byte to `tokens` (room for `bytes`); returns how many: `bytes`. */
size_t dray__bytes_encode(const void *text, size_t bytes, int32_t *tokens);
/* Writes the bytes of tokens[0..count) to `text` (room for `count`), leaving out special tokens and
 * ids that are no byte; returns how many were written. No terminator. */
size_t dray__bytes_decode(const int32_t *tokens, size_t count, void *text);

#endif
