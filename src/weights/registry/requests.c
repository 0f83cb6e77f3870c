/* The registry's requests: decoding them, the entries that they open, and the registry itself. */
#include "weights/registry/state.h"

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

/* ---- entries --------------------------------------------------------------------------------- */

static void handles_free(struct registrant *entry)
{
    for (uint32_t i = 0; i < entry->region_count; i++) {
        free(entry->regions[i].handle);
        if (entry->regions[i].fd >= 0)
            close(entry->regions[i].fd);
        entry->regions[i] = (struct stored_region){.fd = -1};
    }
}

static void entry_free(struct registrant *entry)
{
    handles_free(entry);
    free(entry->regions);
    free(entry->layout);
    free(entry->name);
    free(entry->endpoint);
    dray__sums_forms_clear(&entry->forms);
    dray__vote_free(&entry->vote);
    free(entry);
}

/* Makes an entry, which is not yet in the registry's list. */
static struct registrant *entry_new(dray__registry *r, const dray__party *party,
                                    struct model *model, uint32_t rank, uint64_t token,
                                    const char *endpoint)
{
    struct registrant *entry = calloc(1, sizeof *entry);
    if (!entry)
        return NULL;
    entry->name = strdup(party->name ? party->name : "");
    entry->endpoint = strdup(endpoint);
    if (!entry->name || !entry->endpoint) {
        entry_free(entry);
        return NULL;
    }
    entry->key = r->next_id++;
    entry->member = party->member;
    entry->host = party->host;
    entry->pid = party->pid;
    entry->model = model;
    entry->rank = rank;
    entry->token = token;
    return entry;
}

static void entry_add(dray__registry *r, struct registrant *entry)
{
    entry->next = r->entries;
    r->entries = entry;
}

static void model_drop_if_unused(dray__registry *r, struct model *model)
{
    if (model->trainers || model->groups)
        return;
    for (struct model **at = &r->models; *at; at = &(*at)->next)
        if (*at == model) {
            *at = model->next;
            free(model->name);
            free(model);
            return;
        }
}

static void entry_end(dray__registry *r, struct registrant *entry, const char *why)
{
    for (struct registrant **at = &r->entries; *at; at = &(*at)->next)
        if (*at == entry) {
            *at = entry->next;
            break;
        }
    dray__reg_pins_forget(r, entry);
    if (entry->trainer)
        dray__reg_trainer_leave(r, entry, why);
    if (entry->group)
        dray__reg_group_leave(r, entry, why);
    struct model *model = entry->model;
    dray__reg_cohort_leave(model, entry);
    entry_free(entry);
    model_drop_if_unused(r, model);
}

static void settle(dray__registry *r)
{
    dray__reg_pending_settle(r);
    dray__reg_groups_settle(r);
    dray__reg_watchers_settle(r);
}

/* ---- requests -------------------------------------------------------------------------------- */

typedef dray__reg_call call;

/* Reads the claim that follows the opening of a member that registers again. */
static void get_claim(call *c, const dray__fields *of, dray__rank_claim *out)
{
    if (c->in->failed || c->in->at == c->in->size)
        return;
    dray__get_fields(c->in, &c->texts, of, out);
    out->given = true;
}

static int check_claim(const dray__registry *r, const dray__rank_claim *claim, dray_error *error)
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

static int check_opening(const call *c, const dray__enrolling *m, const dray__rank_claim *claim,
                         bool *pinned, dray_error *error)
{
    dray_layout *layout;
    if (!m->model[0] || (m->group && !m->group[0]))
        return dray__fail(error, DRAY_EINVALID, "a %s needs a name",
                          m->model[0] ? "group" : "model");
    if (m->to_put > m->regions)
        return dray__fail(error, DRAY_EINVALID, "%" PRIu32 " of %" PRIu32 " regions to put",
                          m->to_put, m->regions);
    int rc = check_claim(c->r, claim, error);
    if (rc == DRAY_OK)
        rc = dray_layout_unpack(m->layout, m->layout_size, &layout, error);
    if (rc)
        return rc;
    *pinned = has_pinned(layout);
    dray_layout_free(layout);
    return DRAY_OK;
}

