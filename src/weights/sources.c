/* What an update reads: the publishers' layouts (or a checkpoint's), the plan (ops.c), and the
 * regions made reachable. Made once and kept until the ranks on either side, or the files, change.
 */
#include "base/error.h"
#include "control/coverage.h"
#include "control/registry.h"
#include "weights/delta.h"
#include "weights/fan.h"
#include "weights/mark.h"
#include "weights/nccl.h"
#include "weights/overlay.h"
#include "weights/peer.h"
#include "weights/program.h"
#include "weights/vote_table.h"
#include "weights/wired.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Regions behind the layout's: that of a delta, that of a staging arena. */
enum { EXTRAS = 2 };

static void free_regions(dray__source *source)
{
    dray__delta_close(source->delta);
    dray_event_free(source->mark);
    source->mark = NULL;
    source->delta = NULL;
    source->arena = NULL;
    uint32_t count = source->layout ? dray_layout_region_count(source->layout) + EXTRAS : 0;
    for (uint32_t i = 0; source->regions && i < count; i++)
        dray_region_free(source->regions[i]);
    free(source->regions);
    source->regions = NULL;
}

void dray__sources_close(dray__sources *s)
{
    dray__programs_clear(s->programs); /* they read the regions */
    dray__fan_free(s->fan);
    s->fan = NULL;
    s->fan_sought = false;
    for (uint32_t i = 0; i < s->count; i++)
        free_regions(&s->sources[i]);
    s->imported = false;
    s->next_op = s->next_extra = 0;
}

void dray__source_clear(dray__source *source)
{
    free_regions(source);
    dray__peer_free(source->peer);
    dray__nccl_link_free(source->nccl);
    dray__overlay_free(source->overlay);
    dray_layout_free(source->layout);
    free(source->name);
    free(source->endpoint);
    *source = (dray__source){0};
}

static void free_group(dray__sources *s)
{
    for (uint32_t i = 0; s->group && i < s->group_count; i++)
        if (s->group[i].layout)
            dray__source_clear(&s->group[i]);
    free(s->group);
    s->group = NULL;
}

static void free_cohort(dray__sources *s)
{
    dray__fan_free(s->fan);
    s->fan = NULL;
    s->fan_sought = false;
    s->next_member = 0;
    for (uint32_t i = 0; i < s->cohort_count; i++)
        dray__source_clear(&s->cohort[i]);
    free(s->cohort);
    s->cohort = NULL;
    s->cohort_set = 0;
    s->cohort_count = s->cohort_wanted = 0;
}

int dray__sources_cohort(dray__sources *s, uint64_t set, uint32_t count, dray_error *error)
{
    if (set == s->cohort_set && s->cohort_count == s->cohort_wanted)
        return DRAY_OK;
    free_cohort(s);
    if (!set)
        return DRAY_OK;
    s->cohort = calloc(count, sizeof *s->cohort);
    if (!s->cohort)
        return dray__nomem(error);
    s->cohort_set = set;
    s->cohort_wanted = count;
    return DRAY_OK;
}

void dray__sources_free(dray__sources *s)
{
    if (!s)
        return;
    dray__programs_clear(s->programs);
    free(s->programs);
    dray__vote_table_free(s->table);
    free_cohort(s); /* what is shared reads the sources' regions */
    for (uint32_t i = 0; i < s->count; i++)
        dray__source_clear(&s->sources[i]);
    free(s->sources);
    free_group(s);
    dray_plan_free(s->plan);
    free(s->ops);
    free(s->transform_ops);
    free(s->write_blocks);
    free(s->names);
    free(s->path);
    free(s->disk);
    dray__sums_free(&s->stored);
    free(s);
}

/* ---- members of a set --------------------------------------------------------------------------
 */

static void put_members_request(dray__writer *w, uint64_t key, uint64_t set, uint32_t index)
{
    dray__put_u64(w, key);
    dray__put_u8(w, DRAY__SOURCES_MEMBERS);
    dray__put_i64(w, 0);
    dray__put_u64(w, set);
    dray__put_u32(w, index);
}

