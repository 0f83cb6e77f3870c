/* Who has mapped whose memory: what is freed only after it was unmapped, or named when it was not;
 * and publishers whose memory is elsewhere now. */
#include "base/clock.h"
#include "base/error.h"
#include "control/protocol.h"
#include "control/registry_state.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int dray__reg_pin(dray__registry *r, struct entry *reader, const struct entry *owner, uint64_t set,
                  uint64_t bytes, dray_error *error)
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

/* reader NULL: anybody; set 0: any; owner 0: any. */
static void forget(dray__registry *r, const struct entry *reader, uint64_t set, uint64_t owner)
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

void dray__reg_pins_forget(dray__registry *r, const struct entry *entry)
{
    forget(r, entry, 0, 0);
    forget(r, NULL, 0, entry->key);
}

static bool pinned(const dray__registry *r, const struct entry *owner)
{
    for (const struct pin *pin = r->pins; pin; pin = pin->next)
        if (pin->owner == owner->key)
            return true;
    return false;
}

static void answer_release(dray__registry *r, struct entry *entry)
{
    void *ticket = entry->release_ticket;
    uint32_t count = 0;
    entry->release_ticket = NULL;
    for (const struct pin *pin = r->pins; pin; pin = pin->next)
        count += pin->owner == entry->key;
    dray__writer w = {0};
    dray__put_u32(&w, count);
    for (const struct pin *pin = r->pins; pin; pin = pin->next)
        if (pin->owner == entry->key) {
            dray__put_u64(&w, pin->reader->member);
            dray__put_u64(&w, pin->bytes);
            dray__put_string(&w, pin->reader->name);
        }
    dray__reg_reply(r, ticket, &w, -1);
}

void dray__reg_releases_settle(dray__registry *r)
{
    for (struct entry *entry = r->entries; entry; entry = entry->next)
        if (entry->release_ticket && !dray__reg_gang_read(entry->gang) && !pinned(r, entry))
            answer_release(r, entry);
}

bool dray__reg_release_expired(dray__registry *r, struct entry *entry, void *ticket)
{
    if (entry->release_ticket != ticket)
        return false;
    dray__reg_gang_drop_readers(r, entry->gang);
    answer_release(r, entry);
    return true;
}

/* ---- requests -------------------------------------------------------------------------------- */

/* What was exported is not handed out any more; those who have it mapped are to let it go. */
static void take_back(dray__registry *r, struct entry *entry)
{
    for (uint32_t i = 0; i < entry->region_count; i++) {
        free(entry->regions[i].handle);
        if (entry->regions[i].fd >= 0)
            close(entry->regions[i].fd);
        entry->regions[i] = (struct stored_region){.fd = -1};
    }
    for (struct pin *pin = r->pins; pin; pin = pin->next)
        pin->revoked |= pin->owner == entry->key;
    dray__reg_gang_withdraw(entry);
    entry->gang->set.id = r->next_id++;
    entry->released = true;
}

