/* The nearest right word, for messages; lines of strangers. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>
#include <stddef.h>

enum { DRAY__WORD_FAR = 255 };

/* Damerau-Levenshtein distance (optimal string alignment), case ignored. Returns DRAY__WORD_FAR
 * when a word is too long for it. */
size_t dray__word_distance(const char *a, const char *b);
/* Index of the word nearest to `word`, or -1 when none is near enough to be meant. */
long dray__word_nearest(const char *word, const char *const *words, size_t count);
/* "; did you mean 'x'?" or "", in `out`, which it returns. */
char *dray__word_hint(const char *word, const char *const *words, size_t count, char *out,
                      size_t capacity);
/* The same; where no word is near: " (one of: a, b, c)". For short lists. */
char *dray__word_hint_or_all(const char *word, const char *const *words, size_t count, char *out,
                             size_t capacity);
/* The variable of the environment, which must be one of the words (NULL ends them), or empty: then
 * *out is NULL. DRAY_EINVALID. */
int dray__word_of_variable(const char *variable, const char *const *words, const char **out,
                           dray_error *error);

/* Copies a stranger's text (NULL is empty) in whole characters, as far as there is room, with
 * spaces instead of characters that control terminals. The result is a line for people, and for
 * JSON. Returns out. */
char *dray__take_line(char *out, size_t capacity, const char *text);

/* Whether the text ends with `end`. */
bool dray__ends_with(const char *text, const char *end);
