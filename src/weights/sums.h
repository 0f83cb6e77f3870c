/* Tables of checksums by tensor name. Publishers announce a version with such a table, and ranks of
 * groups vote with one. The sums are those of mover/kernels/checksum.h, so that the sums of
 * disjoint rectangles can be added.
 *
 * A model has tens of thousands of tensors, and only the sums change from one version to the next.
 * Therefore tables can share a form, which has the names, dtypes and elements. A form is sent over
 * a connection once; later tables are sent as the form's number and the sums. Joining two tables
 * whose forms were joined before only adds numbers. The items of such a table are made when they
 * are first asked for. */
#pragma once

#include "base/hash.h"
#include "base/wire.h"

#include <dray/model.h>
#include <stdbool.h>

#define DRAY__TENSOR_NAME_MAX 4096u

/* All tables that share a form must be used by one thread at a time. Each member, and the
 * coordinator, has its own forms. */
typedef struct dray__sums_form dray__sums_form;

typedef struct dray__named_sum {
    const char *name; /* owned by the table or its form */
    int32_t dtype;
    bool mixed;        /* it is held in several dtypes, so that bits cannot be compared */
    uint64_t elements; /* the number of elements in the sum */
    uint64_t sum;
} dray__named_sum;

extern const dray__fields dray__named_sum_fields;

typedef struct dray__sums {
    dray__named_sum *items; /* NULL until they are made (dray__sums_items); then `plain` has the
                             * sums */
    uint64_t *plain;        /* the sums alone, in the order of the form */
    uint32_t count, capacity;
    dray__sums_form *form;     /* NULL until it has one */
    dray__sums_form *expected; /* while the table is filled: the form whose names it uses */
    dray__map by_name;         /* its own names, without a form */
} dray__sums;

void dray__sums_free(dray__sums *sums);
/* Adds a partial sum. Returns false when memory runs out. */
bool dray__sums_add(dray__sums *sums, const char *name, int32_t dtype, uint64_t elements,
                    uint64_t sum);
/* Adds an item of another table, mixed or not. */
bool dray__sums_add_item(dray__sums *sums, const dray__named_sum *item);
/* Adds a table to another. */
bool dray__sums_join(dray__sums *sums, dray__sums *more);
/* Returns the item of that name; NULL when there is none, or when out of memory. */
const dray__named_sum *dray__sums_find(const dray__sums *sums, const char *name);
/* Returns all items. The first call makes them; it must come from the thread that uses the table.
 * NULL when there are none, or when out of memory. */
const dray__named_sum *dray__sums_items(const dray__sums *sums);
uint64_t dray__sums_at(const dray__sums *sums, uint32_t index);

/* ---- forms ----------------------------------------------------------------------------------- */

/* Prepares an empty table for items that will probably have this form, in its order, which makes
 * adding them cheap. form may be NULL. */
void dray__sums_expect(dray__sums *sums, dray__sums_form *form);
/* Returns the table's form, borrowed. NULL when out of memory. */
dray__sums_form *dray__sums_form_of(dray__sums *sums);
/* Gives an empty table this form and these sums, which were allocated by malloc and are taken over.
 */
void dray__sums_of_form(dray__sums *sums, dray__sums_form *form, uint64_t *plain);
uint32_t dray__sums_form_count(const dray__sums_form *form);
const dray__named_sum *dray__sums_form_item(const dray__sums_form *form,
                                            uint32_t index);  /* sum 0 */
dray__sums_form *dray__sums_form_keep(dray__sums_form *form); /* NULL is fine */
void dray__sums_form_drop(dray__sums_form *form);             /* NULL is fine */
/* Returns the index of the item with the name; UINT32_MAX when there is none. */
uint32_t dray__sums_form_find(const dray__sums_form *form, const char *name);

/* ---- on the wire ----------------------------------------------------------------------------- */

/* The forms that one end of a connection has sent, or that the other end has received. */
enum { DRAY__SUMS_FORMS = 8 };
typedef struct dray__sums_forms {
    dray__sums_form *form[DRAY__SUMS_FORMS];
    uint32_t next;
} dray__sums_forms;

/* Forgets the forms. The sender calls it when it cannot know whether a message has arrived. */
void dray__sums_forms_clear(dray__sums_forms *forms);

/* Write u8 1, u32 count, items; or u8 2, u64 number of a form that was sent before, the sums. */
void dray__sums_put(dray__writer *w, const dray__sums *sums); /* whole */
void dray__sums_put_known(dray__writer *w, dray__sums *sums, dray__sums_forms *sent);
/* Reads a table that was written by these, and adds it to `sums`. Malformed input, such as the
 * number of an unknown form, makes the reader fail. known may be NULL. Returns false when memory
 * runs out. */
bool dray__sums_get(dray__reader *r, dray__sums *sums, dray__sums_forms *known);
