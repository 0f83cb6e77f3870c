/* The settings of a job file. One table (settings.c) says of each its key, type, place in
 * dray__job, default, what it accepts and what it means; what reads job files and --set, checks,
 * writes the resolved job and prints docs/run.md's table goes by it alone. A new setting is one
 * line there. */
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
    const char *name; /* NULL: the end */
    int32_t value;
    const char *refused; /* why a word that people know is none here: "is not in this version" */
} dray__word;

enum { DRAY__PRESET_TEXTS = 16, DRAY__SETTING_BYTES = 4096 };

typedef struct dray__setting {
    const char *key; /* "actor.lr"; of a record "ranks". NULL: the end */
    int type;        /* dray__setting_type */
    size_t at, count_at;
    double low, high;        /* of numbers; of lists: how many entries */
    bool above;              /* low itself is outside */
    const dray__word *words; /* words */
    const char *text;        /* default, as a job file would say it (texts: with blanks between
                                them); NULL: the key must be there */
    const char *meaning;     /* for people */
    const struct dray__setting_record *record;
} dray__setting;

/* What a list of records holds, and its entries where the job file gives none: keys and values in
 * turn. Each record's first setting is its name. */
typedef struct dray__setting_record {
    size_t size;
    const dray__setting *settings;
    const char *const (*presets)[DRAY__PRESET_TEXTS];
    uint32_t preset_count;
} dray__setting_record;

extern const dray__setting dray__settings[];
/* Keys of earlier versions, and what they are called now; ended by NULL. */
extern const char *const dray__settings_renamed[][2];

/* ---- reading (settings_read.c) --------------------------------------------------------------- */

/* Where each value was written: file, line, column. */
typedef struct dray__places dray__places;

int dray__places_open(const char *file, dray__places **out, dray_error *error);
void dray__places_close(dray__places *places);

/* A job of defaults. */
int dray__settings_default(dray__job **out, dray_error *error);
/* Sets what `tree` says. Sections and records by name are laid over what is there, lists take its
 * place. DRAY_EINVALID with file, line, column, what was expected and found: unknown keys and words
 * (with the nearest right one), types, ranges. The places refer to the tree's source. */
int dray__settings_read(dray__job *job, const dray__node *tree, dray__places *places,
                        dray_error *error);
void dray__settings_free(dray__job *job);

/* Was the setting given, by the file or --set? */
bool dray__setting_given(const dray__places *places, const char *key);
/* DRAY_EINVALID about a setting: "FILE:LINE:COLUMN: key: message". `keys`: "a.b", or several with
 * blanks between them: the first is named, and the place is that of the first that was given (or
 * whose section was). */
int dray__setting_fail(const dray__places *places, const char *keys, dray_error *error,
                       const char *format, ...) __attribute__((format(printf, 4, 5)));

/* ---- writing (settings_write.c) -------------------------------------------------------------- */

/* The job as it is, all of it; NULL: out of memory. */
json_t *dray__settings_json(const dray__job *job);
/* The same as a job file, which reads as the same job again; malloc'ed. */
int dray__settings_yaml(const dray__job *job, char **out, dray_error *error);
/* The table itself: lines of Markdown, as in docs/run.md, or one JSON object a line. False: nowhere
 * to write, or out of memory. */
bool dray__settings_print(FILE *out, bool json);
/* All keys by section, for --help; malloc'ed; NULL: out of memory. */
char *dray__settings_keys(void);
