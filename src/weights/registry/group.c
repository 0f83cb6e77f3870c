/* Subscribers: groups, and updates that all ranks of a group commit together or not at all. */
#include "base/error.h"
#include "base/log.h"
#include "weights/registry/state.h"

#include <dray/weights.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void holding_free(struct holding *holding)
{
    dray__sums_free(&holding->read);
    dray__sums_free(&holding->resident);
    *holding = (struct holding){0};
}

static void group_free(struct group *group)
{
    holding_free(&group->now);
    holding_free(&group->staged);
    holding_free(&group->goal);
    dray__sums_free(&group->expected);
    dray__coverage_free(&group->coverage);
    free(group->set.entries);
    free(group->report);
    free(group->name);
    free(group);
}

static void group_drop_if_empty(struct group *group)
{
    if (group->set.present)
        return;
    for (struct group **at = &group->model->groups; *at; at = &(*at)->next)
        if (*at == group) {
            *at = group->next;
            break;
        }
    group_free(group);
}

bool dray__reg_group_returning(const struct group *group)
{
    bool any = false;
    for (uint32_t i = 0; i < group->set.world; i++)
        any |= group->set.entries[i] && group->set.entries[i]->claim.given;
    return any && !group->decided && group->set.present < group->set.world;
}

/* Derives a group's version after a restart from its ranks' claims: the group is whole only if all
 * have the same version (a new rank has none). A state that this registry decided is not changed.
 */
static void adopt(struct group *group)
{
    const dray__rank_claim *first = NULL;
    bool same = true, staged = true, ids = true, any = false;
    for (uint32_t i = 0; i < group->set.world; i++) {
        const dray__rank_claim *claim =
            group->set.entries[i] ? &group->set.entries[i]->claim : NULL;
        if (!claim)
            return; /* not known yet */
        any |= claim->given;
        first = first ? first : claim;
        same &= claim->state == first->state && claim->version == first->version &&
                claim->incarnation == first->incarnation;
        ids &= claim->set && claim->set == first->set;
        staged &= claim->staged && claim->staged_version == first->staged_version &&
                  claim->staged_incarnation == first->staged_incarnation;
    }
    if (group->decided || !any)
        return;
    group->decided = true;
    group->state = same ? first->state : DRAY_GROUP_TORN;
    if (ids && !dray__reg_set_taken(group->model, first->set))
        group->set.id = first->set; /* readers import its memory again, which may have moved */
    if (group->state == DRAY_GROUP_WHOLE)
        group->now = (struct holding){
            .version = first->version, .incarnation = first->incarnation, .mode = first->mode};
    group->has_staged = staged;
    if (staged)
        group->staged = (struct holding){.version = first->staged_version,
                                         .incarnation = first->staged_incarnation};
}

int dray__reg_group_join(dray__registry *r, struct registrant *entry, const char *name,
                         uint32_t world, dray_error *error)
{
    struct group *group = entry->model->groups;
    while (group && strcmp(group->name, name) != 0)
        group = group->next;
    if (!group) {
        group = calloc(1, sizeof *group);
        char *copy = strdup(name);
        if (!group || !copy) {
            free(group);
            free(copy);
            return dray__nomem(error);
        }
        group->name = copy;
        group->model = entry->model;
        group->epoch = 1;
        group->next = entry->model->groups;
        entry->model->groups = group;
    }
    int rc = dray__reg_set_join(&group->set, entry, world, name, error);
    if (rc) {
        group_drop_if_empty(group);
        return rc;
    }
    group->set.id = group->set.memory = r->next_id++;
    entry->group = group;
    adopt(group);
    return DRAY_OK;
}

static void begin_clear(struct begin *begin)
{
    dray__arena_free(&begin->texts);
    *begin = (struct begin){0};
}

static void begin_refuse(dray__registry *r, struct registrant *entry, const dray_error *error)
{
    void *ticket = entry->begin.ticket;
    begin_clear(&entry->begin);
    if (ticket)
        dray__reg_refuse(r, ticket, error);
}

