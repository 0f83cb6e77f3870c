/* Coverage: the elements of each published tensor that a group of engine ranks holds. The
 * coordinator computes it from the layouts that both ends registered, and compares it with the
 * elements that ranks say they have read. So an update in which a rank forgets a tensor is refused.
 */
#pragma once

#include "weights/sums.h"

#include <dray/model.h>

typedef struct dray__covered {
    char *name; /* the source's name of the tensor */
    int32_t dtype;
    bool mixed;       /* sources hold it in several dtypes, so that bits cannot be compared */
    uint64_t held;    /* elements that sources hold */
    uint64_t covered; /* elements that ranks of the group hold */
    uint32_t tie;     /* 1 + the item of which this is another name in the group's memory, though
                       * sources have two tensors; 0: none */
} dray__covered;

/* The indices of the items in tables of a form. */
typedef struct dray__coverage_of_form {
    dray__sums_form *form;
    uint32_t *at;        /* [item] its index in the form; UINT32_MAX when the form does not have
                          * it */
    const char *unknown; /* a name of the form that no item has; NULL when there is none */
} dray__coverage_of_form;

typedef struct dray__compared {
    uint64_t tensors, bytes; /* tensors that the group holds as a whole; bytes as published */
} dray__compared;

typedef struct dray__coverage {
    dray__map by_name;
    dray__covered *items;
    uint32_t count;
    uint64_t capacity;
    uint32_t partial;                        /* items that are not compared as a whole */
    bool tied;                               /* an item has a tie */
    dray__coverage_of_form announced, found; /* of the last comparison */
    /* The elements of these two forms equal the layouts', and `whole` is compared of them. */
    bool counted;
    dray__compared whole;
    struct dray__coverage_pair *pairs;
    uint32_t pair_count;
} dray__coverage;

/* An item that is compared, and where it is in the two tables. */
typedef struct dray__coverage_pair {
    uint32_t item, announced, found;
    bool differs; /* the dtypes differ */
} dray__coverage_pair;

typedef struct dray__packed_layout {
    const void *data;
    size_t size;
} dray__packed_layout;

/* Computes the coverage of the publishers' tensors. Elements that several ranks hold count once.
 * Fails as dray_layout_unpack does, and with DRAY_EUNSUPPORTED when the rectangles overlap in so
 * many ways that counting them would stop the coordinator for too long. */
int dray__coverage_of_layouts(const dray__packed_layout *sources, uint32_t source_count,
                              const dray__packed_layout *group, uint32_t group_count,
                              dray__coverage *out, dray_error *error);
/* Computes the coverage of a checkpoint, which has the tensors of `sources` as a whole. */
int dray__coverage_of_sums(const dray__sums *sources, const dray__packed_layout *group,
                           uint32_t group_count, dray__coverage *out, dray_error *error);
void dray__coverage_free(dray__coverage *coverage);

/* Returns true when the tensor is compared as a whole. */
bool dray__coverage_whole(const dray__covered *item);
/* Compares the sums of the group's ranks with the announced sums, tensor by tensor. On both sides
 * the number of elements must be that of the layouts. The sums of tensors that the group holds as a
 * whole must be equal, and so must the announced sums of two tensors that are one in the group's
 * memory, which has the values of one of them. origin: names the announced sums in the message.
 * DRAY_ECHECKSUM names the tensors that differ. */
int dray__coverage_compare(dray__coverage *coverage, dray__sums *announced, dray__sums *found,
                           const char *origin, dray__compared *out, dray_error *error);

/* Finds the source's name of each tensor of a destination's layout. `find` returns the source's
 * name for a name, or NULL. A tied tensor is looked up by each of its names. names has room for all
 * tensors. */
typedef const char *(*dray__find_name)(const void *user, const char *name);
void dray__names_resolve(const dray_layout *layout, dray__find_name find, const void *user,
                         const char **names);
