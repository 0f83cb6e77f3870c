/* How much of each published tensor a group of engine ranks holds, derived by the coordinator from
 * the layouts that both sides registered. What ranks say that they compared is judged by this,
 * never by their own counts: a rank that forgets a tensor is refused, instead of switching its
 * check off.
 */
#pragma once

#include "weights/sums.h"

#include <dray/model.h>

typedef struct dray__covered {
    char *name; /* the source's */
    int32_t dtype;
    bool mixed;       /* sources hold it in several dtypes: bits cannot be compared */
    uint64_t held;    /* elements that sources hold */
    uint64_t covered; /* elements that ranks of the group hold */
} dray__covered;

/* Where each item is in tables of a form. */
typedef struct dray__coverage_of_form {
    dray__sums_form *form;
    uint32_t *at;        /* UINT32_MAX: nowhere */
    const char *unknown; /* a name that no item has, the form's; NULL: there is none */
} dray__coverage_of_form;

typedef struct dray__compared {
    uint64_t tensors, bytes; /* of those that the group holds as a whole, as they were published */
} dray__compared;

typedef struct dray__coverage {
    dray__map by_name;
    dray__covered *items;
    uint32_t count;
    uint64_t capacity;
    uint32_t partial;                        /* items that are not compared as a whole */
    dray__coverage_of_form announced, found; /* of the last comparison */
    /* These two were found to be as the layouts say, and this is compared of them. */
    bool counted;
    dray__compared whole;
    struct dray__coverage_pair *pairs;
    uint32_t pair_count;
} dray__coverage;

/* An item that is compared, and where it is in the two tables. */
typedef struct dray__coverage_pair {
    uint32_t item, announced, found;
    bool differs; /* already in dtype */
} dray__coverage_pair;

typedef struct dray__packed_layout {
    const void *data;
    size_t size;
} dray__packed_layout;

/* Of the publishers' ranks. Elements that several ranks hold count once. DRAY_EFORMAT and what else
 * dray_layout_unpack returns; DRAY_EUNSUPPORTED: rectangles in such confusion that counting them
 * would hold up everybody. */
int dray__coverage_of_layouts(const dray__packed_layout *sources, uint32_t source_count,
                              const dray__packed_layout *group, uint32_t group_count,
                              dray__coverage *out, dray_error *error);
/* Of a checkpoint, which holds the tensors of `sources` as a whole. */
int dray__coverage_of_sums(const dray__sums *sources, const dray__packed_layout *group,
                           uint32_t group_count, dray__coverage *out, dray_error *error);
void dray__coverage_free(dray__coverage *coverage);

/* Will it be compared as a whole? */
bool dray__coverage_whole(const dray__covered *item);
/* Compares what the group's ranks read with what was announced, tensor by tensor: the elements must
 * be as many as the layouts say, on both sides, and the sums of tensors that the group holds as a
 * whole must be equal. origin: for the message, "what was published". DRAY_ECHECKSUM names those
 * that differ. */
int dray__coverage_compare(dray__coverage *coverage, dray__sums *announced, dray__sums *found,
                           const char *origin, dray__compared *out, dray_error *error);

/* For each tensor of a destination's layout what the source calls it, by `find` (NULL: it has no
 * such name); a tied one may be known by any of its names. names has room for all tensors. */
typedef const char *(*dray__find_name)(const void *user, const char *name);
void dray__names_resolve(const dray_layout *layout, dray__find_name find, const void *user,
                         const char **names);