/* Ends the group's update and its lease, and clears its votes. */
static void update_over(struct group *group)
{
    group->phase = ATTEMPT_NONE;
    if (group->reading)
        group->reading->readers--;
    if (group->peer)
        group->peer->readers--;
    group->reading = NULL;
    group->trainer = NULL;
    group->peer = NULL;
    holding_free(&group->goal);
    dray__sums_free(&group->expected);
    for (uint32_t i = 0; i < group->set.world; i++)
        if (group->set.entries[i]) {
            group->set.entries[i]->writing = false;
            group->set.entries[i]->voted = false;
            dray__vote_free(&group->set.entries[i]->vote);
        }
}

static void drop_staged(struct group *group)
{
    holding_free(&group->staged);
    group->has_staged = false;
}

void dray__reg_prefetch_drop(struct registrant *entry)
{
    drop_staged(entry->group);
}

/* Lets the rank write. In a prefetch the staged version is lost; otherwise the group's memory no
 * longer holds its version. */
void dray__reg_grant_writing(struct registrant *entry)
{
    entry->writing = true;
    if (entry->group->purpose == DRAY__PREFETCH)
        drop_staged(entry->group);
}

void dray__reg_abort(dray__registry *r, struct group *group, const dray_error *reason)
{
    if (group->phase != ATTEMPT_MOVING)
        return;
    bool writing = false;
    for (uint32_t i = 0; i < group->set.world; i++)
        writing |= group->set.entries[i] && group->set.entries[i]->writing;
    group->aborted = group->attempt;
    if (writing && group->purpose != DRAY__PREFETCH) {
        group->state = DRAY_GROUP_TORN;
        dray__fail(&group->abort_error, DRAY_ETORN,
                   "group %s is torn (bytes may be overwritten already): %s", group->name,
                   reason->message);
    } else {
        dray__fail(&group->abort_error, reason->code, "update of group %s was given up: %s",
                   group->name, reason->message);
    }
    dray__log(DRAY_LOG_WARN, "%s", group->abort_error.message);
    update_over(group);
    for (uint32_t i = 0; i < group->set.world; i++) {
        struct registrant *entry = group->set.entries[i];
        if (!entry)
            continue;
        void *ticket = entry->vote_ticket;
        entry->vote_ticket = NULL;
        if (ticket)
            dray__reg_refuse(r, ticket, &group->abort_error);
        dray__reg_pending_refuse(r, entry, &dray__reg_to_write, &group->abort_error);
    }
}

/* Makes the goal the staged, or held, version. */
static void commit(dray__registry *r, struct group *group)
{
    dray__compared compared = group->goal.compared;
    bool prefetch = group->purpose == DRAY__PREFETCH;
    struct holding *to = prefetch ? &group->staged : &group->now;
    holding_free(to);
    if (group->purpose == DRAY__COMMIT) {
        *to = group->staged;
        compared = to->compared;
        group->staged = (struct holding){0};
        group->has_staged = false;
    } else {
        *to = group->goal;
        group->goal = (struct holding){0};
    }
    if (prefetch) {
        group->has_staged = true;
    } else {
        group->state = DRAY_GROUP_WHOLE;
        group->leaving = false;
        dray__reg_delivered(group);
    }
    dray__reg_rehouse(r, group);
    update_over(group);
    for (uint32_t i = 0; i < group->set.world; i++) {
        struct registrant *entry = group->set.entries[i];
        void *ticket = entry->vote_ticket;
        entry->vote_ticket = NULL;
        if (ticket)
            dray__reg_answer(r, ticket, &dray__committed_fields,
                             &(dray__committed){compared.tensors, compared.bytes});
    }
}

void dray__reg_group_leave(dray__registry *r, struct registrant *entry, const char *why)
{
    struct group *group = entry->group;
    dray_error error;
    dray__fail(&error, DRAY_EDEAD, "rank %" PRIu32 " (%s, member %" PRIu64 ") %s", entry->rank,
               entry->name, entry->member, why);
    dray__reg_abort(r, group, &error);
    dray__reg_revoke(r, group, DRAY_EDEAD, error.message);
    begin_refuse(r, entry, &error);
    dray__reg_pending_refuse(r, entry, NULL, &error);
    dray__reg_set_leave(&group->set, entry);
    entry->group = NULL;
    group->set.id = group->set.memory = r->next_id++;
    group->epoch++;
    drop_staged(group);
    if (!group->decided && entry->claim.given && entry->claim.state != DRAY_GROUP_EMPTY)
        group->state = DRAY_GROUP_TORN;
    if (group->state != DRAY_GROUP_EMPTY)
        group->decided = true;
    if (group->state == DRAY_GROUP_WHOLE)
        group->state = DRAY_GROUP_TORN; /* the part of the rank that left is lost */
    group_drop_if_empty(group);
}