/* Returns the entry of a member that registers again a second time, because it has not got the
 * answer to the first. A publisher may have drawn another token since, but not another
 * incarnation. */
static struct registrant *opened_before(const call *c, const struct model *model,
                                        const dray__enrolling *m, const dray__rank_claim *claim)
{
    for (struct registrant *entry = c->r->entries; entry; entry = entry->next)
        if (entry->member == c->party->member && entry->model == model && entry->claim.given &&
            entry->rank == m->rank &&
            (m->group ? entry->token == m->token && entry->group &&
                            strcmp(entry->group->name, m->group) == 0
                      : entry->trainer && entry->claim.incarnation == claim->incarnation))
            return entry;
    return NULL;
}

/* Answers once more with its key. The member puts all of its regions after that. */
static int open_again(call *c, struct registrant *entry, const dray__enrolling *m,
                      dray_error *error)
{
    handles_free(entry);
    int rc = dray__reg_lay_out(entry, m->regions, m->layout, m->layout_size, error);
    if (rc)
        return rc;
    entry->token = m->token;
    entry->regions_missing = m->to_put;
    dray__reg_answer(c->r, c->ticket, &dray__u64_fields, &entry->key);
    return DRAY_OK;
}

static int open_entry(call *c, const dray__enrolling *m, dray__rank_claim *claim, dray_error *error)
{
    bool pinned = false;
    int rc = check_opening(c, m, claim, &pinned, error);
    if (rc)
        return rc;
    struct model *model = dray__reg_model(c->r, m->model, true);
    if (!model)
        return dray__nomem(error);
    struct registrant *entry = claim->given ? opened_before(c, model, m, claim) : NULL;
    if (entry)
        return open_again(c, entry, m, error);
    entry = entry_new(c->r, c->party, model, m->rank, m->token, m->endpoint);
    rc = entry ? dray__reg_lay_out(entry, m->regions, m->layout, m->layout_size, error)
               : dray__nomem(error);
    if (rc == DRAY_OK) {
        entry->regions_missing = m->to_put;
        entry->slot_bytes = m->slot_bytes;
        entry->pinned = pinned;
        entry->shared = m->regions && m->to_put == m->regions;
        entry->claim = *claim;
        entry->claim.sums = (dray__sums){0};
        rc = m->group ? dray__reg_group_join(c->r, entry, m->group, m->world, error)
                      : dray__reg_trainer_join(c->r, entry, m->world, claim, error);
    }
    if (rc) {
        if (entry)
            entry_free(entry);
        model_drop_if_unused(c->r, model);
        return rc;
    }
    entry_add(c->r, entry);
    dray__reg_answer(c->r, c->ticket, &dray__u64_fields, &entry->key);
    return DRAY_OK;
}

static int publisher_open(call *c, const void *message, dray_error *error)
{
    dray__rank_claim claim = {0};
    get_claim(c, &dray__publisher_claim_fields, &claim);
    int rc = claim.given && !dray__sums_get(c->in, &claim.sums, NULL) ? dray__nomem(error)
                                                                      : dray__reg_finish(c, error);
    if (rc == DRAY_OK)
        rc = open_entry(c, message, &claim, error);
    dray__sums_free(&claim.sums);
    return rc;
}

static int subscriber_open(call *c, const void *message, dray_error *error)
{
    dray__rank_claim claim = {0};
    get_claim(c, &dray__subscriber_claim_fields, &claim);
    int rc = dray__reg_finish(c, error);
    return rc ? rc : open_entry(c, message, &claim, error);
}

