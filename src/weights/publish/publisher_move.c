/* Moves a publisher's memory, gives it another layout, or takes it back from its readers. */
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "memory/region.h"
#include "weights/publish/publisher.h"
#include "weights/publish/snapshot.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Frees the jobs that sum, which were compiled for the present regions. */
static void forget_sums(dray_publisher *p)
{
    dray__source_sums_free(p->gpu_sums);
    p->gpu_sums = NULL;
}

static int check_move(dray_publisher *p, dray_region *const *regions, dray_error *error)
{
    if (!p || !regions)
        return dray__fail(error, DRAY_EINVALID, "publisher and regions must be given");
    if (p->delta)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "a publisher that offers deltas cannot move: close it and open it again");
    return p->origin ? DRAY_OK : dray__regions_check(p->layout, regions, error);
}

/* Exports the regions again, under a new set. */
static int export_anew(dray_publisher *p, dray_error *error)
{
    int64_t deadline = dray__publisher_deadline(p, DRAY_WAIT_DEFAULT);
    int ready = dray__publisher_ensure(p, deadline, error);
    if (ready)
        return ready;
    const dray__moving message = {.key = p->key,
                                  .token = p->token,
                                  .regions = dray__publisher_regions(p),
                                  .to_put = dray__publisher_shared(p),
                                  .layout = p->packed.data,
                                  .layout_size = p->relaid ? p->packed.size : 0};
    int rc = dray__ask(p->channel, DRAY__MSG_REGIONS_MOVE, &dray__moving_fields, &message, deadline,
                       NULL, &dray__u64_fields, &p->set, error);
    if (rc == DRAY_OK)
        p->relaid = false;
    return rc ? rc : dray__publisher_put(p, deadline, error);
}

static void hide(dray_publisher *p)
{
    if (p->local)
        dray__local_remove(p->token);
    p->local = false;
}

/* Offers the regions to readers again, after they were released. A snapshot is allocated again. */
static int show_anew(dray_publisher *p, dray_error *error)
{
    forget_sums(p);
    p->token = dray__local_token();
    int rc = p->origin ? dray__snapshot_make_regions(p, error)
                       : dray__publisher_note(p, p->regions, error);
    if (rc == DRAY_OK)
        rc = dray__publisher_offer(p, error);
    if (rc == DRAY_OK)
        rc = export_anew(p, error);
    p->released = rc != DRAY_OK;
    if (rc)
        hide(p);
    if (rc && p->origin) /* the next move allocates it again */
        dray__snapshot_free_regions(p);
    return rc;
}

int dray_publisher_move(dray_publisher *p, dray_region *const *regions, dray_error *error)
{
    int rc = check_move(p, regions, error);
    if (rc == DRAY_OK)
        rc = dray__gate_join(&p->gate, error);
    if (rc == DRAY_OK)
        rc = dray__publisher_sums_end(p, dray__publisher_deadline(p, DRAY_WAIT_DEFAULT), error);
    if (rc)
        return rc;
    uint32_t count = dray_layout_region_count(p->layout);
    if (p->origin) { /* readers map the snapshot, which does not move */
        rc = dray__snapshot_move(p, regions, error);
        if (rc == DRAY_OK)
            rc = dray__publisher_note(p, regions, error);
        return rc || !p->released ? rc : show_anew(p, error);
    }
    hide(p);
    for (uint32_t i = 0; i < count; i++)
        p->regions[i] = regions[i];
    return show_anew(p, error);
}

/* Checks that every element of b is in a. */
static int within(const dray_layout *a, const dray_layout *b, dray_error *error)
{
    const dray__holder both[] = {{.layout = a}, {.layout = b}};
    dray__pieces more = {0};
    int rc = dray__pieces_make(both, 1, &more, error);
    for (uint32_t i = 0; i < more.count && rc == DRAY_OK; i++)
        if (more.items[i].owned && dray__rect_elements(&more.items[i].rect)) {
            uint32_t tensor = dray_layout_block(b, more.items[i].block)->tensor;
            rc = dray__fail(error, DRAY_EINVALID,
                            "tensor %s: one of the two layouts has elements that the other has not "
                            "(open the publisher again)",
                            dray_layout_tensor(b, tensor)->name);
        }
    dray__pieces_free(&more);
    return rc;
}

