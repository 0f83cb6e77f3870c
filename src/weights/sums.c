#include "weights/sums.h"

#include <stdlib.h>
#include <string.h>

enum { NOWHERE = UINT32_MAX };

struct dray__sums_form {
    uint32_t references, count;
    uint64_t number;        /* of its contents */
    dray__named_sum *items; /* the form owns their names; sums are 0 */
    dray__map by_name;
    /* The form that it was last joined with, and the result. `at` has the indices of the items of
     * `with` in the result. */
    dray__sums_form *with, *joined;
    uint32_t *at;
};

uint64_t dray__sums_at(const dray__sums *sums, uint32_t index)
{
    return sums->plain ? sums->plain[index] : sums->items[index].sum;
}

/* ---- forms ----------------------------------------------------------------------------------- */

dray__sums_form *dray__sums_form_keep(dray__sums_form *form)
{
    if (form)
        form->references++;
    return form;
}

static void forget_join(dray__sums_form *form)
{
    dray__sums_form_drop(form->with);
    dray__sums_form_drop(form->joined);
    free(form->at);
    form->with = form->joined = NULL;
    form->at = NULL;
}

void dray__sums_form_drop(dray__sums_form *form)
{
    if (!form || --form->references)
        return;
    forget_join(form);
    for (uint32_t i = 0; i < form->count; i++)
        free((char *)form->items[i].name);
    free(form->items);
    dray__map_free(&form->by_name);
    free(form);
}

uint32_t dray__sums_form_count(const dray__sums_form *form)
{
    return form->count;
}

const dray__named_sum *dray__sums_form_item(const dray__sums_form *form, uint32_t index)
{
    return &form->items[index];
}

uint32_t dray__sums_form_find(const dray__sums_form *form, const char *name)
{
    uint32_t index;
    return dray__map_get(&form->by_name, name, &index) ? index : NOWHERE;
}

static bool same_form(const dray__sums *sums, const dray__sums_form *form)
{
    if (sums->count != form->count)
        return false;
    for (uint32_t i = 0; i < sums->count; i++) {
        const dray__named_sum *a = &sums->items[i], *b = &form->items[i];
        if (a->dtype != b->dtype || a->mixed != b->mixed || a->elements != b->elements)
            return false;
    }
    return true;
}

/* The parts that two tables of the same tensors share. */
static const dray__fields form_item_fields =
    DRAY__FIELDS(dray__named_sum, DRAY__FIELD_TEXT(dray__named_sum, name, DRAY__TENSOR_NAME_MAX),
                 DRAY__NUMBERS(dray__named_sum, dtype, mixed, elements));
const dray__fields dray__named_sum_fields =
    DRAY__FIELDS(dray__named_sum, DRAY__FIELD_TEXT(dray__named_sum, name, DRAY__TENSOR_NAME_MAX),
                 DRAY__NUMBERS(dray__named_sum, dtype, mixed, elements, sum));

static uint64_t number_of(const dray__sums *sums)
{
    dray__writer w = {0};
    for (uint32_t i = 0; i < sums->count; i++) {
        const dray__named_sum *item = &sums->items[i];
        dray__put_fields(&w, &form_item_fields, item);
    }
    uint64_t number = w.failed ? 0 : dray__hash(w.data, w.size);
    dray__writer_free(&w);
    return number;
}

/* ---- tables ---------------------------------------------------------------------------------- */

void dray__sums_free(dray__sums *sums)
{
    for (uint32_t i = 0; i < sums->count && !sums->form && !sums->expected; i++)
        free((char *)sums->items[i].name);
    free(sums->items);
    free(sums->plain);
    dray__map_free(&sums->by_name);
    dray__sums_form_drop(sums->form);
    dray__sums_form_drop(sums->expected);
    *sums = (dray__sums){0};
}

/* Makes the items of a table that has only sums. */
static bool make_items(dray__sums *sums)
{
    const dray__sums_form *form = sums->form;
    dray__named_sum *items = malloc(((size_t)sums->count + 1) * sizeof *items);
    if (!items)
        return false;
    for (uint32_t i = 0; i < sums->count; i++) {
        items[i] = form->items[i];
        items[i].sum = sums->plain[i];
    }
    free(sums->plain);
    sums->plain = NULL;
    sums->items = items;
    sums->capacity = sums->count + 1;
    return true;
}