static bool on_gpu(const dray_layout *layout)
{
    for (uint32_t i = 0; i < dray_layout_region_count(layout); i++)
        if (dray_layout_region(layout, i)->kind == DRAY_REGION_CUDA)
            return true;
    return false;
}

static int get_member(dray__reader *r, dray__source *out, dray_error *error)
{
    dray__source source = {0};
    dray__get_u64(r); /* key */
    source.member = dray__get_u64(r);
    source.host = dray__get_u64(r);
    source.pid = dray__get_i64(r);
    source.token = dray__get_u64(r);
    source.endpoint = dray__get_string(r, 256);
    source.mapped = dray__get_u8(r) != 0;
    source.name = dray__get_string(r, 256);
    size_t size;
    const void *layout = dray__get_blob(r, &size);
    uint32_t regions = dray__get_u32(r);
    source.slot_bytes = dray__get_u64(r);
    int rc = r->failed ? dray__reader_finish(r, "UPDATE_SOURCES", error)
                       : dray_layout_unpack(layout, size, &source.layout, error);
    if (rc) {
        free(source.name);
        free(source.endpoint);
        return rc;
    }
    bool more = regions > dray_layout_region_count(source.layout) + (source.slot_bytes != 0);
    source.has_board =
        more && on_gpu(source.layout); /* or a delta: that is seen when it is there */
    source.has_delta = more;
    dray__local *local = dray__local_hold(source.token);
    source.local = local != NULL;
    dray__local_release(local);
    *out = source;
    return DRAY_OK;
}

/* Takes the members that one reply has, the first being `next` of `count`. It may have more than
 * are wanted. */
static int get_members(dray__reader *r, dray__source *sources, uint32_t count, uint32_t *next,
                       dray_error *error)
{
    uint32_t got = dray__get_u32(r);
    if (!r->failed && got == 0)
        return dray__fail(error, DRAY_EPROTO, "UPDATE_SOURCES: an answer without members");
    uint32_t last = got > count - *next ? count : *next + got;
    int rc = r->failed ? dray__reader_finish(r, "UPDATE_SOURCES", error) : DRAY_OK;
    while (*next < last && rc == DRAY_OK) {
        rc = get_member(r, &sources[*next], error);
        *next += rc == DRAY_OK;
    }
    return rc;
}

int dray__members_fetch(dray__channel *channel, uint64_t key, uint64_t set, dray__source *sources,
                        uint32_t count, int64_t deadline_ns, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t next = 0; next < count && rc == DRAY_OK;) {
        dray__writer w = {0};
        dray__reply reply;
        put_members_request(&w, key, set, next);
        rc = dray__call(channel, DRAY__MSG_UPDATE_SOURCES, &w, NULL, 0, deadline_ns, &reply, error);
        dray__writer_free(&w);
        if (rc == DRAY_OK)
            rc = get_members(&reply.payload, sources, count, &next, error);
    }
    return rc;
}

/* ---- what is read ---------------------------------------------------------------------------- */

static dray__cuda_device *device_of(const dray__destination *destination)
{
    for (uint32_t i = 0; i < dray_layout_region_count(destination->layout); i++)
        if (destination->regions[i] &&
            dray_region_get_kind(destination->regions[i]) == DRAY_REGION_CUDA)
            return destination->regions[i]->device;
    return NULL;
}

/* What both kinds of sources begin with. */
static dray__sources *sources_new(uint32_t count, uint64_t group_set,
                                  const dray__destination *destination)
{
    dray__sources *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->sources = calloc((size_t)count + 1, sizeof *s->sources);
    s->group = calloc((size_t)destination->world + 1, sizeof *s->group);
    s->programs = calloc(1, sizeof *s->programs);
    s->table = dray__vote_table_new();
    s->host = destination->host;
    s->device = device_of(destination);
    s->group_set = group_set;
    s->group_count = destination->world;
    if (s->sources && s->group && s->programs && s->table)
        return s;
    dray__sources_free(s);
    return NULL;
}

