/* The registry's requests: decoding, the entries that they open, and what keeps it all together. */
#include "control/registry_state.h"

#include "base/clock.h"
#include "base/error.h"
#include "control/protocol.h"

#include <dray/weights.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MEMBERS_BYTES (1u << 20)
#define GENERATION_SHIFT 40

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

void dray__reg_refuse(dray__registry *r, void *ticket, const dray_error *error)
{
    r->ops.answer(r->ops.user, ticket, error, NULL, -1);
}

/* ---- models, sets, entries ------------------------------------------------------------------- */

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

int dray__reg_set_join(struct set *set, struct entry *entry, uint32_t world, const char *what,
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
        const struct entry *holder = set->entries[entry->rank];
        return dray__fail(error, DRAY_EEXIST,
                          "%s of %s: rank %" PRIu32 " is taken by %s, member %" PRIu64, what,
                          entry->model->name, entry->rank, holder->name, holder->member);
    }
    if (!set->present) {
        struct entry **entries = calloc(world, sizeof(struct entry *));
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

void dray__reg_set_leave(struct set *set, struct entry *entry)
{
    set->entries[entry->rank] = NULL;
    set->present--;
}

static void entry_free(struct entry *entry)
{
    for (uint32_t i = 0; i < entry->region_count; i++) {
        free(entry->regions[i].handle);
        if (entry->regions[i].fd >= 0)
            close(entry->regions[i].fd);
    }
    free(entry->regions);
    free(entry->layout);
    free(entry->name);
    free(entry->endpoint);
    dray__sums_forms_clear(&entry->forms);
    dray__vote_free(&entry->vote);
    free(entry);
}

/* Not yet in the registry's list. Takes a copy of the layout. */
static struct entry *entry_new(dray__registry *r, const dray__party *party, struct model *model,
                               uint32_t rank, uint64_t token, const char *endpoint,
                               const void *layout, size_t size)
{
    struct entry *entry = calloc(1, sizeof *entry);
    if (!entry)
        return NULL;
    entry->name = strdup(party->name ? party->name : "");
    entry->endpoint = strdup(endpoint);
    entry->layout = malloc(size ? size : 1);
    if (!entry->name || !entry->endpoint || !entry->layout) {
        entry_free(entry);
        return NULL;
    }
    if (size)
        memcpy(entry->layout, layout, size);
    entry->layout_size = size;
    entry->key = r->next_id++;
    entry->member = party->member;
    entry->host = party->host;
    entry->pid = party->pid;
    entry->model = model;
    entry->rank = rank;
    entry->token = token;
    return entry;
}

static void entry_add(dray__registry *r, struct entry *entry)
{
    entry->next = r->entries;
    r->entries = entry;
}

static void model_drop_if_unused(dray__registry *r, struct model *model)
{
    if (model->gangs || model->groups)
        return;
    for (struct model **at = &r->models; *at; at = &(*at)->next)
        if (*at == model) {
            *at = model->next;
            free(model->name);
            free(model);
            return;
        }
}

static void entry_end(dray__registry *r, struct entry *entry, const char *why)
{
    for (struct entry **at = &r->entries; *at; at = &(*at)->next)
        if (*at == entry) {
            *at = entry->next;
            break;
        }
    dray__reg_pins_forget(r, entry);
    if (entry->release_ticket) {
        dray_error error;
        dray__fail(&error, DRAY_ECANCELED, "publisher %s", why);
        dray__reg_lease_refuse(r, &entry->release_ticket, &error);
    }
    if (entry->gang)
        dray__reg_gang_leave(r, entry, why);
    if (entry->group)
        dray__reg_group_leave(r, entry, why);
    struct model *model = entry->model;
    dray__reg_cohort_leave(model, entry);
    entry_free(entry);
    model_drop_if_unused(r, model);
}

static void settle(dray__registry *r)
{
    dray__reg_waits_settle(r);
    dray__reg_deliveries_settle(r);
    dray__reg_leases_settle(r);
    dray__reg_releases_settle(r);
    dray__reg_groups_settle(r);
    dray__reg_watchers_settle(r);
}

int dray__reg_entry(const dray__reg_call *c, uint64_t key, enum dray__side side, struct entry **out,
                    dray_error *error)
{
    struct entry *entry = c->r->entries;
    while (entry && entry->key != key)
        entry = entry->next;
    if (!entry || entry->member != c->party->member)
        return dray__fail(error, DRAY_ENOENT, "member %" PRIu64 " opened nothing with key %" PRIu64,
                          c->party->member, key);
    if ((side == DRAY__PUBLISHER && !entry->gang) || (side == DRAY__SUBSCRIBER && !entry->group))
        return dray__fail(error, DRAY_EINVALID, "key %" PRIu64 " is no %s", key,
                          side == DRAY__PUBLISHER ? "publisher" : "subscriber");
    *out = entry;
    return DRAY_OK;
}

/* ---- requests: each answers or keeps the ticket, or returns an error for it ----------------- */

typedef dray__reg_call call;

int dray__reg_done(const dray__reg_call *c)
{
    dray__reg_reply(c->r, c->ticket, NULL, -1);
    return DRAY_OK;
}

static int finish_reading(const call *c, const char *what, dray_error *error)
{
    return dray__reader_finish(c->in, what, error);
}

static int answer_key(const call *c, uint64_t key)
{
    dray__writer w = {0};
    dray__put_u64(&w, key);
    dray__reg_reply(c->r, c->ticket, &w, -1);
    return DRAY_OK;
}

static int regions_new(struct entry *entry, uint32_t count, dray_error *error)
{
    if (count > DRAY__REGIONS_MAX)
        return dray__fail(error, DRAY_EINVALID, "%" PRIu32 " regions (at most %u)", count,
                          DRAY__REGIONS_MAX);
    entry->regions = calloc(count ? count : 1, sizeof *entry->regions);
    if (!entry->regions)
        return dray__nomem(error);
    for (uint32_t i = 0; i < count; i++)
        entry->regions[i].fd = -1;
    entry->region_count = count;
    return DRAY_OK;
}

/* What follows an opening of somebody who comes back. */
static int publisher_claim(call *c, struct claim *out, dray_error *error)
{
    if (c->in->failed || c->in->at == c->in->size)
        return DRAY_OK;
    out->given = true;
    out->set = dray__get_u64(c->in);
    out->incarnation = dray__get_u64(c->in);
    out->published = dray__get_u8(c->in) != 0;
    out->version = dray__get_u64(c->in);
    out->checked = dray__get_u8(c->in) != 0;
    out->readable = dray__get_u8(c->in) != 0;
    return dray__sums_get(c->in, &out->sums, NULL) ? DRAY_OK : dray__nomem(error);
}

static void subscriber_claim(call *c, struct claim *out)
{
    if (c->in->failed || c->in->at == c->in->size)
        return;
    out->given = true;
    out->set = dray__get_u64(c->in);
    out->state = dray__get_u8(c->in);
    out->mode = dray__get_u8(c->in);
    out->version = dray__get_u64(c->in);
    out->incarnation = dray__get_u64(c->in);
    out->staged = dray__get_u8(c->in) != 0;
    out->staged_version = dray__get_u64(c->in);
    out->staged_incarnation = dray__get_u64(c->in);
}

static int check_claim(const dray__registry *r, const struct claim *claim, dray_error *error)
{
    if (!claim->given)
        return DRAY_OK;
    if (claim->set >= r->first_id || claim->incarnation >= r->first_incarnation ||
        claim->staged_incarnation >= r->first_incarnation || claim->state > DRAY_GROUP_TORN ||
        claim->mode > DRAY_MODE_DISK)
        return dray__fail(error, DRAY_EINVALID,
                          "set %" PRIu64 ", incarnation %" PRIu64 ", state %d: nothing that a "
                          "coordinator before this one gave",
                          claim->set, claim->incarnation, claim->state);
    return DRAY_OK;
}

static bool has_pinned(const dray_layout *layout)
{
    for (uint32_t i = 0; i < dray_layout_region_count(layout); i++)
        if (dray_layout_region(layout, i)->kind == DRAY_REGION_PINNED)
            return true;
    return false;
}

static int open_entry(call *c, const char *model_name, const char *group, uint32_t rank,
                      uint32_t world, uint64_t token, const char *endpoint, uint32_t regions,
                      uint32_t shared, uint64_t slot_bytes, const void *layout, size_t size,
                      struct claim *claim, dray_error *error)
{
    if (!model_name[0])
        return dray__fail(error, DRAY_EINVALID, "a model needs a name");
    dray_layout *checked;
    int bad = check_claim(c->r, claim, error);
    if (!bad)
        bad = dray_layout_unpack(layout, size, &checked, error);
    if (bad)
        return bad;
    bool pinned = has_pinned(checked);
    dray_layout_free(checked);
    struct model *model = dray__reg_model(c->r, model_name, true);
    if (!model)
        return dray__nomem(error);
    struct entry *entry = entry_new(c->r, c->party, model, rank, token, endpoint, layout, size);
    int rc = entry ? regions_new(entry, regions, error) : dray__nomem(error);
    if (rc == DRAY_OK) {
        entry->regions_missing = shared;
        entry->slot_bytes = slot_bytes;
        entry->pinned = pinned;
        entry->shared = regions && shared == regions;
        entry->claim = *claim;
        entry->claim.sums = (dray__sums){0};
        rc = group ? dray__reg_group_join(c->r, entry, group, world, error)
                   : dray__reg_gang_join(c->r, entry, world, claim, error);
    }
    if (rc) {
        if (entry)
            entry_free(entry);
        model_drop_if_unused(c->r, model);
        return rc;
    }
    entry_add(c->r, entry);
    return answer_key(c, entry->key);
}

static int check_regions(uint32_t regions, uint32_t to_put, dray_error *error)
{
    return to_put <= regions
               ? DRAY_OK
               : dray__fail(error, DRAY_EINVALID, "%" PRIu32 " of %" PRIu32 " regions to put",
                            to_put, regions);
}

static int publisher_open(call *c, dray_error *error)
{
    char *model = dray__get_string(c->in, DRAY__NAME_MAX);
    uint32_t rank = dray__get_u32(c->in), world = dray__get_u32(c->in);
    uint64_t token = dray__get_u64(c->in);
    char *endpoint = dray__get_string(c->in, DRAY__NAME_MAX);
    uint32_t regions = dray__get_u32(c->in), shared = dray__get_u32(c->in);
    uint64_t slot_bytes = dray__get_u64(c->in);
    size_t size;
    const void *layout = dray__get_blob(c->in, &size);
    struct claim claim = {0};
    int rc = publisher_claim(c, &claim, error);
    if (rc == DRAY_OK)
        rc = finish_reading(c, "PUBLISHER_OPEN", error);
    if (rc == DRAY_OK)
        rc = check_regions(regions, shared, error);
    if (rc == DRAY_OK)
        rc = open_entry(c, model, NULL, rank, world, token, endpoint, regions, shared, slot_bytes,
                        layout, size, &claim, error);
    dray__sums_free(&claim.sums);
    free(model);
    free(endpoint);
    return rc;
}

static int subscriber_open(call *c, dray_error *error)
{
    char *model = dray__get_string(c->in, DRAY__NAME_MAX);
    char *group = dray__get_string(c->in, DRAY__NAME_MAX);
    uint32_t rank = dray__get_u32(c->in), world = dray__get_u32(c->in);
    uint64_t token = dray__get_u64(c->in);
    char *endpoint = dray__get_string(c->in, DRAY__NAME_MAX);
    uint32_t regions = dray__get_u32(c->in), shared = dray__get_u32(c->in);
    size_t size;
    const void *layout = dray__get_blob(c->in, &size);
    struct claim claim = {0};
    subscriber_claim(c, &claim);
    int rc = finish_reading(c, "SUBSCRIBER_OPEN", error);
    if (rc == DRAY_OK && !group[0])
        rc = dray__fail(error, DRAY_EINVALID, "a group needs a name");
    if (rc == DRAY_OK)
        rc = check_regions(regions, shared, error);
    if (rc == DRAY_OK)
        rc = open_entry(c, model, group, rank, world, token, endpoint, regions, shared, 0, layout,
                        size, &claim, error);
    free(model);
    free(group);
    free(endpoint);
    return rc;
}

/* A GPU's memory that its driver exports by a handle alone. */
static bool goes_without_descriptor(const void *packed, size_t size)
{
    dray_handle handle = DRAY_HANDLE_INIT;
    return dray_handle_unpack(packed, size, &handle, NULL) == DRAY_OK &&
           handle.kind == DRAY_REGION_CUDA;
}

static int region_put(call *c, dray_error *error)
{
    uint64_t key = dray__get_u64(c->in);
    uint32_t index = dray__get_u32(c->in);
    size_t size;
    const void *handle = dray__get_blob(c->in, &size);
    struct entry *entry = NULL;
    int rc = finish_reading(c, "REGION_PUT", error);
    if (rc == DRAY_OK)
        rc = dray__reg_entry(c, key, DRAY__EITHER, &entry, error);
    if (rc)
        return rc;
    if (index >= entry->region_count || entry->regions[index].handle || !entry->regions_missing)
        return dray__fail(error, DRAY_EINVALID,
                          "region %" PRIu32 " of %" PRIu32 " was put already or does not exist",
                          index, entry->region_count);
    if (c->fd < 0 && !goes_without_descriptor(handle, size))
        return dray__fail(error, DRAY_EINVALID,
                          "region %" PRIu32 " came without its descriptor (they pass over Unix "
                          "sockets only)",
                          index);
    struct stored_region *region = &entry->regions[index];
    region->handle = malloc(size ? size : 1);
    if (!region->handle)
        return dray__nomem(error);
    if (size)
        memcpy(region->handle, handle, size);
    region->handle_size = size;
    region->fd = c->fd;
    c->fd = -1;
    entry->regions_missing--;
    if (entry->gang)
        dray__reg_gang_complete(c->r, entry->gang);
    return dray__reg_done(c);
}

/* A set of the model, if it still is what it was, with a rank `index`. */
static int find_set(const struct model *model, uint64_t id, uint32_t index, const struct set **out,
                    dray_error *error)
{
    const struct set *set = NULL;
    for (const struct gang *gang = model->gangs; gang && !set; gang = gang->next)
        if (gang->set.id == id && !gang->broken)
            set = &gang->set;
    for (const struct group *group = model->groups; group && !set; group = group->next)
        if (group->set.id == id)
            set = &group->set;
    if (!set)
        set = dray__reg_cohort_set(model, id);
    if (!set)
        return dray__fail(error, DRAY_ESTALE, "the ranks of %s changed meanwhile", model->name);
    if (index >= set->world || !set->entries[index])
        return dray__fail(error, DRAY_ENOENT, "%s has no rank %" PRIu32, model->name, index);
    *out = set;
    return DRAY_OK;
}

/* Were its regions put? Descriptors pass over Unix sockets only. */
static bool can_be_mapped(const struct entry *entry)
{
    for (uint32_t i = 0; i < entry->region_count; i++)
        if (entry->regions[i].handle)
            return true;
    return false;
}

static void put_member(dray__writer *w, const struct entry *rank)
{
    dray__put_u64(w, rank->key);
    dray__put_u64(w, rank->member);
    dray__put_u64(w, rank->host);
    dray__put_i64(w, rank->pid);
    dray__put_u64(w, rank->token);
    dray__put_string(w, rank->endpoint);
    dray__put_u8(w, can_be_mapped(rank));
    dray__put_string(w, rank->name);
    dray__put_blob(w, rank->layout, rank->layout_size);
    dray__put_u32(w, rank->region_count);
    dray__put_u64(w, rank->slot_bytes);
}

/* The ranks from `index` on: at least one, and no more than go into a frame of moderate size. */
static int answer_members(const call *c, const struct set *set, uint32_t index)
{
    size_t bytes = 0;
    uint32_t end = index;
    while (end < set->world && set->entries[end] && (end == index || bytes < MEMBERS_BYTES))
        bytes += set->entries[end++]->layout_size;
    dray__writer w = {0};
    dray__put_u32(&w, end - index);
    for (uint32_t i = index; i < end; i++)
        put_member(&w, set->entries[i]);
    dray__reg_reply(c->r, c->ticket, &w, -1);
    return DRAY_OK;
}

static int update_sources(call *c, dray_error *error)
{
    uint64_t key = dray__get_u64(c->in);
    uint8_t what = dray__get_u8(c->in);
    int64_t timeout = dray__get_i64(c->in);
    uint64_t id = dray__get_u64(c->in);
    uint32_t index = dray__get_u32(c->in);
    struct entry *entry = NULL;
    const struct set *set = NULL;
    int rc = finish_reading(c, "UPDATE_SOURCES", error);
    if (rc == DRAY_OK)
        rc = dray__reg_entry(c, key, what == DRAY__SOURCES_GANG ? DRAY__PUBLISHER : DRAY__EITHER,
                             &entry, error);
    if (rc)
        return rc;
    if (what == DRAY__SOURCES_GANG) {
        if (entry->gang_ticket)
            return dray__fail(error, DRAY_EBUSY, "a request for the gang waits already");
        entry->gang_ticket = c->ticket;
        dray__reg_gang_answer(c->r, entry);
        if (entry->gang_ticket)
            c->r->ops.expire_at(c->r->ops.user, c->ticket, dray__deadline(timeout));
        return DRAY_OK;
    }
    rc = find_set(entry->model, id, index, &set, error);
    return rc ? rc : answer_members(c, set, index);
}

/* Of the descriptor, which is what stays mapped; a GPU's memory has none, or one without a size. */
static uint64_t region_bytes(const struct stored_region *region)
{
    struct stat st;
    dray_handle handle = DRAY_HANDLE_INIT;
    if (region->fd >= 0 && fstat(region->fd, &st) == 0 && st.st_size > 0)
        return (uint64_t)st.st_size;
    int rc = dray_handle_unpack(region->handle, region->handle_size, &handle, NULL);
    return rc == DRAY_OK ? handle.storage_bytes : 0;
}

static int region_get(call *c, dray_error *error)
{
    uint64_t key = dray__get_u64(c->in), id = dray__get_u64(c->in);
    uint32_t index = dray__get_u32(c->in), number = dray__get_u32(c->in);
    struct entry *entry = NULL;
    const struct set *set = NULL;
    int rc = finish_reading(c, "REGION_GET", error);
    if (rc == DRAY_OK)
        rc = dray__reg_entry(c, key, DRAY__EITHER, &entry, error);
    if (rc == DRAY_OK)
        rc = find_set(entry->model, id, index, &set, error);
    if (rc)
        return rc;
    const struct entry *rank = set->entries[index];
    if (number >= rank->region_count || !rank->regions[number].handle)
        return dray__fail(error, DRAY_ENOENT,
                          "region %" PRIu32 " of %s, rank %" PRIu32 " (%s), cannot be reached from "
                          "another process: allocate it as a shared region",
                          number, entry->model->name, index, rank->name);
    rc = dray__reg_pin(c->r, entry, rank, id, region_bytes(&rank->regions[number]), error);
    if (rc)
        return rc;
    dray__writer w = {0};
    dray__put_blob(&w, rank->regions[number].handle, rank->regions[number].handle_size);
    dray__reg_reply(c->r, c->ticket, &w, rank->regions[number].fd);
    return DRAY_OK;
}

static int publish(call *c, dray_error *error)
{
    uint64_t key = dray__get_u64(c->in), number = dray__get_u64(c->in);
    bool checked = dray__get_u8(c->in) != 0;
    dray__sums sums = {0};
    struct entry *entry;
    int rc = dray__reg_entry(c, key, DRAY__PUBLISHER, &entry, error);
    if (rc)
        return rc;
    rc = dray__sums_get(c->in, &sums, &entry->forms) ? finish_reading(c, "PUBLISH", error)
                                                     : dray__nomem(error);
    if (rc == DRAY_OK)
        rc = dray__reg_publish(c->r, entry, number, checked, &sums, error);
    dray__sums_free(&sums);
    return rc ? rc : dray__reg_done(c);
}

static int publisher_wait(call *c, dray_error *error)
{
    uint64_t key = dray__get_u64(c->in), number = dray__get_u64(c->in);
    int64_t timeout = dray__get_i64(c->in);
    struct entry *entry = NULL;
    int rc = finish_reading(c, "PUBLISHER_WAIT", error);
    if (rc == DRAY_OK)
        rc = dray__reg_entry(c, key, DRAY__PUBLISHER, &entry, error);
    return rc ? rc : dray__reg_wait(c->r, entry, number, timeout, c->ticket, error);
}

static int publisher_deliver(call *c, dray_error *error)
{
    uint64_t key = dray__get_u64(c->in), number = dray__get_u64(c->in);
    uint32_t count = dray__get_u32(c->in), names = dray__get_count(c->in, sizeof(uint32_t));
    char **groups = names ? calloc(names, sizeof *groups) : NULL;
    for (uint32_t i = 0; groups && i < names; i++)
        groups[i] = dray__get_string(c->in, DRAY__NAME_MAX);
    int64_t timeout = dray__get_i64(c->in);
    struct entry *entry = NULL;
    int rc = names && !groups ? dray__nomem(error) : finish_reading(c, "PUBLISHER_DELIVER", error);
    if (rc == DRAY_OK && (!count || (names && names != count)))
        rc =
            dray__fail(error, DRAY_EINVALID, "%" PRIu32 " groups, %" PRIu32 " names", count, names);
    if (rc == DRAY_OK)
        rc = dray__reg_entry(c, key, DRAY__PUBLISHER, &entry, error);
    if (rc) {
        dray__reg_names_free(groups, names);
        return rc;
    }
    return dray__reg_deliver(c->r, entry, number, groups, count, timeout, c->ticket, error);
}

static int checksums_get(call *c, dray_error *error)
{
    char *name = dray__get_string(c->in, DRAY__NAME_MAX);
    char *group_name = dray__get_string(c->in, DRAY__NAME_MAX);
    int rc = finish_reading(c, "CHECKSUMS_GET", error);
    const dray__sums *sums = NULL;
    uint64_t version = 0, incarnation = 0;
    const struct model *model = rc ? NULL : dray__reg_model(c->r, name, false);
    if (rc == DRAY_OK && !model)
        rc = dray__fail(error, DRAY_ENOENT, "nobody publishes or subscribes to model '%s'", name);
    if (rc == DRAY_OK && group_name[0]) {
        const struct group *group = model->groups;
        while (group && strcmp(group->name, group_name) != 0)
            group = group->next;
        if (!group || group->state != DRAY_GROUP_WHOLE || !group->now.read.count) {
            rc = dray__fail(error, DRAY_ENOENT, "model %s: group '%s' %s", name, group_name,
                            !group                             ? "does not exist"
                            : group->state != DRAY_GROUP_WHOLE ? "holds no whole version"
                                                               : "updated without verification");
        } else {
            sums = &group->now.read;
            version = group->now.version;
            incarnation = group->now.incarnation;
        }
    } else if (rc == DRAY_OK) {
        const struct gang *gang;
        const struct version *newest = dray__reg_latest(model, &gang);
        if (!newest) {
            rc = dray__fail(error, DRAY_ENOENT, "model %s: no version was published", name);
        } else {
            sums = &newest->sums;
            version = newest->number;
            incarnation = gang->incarnation;
        }
    }
    if (rc == DRAY_OK) {
        dray__writer w = {0};
        dray__put_u64(&w, version);
        dray__put_u64(&w, incarnation);
        dray__sums_put(&w, sums);
        dray__reg_reply(c->r, c->ticket, &w, -1);
    }
    free(name);
    free(group_name);
    return rc;
}

static int weights_close(call *c, dray_error *error)
{
    uint64_t key = dray__get_u64(c->in);
    struct entry *entry = NULL;
    int rc = finish_reading(c, "WEIGHTS_CLOSE", error);
    if (rc == DRAY_OK)
        rc = dray__reg_entry(c, key, DRAY__EITHER, &entry, error);
    if (rc)
        return rc;
    entry_end(c->r, entry, "closed");
    return dray__reg_done(c);
}

static const struct {
    uint16_t type;
    int (*handle)(call *c, dray_error *error);
} handlers[] = {
    {DRAY__MSG_PUBLISHER_OPEN, publisher_open}, {DRAY__MSG_REGION_PUT, region_put},
    {DRAY__MSG_REGION_GET, region_get},         {DRAY__MSG_PUBLISH, publish},
    {DRAY__MSG_PUBLISHER_WAIT, publisher_wait}, {DRAY__MSG_SUBSCRIBER_OPEN, subscriber_open},
    {DRAY__MSG_UPDATE_SOURCES, update_sources}, {DRAY__MSG_CHECKSUMS_GET, checksums_get},
    {DRAY__MSG_WEIGHTS_CLOSE, weights_close},   {DRAY__MSG_PUBLISHER_DELIVER, publisher_deliver},
};

void dray__registry_handle(dray__registry *r, const dray__party *party, uint16_t type,
                           dray__reader *payload, int fd, void *ticket)
{
    call c = {r, party, payload, ticket, fd};
    dray_error error;
    int rc = DRAY_EPROTO;
    bool known = false;
    for (size_t i = 0; i < sizeof handlers / sizeof *handlers && !known; i++)
        if (handlers[i].type == type) {
            known = true;
            rc = handlers[i].handle(&c, &error);
        }
    if (!known)
        rc = dray__reg_update_request(&c, type, &known, &error);
    if (!known)
        rc = dray__reg_pins_request(&c, type, &known, &error);
    if (!known)
        rc = dray__fail(&error, DRAY_EPROTO, "the registry knows no message 0x%04x", type);
    if (rc)
        dray__reg_refuse(r, ticket, &error);
    if (c.fd >= 0)
        close(c.fd);
    settle(r);
}

void dray__registry_expired(dray__registry *r, void *ticket, int gone)
{
    bool found = dray__reg_wait_expired(r, ticket) || dray__reg_watch_expired(r, ticket) ||
                 dray__reg_delivery_expired(r, ticket);
    for (struct entry *entry = r->entries; entry && !found; entry = entry->next) {
        if (entry->gang_ticket == ticket) {
            dray_error error;
            dray__fail(&error, DRAY_ETIMEDOUT,
                       "publisher of %s: %" PRIu32 " of %" PRIu32 " ranks opened in time",
                       entry->model->name, entry->gang->set.present, entry->gang->set.world);
            entry->gang_ticket = NULL;
            dray__reg_refuse(r, ticket, &error);
            found = true;
        } else if (dray__reg_release_expired(r, entry, ticket)) {
            found = true;
        } else if (entry->group) {
            found = dray__reg_group_expired(r, entry, ticket, gone != 0) ||
                    dray__reg_lease_expired(r, entry, ticket, gone != 0);
        }
    }
    settle(r);
}

void dray__registry_member_ended(dray__registry *r, uint64_t member)
{
    for (struct entry *entry = r->entries; entry;) {
        struct entry *next = entry->next;
        if (entry->member == member) {
            entry_end(r, entry, "died");
            next = r->entries; /* ending one may not end others, but costs little to be sure */
        }
        entry = next;
    }
    settle(r);
}

int dray__registry_new(const dray__registry_ops *ops, dray__registry **out, dray_error *error)
{
    dray__registry *r = calloc(1, sizeof *r);
    if (!r)
        return dray__nomem(error);
    r->ops = *ops;
    r->next_id = 1;
    r->next_incarnation = 1;
    r->first_id = r->first_incarnation = 1;
    *out = r;
    return DRAY_OK;
}

void dray__registry_begin(dray__registry *r, uint64_t generation)
{
    uint64_t base = (generation - 1) << GENERATION_SHIFT;
    r->next_id = r->first_id = base + 1;
    r->next_incarnation = r->first_incarnation = base + 1;
    r->engines_sequence = base;
}

void dray__registry_free(dray__registry *r)
{
    if (!r)
        return;
    while (r->entries)
        entry_end(r, r->entries, "ended with the coordinator");
    while (r->watchers)
        dray__reg_watch_expired(r, r->watchers->ticket);
    free(r);
}