/* Returns true for GPU memory that its driver exports by a handle alone. */
static bool goes_without_descriptor(const void *packed, size_t size)
{
    dray_handle handle = DRAY_HANDLE_INIT;
    return dray_handle_unpack(packed, size, &handle, NULL) == DRAY_OK &&
           handle.kind == DRAY_REGION_CUDA;
}

static int region_put(call *c, const void *message, dray_error *error)
{
    const dray__region_given *m = message;
    uint32_t index = m->region;
    size_t size = m->handle_size;
    struct registrant *entry = c->entry;
    if (entry->group && index < entry->region_count && entry->regions[index].handle)
        dray__reg_unhouse(c->r, entry); /* other memory is there now, also in its other regions */
    if (index >= entry->region_count || entry->regions[index].handle || !entry->regions_missing)
        return dray__fail(error, DRAY_EINVALID,
                          "region %" PRIu32 " of %" PRIu32 " was put already or does not exist",
                          index, entry->region_count);
    if (c->fd < 0 && !goes_without_descriptor(m->handle, size))
        return dray__fail(error, DRAY_EINVALID,
                          "region %" PRIu32 " came without its descriptor (they pass over Unix "
                          "sockets only)",
                          index);
    struct stored_region *region = &entry->regions[index];
    region->handle = malloc(size ? size : 1);
    if (!region->handle)
        return dray__nomem(error);
    if (size)
        memcpy(region->handle, m->handle, size);
    region->handle_size = size;
    region->fd = c->fd;
    c->fd = -1;
    entry->regions_missing--;
    if (entry->trainer)
        dray__reg_trainer_complete(c->r, entry->trainer);
    return dray__reg_done(c);
}