int dray__sources_live(uint64_t source_set, uint32_t source_count, uint64_t group_set,
                       const dray__destination *destination, dray__sources **out, dray_error *error)
{
    dray__sources *s = sources_new(source_count, group_set, destination);
    if (!s)
        return dray__nomem(error);
    s->source_set = source_set;
    s->wanted = source_count;
    *out = s;
    return DRAY_OK;
}

int dray__sources_disk(const char *path, uint64_t group_set, const dray__destination *destination,
                       dray__sources **out, dray_error *error)
{
    dray__sources *s = sources_new(1, group_set, destination);
    if (!s)
        return dray__nomem(error);
    s->path = strdup(path);
    int rc = s->path ? dray__checkpoint_layout(path, &s->sources[0].layout, &s->sources[0].overlay,
                                               error)
                     : dray__nomem(error);
    if (rc == DRAY_OK) {
        s->wanted = s->count = 1;
        s->sources[0].host = destination->host;
        s->sources[0].name = strdup(path);
        rc = s->sources[0].name
                 ? dray_layout_pack(s->sources[0].layout, &s->disk, &s->disk_size, error)
                 : dray__nomem(error);
    }
    if (rc) {
        dray__sources_free(s);
        return rc;
    }
    *out = s;
    return DRAY_OK;
}

int dray__sources_disk_sums(dray__sources *s, dray_error *error)
{
    dray__sums_free(&s->stored);
    const dray__source *from = &s->sources[0];
    return from->overlay ? dray__overlay_sums(from->overlay, from->layout, &s->stored, error)
                         : dray__stored_sums(from->layout, &s->stored, error);
}

bool dray__sources_disk_same(const dray__sources *s, const char *path)
{
    if (!s->path || strcmp(s->path, path) != 0)
        return false;
    dray_layout *layout;
    dray__overlay *overlay;
    if (s->sources[0].overlay || dray__checkpoint_layout(path, &layout, &overlay, NULL))
        return false; /* what changed is read anew */
    bool whole = !overlay;
    dray__overlay_free(overlay);
    void *packed = NULL;
    size_t size = 0;
    bool same = whole && dray_layout_pack(layout, &packed, &size, NULL) == DRAY_OK &&
                size == s->disk_size && memcmp(packed, s->disk, size) == 0;
    free(packed);
    dray_layout_free(layout);
    return same;
}

/* ---- reaching the regions ------------------------------------------------------------------- */

/* GPU memory is mapped for the GPU that is to read it. */
static int import(const dray_handle *handle, int fd, dray__cuda_device *device, dray_region **out,
                  dray_error *error)
{
    bool enters = device && handle->kind != DRAY_REGION_SHARED;
    int rc = enters ? dray__cuda_enter(device, error) : DRAY_OK;
    if (rc)
        return rc;
    rc = dray_region_import(handle, fd, 0, out, error);
    if (enters)
        dray__cuda_leave();
    return rc;
}

/* Which GPU's it is need not be seen here. */
static int open_mark(const dray_handle *handle, dray__cuda_device *device, dray_event **out,
                     dray_error *error)
{
    if (*out || dray_event_import(handle->device, handle->event, out, NULL) == DRAY_OK)
        return DRAY_OK;
    int rc = dray_event_import(device ? device->uuid : NULL, handle->event, out, error);
    return rc ? dray__fail_prefix(error, rc, "the fence of a publisher without checksums: ") : rc;
}

