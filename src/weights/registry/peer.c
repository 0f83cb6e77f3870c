/* Groups that read each other's memory: the permissions, the leases that an overwrite waits for,
 * and the list of engines that routers watch. */
#include "base/error.h"
#include "base/hash.h"
#include "weights/registry/state.h"

#include <dray/weights.h>
#include <inttypes.h>
#include <stdlib.h>

/* ---- choice of a peer--------------------------------------------------------------------------
 */

/* Can the reader reach the entry's memory? It uses shared memory on the same host, else the data
 * server. */
static bool reaches(const struct registrant *reader, const struct registrant *entry)
{
    return reader->host == entry->host ? entry->shared && !entry->regions_missing
                                       : entry->endpoint[0] != 0;
}

static bool reachable(const struct group *group, const struct group *peer)
{
    for (uint32_t i = 0; i < peer->set.world; i++)
        for (uint32_t k = 0; k < group->set.world; k++)
            if (!reaches(group->set.entries[k], peer->set.entries[i]))
                return false;
    return true;
}

bool dray__reg_near(const struct group *group, const struct group *peer)
{
    for (uint32_t i = 0; i < peer->set.world; i++)
        for (uint32_t k = 0; k < group->set.world; k++)
            if (group->set.entries[k]->host != peer->set.entries[i]->host)
                return false;
    return true;
}

/* Does the group hold a whole version, with no update in progress? */
static bool steady(const struct group *peer)
{
    return peer->state == DRAY_GROUP_WHOLE && peer->set.present == peer->set.world &&
           !peer->leaving && (peer->phase == ATTEMPT_NONE || peer->purpose == DRAY__PREFETCH);
}

static bool newer(const struct holding *a, const struct holding *b)
{
    return a->incarnation != b->incarnation ? a->incarnation > b->incarnation
                                            : a->version > b->version;
}

/* Returns true when both groups have the same dtypes. Converted bits differ from the published
 * ones, so that only a reader with the same dtype gets the same bits from the peer as from the
 * publishers.
 */
static bool same_dtypes(struct group *group, const struct group *peer)
{
    dray__packed_layout *ranks = dray__reg_layouts(&group->set);
    bool same = ranks != NULL;
    for (uint32_t i = 0; i < group->set.world && same; i++) {
        dray_layout *layout = NULL;
        same = dray_layout_unpack(ranks[i].data, ranks[i].size, &layout, NULL) == DRAY_OK;
        for (uint32_t t = 0; same && t < dray_layout_tensor_count(layout); t++) {
            const dray_tensor_info *tensor = dray_layout_tensor(layout, t);
            const dray__named_sum *resident = dray__sums_find(&peer->now.resident, tensor->name);
            same = !resident || resident->dtype == tensor->dtype;
        }
        dray_layout_free(layout);
    }
    free(ranks);
    return same;
}

/* Can the group read all that it needs from the peer, and compare it? */
static bool fits(struct group *group, const struct group *peer)
{
    const dray__sums *resident = &peer->now.resident;
    if (!peer->now.complete || !peer->now.resident_known || !same_dtypes(group, peer) ||
        dray__reg_cover(group, &peer->set, NULL))
        return false;
    for (uint32_t i = 0; i < group->coverage.count; i++) {
        const dray__covered *item = &group->coverage.items[i];
        const dray__named_sum *sum = dray__sums_find(resident, item->name);
        if (item->held != (sum ? sum->elements : 0))
            return false;
    }
    return true;
}

/* Prefers the newest version; then a peer on this host; then the one with the fewest readers. */
static bool better(const struct group *group, const struct group *peer, const struct group *best)
{
    if (!best || newer(&peer->now, &best->now) || newer(&best->now, &peer->now))
        return !best || newer(&peer->now, &best->now);
    bool near = dray__reg_near(group, peer);
    return near == dray__reg_near(group, best) ? peer->readers < best->readers : near;
}

struct group *dray__reg_peer(struct group *group, uint64_t min, const struct trainer *trainer,
                             const struct version *version, bool near)
{
    struct group *best = NULL;
    bool tensor = group->set.entries[0]->begin.wish.mode == DRAY_MODE_TENSOR;
    for (struct group *peer = group->model->groups; peer; peer = peer->next) {
        if (peer == group || !steady(peer) || peer->now.version < min || !reachable(group, peer))
            continue;
        if (version ? peer->now.version != version->number ||
                          peer->now.incarnation != trainer->incarnation
                    : group->state == DRAY_GROUP_WHOLE && !newer(&peer->now, &group->now))
            continue;
        bool close = dray__reg_near(group, peer);
        if (!close && (near || tensor))
            continue;
        if (version && close == near && peer->readers >= version->readers)
            continue; /* the publishers are no busier */
        if (better(group, peer, best) && fits(group, peer))
            best = peer;
    }
    return best;
}