/* Makes the array of sums of a table with a form. */
static bool make_plain(dray__sums *sums)
{
    if (sums->plain)
        return true;
    uint64_t *plain = malloc(((size_t)sums->count + 1) * sizeof *plain);
    if (!plain)
        return false;
    for (uint32_t i = 0; i < sums->count; i++)
        plain[i] = sums->items[i].sum;
    free(sums->items);
    sums->items = NULL;
    sums->capacity = 0;
    sums->plain = plain;
    return true;
}

/* Making the items does not change the table's contents, so that the argument can be const. */
const dray__named_sum *dray__sums_items(const dray__sums *sums)
{
    if (sums->plain && !make_items((dray__sums *)sums))
        return NULL;
    return sums->items;
}

/* Copies the names that the table borrows. */
static bool own_names(dray__sums *sums)
{
    char **names = calloc((size_t)sums->count + 1, sizeof *names);
    bool made = names != NULL;
    for (uint32_t i = 0; i < sums->count && made; i++) {
        names[i] = strdup(sums->items[i].name);
        made = names[i] && dray__map_set(&sums->by_name, names[i], i);
    }
    for (uint32_t i = 0; i < sums->count && names; i++) {
        if (made)
            sums->items[i].name = names[i];
        else
            free(names[i]);
    }
    free(names);
    if (!made) {
        dray__map_free(&sums->by_name);
        return false;
    }
    dray__sums_form_drop(sums->expected);
    sums->expected = NULL;
    return true;
}

static dray__named_sum *push(dray__sums *sums, const char *name, int32_t dtype)
{
    if (sums->count == sums->capacity) {
        if (sums->capacity > UINT32_MAX / 2)
            return NULL;
        uint32_t capacity = sums->capacity ? sums->capacity * 2 : 64;
        if (sums->expected && sums->expected->count > capacity)
            capacity = sums->expected->count;
        dray__named_sum *items = realloc(sums->items, capacity * sizeof *items);
        if (!items)
            return NULL;
        sums->items = items;
        sums->capacity = capacity;
    }
    dray__named_sum *item = &sums->items[sums->count++];
    *item = (dray__named_sum){.name = name, .dtype = dtype};
    return item;
}

static dray__named_sum *push_own(dray__sums *sums, const char *name, int32_t dtype)
{
    char *copy = strdup(name);
    dray__named_sum *item = copy ? push(sums, copy, dtype) : NULL;
    if (item && dray__map_set(&sums->by_name, name, sums->count - 1))
        return item;
    sums->count -= item != NULL;
    free(copy);
    return NULL;
}

/* Returns the item of a name, and adds it if it is new. Uses the names of the expected form while
 * the items are in its order. */
static dray__named_sum *item_of(dray__sums *sums, const char *name, int32_t dtype)
{
    const dray__sums_form *expected = sums->expected;
    uint32_t next = sums->count, index;
    if (next && strcmp(sums->items[next - 1].name, name) == 0)
        return &sums->items[next - 1];
    if (expected && next < expected->count && strcmp(expected->items[next].name, name) == 0)
        return push(sums, expected->items[next].name, dtype);
    if (expected && dray__map_get(&expected->by_name, name, &index) && index < next)
        return &sums->items[index];
    if (expected && !own_names(sums))
        return NULL;
    return dray__map_get(&sums->by_name, name, &index) ? &sums->items[index]
                                                       : push_own(sums, name, dtype);
}

bool dray__sums_add(dray__sums *sums, const char *name, int32_t dtype, uint64_t elements,
                    uint64_t sum)
{
    if (sums->plain && !make_items(sums))
        return false;
    if (sums->form) { /* it no longer has that form */
        sums->expected = sums->form;
        sums->form = NULL;
    }
    dray__named_sum *item = item_of(sums, name, dtype);
    if (!item)
        return false;
    item->mixed |= item->dtype != dtype;
    item->elements += elements;
    item->sum += sum;
    return true;
}

