/* The functions that all files of the registry need: tickets' answers, models, and the sets of a
 * model's ranks. */
#include "weights/registry/state.h"

#include "base/clock.h"
#include "base/error.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

void dray__reg_reply(dray__registry *r, void *ticket, dray__writer *payload, int fd)
{
    dray_error error;
    if (payload && dray__writer_check(payload, &error))
        r->ops.answer(r->ops.user, ticket, &error, NULL, -1);
    else
        r->ops.answer(r->ops.user, ticket, NULL, payload, fd);
    if (payload)
        dray__writer_free(payload);
}

void dray__reg_answer(dray__registry *r, void *ticket, const dray__fields *of, const void *answer)
{
    dray__writer w = {0};
    dray__put_fields(&w, of, answer);
    dray__reg_reply(r, ticket, &w, -1);
}

void dray__reg_answer_list(dray__registry *r, void *ticket, const dray__fields *of,
                           const void *answer, const void *items)
{
    dray__writer w = {.failed = !items};
    if (items)
        dray__put_fields(&w, of, answer);
    free((void *)items);
    dray__reg_reply(r, ticket, &w, -1);
}

void dray__reg_refuse(dray__registry *r, void *ticket, const dray_error *error)
{
    r->ops.answer(r->ops.user, ticket, error, NULL, -1);
}

struct model *dray__reg_model(dray__registry *r, const char *name, bool make)
{
    struct model *model = r->models;
    while (model && strcmp(model->name, name) != 0)
        model = model->next;
    if (model || !make)
        return model;
    model = calloc(1, sizeof *model);
    char *copy = strdup(name);
    if (!model || !copy) {
        free(model);
        free(copy);
        return NULL;
    }
    model->name = copy;
    model->next = r->models;
    r->models = model;
    return model;
}

int dray__reg_set_join(struct set *set, struct registrant *entry, uint32_t world, const char *what,
                       dray_error *error)
{
    if (world == 0 || world > DRAY__WORLD_MAX || entry->rank >= world)
        return dray__fail(error, DRAY_EINVALID,
                          "%s of %s: rank %" PRIu32 " of %" PRIu32 " (at most %u ranks)", what,
                          entry->model->name, entry->rank, world, DRAY__WORLD_MAX);
    if (set->present && set->world != world)
        return dray__fail(error, DRAY_EINVALID,
                          "%s of %s: rank %" PRIu32 " says %" PRIu32
                          " ranks, those that are there say %" PRIu32,
                          what, entry->model->name, entry->rank, world, set->world);
    if (set->present && set->entries[entry->rank]) {
        const struct registrant *holder = set->entries[entry->rank];
        return dray__fail(error, DRAY_EEXIST,
                          "%s of %s: rank %" PRIu32 " is taken by %s, member %" PRIu64, what,
                          entry->model->name, entry->rank, holder->name, holder->member);
    }
    if (!set->present) {
        struct registrant **entries = calloc(world, sizeof(struct registrant *));
        if (!entries)
            return dray__nomem(error);
        free(set->entries);
        set->entries = entries;
        set->world = world;
    }
    set->entries[entry->rank] = entry;
    set->present++;
    return DRAY_OK;
}

void dray__reg_set_leave(struct set *set, struct registrant *entry)
{
    set->entries[entry->rank] = NULL;
    set->present--;
}

int dray__reg_lay_out(struct registrant *entry, uint32_t regions, const void *layout, size_t size,
                      dray_error *error)
{
    if (regions > DRAY__REGIONS_MAX)
        return dray__fail(error, DRAY_EINVALID, "%" PRIu32 " regions (at most %u)", regions,
                          DRAY__REGIONS_MAX);
    struct stored_region *list = calloc((size_t)regions + 1, sizeof *list);
    void *copy = malloc(size);
    if (!list || !copy) {
        free(list);
        free(copy);
        return dray__nomem(error);
    }
    memcpy(copy, layout, size);
    for (uint32_t i = 0; i < regions; i++)
        list[i].fd = -1;
    free(entry->layout);
    free(entry->regions);
    entry->layout = copy;
    entry->layout_size = size;
    entry->regions = list;
    entry->region_count = regions;
    return DRAY_OK;
}

int dray__reg_entry(const dray__reg_call *c, uint64_t key, enum dray__side side,
                    struct registrant **out, dray_error *error)
{
    struct registrant *entry = c->r->entries;
    while (entry && entry->key != key)
        entry = entry->next;
    if (!entry || entry->member != c->party->member)
        return dray__fail(error, DRAY_ENOENT, "member %" PRIu64 " opened nothing with key %" PRIu64,
                          c->party->member, key);
    if ((side == DRAY__PUBLISHER && !entry->trainer) || (side == DRAY__SUBSCRIBER && !entry->group))
        return dray__fail(error, DRAY_EINVALID, "key %" PRIu64 " is no %s", key,
                          side == DRAY__PUBLISHER ? "publisher" : "subscriber");
    *out = entry;
    return DRAY_OK;
}

int dray__reg_finish(const dray__reg_call *c, dray_error *error)
{
    return dray__reader_finish(c->in, c->name, error);
}

void dray__reg_expire(dray__registry *r, void *ticket, int64_t timeout_ns)
{
    r->ops.expire_at(r->ops.user, ticket, dray__deadline(timeout_ns));
}

int dray__reg_done(const dray__reg_call *c)
{
    dray__reg_reply(c->r, c->ticket, NULL, -1);
    return DRAY_OK;
}
