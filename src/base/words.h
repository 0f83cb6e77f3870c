/* Finds the nearest known word, for messages; cleans text from other processes. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>
#include <stddef.h>

enum { DRAY__WORD_FAR = 255 };

/* Damerau-Levenshtein distance (optimal string alignment), case ignored. Returns DRAY__WORD_FAR
 * when a word is too long for it. */
size_t dray__word_distance(const char *a, const char *b);
/* Returns the index of the word nearest to `word`, or -1 when none is near enough to be meant. */
long dray__word_nearest(const char *word, const char *const *words, size_t count);
/* Writes "; did you mean 'x'?" or "" to `out`, and returns it. */
char *dray__word_hint(const char *word, const char *const *words, size_t count, char *out,
                      size_t capacity);
/* The same, but writes " (one of: a, b, c)" when no word is near. For short lists. */
char *dray__word_hint_or_all(const char *word, const char *const *words, size_t count, char *out,
                             size_t capacity);
/* Reads a variable of the environment, which must be one of the words (ended by NULL). *out is NULL
 * when it is empty. Returns 0, or DRAY_EINVALID. */
int dray__word_of_variable(const char *variable, const char *const *words, const char **out,
                           dray_error *error);

/* Copies text from another process (NULL is empty) as far as there is room, in whole characters,
 * with spaces in place of control characters. The result is safe for terminals and JSON. Returns
 * out. */
char *dray__take_line(char *out, size_t capacity, const char *text);

/* Copies text as far as there is room, in whole characters, with a question mark in place of each
 * byte that is not UTF-8, as where a name in it was cut within a character. Returns out. */
char *dray__take_text(char *out, size_t capacity, const char *text);

/* Returns whether the text ends with `end`. */
bool dray__ends_with(const char *text, const char *end);

/* Gives the number of the first line in which two texts differ, and both forms of that line. */
void dray__words_differ(const char *ours, const char *theirs, char *out, size_t capacity);
