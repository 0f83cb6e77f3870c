/* The sources of an update: fetches the publishers' layouts (or a checkpoint's), plans (ops.c), and
 * makes the regions reachable. They are made once, and kept until the ranks on either side, or the
 * files, change. */
#include "base/error.h"
#include "net/peer.h"
#include "weights/checkpoint/overlay.h"
#include "weights/delta/delta.h"
#include "weights/mark.h"
#include "weights/placements/prequantised.h"
#include "weights/registry/coverage.h"
#include "weights/registry/registry.h"
#include "weights/server/nccl.h"
#include "weights/sources/upload.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Regions behind the layout's: the delta's, the staging arena's. */
enum { EXTRAS = DRAY__EXTRA_REGIONS };

static void free_regions(dray__source *source)
{
    dray__kept_end(&source->kept, dray__delta_forget);
    dray__event_free(source->mark);
    source->mark = NULL;
    source->arena = NULL;
    uint32_t count = source->layout ? dray_layout_region_count(source->layout) + EXTRAS : 0;
    for (uint32_t i = 0; source->regions && i < count; i++)
        dray_region_free(source->regions[i]);
    free(source->regions);
    source->regions = NULL;
}

void dray__sources_close(dray__sources *s)
{
    dray__kept_end(&s->kept, NULL); /* first, because programs use the regions */
    for (uint32_t i = 0; i < s->count; i++)
        free_regions(&s->sources[i]);
    s->imported = s->cohort_looked = s->ready = false;
    s->next_op = s->next_extra = 0;
}

void dray__source_clear(dray__source *source)
{
    free_regions(source);
    dray__kept_end(&source->kept, NULL);
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
    dray__kept_end(&s->kept, dray__upload_forget);
    s->cohort_looked = s->ready = false;
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
    dray__kept_end(&s->kept, NULL); /* first, because it uses the regions */
    free_cohort(s);
    for (uint32_t i = 0; i < s->count; i++)
        dray__source_clear(&s->sources[i]);
    free(s->sources);
    free_group(s);
    dray_plan_free(s->plan);
    free(s->ops);
    free(s->transform_ops);
    free(s->write_blocks);
    free(s->names);
    dray__sums_free(&s->stored);
    free(s);
}

/* ---- members of a set ------------------------------------------------------------------------ */

static void put_members_request(dray__writer *w, uint64_t key, uint64_t set, uint32_t index)
{
    const dray__sources_asked asked = {
        .key = key, .what = DRAY__SOURCES_MEMBERS, .set = set, .index = index};
    dray__put_fields(w, &dray__sources_asked_fields, &asked);
}

static bool on_gpu(const dray_layout *layout)
{
    for (uint32_t i = 0; i < dray_layout_region_count(layout); i++)
        if (dray_layout_region(layout, i)->kind == DRAY_REGION_CUDA)
            return true;
    return false;
}

static int take_member(const dray__member_told *told, dray__source *out, dray_error *error)
{
    dray__source source = {.member = told->member,
                           .host = told->host,
                           .pid = told->pid,
                           .token = told->token,
                           .mapped = told->mapped,
                           .slot_bytes = told->slot_bytes};
    int rc = dray_layout_unpack(told->layout, told->layout_size, &source.layout, error);
    if (rc)
        return rc;
    source.endpoint = strdup(told->endpoint);
    source.name = strdup(told->name);
    if (!source.endpoint || !source.name) {
        dray_layout_free(source.layout);
        free(source.endpoint);
        free(source.name);
        return dray__nomem(error);
    }
    bool more = told->regions > dray_layout_region_count(source.layout) + (source.slot_bytes != 0);
    source.has_progress =
        more && on_gpu(source.layout); /* or it is a delta, which import_delta finds out */
    source.has_delta = more;
    dray__local *local = dray__local_hold(source.token);
    source.local = local != NULL;
    dray__local_release(local);
    *out = source;
    return DRAY_OK;
}

/* Takes the members of one reply. The first is number *next of `count`. The reply may have more
 * members than wanted. */