/* The blocks lie otherwise in regions that are as many as may be; none of them is there yet. */
static int relay(struct entry *entry, uint32_t regions, const void *layout, size_t size,
                 dray_error *error)
{
    dray_layout *checked;
    int rc = dray_layout_unpack(layout, size, &checked, error);
    if (rc)
        return rc;
    dray_layout_free(checked);
    struct stored_region *list = calloc(regions ? regions : 1, sizeof *list);
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

static int regions_move(dray__reg_call *c, dray_error *error)
{
    uint64_t key = dray__get_u64(c->in), token = dray__get_u64(c->in);
    uint32_t regions = dray__get_u32(c->in), to_put = dray__get_u32(c->in);
    size_t size;
    const void *layout = dray__get_blob(c->in, &size);
    struct entry *entry = NULL;
    int rc = dray__reader_finish(c->in, "REGIONS_MOVE", error);
    if (rc == DRAY_OK)
        rc = dray__reg_entry(c, key, DRAY__PUBLISHER, &entry, error);
    if (rc == DRAY_OK && ((!size && regions != entry->region_count) || to_put > regions ||
                          regions > DRAY__REGIONS_MAX))
        rc = dray__fail(error, DRAY_EINVALID,
                        "%" PRIu32 " regions, %" PRIu32 " of them to put; %" PRIu32
                        " were registered",
                        regions, to_put, entry->region_count);
    if (rc == DRAY_OK && entry->gang->broken)
        rc = dray__fail(error, DRAY_ESTALE, "%s: open the publisher again", entry->gang->reason);
    if (rc)
        return rc;
    take_back(c->r, entry);
    entry->released = true;
    rc = size ? relay(entry, regions, layout, size, error) : DRAY_OK;
    if (rc)
        return rc;
    entry->released = false;
    entry->token = token;
    entry->regions_missing = to_put;
    dray__writer w = {0};
    dray__put_u64(&w, entry->gang->set.id);
    dray__reg_reply(c->r, c->ticket, &w, -1);
    return DRAY_OK;
}

static int regions_release(dray__reg_call *c, dray_error *error)
{
    uint64_t key = dray__get_u64(c->in);
    int64_t timeout = dray__get_i64(c->in);
    struct entry *entry = NULL;
    int rc = dray__reader_finish(c->in, "REGIONS_RELEASE", error);
    if (rc == DRAY_OK)
        rc = dray__reg_entry(c, key, DRAY__PUBLISHER, &entry, error);
    if (rc == DRAY_OK && entry->release_ticket)
        rc = dray__fail(error, DRAY_EBUSY, "a release waits already");
    if (rc)
        return rc;
    take_back(c->r, entry);
    entry->release_ticket = c->ticket;
    if (timeout <= 0)
        dray__reg_release_expired(c->r, entry, c->ticket);
    else
        c->r->ops.expire_at(c->r->ops.user, c->ticket, dray__deadline(timeout));
    return DRAY_OK;
}

static int regions_drop(dray__reg_call *c, dray_error *error)
{
    uint64_t key = dray__get_u64(c->in), set = dray__get_u64(c->in);
    struct entry *entry = NULL;
    int rc = dray__reader_finish(c->in, "REGIONS_DROP", error);
    if (rc == DRAY_OK)
        rc = dray__reg_entry(c, key, DRAY__SUBSCRIBER, &entry, error);
    if (rc)
        return rc;
    if (set)
        forget(c->r, entry, set, 0);
    return dray__reg_done(c);
}

static int regions_revoked(dray__reg_call *c, dray_error *error)
{
    uint64_t key = dray__get_u64(c->in);
    struct entry *entry = NULL;
    int rc = dray__reader_finish(c->in, "REGIONS_REVOKED", error);
    if (rc == DRAY_OK)
        rc = dray__reg_entry(c, key, DRAY__SUBSCRIBER, &entry, error);
    if (rc)
        return rc;
    uint32_t count = 0;
    for (const struct pin *pin = c->r->pins; pin; pin = pin->next)
        count += pin->reader == entry && pin->revoked;
    dray__writer w = {0};
    dray__put_u32(&w, count);
    for (const struct pin *pin = c->r->pins; pin; pin = pin->next)
        if (pin->reader == entry && pin->revoked)
            dray__put_u64(&w, pin->set);
    dray__reg_reply(c->r, c->ticket, &w, -1);
    return DRAY_OK;
}

int dray__reg_pins_request(dray__reg_call *c, uint16_t type, bool *known, dray_error *error)
{
    static const struct {
        uint16_t type;
        int (*handle)(dray__reg_call *c, dray_error *error);
    } handlers[] = {
        {DRAY__MSG_REGIONS_MOVE, regions_move},
        {DRAY__MSG_REGIONS_RELEASE, regions_release},
        {DRAY__MSG_REGIONS_DROP, regions_drop},
        {DRAY__MSG_REGIONS_REVOKED, regions_revoked},
    };
    for (size_t i = 0; i < sizeof handlers / sizeof *handlers; i++)
        if (handlers[i].type == type) {
            *known = true;
            return handlers[i].handle(c, error);
        }
    return DRAY_EPROTO;
}