int dray__reg_begin(dray__registry *r, struct registrant *entry, struct begin *begin,
                    dray_error *error)
{
    struct group *group = entry->group;
    if (entry->begin.ticket) {
        begin_clear(begin);
        return dray__fail(error, DRAY_EBUSY, "rank %" PRIu32 " of group %s has begun already",
                          entry->rank, group->name);
    }
    if (group->phase == ATTEMPT_MOVING) {
        dray_error reason;
        dray__fail(&reason, DRAY_ECANCELED, "rank %" PRIu32 " (%s) began another update",
                   entry->rank, entry->name);
        dray__reg_abort(r, group, &reason);
    }
    entry->begin = *begin;
    return DRAY_OK;
}

/* Checks that the wishes of all ranks that began agree. The error names the first rank that
 * differs. */
static int agree(const struct group *group, uint64_t *min, dray_error *error)
{
    const dray__update_wish *first = &group->set.entries[0]->begin.wish;
    *min = first->min_version;
    for (uint32_t i = 1; i < group->set.world; i++) {
        const dray__update_wish *other = &group->set.entries[i]->begin.wish;
        if (other->min_version > *min)
            *min = other->min_version;
        if (other->mode != first->mode || strcmp(other->path, first->path) != 0 ||
            other->path_version != first->path_version)
            return dray__fail(error, DRAY_EINVALID,
                              "group %s: rank %" PRIu32 " asked for mode %d, path \"%s\" (version "
                              "%" PRIu64 "), rank 0 for mode %d, path \"%s\" (version %" PRIu64 ")",
                              group->name, i, other->mode, other->path, other->path_version,
                              first->mode, first->path, first->path_version);
        if (other->purpose != first->purpose)
            return dray__fail(error, DRAY_EINVALID,
                              "group %s: rank %" PRIu32 " and rank 0 began different things: an "
                              "update, a prefetch and a commit are each begun by all ranks",
                              group->name, i);
        if (other->verify != first->verify)
            return dray__fail(error, DRAY_EINVALID,
                              "group %s: rank %" PRIu32 " asked for an update %s verification, "
                              "rank 0 %s",
                              group->name, i, other->verify ? "with" : "without",
                              first->verify ? "with" : "without");
    }
    return DRAY_OK;
}

static bool same_host(const struct trainer *trainer, const struct group *group)
{
    uint64_t host = group->set.entries[0]->host;
    for (uint32_t i = 0; i < group->set.world; i++)
        if (group->set.entries[i]->host != host)
            return false;
    for (uint32_t i = 0; i < trainer->set.world; i++)
        if (trainer->set.entries[i]->host != host)
            return false;
    return true;
}

/* Can all ranks reach all publishers? A publisher on another host needs a data server. */
static bool served(const struct trainer *trainer, const struct group *group)
{
    for (uint32_t i = 0; i < trainer->set.world; i++)
        for (uint32_t k = 0; k < group->set.world; k++)
            if (trainer->set.entries[i]->host != group->set.entries[k]->host &&
                !trainer->set.entries[i]->endpoint[0])
                return false;
    return true;
}

dray__packed_layout *dray__reg_layouts(const struct set *set)
{
    dray__packed_layout *list = calloc((size_t)set->world + 1, sizeof *list);
    for (uint32_t i = 0; list && i < set->world; i++)
        list[i] = (dray__packed_layout){set->entries[i]->layout, set->entries[i]->layout_size};
    return list;
}

