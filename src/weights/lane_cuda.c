/* The lane of memory that GPUs reach: its ops are a program (program.h), whose jobs it starts, step
 * by step, and whose sums it enters in the books. It never waits: GPUs tell when they are done.
 *
 * What a publisher of this process holds may be taken back while a GPU reads it: then the jobs are
 * stopped by whoever takes it back. */
#include "base/clock.h"
#include "base/error.h"
#include "weights/program.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>

struct cuda_lane {
    dray__haul *haul;
    dray__program *program;
    uint32_t step;
    bool running; /* the jobs of the step */
    int64_t began_ns;
    pthread_mutex_t lock; /* of what is above, against who takes memory back */
    bool stopped;
    dray__guest *guests; /* one a source */
};

/* ---- ends ------------------------------------------------------------------------------------ */

static void on_taken_back(void *user)
{
    struct cuda_lane *l = user;
    pthread_mutex_lock(&l->lock);
    if (l->program)
        dray__program_stop(l->program);
    l->stopped = true;
    pthread_mutex_unlock(&l->lock);
}

static void lane_close(void *lane)
{
    struct cuda_lane *l = lane;
    if (!l)
        return;
    for (uint32_t i = 0; l->guests && i < l->haul->sources->count; i++)
        dray__local_depart(&l->guests[i]);
    if (l->program)
        dray__program_stop(l->program);
    pthread_mutex_destroy(&l->lock);
    free(l->guests);
    free(l);
}

/* ---- opening --------------------------------------------------------------------------------- */

static int enter(struct cuda_lane *l, dray_error *error)
{
    const dray__sources *s = l->haul->sources;
    l->guests = calloc((size_t)s->count + 1, sizeof *l->guests);
    if (!l->guests)
        return dray__nomem(error);
    for (uint32_t i = 0; i < s->count; i++) {
        if (!s->sources[i].local)
            continue;
        dray__local *local = dray__local_hold(s->sources[i].token);
        if (!local)
            return dray__fail(error, DRAY_EDEAD, "publisher %s (member %" PRIu64 ") closed",
                              s->sources[i].name, s->sources[i].member);
        l->guests[i] =
            (dray__guest){.attempt = l->haul->options.attempt, .stop = on_taken_back, .user = l};
        dray__local_enter(local, &l->guests[i]);
        dray__local_release(local);
    }
    return DRAY_OK;
}

static int open_lane(dray__haul *haul, const uint64_t *ops, uint64_t count, bool patches,
                     uint64_t ceiling, void **out, dray_error *error)
{
    struct cuda_lane *l = calloc(1, sizeof *l);
    if (!l)
        return dray__nomem(error);
    l->haul = haul;
    pthread_mutex_init(&l->lock, NULL);
    /* Who takes memory back looks at the program. */
    int rc = dray__program_find(haul, ops, count, patches, ceiling, &l->program, error);
    if (rc == DRAY_OK)
        rc = enter(l, error);
    if (rc) {
        lane_close(l);
        return rc;
    }
    *out = l;
    return DRAY_OK;
}

static int lane_open(dray__haul *haul, const uint64_t *ops, uint64_t count, uint64_t ceiling,
                     void **out, dray_error *error)
{
    return open_lane(haul, ops, count, false, ceiling, out, error);
}

static int patch_open(dray__haul *haul, const uint64_t *ops, uint64_t count, uint64_t ceiling,
                      void **out, dray_error *error)
{
    return open_lane(haul, ops, count, true, ceiling, out, error);
}

/* ---- moving ---------------------------------------------------------------------------------- */

static int start(struct cuda_lane *l, dray_error *error)
{
    l->began_ns = dray__now();
    l->running = true;
    int rc = dray__program_start(l->program, l->step, error);
    dray__program_expect(l->program, l->step, l->began_ns);
    return rc;
}

static int end_step(struct cuda_lane *l, dray_error *error)
{
    dray__haul *h = l->haul;
    int64_t done = dray__now();
    h->move_ns += done - l->began_ns;
    h->device_ns += dray__program_device_ns(l->program, l->step);
    l->running = false;
    dray__program_expect_nothing(l->program);
    if (h->options.verify || l->program->patches)
        dray__program_enter(h, l->program, l->step);
    if (h->misplaced)
        return dray__fail(error, DRAY_EFORMAT, "%" PRIu64 " entries of deltas lead outside",
                          h->misplaced);
    h->verify_ns += dray__now() - done;
    if (++l->step < l->program->steps)
        return DRAY_EAGAIN;
    h->bytes += l->program->bytes;
    return DRAY_OK;
}

static int advance(struct cuda_lane *l, bool *waits, dray_error *error)
{
    if (l->stopped)
        return dray__fail(error, DRAY_EDEAD,
                          "a publisher of this process took its memory back during the update");
    if (!l->running && l->step < l->program->steps) {
        int rc = start(l, error);
        if (rc)
            return rc;
    }
    if (!l->running)
        return DRAY_OK;
    int rc = dray__program_poll(l->program, l->step, error);
    *waits = rc == DRAY_EAGAIN && !dray__program_ends_soon(l->program, dray__now());
    return rc ? rc : end_step(l, error);
}

static int lane_step(void *lane, int64_t until_ns, bool *waits, dray_error *error)
{
    struct cuda_lane *l = lane;
    int rc;
    *waits = false;
    do {
        pthread_mutex_lock(&l->lock);
        rc = advance(l, waits, error);
        pthread_mutex_unlock(&l->lock);
    } while (rc == DRAY_EAGAIN && !*waits && dray__now() < until_ns);
    return rc;
}

static int lane_fd(const void *lane)
{
    const struct cuda_lane *l = lane;
    return l->program->poll_fd;
}

static uint64_t lane_held_bytes(const void *lane)
{
    const struct cuda_lane *l = lane;
    return l->program->held_bytes;
}

const dray__lane_kind dray__lane_cuda = {.name = "cuda",
                                         .takes = dray__program_takes,
                                         .open = lane_open,
                                         .step = lane_step,
                                         .fd = lane_fd,
                                         .held_bytes = lane_held_bytes,
                                         .close = lane_close};

const dray__lane_kind dray__lane_patch = {.name = "patch",
                                          .takes = dray__patch_takes,
                                          .open = patch_open,
                                          .step = lane_step,
                                          .fd = lane_fd,
                                          .held_bytes = lane_held_bytes,
                                          .close = lane_close};