static int get_region(dray__reply *reply, dray__cuda_device *device, dray_region **out,
                      dray_event **mark, dray_error *error)
{
    size_t size;
    const void *packed = dray__get_blob(&reply->payload, &size);
    dray_handle handle = DRAY_HANDLE_INIT;
    int rc = dray__reader_finish(&reply->payload, "REGION_GET", error);
    if (rc == DRAY_OK)
        rc = dray_handle_unpack(packed, size, &handle, error);
    bool bare = rc == DRAY_OK && handle.kind == DRAY_REGION_CUDA && !reply->fd_count;
    if (rc == DRAY_OK && !bare && reply->fd_count != 1)
        rc = dray__fail(error, DRAY_EPROTO, "a region came with %" PRIu32 " descriptors, not 1",
                        reply->fd_count);
    if (rc == DRAY_OK)
        rc = import(&handle, bare ? -1 : reply->fds[0], device, out, error);
    static const uint8_t none[sizeof handle.event];
    if (rc == DRAY_OK && mark && memcmp(handle.event, none, sizeof none) != 0)
        rc = open_mark(&handle, device, mark, error);
    for (uint32_t i = 0; i < reply->fd_count; i++)
        close(reply->fds[i]);
    return rc;
}

/* What is reached as less than its layout says would be read beyond its end: GPUs look at no
 * bounds. */
static int take_region(dray__reply *reply, dray__source *source, uint32_t index,
                       dray__cuda_device *device, dray_event **mark, dray_error *error)
{
    dray_region **region = &source->regions[index];
    int rc = get_region(reply, device, region, mark, error);
    uint64_t said = index < dray_layout_region_count(source->layout)
                        ? dray_layout_region(source->layout, index)->bytes
                        : 0;
    if (rc || dray_region_bytes(*region) >= said)
        return rc;
    rc = dray__fail(error, DRAY_EPROTO,
                    "region %" PRIu32 " of %s has %" PRIu64 " bytes, its layout says %" PRIu64,
                    index, source->name, dray_region_bytes(*region), said);
    dray_region_free(*region);
    *region = NULL;
    return rc;
}

bool dray__source_remote(const dray__source *source, uint32_t region, uint64_t host)
{
    int32_t kind = dray_layout_region(source->layout, region)->kind;
    return !source->local && source->endpoint && source->endpoint[0] &&
           (source->host != host || kind == DRAY_REGION_HOST ||
            (kind == DRAY_REGION_FILE ? source->staged : !source->mapped));
}

/* Makes a region reachable, unless the coordinator must be asked for it: DRAY_EAGAIN. */
static int import_one(dray__source *source, uint32_t region, uint64_t host, dray_error *error)
{
    const dray_region_info *info = dray_layout_region(source->layout, region);
    if (!source->regions) {
        uint32_t regions = dray_layout_region_count(source->layout);
        source->regions = calloc((size_t)regions + EXTRAS, sizeof(dray_region *));
        if (!source->regions)
            return dray__nomem(error);
    }
    if (source->regions[region] || source->local || dray__source_remote(source, region, host))
        return DRAY_OK;
    if (source->host != host)
        return dray__fail(
            error, DRAY_EUNSUPPORTED,
            "publisher %s is on another host and has no data server: let it reach the "
            "coordinator by TCP, or set DRAY_DATA_ADDRESS to an address of its host",
            source->name);
    if (info->kind == DRAY_REGION_FILE) {
        int rc = dray_region_open(info->name, 0, &source->regions[region], error);
        if (!rc)
            dray__overlay_attach(source->overlay, region, source->regions[region]);
        return rc;
    }
    if (info->kind == DRAY_REGION_HOST)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "region %s of publisher %s is %s memory of another process: allocate it "
                          "as a shared region",
                          info->name, source->name,
                          dray_region_kind_name((dray_region_kind)info->kind));
    return DRAY_EAGAIN;
}

/* The region behind those of the layout, in the same way; so is the arena's. A publisher of this
 * process is read as it is, and one of which nothing is read needs none. */
static int import_delta(dray__source *source, uint64_t host, dray_error *error)
{
    uint32_t region = dray_layout_region_count(source->layout);
    if (!source->has_delta || source->local || source->host != host || !source->mapped ||
        !source->regions || source->delta)
        return DRAY_OK;
    if (!source->regions[region])
        return DRAY_EAGAIN;
    if (source->has_board && !dray__delta_is(source->regions[region]))
        return DRAY_OK;
    return dray__delta_open(source->layout, source->regions[region], &source->delta, error);
}