static int get_members(dray__reader *r, dray__source *sources, uint32_t count, uint32_t *next,
                       dray_error *error)
{
    dray__members_told told;
    dray__arena texts = {0};
    dray__get_fields(r, &texts, &dray__members_told_fields, &told);
    int rc = dray__reader_finish(r, "UPDATE_SOURCES", error);
    if (rc == DRAY_OK && told.count == 0)
        rc = dray__fail(error, DRAY_EPROTO, "UPDATE_SOURCES: an answer without members");
    for (uint32_t i = 0; rc == DRAY_OK && i < told.count && *next < count; i++) {
        rc = take_member(&told.items[i], &sources[*next], error);
        *next += rc == DRAY_OK;
    }
    dray__arena_free(&texts);
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

/* ---- sources --------------------------------------------------------------------------------- */

static dray__cuda_device *device_of(const dray__destination *destination)
{
    for (uint32_t i = 0; i < dray_layout_region_count(destination->layout); i++)
        if (destination->regions[i] &&
            dray_region_get_kind(destination->regions[i]) == DRAY_REGION_CUDA)
            return destination->regions[i]->device;
    return NULL;
}

/* Makes empty sources, of either kind. */
static dray__sources *sources_new(uint32_t count, uint64_t group_set,
                                  const dray__destination *destination)
{
    dray__sources *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->sources = calloc((size_t)count + 1, sizeof *s->sources);
    s->group = calloc((size_t)destination->world + 1, sizeof *s->group);
    s->host = destination->host;
    s->device = device_of(destination);
    s->group_set = group_set;
    s->group_count = destination->world;
    if (s->sources && s->group)
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
    dray__source *from = &s->sources[0];
    s->wanted = s->count = 1;
    from->host = destination->host;
    from->name = strdup(path);
    dray__overlay *overlay = NULL;
    int rc = from->name ? dray__checkpoint_layout(path, &from->layout, &overlay, error)
                        : dray__nomem(error);
    if (rc == DRAY_OK && overlay)
        rc = dray__kept_add(&from->kept, dray__overlay_forget, overlay, error);
    if (rc)
        dray__sources_free(s);
    else
        *out = s;
    return rc;
}

int dray__sources_staged(const dray__destination *destination, dray_region **staging,
                         dray__sources **out, dray_error *error)
{
    dray__destination alone = *destination; /* other ranks of the group commit their own parts */
    alone.rank = 0;
    alone.world = 1;
    dray__sources *s = sources_new(1, 0, &alone);
    if (!s)
        return dray__nomem(error);
    dray__source *from = &s->sources[0];
    s->wanted = s->count = 1;
    from->member = destination->member;
    from->host = destination->host;
    from->name = strdup("staging");
    int rc = from->name ? dray__layout_in(destination->layout, DRAY_REGION_HOST, staging,
                                          &from->layout, error)
                        : dray__nomem(error);
    if (rc == DRAY_OK)
        rc = dray__sources_prepare(s, &alone, error);
    if (rc) {
        dray__sources_free(s);
        return rc;
    }
    from->regions = staging;
    s->imported = true;
    *out = s;
    return DRAY_OK;
}

int dray__sources_disk_sums(dray__sources *s, dray_error *error)
{
    dray__sums_free(&s->stored);
    const dray__source *from = &s->sources[0];
    return dray__overlay_sums(dray__overlay_of(from), from->layout, &s->stored, error);
}

bool dray__sources_disk_same(const dray__sources *s, const char *path)
{
    const dray__source *from = &s->sources[0];
    dray_layout *layout;
    dray__overlay *overlay;
    if (strcmp(from->name, path) != 0 || dray__overlay_of(from) ||
        dray__checkpoint_layout(path, &layout, &overlay, NULL))
        return false; /* changed files are read again */
    bool whole = !overlay;
    dray__overlay_free(overlay);
    void *now = NULL, *then = NULL;
    size_t size = 0, size_then = 0;
    bool same = whole && dray_layout_pack(layout, &now, &size, NULL) == DRAY_OK &&
                dray_layout_pack(from->layout, &then, &size_then, NULL) == DRAY_OK &&
                size == size_then && memcmp(now, then, size) == 0;
    free(now);
    free(then);
    dray_layout_free(layout);
    return same;
}

/* ---- reaching the regions ------------------------------------------------------------------- */

/* Maps a region. GPU memory is mapped for the GPU that reads it. */
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

/* Opens a mark. Its GPU need not be visible to this process. */
static int open_mark(const dray_handle *handle, dray__cuda_device *device, dray__event **out,
                     dray_error *error)
{
    if (*out || dray__event_import(handle->device, handle->event, out, NULL) == DRAY_OK)
        return DRAY_OK;
    int rc = dray__event_import(device ? device->uuid : NULL, handle->event, out, error);
    return rc ? dray__fail_prefix(error, rc, "the fence of a publisher without checksums: ") : rc;
}

/* Without its mark the region is not kept: the next update would find it, and not wait for the
 * publisher's fence. */
static int get_region(dray__reply *reply, dray__cuda_device *device, dray_region **out,
                      dray__event **mark, dray_error *error)
{
    dray_region *region = NULL;
    dray__region_given told;
    dray__get_fields(&reply->payload, NULL, &dray__handle_told_fields, &told);
    dray_handle handle = DRAY_HANDLE_INIT;
    int rc = dray__reader_finish(&reply->payload, "REGION_GET", error);
    if (rc == DRAY_OK)
        rc = dray_handle_unpack(told.handle, told.handle_size, &handle, error);
    bool bare = rc == DRAY_OK && handle.kind == DRAY_REGION_CUDA && !reply->fd_count;
    if (rc == DRAY_OK && !bare && reply->fd_count != 1)
        rc = dray__fail(error, DRAY_EPROTO, "a region came with %" PRIu32 " descriptors, not 1",
                        reply->fd_count);
    if (rc == DRAY_OK)
        rc = import(&handle, bare ? -1 : reply->fds[0], device, &region, error);
    static const uint8_t none[sizeof handle.event];
    if (rc == DRAY_OK && mark && memcmp(handle.event, none, sizeof none) != 0)
        rc = open_mark(&handle, device, mark, error);
    if (rc)
        dray_region_free(region);
    else
        *out = region;
    for (uint32_t i = 0; i < reply->fd_count; i++)
        close(reply->fds[i]);
    return rc;
}

/* Takes a region from a reply, and checks its size, because GPUs would read beyond the end of a
 * region that is smaller than its layout. */
static int take_region(dray__reply *reply, dray__source *source, uint32_t index,
                       dray__cuda_device *device, dray__event **mark, dray_error *error)
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

/* Takes a region of a member of the cohort: memory, or, behind the layout's, its progress. */
static bool take_of_member(dray__sources *s, dray__reply *reply)
{
    dray__source *member = &s->cohort[s->asked_source];
    return take_region(reply, member, s->asked_region, s->device, NULL, NULL) == DRAY_OK &&
           (s->asked_region < dray_layout_region_count(member->layout) ||
            dray__progress_is(member->regions[s->asked_region]));
}

/* Makes a region reachable. Returns DRAY_EAGAIN when the coordinator must be asked for it. */
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
            dray__overlay_attach(dray__overlay_of(source), region, source->regions[region]);
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

/* Imports the delta's region in the same way. It is not needed for a publisher in this process, nor
 * for one from which no region is read. */
static int import_delta(dray__source *source, uint64_t host, dray_error *error)
{
    uint32_t region = dray_layout_region_count(source->layout);
    if (!source->has_delta || source->local || source->host != host || !source->mapped ||
        !source->regions || dray__delta_of(source))
        return DRAY_OK;
    if (!source->regions[region])
        return DRAY_EAGAIN;
    if (source->has_progress && !dray__delta_is(source->regions[region]))
        return DRAY_OK;
    dray__delta_view *view;
    int rc = dray__delta_open(source->layout, source->regions[region], &view, error);
    return rc ? rc : dray__kept_add(&source->kept, dray__delta_forget, view, error);
}

/* Imports the arena, which is needed for regions that are not shared. */
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

/* ---- the steps: each asks the coordinator at most one thing at a time ------------------------ */

static int ask(dray__sources *s, dray__channel *channel, uint16_t type, dray__writer *w,
               dray_error *error)
{
    int rc = dray__call_start(channel, type, w, NULL, 0, error);
    dray__writer_free(w);
    s->asked = rc == DRAY_OK ? type : 0;
    return rc;
}

/* Returns the next rank of the group to fetch the layout of; the group's size when there is none.
 */
static uint32_t group_next(const dray__sources *s)
{
    uint32_t next = 0;
    while (next < s->group_count && s->group[next].layout)
        next++;
    return next;
}

/* Decides how this rank reaches the source. */
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
        free_cohort(s); /* a member has left: each rank reads for itself */
        return DRAY_OK;
    }
    if (type == DRAY__MSG_REGION_GET && s->asked_member) {
        if (rc || !take_of_member(s, &reply))
            dray__upload_lose(dray__upload_of(s), s->asked_source);
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
    const dray__region_asked asked = {key, member ? s->cohort_set : s->source_set, source, region};
    dray__put_fields(&w, &dray__region_asked_fields, &asked);
    s->asked_member = member;
    s->asked_source = source;
    s->asked_region = region;
    return ask(s, channel, DRAY__MSG_REGION_GET, &w, error);
}