/* An item without a dtype makes it mixed. */
bool dray__sums_add_item(dray__sums *sums, const dray__named_sum *item)
{
    return dray__sums_add(sums, item->name, item->dtype, item->elements, item->sum) &&
           (!item->mixed || dray__sums_add(sums, item->name, DRAY_DTYPE_NONE, 0, 0));
}

const dray__named_sum *dray__sums_find(const dray__sums *sums, const char *name)
{
    const dray__sums_form *names = sums->form ? sums->form : sums->expected;
    uint32_t index;
    bool found = dray__map_get(names ? &names->by_name : &sums->by_name, name, &index);
    const dray__named_sum *items = found ? dray__sums_items(sums) : NULL;
    return items && index < sums->count ? &items[index] : NULL;
}

void dray__sums_expect(dray__sums *sums, dray__sums_form *form)
{
    if (!sums->count && !sums->form && !sums->expected)
        sums->expected = dray__sums_form_keep(form);
}

dray__sums_form *dray__sums_form_of(dray__sums *sums)
{
    if (sums->form)
        return sums->form;
    if (sums->expected && same_form(sums, sums->expected)) {
        sums->form = sums->expected;
        sums->expected = NULL;
        return sums->form;
    }
    if (sums->expected && !own_names(sums))
        return NULL;
    dray__sums_form *form = calloc(1, sizeof *form);
    dray__named_sum *items = calloc((size_t)sums->count + 1, sizeof *items);
    if (!form || !items) {
        free(form);
        free(items);
        return NULL;
    }
    if (sums->count)
        memcpy(items, sums->items, sums->count * sizeof *items);
    for (uint32_t i = 0; i < sums->count; i++)
        items[i].sum = 0;
    *form = (dray__sums_form){.references = 1,
                              .count = sums->count,
                              .number = number_of(sums),
                              .items = items,
                              .by_name = sums->by_name};
    sums->by_name = (dray__map){0}; /* the form owns names and map now */
    sums->form = form;
    return form;
}

void dray__sums_of_form(dray__sums *sums, dray__sums_form *form, uint64_t *plain)
{
    dray__sums_form *kept = dray__sums_form_keep(form);
    dray__sums_free(sums);
    *sums = (dray__sums){.plain = plain, .count = form->count, .form = kept};
}

/* ---- joining --------------------------------------------------------------------------------- */

/* Joins item by item, and remembers the result for later joins. */
static bool join_anew(dray__sums *sums, dray__sums *more)
{
    dray__sums_form *first = dray__sums_form_keep(sums->form);
    uint32_t *at = calloc((size_t)more->count + 1, sizeof *at);
    const dray__named_sum *items = dray__sums_items(more);
    bool joined = at && items;
    for (uint32_t i = 0; i < more->count && joined; i++)
        joined = dray__sums_add_item(sums, &items[i]);
    dray__sums_form *result = joined ? dray__sums_form_of(sums) : NULL;
    for (uint32_t i = 0; i < more->count && result; i++)
        at[i] = dray__sums_form_find(result, items[i].name);
    if (result && result != first) {
        forget_join(first);
        first->with = dray__sums_form_keep(more->form);
        first->joined = dray__sums_form_keep(result);
        first->at = at;
        at = NULL;
    }
    free(at);
    dray__sums_form_drop(first);
    return result != NULL;
}

/* Joins as remembered, by adding the sums in place. */
static bool join_again(dray__sums *sums, const dray__sums *more)
{
    dray__sums_form *first = sums->form, *joined = first->joined;
    if (!make_plain(sums))
        return false;
    if (joined->count > sums->count) {
        uint64_t *plain = realloc(sums->plain, joined->count * sizeof *plain);
        if (!plain)
            return false;
        memset(plain + sums->count, 0, (joined->count - sums->count) * sizeof *plain);
        sums->plain = plain;
    }
    for (uint32_t i = 0; i < more->count; i++)
        sums->plain[first->at[i]] += dray__sums_at(more, i);
    sums->count = joined->count;
    sums->form = dray__sums_form_keep(joined);
    dray__sums_form_drop(first);
    return true;
}