/* Needed where something is not shared. */
static int import_arena(dray__source *source, dray_error *error)
{
    uint32_t region = dray_layout_region_count(source->layout) + source->has_delta;
    if (!source->staged || !source->regions || source->arena)
        return DRAY_OK;
    if (!source->regions[region])
        return DRAY_EAGAIN;
    if (dray_region_bytes(source->regions[region]) < source->slot_bytes ||
        !dray_region_base(source->regions[region]))
        return dray__fail(error, DRAY_EFORMAT,
                          "publisher %s has slots of %" PRIu64 " bytes in an arena of %" PRIu64,
                          source->name, source->slot_bytes,
                          dray_region_bytes(source->regions[region]));
    source->arena = source->regions[region];
    return DRAY_OK;
}

/* ---- the steps: each asks the coordinator at most one thing at a time -------------------------
 */

static int ask(dray__sources *s, dray__channel *channel, uint16_t type, dray__writer *w,
               dray_error *error)
{
    int rc = dray__call_start(channel, type, w, NULL, 0, error);
    dray__writer_free(w);
    s->asked = rc == DRAY_OK ? type : 0;
    return rc;
}

/* The next rank of the group whose layout is needed; all of them: the group's size. */
static uint32_t group_next(const dray__sources *s)
{
    uint32_t next = 0;
    while (next < s->group_count && s->group[next].layout)
        next++;
    return next;
}

/* How the source is reached, from here. */
static void settle(const dray__sources *s, dray__source *source, const dray__channel *channel)
{
    source->local &= source->host == s->host;
    source->staged = source->slot_bytes && !source->local && source->host == s->host &&
                     source->mapped && dray__channel_passes_fds(channel);
}

static int take_answer(dray__sources *s, dray__channel *channel, dray_error *error)
{
    dray__reply reply;
    int rc = dray__call_poll(channel, &reply, error);
    if (rc == DRAY_EAGAIN)
        return rc;
    uint16_t type = s->asked;
    s->asked = 0;
    if (rc && s->plan && type == DRAY__MSG_UPDATE_SOURCES) {
        free_cohort(s); /* one of them left: everybody reads for himself */
        return DRAY_OK;
    }
    if (type == DRAY__MSG_REGION_GET && s->asked_member) {
        dray__source *member = &s->cohort[s->asked_source];
        if (rc || take_region(&reply, member, s->asked_region, s->device, NULL, NULL))
            dray__fan_lose(s->fan, s->asked_source);
        return DRAY_OK;
    }
    if (rc)
        return rc;
    if (type == DRAY__MSG_REGION_GET) {
        dray__source *source = &s->sources[s->asked_source];
        return take_region(&reply, source, s->asked_region, s->device, &source->mark, error);
    }
    if (s->count < s->wanted) {
        rc = get_members(&reply.payload, s->sources, s->wanted, &s->count, error);
        for (uint32_t i = 0; i < s->count; i++)
            settle(s, &s->sources[i], channel);
        return rc;
    }
    if (s->plan)
        return get_members(&reply.payload, s->cohort, s->cohort_wanted, &s->cohort_count, error);
    uint32_t next = group_next(s);
    return get_members(&reply.payload, s->group, s->group_count, &next, error);
}

static int ask_region(dray__sources *s, dray__channel *channel, uint64_t key, bool member,
                      uint32_t source, uint32_t region, dray_error *error)
{
    dray__writer w = {0};
    dray__put_u64(&w, key);
    dray__put_u64(&w, member ? s->cohort_set : s->source_set);
    dray__put_u32(&w, source);
    dray__put_u32(&w, region);
    s->asked_member = member;
    s->asked_source = source;
    s->asked_region = region;
    return ask(s, channel, DRAY__MSG_REGION_GET, &w, error);
}