int dray__reg_cover(struct group *group, const struct set *from, dray_error *error)
{
    if (group->coverage_source == from->id && group->coverage_group == group->set.id)
        return DRAY_OK;
    dray__coverage_free(&group->coverage);
    group->coverage_source = 0;
    dray__packed_layout *sources = dray__reg_layouts(from), *ranks = dray__reg_layouts(&group->set);
    int rc = sources && ranks ? dray__coverage_of_layouts(sources, from->world, ranks,
                                                          group->set.world, &group->coverage, error)
                              : dray__nomem(error);
    free(sources);
    free(ranks);
    if (rc)
        return rc;
    group->coverage_source = from->id;
    group->coverage_group = group->set.id;
    return DRAY_OK;
}

/* Chooses the goal of a commit, which is the prefetched version. */
static int choose_staged(struct group *group, uint64_t min, dray_error *error)
{
    if (!group->has_staged)
        return dray__fail(error, DRAY_ENOENT, "group %s has prefetched no version", group->name);
    if (group->staged.version < min)
        return dray__fail(error, DRAY_ENOENT,
                          "group %s has prefetched version %" PRIu64 ", at least %" PRIu64
                          " expected",
                          group->name, group->staged.version, min);
    group->goal = (struct holding){.version = group->staged.version,
                                   .incarnation = group->staged.incarnation,
                                   .mode = group->staged.mode};
    return DRAY_OK;
}

static int read_publishers(struct group *group, struct trainer *trainer, struct version *version,
                           dray_error *error)
{
    if (group->verify && !version->unchecked) {
        int rc = dray__reg_cover(group, &trainer->set, error);
        if (rc)
            return rc;
    }
    group->trainer = trainer;
    group->reading = version;
    group->goal.version = version->number;
    group->goal.incarnation = trainer->incarnation;
    return DRAY_OK;
}

/* Resolves AUTO and chooses the version. Returns DRAY_EAGAIN while there is none. */
static int choose(struct group *group, dray_error *error)
{
    const dray__update_wish *first = &group->set.entries[0]->begin.wish;
    uint64_t min;
    int rc = agree(group, &min, error);
    if (rc)
        return rc;
    struct trainer *trainer = NULL;
    struct version *version = NULL;
    bool peers = first->mode != DRAY_MODE_DISK;
    for (uint32_t i = 0; i < group->set.world; i++)
        peers &= !group->set.entries[i]->begin.wish.publishers_only;
    group->goal.mode = first->mode;
    group->verify = first->verify;
    group->purpose = first->purpose;
    if (group->purpose == DRAY__COMMIT)
        return choose_staged(group, min, error);
    if (first->mode != DRAY_MODE_DISK)
        version = dray__reg_newest(group->model, min, &trainer);
    bool near = version && same_host(trainer, group);
    struct group *peer = peers ? dray__reg_peer(group, min, trainer, version, near) : NULL;
    if (first->mode == DRAY_MODE_AUTO && first->path[0] && !near && !peer &&
        !(version && served(trainer, group)))
        group->goal.mode = DRAY_MODE_DISK;
    if (group->goal.mode == DRAY_MODE_DISK) {
        group->goal.version = first->path_version;
        return DRAY_OK;
    }
    if (peer) {
        rc = group->verify ? dray__reg_cover(group, &peer->set, error) : DRAY_OK;
        if (rc)
            return rc;
        if (group->goal.mode == DRAY_MODE_AUTO)
            group->goal.mode =
                dray__reg_near(group, peer) ? DRAY_MODE_TENSOR : DRAY_MODE_DISTRIBUTED;
        group->peer = peer;
        group->goal.version = peer->now.version;
        group->goal.incarnation = peer->now.incarnation;
        return DRAY_OK;
    }
    if (!version)
        return DRAY_EAGAIN;
    if (!near && group->goal.mode == DRAY_MODE_TENSOR)
        return dray__fail(
            error, DRAY_EUNSUPPORTED,
            "group %s: publishers of %s are on another host, where mode tensor cannot "
            "reach; use mode distributed, or auto",
            group->name, group->model->name);
    if (group->goal.mode == DRAY_MODE_AUTO)
        group->goal.mode = near ? DRAY_MODE_TENSOR : DRAY_MODE_DISTRIBUTED;
    return read_publishers(group, trainer, version, error);
}

