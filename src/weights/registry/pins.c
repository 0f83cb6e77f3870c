/* Mappings of members' memory. Memory is freed only after all readers have unmapped it; members
 * that still have it mapped are reported. Also handles publishers that moved their memory. */
#include "base/error.h"
#include "control/protocol.h"
#include "weights/registry/state.h"

#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

int dray__reg_pin(dray__registry *r, struct registrant *reader, const struct registrant *owner,
                  uint64_t set, uint64_t bytes, dray_error *error)
{
    for (struct pin *pin = r->pins; pin; pin = pin->next)
        if (pin->reader == reader && pin->owner == owner->key && pin->set == set) {
            pin->bytes += bytes;
            return DRAY_OK;
        }
    struct pin *pin = calloc(1, sizeof *pin);
    if (!pin)
        return dray__nomem(error);
    *pin = (struct pin){r->pins, reader, owner->key, set, bytes, false};
    r->pins = pin;
    return DRAY_OK;
}

/* Forgets the matching pins. reader NULL, set 0 and owner 0 match all. */
static void forget(dray__registry *r, const struct registrant *reader, uint64_t set, uint64_t owner)
{
    for (struct pin **at = &r->pins; *at;) {
        struct pin *pin = *at;
        if ((reader && pin->reader != reader) || (set && pin->set != set) ||
            (owner && pin->owner != owner)) {
            at = &pin->next;
            continue;
        }
        *at = pin->next;
        free(pin);
    }
}

void dray__reg_pins_forget(dray__registry *r, const struct registrant *entry)
{
    forget(r, entry, 0, 0);
    forget(r, NULL, 0, entry->key);
}

bool dray__reg_pinned(const dray__registry *r, const struct registrant *owner)
{
    for (const struct pin *pin = r->pins; pin; pin = pin->next)
        if (pin->owner == owner->key)
            return true;
    return false;
}

void dray__reg_release_answer(dray__registry *r, const struct registrant *entry, void *ticket)
{
    dray__pins_told answer = {0};
    for (const struct pin *pin = r->pins; pin; pin = pin->next)
        answer.count += pin->owner == entry->key;
    dray__pin_told *at = calloc(answer.count + 1u, sizeof *at);
    answer.items = at;
    for (const struct pin *pin = r->pins; at && pin; pin = pin->next)
        if (pin->owner == entry->key)
            *at++ = (dray__pin_told){pin->reader->member, pin->bytes, pin->reader->name};
    dray__reg_answer_list(r, ticket, &dray__pins_told_fields, &answer, answer.items);
}

/* ---- requests -------------------------------------------------------------------------------- */

/* Forgets the entry's exported handles, and asks members that have them mapped to unmap them.
 * Returns the number of regions. */
static uint32_t void_handles(dray__registry *r, struct registrant *entry)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < entry->region_count; i++) {
        count += entry->regions[i].handle != NULL;
        free(entry->regions[i].handle);
        if (entry->regions[i].fd >= 0)
            close(entry->regions[i].fd);
        entry->regions[i] = (struct stored_region){.fd = -1};
    }
    for (struct pin *pin = r->pins; pin; pin = pin->next)
        pin->revoked |= pin->owner == entry->key;
    return count;
}

uint64_t dray__reg_source_id(const struct set *sources)
{
    return sources->memory ? sources->memory : sources->id;
}

void dray__reg_unhouse(dray__registry *r, struct registrant *entry)
{
    uint32_t count = void_handles(r, entry);
    if (!count)
        return;
    entry->regions_missing += count;
    dray__reg_cohort_leave(entry->model, entry);
    entry->group->set.memory = r->next_id++;
}

void dray__reg_rehouse(dray__registry *r, struct group *group)
{
    bool any = false;
    for (uint32_t i = 0; i < group->set.world; i++) {
        struct registrant *entry = group->set.entries[i];
        if (!entry || entry->vote.held != DRAY__HELD_MOVED)
            continue;
        entry->regions_missing += void_handles(r, entry);
        dray__reg_cohort_leave(group->model, entry);
        any = true;
    }
    if (any)
        group->set.memory = r->next_id++;
}