/* DRAY_EAGAIN: of this member of the cohort, `region` is needed still: its memory, its board. */
static int next_of_member(dray__sources *s, uint32_t index, uint32_t *region, dray_error *error)
{
    dray__source *member = &s->cohort[index];
    uint32_t count = dray_layout_region_count(member->layout);
    if (!dray__fan_wants(s->fan, index))
        return DRAY_OK;
    if (!member->regions)
        member->regions = calloc((size_t)count + EXTRAS, sizeof(dray_region *));
    if (!member->regions)
        return dray__nomem(error);
    for (*region = 0; *region <= count; ++*region)
        if (!member->regions[*region] &&
            (*region == count ||
             dray_layout_region(member->layout, *region)->kind == DRAY_REGION_CUDA))
            return DRAY_EAGAIN;
    return DRAY_OK;
}

static int import_next(dray__sources *s, dray__channel *channel, uint64_t key, dray_error *error)
{
    for (; s->next_op < s->op_count; s->next_op++) {
        const dray_copy *copy = &s->ops[s->next_op].copy;
        int rc = import_one(&s->sources[copy->source], copy->source_region, s->host, error);
        if (rc == DRAY_OK)
            continue;
        if (rc != DRAY_EAGAIN)
            return rc;
        return ask_region(s, channel, key, false, copy->source, copy->source_region, error);
    }
    for (; s->next_extra < s->count; s->next_extra++) {
        dray__source *source = &s->sources[s->next_extra];
        uint32_t region = dray_layout_region_count(source->layout);
        int rc = import_delta(source, s->host, error);
        if (rc == DRAY_OK) {
            region += source->has_delta;
            rc = import_arena(source, error);
        }
        if (rc == DRAY_OK)
            continue;
        if (rc != DRAY_EAGAIN)
            return rc;
        return ask_region(s, channel, key, false, s->next_extra, region, error);
    }
    for (; s->fan && s->next_member < s->cohort_count; s->next_member++) {
        uint32_t region = 0;
        int rc = next_of_member(s, s->next_member, &region, error);
        if (rc == DRAY_EAGAIN)
            return ask_region(s, channel, key, true, s->next_member, region, error);
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

int dray__sources_plan(dray__sources *s, dray__channel *channel, uint64_t key,
                       const dray__destination *destination, dray_error *error)
{
    while (!s->plan || s->cohort_count < s->cohort_wanted || s->asked) {
        int rc = s->asked ? take_answer(s, channel, error) : DRAY_OK;
        if (rc)
            return rc;
        if (s->plan && s->cohort_count == s->cohort_wanted)
            break;
        uint32_t next = s->plan || s->group_count < 2 ? s->group_count : group_next(s);
        dray__writer w = {0};
        if (s->plan) {
            put_members_request(&w, key, s->cohort_set, s->cohort_count);
            rc = ask(s, channel, DRAY__MSG_UPDATE_SOURCES, &w, error);
        } else if (s->count < s->wanted) {
            put_members_request(&w, key, s->source_set, s->count);
            rc = ask(s, channel, DRAY__MSG_UPDATE_SOURCES, &w, error);
        } else if (next < s->group_count) {
            put_members_request(&w, key, s->group_set, next);
            rc = ask(s, channel, DRAY__MSG_UPDATE_SOURCES, &w, error);
        } else {
            rc = dray__sources_prepare(s, destination, error);
            free_group(s);
            if (rc) { /* without all of its ops it is no plan to come back to */
                dray_plan_free(s->plan);
                s->plan = NULL;
            }
        }
        if (rc)
            return rc;
    }
    if (s->fan_sought)
        return DRAY_OK;
    s->fan_sought = true;
    return dray__fan_new(s, destination, &s->fan, error);
}

int dray__sources_import(dray__sources *s, dray__channel *channel, uint64_t key, dray_error *error)
{
    while (!s->imported || s->asked || (s->fan && s->next_member < s->cohort_count)) {
        int rc = s->asked ? take_answer(s, channel, error) : DRAY_OK;
        if (rc == DRAY_OK)
            rc = import_next(s, channel, key, error);
        if (rc)
            return rc;
        s->imported = s->next_op == s->op_count && s->next_extra == s->count;
    }
    return DRAY_OK;
}
