/* Tables of votes (vote_table.h). */
#include "weights/vote_table.h"

#include <stdlib.h>
#include <string.h>

struct dray__vote_table {
    dray__sums_form *form;
    struct dray__tensor_sum *tensors; /* as they were, but for the sums */
    uint32_t *at;                     /* of each tensor: its item */
    uint32_t count;
    bool looked, plain, quantised;
};

dray__vote_table *dray__vote_table_new(void)
{
    return calloc(1, sizeof(dray__vote_table));
}

static void forget(dray__vote_table *t)
{
    dray__sums_form_drop(t->form);
    free(t->tensors);
    free(t->at);
    t->form = NULL;
    t->tensors = NULL;
    t->at = NULL;
    t->count = 0;
}

void dray__vote_table_free(dray__vote_table *t)
{
    if (!t)
        return;
    forget(t);
    free(t);
}

static bool same(const dray__vote_table *t, const struct dray__tensor_sum *tensors, uint32_t count)
{
    bool is = t->form && t->count == count;
    for (uint32_t i = 0; i < count && is; i++)
        is = t->tensors[i].elements == tensors[i].elements &&
             (!tensors[i].elements ||
              (t->tensors[i].dtype == tensors[i].dtype && t->tensors[i].mixed == tensors[i].mixed));
    return is;
}

static bool fill_by_name(const struct dray__tensor_sum *tensors, const char *const *names,
                         uint32_t count, dray__sums *out)
{
    for (uint32_t i = 0; i < count; i++) {
        const struct dray__tensor_sum *sum = &tensors[i];
        dray__named_sum item = {names[i], sum->dtype, sum->mixed, sum->elements, sum->sum};
        if (sum->elements && !dray__sums_add_item(out, &item))
            return false;
    }
    return true;
}

/* What cannot be remembered is looked up again the next time. */
static void remember(dray__vote_table *t, const struct dray__tensor_sum *tensors,
                     const char *const *names, uint32_t count, dray__sums *out)
{
    forget(t);
    dray__sums_form *form = out->count ? dray__sums_form_of(out) : NULL;
    t->tensors = malloc(((size_t)count + 1) * sizeof *t->tensors);
    t->at = calloc((size_t)count + 1, sizeof *t->at);
    if (!form || !t->tensors || !t->at) {
        forget(t);
        return;
    }
    memcpy(t->tensors, tensors, count * sizeof *tensors);
    for (uint32_t i = 0; i < count; i++)
        if (tensors[i].elements)
            t->at[i] = dray__sums_form_find(form, names[i]);
    t->form = dray__sums_form_keep(form);
    t->count = count;
}

bool dray__vote_table_fill(dray__vote_table *t, const struct dray__tensor_sum *tensors,
                           const char *const *names, uint32_t count, dray__sums *out)
{
    if (!same(t, tensors, count)) {
        bool filled = fill_by_name(tensors, names, count, out);
        if (filled)
            remember(t, tensors, names, count, out);
        return filled;
    }
    uint64_t *plain = calloc((size_t)dray__sums_form_count(t->form) + 1, sizeof *plain);
    if (!plain)
        return false;
    for (uint32_t i = 0; i < count; i++)
        if (tensors[i].elements)
            plain[t->at[i]] += tensors[i].sum;
    dray__sums_of_form(out, t->form, plain);
    return true;
}

bool dray__vote_table_plain(dray__vote_table *t, const dray_layout *layout,
                            const char *const *names, bool *quantised)
{
    if (!t->looked) {
        t->looked = t->plain = true;
        t->quantised = false;
        for (uint32_t i = 0; i < dray_layout_tensor_count(layout); i++) {
            const dray_tensor_info *tensor = dray_layout_tensor(layout, i);
            t->quantised |= dray_layout_quant(layout, i) != NULL;
            t->plain &= tensor->alias_of >= 0 || strcmp(names[i], tensor->name) == 0;
        }
    }
    *quantised = t->quantised;
    return t->plain;
}
