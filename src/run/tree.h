/* YAML documents as trees whose nodes know where they came from: layers of a job file (defaults,
 * the file, --set) are merged as trees, so that a message about the result still names the line. */
#ifndef DRAY_RUN_TREE_H
#define DRAY_RUN_TREE_H

#include "base/wire.h"

#include <dray/dray.h>

typedef enum dray__node_kind {
    DRAY__NODE_SCALAR = 0,
    DRAY__NODE_SEQUENCE,
    DRAY__NODE_MAPPING
} dray__node_kind;

typedef struct dray__place {
    int line, column; /* from 1; line 0: not from a file */
} dray__place;

typedef struct dray__node {
    int kind;           /* dray__node_kind */
    char *key;          /* in a mapping; else NULL */
    char *value;        /* scalar */
    const char *source; /* borrowed: the name given to the parser; must outlive the tree */
    dray__place at;     /* of the key, if it has one */
    struct dray__node **children;
    uint32_t count;
} dray__node;

enum { DRAY__PLACE_BYTES = 320 };
/* "SOURCE:LINE:COLUMN", or "SOURCE" where it is not from a file. Returns out. */
char *dray__place_text(const char *source, dray__place at, char out[DRAY__PLACE_BYTES]);

/* Reads one YAML document. DRAY_EFORMAT with the place: bad syntax, a key twice, more than 10,000
 * nodes, more than 16 levels, more than one document. An empty document is an empty mapping. */
int dray__tree_parse(const char *text, size_t size, const char *source, dray__node **out,
                     dray_error *error);
/* A tree of nested mappings for "a.b.c=value": value is YAML (a scalar, or a list in brackets).
 * DRAY_EINVALID where it is none. */
int dray__tree_setting(const char *setting, dray__node **out, dray_error *error);
void dray__tree_free(dray__node *node);

/* Lays `over` on `base`: mappings key by key, everything else is replaced. A sequence of mappings
 * with a `name` is addressed by that name when `over` is a mapping (roles.engine.ranks). Takes
 * over's nodes; over is freed. */
int dray__tree_merge(dray__node *base, dray__node *over, dray_error *error);
/* NULL when the mapping has no such key. */
dray__node *dray__tree_child(const dray__node *mapping, const char *key);
/* "a.b.c"; NULL when not there. */
dray__node *dray__tree_find(dray__node *root, const char *path);
/* Replaces a scalar's value. */
int dray__tree_assign(dray__node *scalar, const char *value, dray_error *error);
/* Block-style YAML that parses to the same tree. */
void dray__tree_emit(const dray__node *root, dray__writer *out);

#endif