/* ---- leases ---------------------------------------------------------------------------------- */

uint32_t dray__reg_revoke(dray__registry *r, struct group *group, int code, const char *why)
{
    uint32_t revoked = 0;
    for (struct group *reader = group->model->groups; reader; reader = reader->next) {
        if (reader->phase != ATTEMPT_MOVING || reader->peer != group)
            continue;
        dray_error error;
        dray__fail(&error, code, "the lease on group %s's memory ended: %.300s", group->name, why);
        reader->epoch++;
        dray__reg_abort(r, reader, &error);
        revoked++;
    }
    return revoked;
}

/* ---- the router's list ----------------------------------------------------------------------- */

bool dray__reg_serving(const struct group *group)
{
    bool writing = false;
    for (uint32_t i = 0; i < group->set.world; i++)
        writing |= group->set.entries[i] && group->set.entries[i]->writing;
    return group->state == DRAY_GROUP_WHOLE && group->set.present == group->set.world &&
           !group->leaving && !(writing && group->purpose != DRAY__PREFETCH);
}

/* Returns the list and its sequence number, which is a new one when the list differs from the last
 * one sent. NULL when out of memory. */
static const dray__engine_told *list_engines(dray__registry *r, dray__engines_told *out)
{
    for (const struct model *model = r->models; model; model = model->next)
        for (const struct group *group = model->groups; group; group = group->next)
            out->count++;
    dray__engine_told *at = calloc(out->count + 1u, sizeof *at);
    out->items = at;
    for (const struct model *model = r->models; at && model; model = model->next)
        for (const struct group *group = model->groups; group; group = group->next)
            *at++ = (dray__engine_told){.model = model->name,
                                        .group = group->name,
                                        .version = group->now.version,
                                        .incarnation = group->now.incarnation,
                                        .epoch = group->epoch,
                                        .ranks = group->set.present,
                                        .world = group->set.world,
                                        .state = (uint8_t)group->state,
                                        .serving = dray__reg_serving(group),
                                        .leaving = group->leaving};
    return out->items;
}

/* Writes the list into `told`, with its number. */
static void look(dray__registry *r, dray__writer *told)
{
    dray__engines_told list = {0};
    if (!list_engines(r, &list))
        told->failed = true;
    else
        dray__put_fields(told, &dray__engines_told_fields, &list);
    uint64_t hash = told->failed ? 0 : dray__hash(told->data, told->size);
    if (hash != r->engines_hash || !r->engines_sequence) {
        r->engines_hash = hash;
        r->engines_sequence++;
    }
    list.sequence = r->engines_sequence;
    dray__writer_reset(told);
    if (list.items)
        dray__put_fields(told, &dray__engines_told_fields, &list);
    free((void *)list.items);
}

static void tell(dray__registry *r, void *ticket, const dray__writer *told)
{
    dray__writer w = {.failed = told->failed};
    dray__put_bytes(&w, told->data, told->size);
    dray__reg_reply(r, ticket, &w, -1);
}

int dray__reg_watch(dray__registry *r, uint64_t seen, int64_t timeout_ns, void *ticket,
                    dray_error *error)
{
    struct watcher *watcher = calloc(1, sizeof *watcher);
    if (!watcher)
        return dray__nomem(error);
    *watcher = (struct watcher){r->watchers, ticket, seen};
    r->watchers = watcher;
    if (timeout_ns <= 0)
        dray__reg_watch_expired(r, ticket);
    else
        dray__reg_expire(r, ticket, timeout_ns);
    return DRAY_OK;
}

void dray__reg_watchers_settle(dray__registry *r)
{
    if (!r->watchers)
        return;
    dray__writer list = {0};
    look(r, &list);
    for (struct watcher **at = &r->watchers; *at;) {
        struct watcher *watcher = *at;
        if (watcher->seen == r->engines_sequence) {
            at = &watcher->next;
            continue;
        }
        *at = watcher->next;
        tell(r, watcher->ticket, &list);
        free(watcher);
    }
    dray__writer_free(&list);
}

bool dray__reg_watch_expired(dray__registry *r, void *ticket)
{
    for (struct watcher **at = &r->watchers; *at; at = &(*at)->next)
        if ((*at)->ticket == ticket) {
            struct watcher *watcher = *at;
            dray__writer list = {0};
            *at = watcher->next;
            look(r, &list);
            tell(r, ticket, &list);
            dray__writer_free(&list);
            free(watcher);
            return true;
        }
    return false;
}