/* Imports the memory and the progress of a member of the cohort. Returns DRAY_EAGAIN when the
 * coordinator must be asked for *region. */
static int next_of_member(dray__sources *s, uint32_t index, uint32_t *region, dray_error *error)
{
    dray__source *member = &s->cohort[index];
    uint32_t count = dray_layout_region_count(member->layout);
    if (!dray__upload_wants(dray__upload_of(s), index))
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
    for (; dray__upload_of(s) && s->next_member < s->cohort_count; s->next_member++) {
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
            if (rc) { /* a plan without all of its ops must not be kept */
                dray_plan_free(s->plan);
                s->plan = NULL;
            }
        }
        if (rc)
            return rc;
    }
    bool looks = !s->cohort_looked && s->cohort_count >= 2 && s->device;
    s->cohort_looked = true;
    return looks ? dray__upload_find(s, destination, error) : DRAY_OK;
}

int dray__sources_import(dray__sources *s, dray__channel *channel, uint64_t key, dray_error *error)
{
    while (!s->imported || s->asked || (dray__upload_of(s) && s->next_member < s->cohort_count)) {
        int rc = s->asked ? take_answer(s, channel, error) : DRAY_OK;
        if (rc == DRAY_OK)
            rc = import_next(s, channel, key, error);
        if (rc)
            return rc;
        s->imported = s->next_op == s->op_count && s->next_extra == s->count;
    }
    s->ready = true;
    return DRAY_OK;
}
