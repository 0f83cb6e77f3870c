/* The settings of a job file. One table (settings.c) has the key, type, place in dray__job,
 * default, range and meaning of each. Reading job files and --set, checking, writing the resolved
 * job and printing docs/run.md's table use this table alone. A new setting is one line there. */
#pragma once

#include "run/job/job.h"
#include "run/job/tree.h"

#include <jansson.h>
#include <stddef.h>
#include <stdio.h>

typedef enum dray__setting_type {
    DRAY__SETTING_INT = 0, /* int64_t */
    DRAY__SETTING_REAL,    /* double */
    DRAY__SETTING_BOOL,    /* bool */
    DRAY__SETTING_WORD,    /* int32_t: the value of one of the words */
    DRAY__SETTING_TEXT,    /* char * */
    DRAY__SETTING_PATH,    /* char *: a path; one that is relative to the file's folder is made
                              absolute  */
    DRAY__SETTING_TEXTS,   /* char **, with their number in a uint32_t */
    DRAY__SETTING_RECORDS, /* array of structs, with their number in a uint32_t; each has a name */
    DRAY__SETTING_TYPES
} dray__setting_type;

typedef struct dray__word {
    const char *name; /* NULL at the end */
    int32_t value;
    const char *refused; /* why a word that users may try is refused: "is not in this version" */
} dray__word;

enum { DRAY__PRESET_TEXTS = 16, DRAY__SETTING_BYTES = 4096 };

typedef struct dray__setting {
    const char *key; /* "actor.lr", or "ranks" in a record; NULL at the end */
    int type;        /* dray__setting_type */
    size_t at, count_at;
    double low, high;        /* range of a number, or of a list's number of entries */
    bool above;              /* low itself is not allowed */
    const dray__word *words; /* words */
    const char *text; /* default, as in a job file (texts have blanks between them); NULL when the
                         key is required */
    const char *meaning; /* for users */
    const struct dray__setting_record *record;
} dray__setting;

/* The records of a list, and its default entries, each a list of alternating keys and values. Each
 * record's first setting is its name. */
typedef struct dray__setting_record {
    size_t size;
    const dray__setting *settings;
    const char *const (*presets)[DRAY__PRESET_TEXTS];
    uint32_t preset_count;
} dray__setting_record;

extern const dray__setting dray__settings[];
/* Keys of earlier versions with their present names; ended by NULL. */
extern const char *const dray__settings_renamed[][2];

/* ---- reading (settings_read.c) --------------------------------------------------------------- */

/* Where each value was written: file, line, column. */
typedef struct dray__places dray__places;

int dray__places_open(const char *file, dray__places **out, dray_error *error);
void dray__places_close(dray__places *places);

/* Makes a job with all defaults. */
int dray__settings_default(dray__job **out, dray_error *error);
/* Sets the values in `tree`. Sections, and records of the same name, are merged with the present
 * ones; lists replace them. Returns 0, or DRAY_EINVALID with file, line, column, the expected and
 * the found value, for unknown keys and words (with the nearest known one), wrong types and values
 * out of range. The places refer to the tree's source. */
int dray__settings_read(dray__job *job, const dray__node *tree, dray__places *places,
                        dray_error *error);
void dray__settings_free(dray__job *job);

/* Returns whether the file or --set gave the setting. */
bool dray__setting_given(const dray__places *places, const char *key);
/* Returns DRAY_EINVALID about a setting: "FILE:LINE:COLUMN: key: message". `keys` is "a.b", or
 * several with blanks between them. The message names the first. The place is that of the first key
 * that was given (or that has its section given). */
int dray__setting_fail(const dray__places *places, const char *keys, dray_error *error,
                       const char *format, ...) __attribute__((format(printf, 4, 5)));

/* ---- writing (settings_write.c) -------------------------------------------------------------- */

/* Returns all of the job's settings; NULL when out of memory. */
json_t *dray__settings_json(const dray__job *job);
/* Returns them as a malloc'ed job file, which reads as the same job again. */
int dray__settings_yaml(const dray__job *job, char **out, dray_error *error);
/* Prints the table: lines of Markdown, as in docs/run.md, or one JSON object a line. Returns false
 * when writing failed, or out of memory. */
bool dray__settings_print(FILE *out, bool json);
/* All keys by section, for --help; malloc'ed; NULL when out of memory. */
char *dray__settings_keys(void);