static int check_relaid(const dray_publisher *p, const dray_layout *layout,
                        dray_region *const *regions, dray_error *error)
{
    if (!p || !layout || !regions)
        return dray__fail(error, DRAY_EINVALID, "publisher, layout and regions must be given");
    if (p->delta || p->origin)
        return dray__fail(error, DRAY_EUNSUPPORTED,
                          "a publisher with deltas or a snapshot keeps its layout: close it and "
                          "open it again");
    int rc = dray__regions_check(layout, regions, error);
    uint32_t tensors = dray_layout_tensor_count(layout);
    if (rc == DRAY_OK && tensors != dray_layout_tensor_count(p->layout))
        rc = dray__fail(error, DRAY_EINVALID, "%" PRIu32 " tensors, %" PRIu32 " before", tensors,
                        dray_layout_tensor_count(p->layout));
    for (uint32_t t = 0; t < tensors && rc == DRAY_OK; t++) {
        const dray_tensor_info *now = dray_layout_tensor(layout, t);
        const dray_tensor_info *then = dray_layout_tensor(p->layout, t);
        if (strcmp(now->name, then->name) != 0 || !dray__tensor_like(now, then))
            rc = dray__fail(error, DRAY_EINVALID, "tensor %" PRIu32 " was %s, is %s", t, then->name,
                            now->name);
    }
    if (rc == DRAY_OK)
        rc = within(p->layout, layout, error);
    return rc ? rc : within(layout, p->layout, error);
}

int dray_publisher_set_layout(dray_publisher *p, const dray_layout *layout,
                              dray_region *const *regions, dray_error *error)
{
    dray__writer packed = {0};
    dray_layout *copy = NULL;
    int rc = check_relaid(p, layout, regions, error);
    if (rc == DRAY_OK)
        rc = dray__gate_join(&p->gate, error);
    if (rc == DRAY_OK)
        rc = dray__publisher_sums_end(p, dray__publisher_deadline(p, DRAY_WAIT_DEFAULT), error);
    if (rc)
        return rc;
    uint32_t count = dray_layout_region_count(layout);
    dray_region **list = calloc((size_t)count + 2, sizeof *list);
    uint64_t *serials = calloc((size_t)count + 1, sizeof *serials);
    rc = list && serials ? dray__layout_copy(layout, regions, &copy, &packed, error)
                         : dray__nomem(error);
    if (rc) {
        free(list);
        free(serials);
        return rc;
    }
    hide(p);
    memcpy(list, regions, count * sizeof *list);
    if (p->arena)
        list[count] = dray__arena_region(p->arena);
    dray_layout_free(p->layout);
    dray__writer_free(&p->packed);
    free(p->regions);
    free(p->serials);
    p->layout = copy;
    p->packed = packed;
    p->regions = list;
    p->serials = serials;
    p->relaid = true;
    dray__pieces_free(&p->pieces);
    p->pieces_made = false;
    return show_anew(p, error);
}

static void take_pins(const dray__pins_told *told, dray_pin *pins, uint32_t capacity)
{
    for (uint32_t i = 0; i < told->count; i++) {
        dray_pin pin = {.member = told->items[i].member, .bytes = told->items[i].bytes};
        snprintf(pin.name, sizeof pin.name, "%s", told->items[i].name);
        dray__log(DRAY_LOG_WARN,
                  "member %" PRIu64 " (%s) has %" PRIu64 " bytes mapped that were released",
                  pin.member, pin.name, pin.bytes);
        if (i < capacity)
            pins[i] = pin;
    }
}

int dray_publisher_release(dray_publisher *p, int64_t timeout_ns, dray_pin *pins, uint32_t capacity,
                           uint32_t *count, dray_error *error)
{
    uint32_t found = 0;
    if (!p || (timeout_ns < 0 && timeout_ns != DRAY_WAIT_DEFAULT) || (capacity && !pins))
        return dray__fail(error, DRAY_EINVALID,
                          "publisher and room for pins must be given, timeout not negative");
    int ready = dray__gate_join(&p->gate, error);
    int64_t deadline = dray__publisher_deadline(p, timeout_ns);
    uint64_t left = dray__left(deadline);
    int summed = ready ? DRAY_OK : dray__publisher_sums_end(p, deadline, error);
    if (ready == DRAY_OK)
        ready = summed == DRAY_ECANCELED ? DRAY_OK : summed;
    if (ready == DRAY_OK)
        ready = dray__publisher_ensure(p, dray__answer_deadline(deadline), error);
    if (ready)
        return ready;
    const dray__timed message = {p->key, (int64_t)left};
    dray__pins_told told;
    dray__arena items = {0};
    int rc =
        dray__ask(p->channel, DRAY__MSG_REGIONS_RELEASE, &dray__timed_fields, &message,
                  dray__answer_deadline(deadline), &items, &dray__pins_told_fields, &told, error);
    if (rc == DRAY_OK) {
        take_pins(&told, pins, capacity);
        found = told.count;
    }
    dray__arena_free(&items);
    if (rc)
        return rc;
    p->released = true;
    forget_sums(p);
    for (uint32_t i = 0; !found && i < dray_layout_region_count(p->layout); i++)
        if (dray__publisher_region(p, i))
            dray_region_unexport(p->regions[i]);
    hide(p); /* readers in this process end after at most a slice */
    if (p->origin)
        dray__snapshot_free_regions(p);
    if (count)
        *count = found;
    return found ? dray__fail(error, DRAY_ETIMEDOUT, "%" PRIu32 " members have it mapped still",
                              found)
                 : DRAY_OK;
}
