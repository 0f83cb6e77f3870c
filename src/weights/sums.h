/* A table of checksums by tensor name: what publishers announce, what groups vote with. The sums
 * are those of mover/kernels/checksum.h, so tables of disjoint rectangles add up.
 *
 * A model has tens of thousands of tensors, and from one version to the next nothing changes but
 * the sums. So a table can be of a form: names, dtypes and elements, which do not change and are
 * shared. A form goes over a connection once; then a table is its number and the sums. Joining two
 * tables whose forms were joined before is adding numbers up. Of such tables nothing but the sums
 * is there until somebody asks for items. */
#pragma once

#include "base/hash.h"
#include "base/wire.h"

#include <dray/model.h>
#include <stdbool.h>

#define DRAY__TENSOR_NAME_MAX 4096u

/* One thread at a time for all that share it: each member, and the coordinator, has its own. */
typedef struct dray__sums_form dray__sums_form;

typedef struct dray__named_sum {
    const char *name; /* the table's or its form's */
    int32_t dtype;
    bool mixed;        /* held in several dtypes: bits cannot be compared */
    uint64_t elements; /* covered */
    uint64_t sum;
} dray__named_sum;

extern const dray__fields dray__named_sum_fields;

typedef struct dray__sums {
    dray__named_sum *items; /* NULL: not made yet (dray__sums_items), but `plain` */
    uint64_t *plain;        /* the sums alone, in the order of the form */
    uint32_t count, capacity;
    dray__sums_form *form;     /* what it is of; NULL: not known yet */
    dray__sums_form *expected; /* while it is made: whose names it uses */
    dray__map by_name;         /* of its own names, when it has neither */
} dray__sums;

void dray__sums_free(dray__sums *sums);
/* Adds a partial sum; false: out of memory. */
bool dray__sums_add(dray__sums *sums, const char *name, int32_t dtype, uint64_t elements,
                    uint64_t sum);
/* The same of another table's item, mixed or not. */
bool dray__sums_add_item(dray__sums *sums, const dray__named_sum *item);
/* Adds a table to another. */
bool dray__sums_join(dray__sums *sums, dray__sums *more);
/* NULL: none of that name, or out of memory. */
const dray__named_sum *dray__sums_find(const dray__sums *sums, const char *name);
/* All items; made by the first call, by the one thread that has the table. NULL: none, or out of
 * memory. */
const dray__named_sum *dray__sums_items(const dray__sums *sums);
uint64_t dray__sums_at(const dray__sums *sums, uint32_t index);

/* ---- forms ----------------------------------------------------------------------------------- */

/* Of an empty table: it will probably be of this form again, added up in the same order; that is
 * cheap then. form may be NULL. */
void dray__sums_expect(dray__sums *sums, dray__sums_form *form);
/* The table's form, borrowed; NULL: out of memory. */
dray__sums_form *dray__sums_form_of(dray__sums *sums);
/* An empty table becomes one of this form, with these sums, which it takes over (malloc). */
void dray__sums_of_form(dray__sums *sums, dray__sums_form *form, uint64_t *plain);
uint32_t dray__sums_form_count(const dray__sums_form *form);
const dray__named_sum *dray__sums_form_item(const dray__sums_form *form,
                                            uint32_t index);  /* sum 0 */
dray__sums_form *dray__sums_form_keep(dray__sums_form *form); /* NULL is fine */
void dray__sums_form_drop(dray__sums_form *form);             /* NULL is fine */
/* Where a name is among the items; UINT32_MAX: nowhere. */
uint32_t dray__sums_form_find(const dray__sums_form *form, const char *name);

/* ---- on the wire ----------------------------------------------------------------------------- */

/* The forms that one side of a connection has sent, or the other has got. */
enum { DRAY__SUMS_FORMS = 8 };
typedef struct dray__sums_forms {
    dray__sums_form *form[DRAY__SUMS_FORMS];
    uint32_t next;
} dray__sums_forms;

/* To be called by the sender whenever it cannot know what became of a message. */
void dray__sums_forms_clear(dray__sums_forms *forms);

/* u8 1, u32 count, items; or u8 2, u64 the number of a form that went before, the sums. */
void dray__sums_put(dray__writer *w, const dray__sums *sums); /* whole */
void dray__sums_put_known(dray__writer *w, dray__sums *sums, dray__sums_forms *sent);
/* Reads what was put, adding to `sums`; malformed input, a form that never came too, sticks to the
 * reader. known may be NULL. false: out of memory. */
bool dray__sums_get(dray__reader *r, dray__sums *sums, dray__sums_forms *known);
