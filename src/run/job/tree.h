/* YAML documents as trees whose nodes know their lines, so that a message about a value names its
 * line. */
#pragma once

#include <dray/dray.h>

typedef enum dray__node_kind {
    DRAY__NODE_SCALAR = 0,
    DRAY__NODE_SEQUENCE,
    DRAY__NODE_MAPPING
} dray__node_kind;

typedef struct dray__text_place {
    int line, column; /* from 1; line 0 when it is not from a file */
} dray__text_place;

typedef struct dray__node {
    int kind;            /* dray__node_kind */
    char *key;           /* in a mapping; else NULL */
    char *value;         /* scalar */
    const char *source;  /* borrowed: the name given to the parser; must outlive the tree */
    dray__text_place at; /* of the key, if the node has one */
    struct dray__node **children;
    uint32_t count;
} dray__node;

enum { DRAY__PLACE_BYTES = 320 };
/* Writes "SOURCE:LINE:COLUMN", or "SOURCE" for a value that is not from a file. Returns out. */
char *dray__place_text(const char *source, dray__text_place at, char out[DRAY__PLACE_BYTES]);

/* Reads one YAML document. Returns 0, or DRAY_EFORMAT with the place for bad syntax, a repeated
 * key, more than 10,000 nodes, more than 16 levels, or more than one document. An empty document is
 * an empty mapping. */
int dray__tree_parse(const char *text, size_t size, const char *source, dray__node **out,
                     dray_error *error);
/* Makes a tree of nested mappings from "a.b.c=value", where value is YAML (a scalar, or a list in
 * brackets). Returns DRAY_EINVALID for any other text. */
int dray__tree_setting(const char *setting, dray__node **out, dray_error *error);
void dray__tree_free(dray__node *node);

/* Returns the child with this key, or NULL. */
dray__node *dray__tree_child(const dray__node *mapping, const char *key);