/* Returns the names of the tensors that the group holds in part. */
static const char *const *list_partial(const dray__coverage *coverage)
{
    const char **names = calloc(coverage->partial + 1u, sizeof *names);
    uint32_t count = 0;
    for (uint32_t i = 0; names && count < coverage->partial && i < coverage->count; i++)
        if (!dray__coverage_whole(&coverage->items[i]))
            names[count++] = coverage->items[i].name;
    return names;
}

static uint8_t source_kind(const struct group *group)
{
    return group->purpose == DRAY__COMMIT ? DRAY__FROM_STAGING
           : group->peer                  ? DRAY__FROM_PEERS
           : group->trainer               ? DRAY__FROM_PUBLISHERS
                                          : DRAY__FROM_DISK;
}

/* Returns true when all ranks have everything that they need to write at once. */
static bool all_prepared(const struct group *group, const struct set *sources)
{
    if (group->readers && group->purpose != DRAY__PREFETCH)
        return false;
    for (uint32_t i = 0; i < group->set.world; i++) {
        const struct begin *begin = &group->set.entries[i]->begin;
        if (group->purpose != DRAY__COMMIT &&
            (!sources || begin->wish.ready_source != dray__reg_source_id(sources) ||
             begin->wish.ready_group != group->set.id))
            return false;
    }
    return true;
}

/* Returns the answer to every rank's UPDATE_BEGIN. */
static dray__update_begun begun(const struct group *group, const struct set *sources,
                                const struct set *cohort, uint64_t run)
{
    dray__update_begun said = {.attempt = group->attempt,
                               .mode = group->goal.mode,
                               .incarnation = group->goal.incarnation,
                               .version = group->goal.version,
                               .compared =
                                   group->verify &&
                                   (group->peer || (group->reading && !group->reading->unchecked)),
                               .source_set = sources ? dray__reg_source_id(sources) : 0,
                               .sources = sources ? sources->world : 0,
                               .group_set = group->set.id,
                               .ranks = group->set.world,
                               .source = source_kind(group),
                               .granted = all_prepared(group, sources),
                               .cohort_set = cohort ? cohort->id : 0,
                               .cohort = cohort ? cohort->world : 0,
                               .run = run,
                               .last = group->reading ? group->reading->last : 0};
    said.partial_count = said.compared ? group->coverage.partial : 0;
    return said;
}

static void start(dray__registry *r, struct group *group, const struct set *cohort, uint64_t run)
{
    const struct set *sources = group->trainer ? &group->trainer->set
                                : group->peer  ? &group->peer->set
                                               : NULL;
    group->attempt = r->next_id++;
    dray__update_begun said = begun(group, sources, cohort, run);
    group->phase = ATTEMPT_MOVING;
    group->decided = true;
    group->gathering = group->gathered = false;
    if (group->reading)
        group->reading->readers++;
    if (group->peer)
        group->peer->readers++;
    for (uint32_t i = 0; i < group->set.world; i++) {
        struct registrant *entry = group->set.entries[i];
        void *ticket = entry->begin.ticket;
        begin_clear(&entry->begin);
        if (said.granted)
            dray__reg_grant_writing(entry);
        said.partial = list_partial(&group->coverage);
        dray__reg_answer_list(r, ticket, &dray__update_begun_fields, &said, said.partial);
    }
}

/* Undoes the choice of a group that cannot start now. */
static void unchoose(struct group *group)
{
    holding_free(&group->goal);
    group->trainer = NULL;
    group->reading = NULL;
    group->peer = NULL;
}

/* Returns true when bytes should come over a link once, for all their readers: from another host,
 * or out of pinned memory into GPUs. */
static bool is_shared(const struct group *group)
{
    bool pinned = false;
    for (uint32_t i = 0; group->trainer && i < group->trainer->set.world; i++)
        pinned |= group->trainer->set.entries[i] && group->trainer->set.entries[i]->pinned;
    return group->reading && (group->goal.mode == DRAY_MODE_DISTRIBUTED ||
                              (group->goal.mode == DRAY_MODE_TENSOR && pinned));
}

/* Starts the group, together with other groups that can read the same version in the same way now.
 */