static void take_back(dray__registry *r, struct registrant *entry)
{
    void_handles(r, entry);
    dray__reg_trainer_withdraw(entry);
    entry->trainer->set.id = r->next_id++;
    entry->released = true;
}

/* Replaces the entry's layout and regions. None of the new regions is sent yet. */
static int move_blocks(struct registrant *entry, uint32_t regions, const void *layout, size_t size,
                       dray_error *error)
{
    dray_layout *checked;
    int rc = dray_layout_unpack(layout, size, &checked, error);
    if (rc)
        return rc;
    dray_layout_free(checked);
    return dray__reg_lay_out(entry, regions, layout, size, error);
}

static int regions_move(dray__reg_call *c, const void *message, dray_error *error)
{
    const dray__moving *m = message;
    struct registrant *entry = c->entry;
    if ((!m->layout_size && m->regions != entry->region_count) || m->to_put > m->regions ||
        m->regions > DRAY__REGIONS_MAX)
        return dray__fail(error, DRAY_EINVALID,
                          "%" PRIu32 " regions, %" PRIu32 " of them to put; %" PRIu32
                          " were registered",
                          m->regions, m->to_put, entry->region_count);
    if (entry->trainer->broken)
        return dray__fail(error, DRAY_ESTALE, "%s: open the publisher again",
                          entry->trainer->reason);
    take_back(c->r, entry);
    int rc =
        m->layout_size ? move_blocks(entry, m->regions, m->layout, m->layout_size, error) : DRAY_OK;
    if (rc)
        return rc;
    entry->released = false;
    entry->token = m->token;
    entry->regions_missing = m->to_put;
    dray__reg_answer(c->r, c->ticket, &dray__u64_fields, &entry->trainer->set.id);
    return DRAY_OK;
}

static int regions_release(dray__reg_call *c, const void *message, dray_error *error)
{
    const dray__timed *m = message;
    struct pending p = {
        .kind = &dray__reg_for_pins, .ticket = c->ticket, .entry = c->entry, .number = UINT64_MAX};
    take_back(c->r, c->entry);
    return dray__reg_pend(c->r, &p, m->timeout_ns, error);
}

static int regions_drop(dray__reg_call *c, const void *message, dray_error *error)
{
    const dray__set_told *m = message;
    (void)error;
    if (m->set)
        forget(c->r, c->entry, m->set, 0);
    return dray__reg_done(c);
}

static int regions_revoked(dray__reg_call *c, const void *message, dray_error *error)
{
    (void)message, (void)error;
    dray__sets_told answer = {0};
    for (const struct pin *pin = c->r->pins; pin; pin = pin->next)
        answer.count += pin->reader == c->entry && pin->revoked;
    uint64_t *at = calloc(answer.count + 1u, sizeof *at);
    answer.items = at;
    for (const struct pin *pin = c->r->pins; at && pin; pin = pin->next)
        if (pin->reader == c->entry && pin->revoked)
            *at++ = pin->set;
    dray__reg_answer_list(c->r, c->ticket, &dray__sets_told_fields, &answer, answer.items);
    return DRAY_OK;
}

const dray__reg_message dray__reg_pins_messages[] = {
    {DRAY__MSG_REGIONS_MOVE, DRAY__PUBLISHER, false, &dray__moving_fields, regions_move},
    {DRAY__MSG_REGIONS_RELEASE, DRAY__PUBLISHER, false, &dray__timed_fields, regions_release},
    {DRAY__MSG_REGIONS_DROP, DRAY__SUBSCRIBER, false, &dray__set_told_fields, regions_drop},
    {DRAY__MSG_REGIONS_REVOKED, DRAY__SUBSCRIBER, false, &dray__u64_fields, regions_revoked},
    {0},
};