/* Finds a set of the model by its id, and checks that it has a rank `index`. */
static int find_set(const struct model *model, uint64_t id, uint32_t index, const struct set **out,
                    dray_error *error)
{
    const struct set *set = NULL;
    for (const struct trainer *trainer = model->trainers; trainer && !set; trainer = trainer->next)
        if (trainer->set.id == id && !trainer->broken)
            set = &trainer->set;
    for (const struct group *group = model->groups; group && !set; group = group->next)
        if (group->set.id == id || group->set.memory == id)
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

/* Were the entry's regions sent? Only Unix sockets pass their descriptors. */
static bool can_be_mapped(const struct registrant *entry)
{
    for (uint32_t i = 0; i < entry->region_count; i++)
        if (entry->regions[i].handle)
            return true;
    return false;
}

/* Answers with the ranks from `index` on: at least one, and as many as fit a frame of moderate
 * size.
 */
static int answer_members(const call *c, const struct set *set, uint32_t index)
{
    size_t bytes = 0;
    uint32_t end = index;
    while (end < set->world && set->entries[end] && (end == index || bytes < MEMBERS_BYTES))
        bytes += set->entries[end++]->layout_size;
    dray__member_told *items = calloc(end - index + 1u, sizeof *items);
    for (uint32_t i = index; items && i < end; i++) {
        const struct registrant *rank = set->entries[i];
        items[i - index] = (dray__member_told){.key = rank->key,
                                               .member = rank->member,
                                               .host = rank->host,
                                               .pid = rank->pid,
                                               .token = rank->token,
                                               .endpoint = rank->endpoint,
                                               .mapped = can_be_mapped(rank),
                                               .name = rank->name,
                                               .layout = rank->layout,
                                               .layout_size = rank->layout_size,
                                               .regions = rank->region_count,
                                               .slot_bytes = rank->slot_bytes};
    }
    const dray__members_told answer = {items, end - index};
    dray__reg_answer_list(c->r, c->ticket, &dray__members_told_fields, &answer, items);
    return DRAY_OK;
}

static int update_sources(call *c, const void *message, dray_error *error)
{
    const dray__sources_asked *m = message;
    struct registrant *entry = c->entry;
    const struct set *set = NULL;
    if (m->what != DRAY__SOURCES_TRAINER) {
        int rc = find_set(entry->model, m->set, m->index, &set, error);
        return rc ? rc : answer_members(c, set, m->index);
    }
    int rc = dray__reg_entry(c, entry->key, DRAY__PUBLISHER, &entry, error);
    if (rc)
        return rc;
    struct pending p = {.kind = &dray__reg_for_trainer, .ticket = c->ticket, .entry = entry};
    return dray__reg_pend(c->r, &p, m->timeout_ns, error);
}

/* Returns the bytes that a reader keeps mapped, from the size of the descriptor. GPU memory has no
 * descriptor, or one without a size. */
static uint64_t region_bytes(const struct stored_region *region)
{
    struct stat st;
    dray_handle handle = DRAY_HANDLE_INIT;
    if (region->fd >= 0 && fstat(region->fd, &st) == 0 && st.st_size > 0)
        return (uint64_t)st.st_size;
    int rc = dray_handle_unpack(region->handle, region->handle_size, &handle, NULL);
    return rc == DRAY_OK ? handle.storage_bytes : 0;
}

static int region_get(call *c, const void *message, dray_error *error)
{
    const dray__region_asked *m = message;
    uint32_t index = m->index, number = m->region;
    struct registrant *entry = c->entry;
    const struct set *set = NULL;
    int rc = find_set(entry->model, m->set, index, &set, error);
    if (rc)
        return rc;
    const struct registrant *rank = set->entries[index];
    if (number >= rank->region_count || !rank->regions[number].handle)
        return dray__fail(error, DRAY_ENOENT,
                          "region %" PRIu32 " of %s, rank %" PRIu32 " (%s), cannot be reached from "
                          "another process: allocate it as a shared region",
                          number, entry->model->name, index, rank->name);
    rc = dray__reg_pin(c->r, entry, rank, m->set, region_bytes(&rank->regions[number]), error);
    if (rc)
        return rc;
    dray__writer w = {0};
    const dray__region_given answer = {.handle = rank->regions[number].handle,
                                       .handle_size = rank->regions[number].handle_size};
    dray__put_fields(&w, &dray__handle_told_fields, &answer);
    dray__reg_reply(c->r, c->ticket, &w, rank->regions[number].fd);
    return DRAY_OK;
}

static int publish(call *c, const void *message, dray_error *error)
{
    const dray__announcing *m = message;
    dray__sums sums = {0};
    int rc = dray__sums_get(c->in, &sums, &c->entry->forms) ? dray__reg_finish(c, error)
                                                            : dray__nomem(error);
    if (rc == DRAY_OK && m->checked > DRAY__CHECKED_LATER)
        rc = dray__fail(error, DRAY_EINVALID, "a version that is checked %d", m->checked);
    if (rc == DRAY_OK)
        rc = dray__reg_publish(c->r, c->entry, m->version, m->checked, &sums, error);
    dray__sums_free(&sums);
    return rc ? rc : dray__reg_done(c);
}

static int publish_sums(call *c, const void *message, dray_error *error)
{
    const dray__summing *m = message;
    dray__sums sums = {0};
    dray_error verdict = {0};
    int rc = dray__sums_get(c->in, &sums, &c->entry->forms) ? dray__reg_finish(c, error)
                                                            : dray__nomem(error);
    if (rc == DRAY_OK && m->code)
        dray__fail(&verdict, m->code, "%s", m->message);
    if (rc == DRAY_OK)
        rc = dray__reg_summed(c->r, c->entry, m->version, &verdict, &sums, error);
    dray__sums_free(&sums);
    return rc ? rc : dray__reg_done(c);
}

static int check_published(const struct registrant *entry, uint64_t number, dray_error *error)
{
    if (entry->has_published && number <= entry->published)
        return DRAY_OK;
    return dray__fail(error, DRAY_EINVALID,
                      "publisher of %s: rank %" PRIu32 " did not publish version %" PRIu64,
                      entry->model->name, entry->rank, number);
}

static int publisher_wait(call *c, const void *message, dray_error *error)
{
    const dray__draining *m = message;
    struct pending p = {.kind = &dray__reg_for_readers,
                        .ticket = c->ticket,
                        .entry = c->entry,
                        .number = m->version};
    int rc = check_published(c->entry, p.number, error);
    if (rc)
        return rc;
    for (struct version *version = c->entry->trainer->versions; version; version = version->next)
        version->withdrawn |= version->number <= p.number;
    return dray__reg_pend(c->r, &p, m->timeout_ns, error);
}

static int publisher_deliver(call *c, const void *message, dray_error *error)
{
    const dray__delivering *m = message;
    if (!m->count || (m->name_count && m->name_count != m->count))
        return dray__fail(error, DRAY_EINVALID, "%" PRIu32 " groups, %" PRIu32 " names", m->count,
                          m->name_count);
    int rc = check_published(c->entry, m->version, error);
    if (rc)
        return rc;
    struct pending p = {.kind = &dray__reg_for_groups,
                        .ticket = c->ticket,
                        .entry = c->entry,
                        .number = m->version,
                        .count = m->count,
                        .groups = m->name_count ? m->names : NULL,
                        .texts = c->texts};
    c->texts = (dray__arena){0};
    return dray__reg_pend(c->r, &p, m->timeout_ns, error);
}

static int group_sums(const struct model *model, const char *name, dray__sums_told *out,
                      const dray__sums **sums, dray_error *error)
{
    const struct group *group = model->groups;
    while (group && strcmp(group->name, name) != 0)
        group = group->next;
    if (!group || group->state != DRAY_GROUP_WHOLE || !group->now.read.count)
        return dray__fail(error, DRAY_ENOENT, "model %s: group '%s' %s", model->name, name,
                          !group                             ? "does not exist"
                          : group->state != DRAY_GROUP_WHOLE ? "holds no whole version"
                                                             : "updated without verification");
    *sums = &group->now.read;
    *out = (dray__sums_told){group->now.version, group->now.incarnation};
    return DRAY_OK;
}

static int checksums_get(call *c, const void *message, dray_error *error)
{
    const dray__sums_asked *m = message;
    const dray__sums *sums = NULL;
    dray__sums_told answer;
    const struct model *model = dray__reg_model(c->r, m->model, false);
    if (!model)
        return dray__fail(error, DRAY_ENOENT, "nobody publishes or subscribes to model '%s'",
                          m->model);
    if (m->group[0]) {
        int rc = group_sums(model, m->group, &answer, &sums, error);
        if (rc)
            return rc;
    } else {
        const struct trainer *trainer;
        const struct version *newest = dray__reg_latest(model, &trainer);
        if (!newest)
            return dray__fail(error, DRAY_ENOENT, "model %s: no version was published", m->model);
        if (!dray__reg_is_summed(newest))
            return dray__fail(error, newest->failed ? DRAY_ENOENT : DRAY_EAGAIN,
                              "model %s: the checksums of version %" PRIu64 " %s", m->model,
                              newest->number,
                              newest->failed ? "could not be computed" : "are not all here yet");
        sums = &newest->sums;
        answer = (dray__sums_told){newest->number, trainer->incarnation};
    }
    dray__writer w = {0};
    dray__put_fields(&w, &dray__sums_told_fields, &answer);
    dray__sums_put(&w, sums);
    dray__reg_reply(c->r, c->ticket, &w, -1);
    return DRAY_OK;
}

static int weights_close(call *c, const void *message, dray_error *error)
{
    (void)message, (void)error;
    entry_end(c->r, c->entry, "closed");
    return dray__reg_done(c);
}

static const dray__reg_message messages[] = {
    {DRAY__MSG_PUBLISHER_OPEN, DRAY__NOBODY, true, &dray__publisher_open_fields, publisher_open},
    {DRAY__MSG_SUBSCRIBER_OPEN, DRAY__NOBODY, true, &dray__subscriber_open_fields, subscriber_open},
    {DRAY__MSG_WEIGHTS_CLOSE, DRAY__EITHER, false, &dray__u64_fields, weights_close},
    {DRAY__MSG_REGION_PUT, DRAY__EITHER, false, &dray__region_given_fields, region_put},
    {DRAY__MSG_REGION_GET, DRAY__EITHER, false, &dray__region_asked_fields, region_get},
    {DRAY__MSG_PUBLISH, DRAY__PUBLISHER, true, &dray__announcing_fields, publish},
    {DRAY__MSG_PUBLISH_SUMS, DRAY__PUBLISHER, true, &dray__summing_fields, publish_sums},
    {DRAY__MSG_PUBLISHER_WAIT, DRAY__PUBLISHER, false, &dray__draining_fields, publisher_wait},
    {DRAY__MSG_PUBLISHER_DELIVER, DRAY__PUBLISHER, false, &dray__delivering_fields,
     publisher_deliver},
    {DRAY__MSG_UPDATE_SOURCES, DRAY__EITHER, false, &dray__sources_asked_fields, update_sources},
    {DRAY__MSG_CHECKSUMS_GET, DRAY__NOBODY, false, &dray__sums_asked_fields, checksums_get},
    {0},
};

static int carry_out(call *c, const dray__reg_message *m, dray_error *error)
{
    uint64_t key = 0;
    void *message = dray__arena_get(&c->texts, m->fields->size);
    if (!message)
        return dray__nomem(error);
    memset(message, 0, m->fields->size);
    dray__get_fields(c->in, &c->texts, m->fields, message);
    int rc = m->more && !c->in->failed ? DRAY_OK : dray__reg_finish(c, error);
    if (rc == DRAY_OK && m->side != DRAY__NOBODY) {
        memcpy(&key, message, sizeof key);
        rc = dray__reg_entry(c, key, m->side, &c->entry, error);
    }
    return rc ? rc : m->handle(c, message, error);
}

void dray__registry_handle(dray__registry *r, const dray__party *party, uint16_t type,
                           dray__reader *payload, int fd, void *ticket)
{
    const dray__reg_message *const tables[] = {messages, dray__reg_update_messages,
                                               dray__reg_pins_messages};
    call c = {.r = r,
              .party = party,
              .in = payload,
              .ticket = ticket,
              .fd = fd,
              .name = dray__message_name(type)};
    dray_error error;
    const dray__reg_message *found = NULL;
    for (size_t i = 0; i < sizeof tables / sizeof *tables && !found; i++)
        for (const dray__reg_message *m = tables[i]; m->type && !found; m++)
            found = m->type == type ? m : NULL;
    int rc = found ? carry_out(&c, found, &error)
                   : dray__fail(&error, DRAY_EPROTO, "the registry knows no message 0x%04x", type);
    dray__arena_free(&c.texts);
    if (rc)
        dray__reg_refuse(r, ticket, &error);
    if (c.fd >= 0)
        close(c.fd);
    settle(r);
}

void dray__registry_expired(dray__registry *r, void *ticket, int gone)
{
    bool found =
        dray__reg_pending_expired(r, ticket, gone != 0) || dray__reg_watch_expired(r, ticket);
    for (struct registrant *entry = r->entries; entry && !found; entry = entry->next)
        found = entry->group && dray__reg_group_expired(r, entry, ticket, gone != 0);
    settle(r);
}

void dray__registry_member_ended(dray__registry *r, uint64_t member)
{
    for (struct registrant *entry = r->entries; entry;) {
        struct registrant *next = entry->next;
        if (entry->member == member) {
            entry_end(r, entry, "died");
            next = r->entries; /* start over, in case this ended others */
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