static void start_cohort(dray__registry *r, struct group *first)
{
    struct group *groups[DRAY__COHORT_MAX] = {first};
    uint32_t count = 1;
    for (struct group *other = first->model->groups; other && count < DRAY__COHORT_MAX;
         other = other->next) {
        if (other == first || !dray__reg_all_began(other) || choose(other, NULL))
            continue;
        if (other->goal.mode == first->goal.mode && other->reading == first->reading)
            groups[count++] = other;
        else
            unchoose(other);
    }
    const struct set *cohort = dray__reg_cohort_make(r, first->model, groups, count);
    uint64_t run = r->next_id++;
    for (uint32_t i = 0; i < count; i++)
        start(r, groups[i], cohort, run);
}

static void group_settle(dray__registry *r, struct group *group)
{
    if (!dray__reg_all_began(group))
        return;
    dray_error error = {0};
    int rc = choose(group, &error);
    if (rc == DRAY_EAGAIN)
        return;
    if (rc) {
        unchoose(group);
        for (uint32_t i = 0; i < group->set.world; i++)
            begin_refuse(r, group->set.entries[i], &error);
    } else if (!is_shared(group)) {
        start(r, group, NULL, 0);
    } else if (dray__reg_cohort_waits(r, group)) {
        unchoose(group);
    } else {
        start_cohort(r, group);
    }
}

void dray__reg_groups_settle(dray__registry *r)
{
    for (struct model *model = r->models; model; model = model->next)
        for (struct group *group = model->groups; group; group = group->next)
            group_settle(r, group);
}

/* Checks that this is the update in progress. If not, the error is the reason why it ended. */
static int current(const struct registrant *entry, uint64_t attempt, dray_error *error)
{
    const struct group *group = entry->group;
    if (group->phase == ATTEMPT_MOVING && group->attempt == attempt)
        return DRAY_OK;
    if (group->aborted == attempt) {
        if (error)
            *error = group->abort_error;
        return group->abort_error.code;
    }
    return dray__fail(error, DRAY_ESTALE, "group %s: update %" PRIu64 " is over", group->name,
                      attempt);
}

int dray__reg_may_write(const struct registrant *entry, uint64_t attempt, dray_error *error)
{
    int rc = current(entry, attempt, error);
    if (rc == DRAY_OK && entry->voted) /* a rank must not write after its vote */
        rc = dray__fail(error, DRAY_EPROTO, "rank %" PRIu32 " of group %s has voted already",
                        entry->rank, entry->group->name);
    return rc;
}

static bool all_whole(const dray__coverage *coverage)
{
    return coverage->count && !coverage->partial;
}

/* Compares the ranks' sums with those in the checkpoint. */
static int compare_disk(struct group *group, dray_error *error)
{
    struct holding *goal = &group->goal;
    if (!group->expected.count)
        return DRAY_OK;
    dray__coverage coverage = {0};
    dray__packed_layout *ranks = dray__reg_layouts(&group->set);
    int rc =
        ranks ? dray__coverage_of_sums(&group->expected, ranks, group->set.world, &coverage, error)
              : dray__nomem(error);
    free(ranks);
    if (rc == DRAY_OK)
        rc = dray__coverage_compare(&coverage, &group->expected, &goal->read,
                                    "the sums in the checkpoint", &goal->compared, error);
    goal->complete = rc == DRAY_OK && all_whole(&coverage);
    dray__coverage_free(&coverage);
    return rc;
}

/* Compares the ranks' sums with those that the publishers announced, or with those of the peer's
 * memory. */
static int compare(struct group *group, dray_error *error)
{
    struct holding *goal = &group->goal;
    if (!group->verify || group->purpose == DRAY__COMMIT)
        return DRAY_OK;
    if (!group->reading && !group->peer)
        return compare_disk(group, error);
    if (group->reading && group->reading->unchecked)
        return DRAY_OK;
    int rc = dray__coverage_compare(
        &group->coverage, group->peer ? &group->peer->now.resident : &group->reading->sums,
        &goal->read, group->peer ? "the peer's memory" : "the published version", &goal->compared,
        error);
    goal->complete = rc == DRAY_OK && all_whole(&group->coverage);
    return rc;
}

void dray__vote_free(struct vote *vote)
{
    dray__sums_free(&vote->read);
    dray__sums_free(&vote->expected);
    dray__sums_free(&vote->resident);
    vote->held = 0;
}