bool dray__sums_join(dray__sums *sums, dray__sums *more)
{
    if (!more->count)
        return true;
    dray__sums_form *form = dray__sums_form_of(more);
    if (!form || (sums->count && !dray__sums_form_of(sums)))
        return false;
    if (sums->count)
        return sums->form->with == form ? join_again(sums, more) : join_anew(sums, more);
    uint64_t *plain = malloc(more->count * sizeof *plain);
    if (!plain)
        return false;
    for (uint32_t i = 0; i < more->count; i++)
        plain[i] = dray__sums_at(more, i);
    dray__sums_of_form(sums, form, plain);
    return true;
}

/* ---- on the wire ----------------------------------------------------------------------------- */

enum { WHOLE = 1, KNOWN = 2 };

void dray__sums_forms_clear(dray__sums_forms *forms)
{
    for (uint32_t i = 0; i < DRAY__SUMS_FORMS; i++)
        dray__sums_form_drop(forms->form[i]);
    *forms = (dray__sums_forms){0};
}

static dray__sums_form *known_form(const dray__sums_forms *forms, uint64_t number)
{
    for (uint32_t i = 0; i < DRAY__SUMS_FORMS; i++)
        if (forms->form[i] && forms->form[i]->number == number)
            return forms->form[i];
    return NULL;
}

/* Remembers a form in the place of the oldest. Both sides do so in the same order. */
static void remember(dray__sums_forms *forms, dray__sums_form *form)
{
    dray__sums_form **at = &forms->form[forms->next++ % DRAY__SUMS_FORMS];
    dray__sums_form_drop(*at);
    *at = dray__sums_form_keep(form);
}

void dray__sums_put(dray__writer *w, const dray__sums *sums)
{
    dray__put_u8(w, WHOLE);
    dray__put_u32(w, sums->count);
    const dray__named_sum *items = sums->form ? sums->form->items : sums->items;
    for (uint32_t i = 0; i < sums->count; i++) {
        dray__named_sum item = items[i];
        item.sum = dray__sums_at(sums, i);
        dray__put_fields(w, &dray__named_sum_fields, &item);
    }
}

void dray__sums_put_known(dray__writer *w, dray__sums *sums, dray__sums_forms *sent)
{
    dray__sums_form *form = sums->count ? dray__sums_form_of(sums) : NULL;
    if (!form || known_form(sent, form->number) != form) {
        dray__sums_put(w, sums);
        if (form)
            remember(sent, form);
        return;
    }
    dray__put_u8(w, KNOWN);
    dray__put_u64(w, form->number);
    for (uint32_t i = 0; i < sums->count; i++)
        dray__put_u64(w, dray__sums_at(sums, i));
}

static bool get_whole(dray__reader *r, dray__sums *sums)
{
    uint32_t count = dray__get_count(r, dray__fields_least(&dray__named_sum_fields));
    bool added = true;
    dray__arena names = {0};
    for (uint32_t i = 0; i < count && added && !r->failed; i++) {
        dray__named_sum item;
        dray__get_fields(r, &names, &dray__named_sum_fields, &item);
        added = r->failed || dray__sums_add_item(sums, &item);
    }
    dray__arena_free(&names);
    return added;
}

static bool get_known(dray__reader *r, dray__sums *sums, const dray__sums_forms *known)
{
    uint64_t number = dray__get_u64(r);
    dray__sums_form *form = known && !r->failed ? known_form(known, number) : NULL;
    if (!form || sums->count) {
        r->failed = true;
        return true;
    }
    uint64_t *plain = malloc(((size_t)form->count + 1) * sizeof *plain);
    if (!plain)
        return false;
    for (uint32_t i = 0; i < form->count; i++)
        plain[i] = dray__get_u64(r);
    dray__sums_of_form(sums, form, plain);
    return true;
}

bool dray__sums_get(dray__reader *r, dray__sums *sums, dray__sums_forms *known)
{
    uint8_t way = dray__get_u8(r);
    if (way == KNOWN)
        return get_known(r, sums, known);
    if (way != WHOLE) {
        r->failed = true;
        return true;
    }
    if (!get_whole(r, sums))
        return false;
    if (!known || r->failed || !sums->count)
        return true;
    dray__sums_form *form = dray__sums_form_of(sums);
    if (form)
        remember(known, form);
    return form != NULL;
}
