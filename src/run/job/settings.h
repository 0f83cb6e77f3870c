/* The settings of a job file. One table (settings.c) has for each its key, type, place in
 * dray__job, default, range and meaning. Reading job files and --set, checking, writing the
 * resolved job and printing docs/run.md's table use this table alone. A new setting is one line
 * there. */
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
    DRAY__SETTING_PATH,  /* char *: a path; relative ones are made absolute, from the file's folder
                          */
    DRAY__SETTING_TEXTS, /* char **, with how many in a uint32_t */
    DRAY__SETTING_RECORDS, /* array of structs, with how many in a uint32_t; each has a name */
    DRAY__SETTING_TYPES
} dray__setting_type;

typedef struct dray__word {
    const char *name; /* NULL at the end */
    int32_t value;
    const char *refused; /* why a word that people know is none here: "is not in this version" */
} dray__word;

enum { DRAY__PRESET_TEXTS = 16, DRAY__SETTING_BYTES = 4096 };

typedef struct dray__setting {
    const char *key; /* "actor.lr"; of a record "ranks". NULL at the end */
    int type;        /* dray__setting_type */
    size_t at, count_at;
    double low, high;        /* of numbers; of lists: how many entries */
    bool above;              /* low itself is outside */
    const dray__word *words; /* words */
    const char *text;        /* default, as in a job file (texts: with blanks between them); NULL
                              * when the key must be there */
    const char *meaning;     /* for people */
    const struct dray__setting_record *record;
} dray__setting;

/* The records of a list, and its entries when the job file gives none: keys and values in turn.
 * Each record's first setting is its name. */
typedef struct dray__setting_record {
    size_t size;
    const dray__setting *settings;
    const char *const (*presets)[DRAY__PRESET_TEXTS];
    uint32_t preset_count;
} dray__setting_record;

extern const dray__setting dray__settings[];
/* Keys of earlier versions, and their present names; ended by NULL. */
extern const char *const dray__settings_renamed[][2];

/* ---- reading (settings_read.c) --------------------------------------------------------------- */

/* Where each value was written: file, line, column. */
typedef struct dray__places dray__places;

int dray__places_open(const char *file, dray__places **out, dray_error *error);
void dray__places_close(dray__places *places);

/* A job of defaults. */
int dray__settings_default(dray__job **out, dray_error *error);
/* Sets the values in `tree`. Sections and records by name are laid over the present ones, lists
 * replace them. Returns 0, or DRAY_EINVALID with file, line, column, the expected and the found
 * value: for unknown keys and words (with the nearest right one), types, ranges. The places refer
 * to the tree's source. */
int dray__settings_read(dray__job *job, const dray__node *tree, dray__places *places,
                        dray_error *error);
void dray__settings_free(dray__job *job);

/* Was the setting given, by the file or --set? */
bool dray__setting_given(const dray__places *places, const char *key);
/* Returns DRAY_EINVALID about a setting: "FILE:LINE:COLUMN: key: message". `keys` is "a.b", or
 * several with blanks between them. The message names the first. Its place is that of the first
 * that was given (or whose section was). */
int dray__setting_fail(const dray__places *places, const char *keys, dray_error *error,
                       const char *format, ...) __attribute__((format(printf, 4, 5)));

/* ---- writing (settings_write.c) -------------------------------------------------------------- */

/* All of the job's settings; NULL when out of memory. */
json_t *dray__settings_json(const dray__job *job);
/* The same as a job file, which reads as the same job again; malloc'ed. */
int dray__settings_yaml(const dray__job *job, char **out, dray_error *error);
/* Prints the table: lines of Markdown, as in docs/run.md, or one JSON object a line. Returns false
 * when writing failed, or out of memory. */
bool dray__settings_print(FILE *out, bool json);
/* All keys by section, for --help; malloc'ed; NULL when out of memory. */
char *dray__settings_keys(void);