/* Joins the votes in the order of ranks, so that the last result of the join can be used again. */
static int count_votes(struct group *group, dray_error *error)
{
    struct holding *goal = &group->goal;
    bool counted = true, own = false;
    goal->resident_known = true;
    for (uint32_t i = 0; i < group->set.world; i++) {
        goal->resident_known &= group->set.entries[i]->vote.held != DRAY__HELD_UNKNOWN;
        own |= group->set.entries[i]->vote.held == DRAY__HELD_OWN;
    }
    for (uint32_t i = 0; i < group->set.world && counted; i++) {
        struct vote *vote = &group->set.entries[i]->vote;
        counted = dray__sums_join(&goal->read, &vote->read) &&
                  (i != 0 || dray__sums_join(&group->expected, &vote->expected));
        if (counted && own && goal->resident_known)
            counted = dray__sums_join(&goal->resident,
                                      vote->held == DRAY__HELD_OWN ? &vote->resident : &vote->read);
    }
    if (counted && !own && goal->resident_known)
        counted = dray__sums_join(&goal->resident, &goal->read);
    return counted ? DRAY_OK : dray__nomem(error);
}

void dray__reg_decide(dray__registry *r, struct group *group)
{
    for (uint32_t i = 0; i < group->set.world; i++)
        if (!group->set.entries[i] || !group->set.entries[i]->voted)
            return;
    if (dray__reg_awaits_sums(group))
        return;
    dray_error error;
    int rc = count_votes(group, &error);
    if (rc == DRAY_OK)
        rc = compare(group, &error);
    if (rc)
        dray__reg_abort(r, group, &error);
    else
        commit(r, group);
}

int dray__reg_vote(dray__registry *r, struct registrant *entry, uint64_t attempt,
                   const dray_error *verdict, struct vote *vote, void *ticket, dray_error *error)
{
    struct group *group = entry->group;
    int rc = current(entry, attempt, error);
    if (rc)
        return rc;
    if (entry->voted)
        return dray__fail(error, DRAY_EPROTO, "rank %" PRIu32 " of group %s votes twice",
                          entry->rank, group->name);
    entry->voted = true;
    entry->vote_ticket = ticket;
    entry->vote = *vote;
    *vote = (struct vote){0};
    if (verdict->code) {
        dray_error reason;
        dray__fail(&reason, verdict->code, "rank %" PRIu32 " (%s): %s", entry->rank, entry->name,
                   verdict->message);
        dray__reg_abort(r, group, &reason);
    } else {
        dray__reg_decide(r, group);
    }
    return DRAY_OK;
}

/* Writes the ranks that the others wait for: "rank 1, rank 3". */
static void missing(const struct group *group, bool vote, char *out, size_t capacity)
{
    out[0] = 0;
    for (uint32_t i = 0; i < group->set.world; i++) {
        const struct registrant *entry = group->set.entries[i];
        if (entry && (vote ? entry->voted : entry->begin.ticket != NULL))
            continue;
        size_t used = strlen(out);
        snprintf(out + used, capacity - used, "%srank %" PRIu32, used ? ", " : "", i);
    }
}

bool dray__reg_group_expired(dray__registry *r, struct registrant *entry, void *ticket, bool gone)
{
    struct group *group = entry->group;
    dray_error error;
    char who[160];
    if (entry->begin.ticket == ticket && !gone && dray__reg_cohort_gathered(r, entry))
        return true;
    if (entry->begin.ticket == ticket) {
        missing(group, false, who, sizeof who);
        if (who[0])
            dray__fail(&error, DRAY_ETIMEDOUT, "group %s: %s did not begin the update", group->name,
                       who);
        else
            dray__reg_no_version(r, group, entry->begin.wish.min_version, &error);
        begin_refuse(r, entry, &error);
        return true;
    }
    if (entry->vote_ticket != ticket)
        return false;
    missing(group, true, who, sizeof who);
    dray__fail(&error, DRAY_ETIMEDOUT, "%s did not vote within the deadline%s", who,
               gone ? " (connection lost)" : "");
    if (!who[0])
        dray__reg_unsummed(group, &error);
    dray__reg_abort(r, group, &error); /* this also answers the ticket */
    return true;
}
