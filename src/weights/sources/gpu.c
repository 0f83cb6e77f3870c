/* Memory that GPUs reach as a source. Its ops are a program (program.h). It starts the program's
 * jobs, step by step, and enters their sums in the books. It never waits: GPUs report the ends of
 * jobs.
 *
 * A publisher in this process may take its memory back while a GPU reads it. The thread that does
 * so stops the jobs. */
#include "base/clock.h"
#include "base/error.h"
#include "weights/program/program.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct cuda_route {
    dray__transfer *transfer;
    dray__program *program;
    uint32_t step;
    bool running; /* the jobs of the step */
    int64_t began_ns;
    uint64_t released;    /* launches, when they are spread over a time */
    pthread_mutex_t lock; /* of the fields above, against a thread that takes memory back */
    bool stopped;
    dray__guest *guests; /* one a source */
};

/* ---- ends ------------------------------------------------------------------------------------ */

static void on_taken_back(void *user)
{
    struct cuda_route *l = user;
    pthread_mutex_lock(&l->lock);
    if (l->program)
        dray__program_stop(l->program);
    l->stopped = true;
    pthread_mutex_unlock(&l->lock);
}

static void route_close(void *state)
{
    struct cuda_route *l = state;
    for (uint32_t i = 0; l->guests && i < l->transfer->sources->count; i++)
        dray__local_depart(&l->guests[i]);
    if (l->program)
        dray__program_stop(l->program);
    pthread_mutex_destroy(&l->lock);
    free(l->guests);
}

/* ---- opening --------------------------------------------------------------------------------- */

static int enter(struct cuda_route *l, dray_error *error)
{
    const dray__sources *s = l->transfer->sources;
    dray__local **held = calloc((size_t)s->count + 1, sizeof *held);
    l->guests = calloc((size_t)s->count + 1, sizeof *l->guests);
    int rc = held && l->guests ? dray__sources_hold(s, held, error) : dray__nomem(error);
    for (uint32_t i = 0; i < s->count && rc == DRAY_OK; i++) {
        if (!held[i])
            continue;
        l->guests[i] = (dray__guest){
            .attempt = l->transfer->options.attempt, .stop = on_taken_back, .user = l};
        dray__local_enter(held[i], &l->guests[i]);
    }
    dray__sources_release(s, held);
    free(held);
    return rc;
}

static bool gpu_reaches(const dray__transfer *h, const dray__op *op,
                        const dray__placement *placement)
{
    return placement == &dray__place_patch ? dray__patch_takes(h, op) : dray__program_takes(h, op);
}

static int route_open(dray__route *route, dray_error *error)
{
    struct cuda_route *l = route->state;
    l->transfer = route->transfer;
    pthread_mutex_init(&l->lock, NULL);
    int rc = dray__program_find(route, &l->program, error);
    if (rc)
        return rc;
    route->fd = l->program->waker.fd;
    route->held = l->program->held_bytes;
    return enter(l, error); /* a thread that takes memory back uses the program */
}

static bool takes_all(const dray__transfer *transfer, const dray__op *op)
{
    (void)transfer, (void)op;
    return true;
}

const dray__placement dray__place_compiled = {"compiled", takes_all};

/* ---- moving ---------------------------------------------------------------------------------- */

static int start(struct cuda_route *l, dray_error *error)
{
    l->began_ns = dray__now();
    l->running = true;
    if (l->step == 0 && l->program->most_count)
        memset(l->program->most, 0, l->program->most_count * sizeof *l->program->most);
    int rc = dray__program_start(l->program, l->step, error);
    if (!l->program->paced)
        dray__program_expect(l->program, l->step, l->began_ns);
    return rc;
}

static int end_step(struct cuda_route *l, dray_error *error)
{
    dray__transfer *h = l->transfer;
    int64_t done = dray__now();
    h->move_ns += done - l->began_ns;
    h->device_ns += dray__program_device_ns(l->program, l->step);
    l->running = false;
    dray__program_expect_nothing(l->program);
    if (l->program->most_count)
        dray__program_take_most(l->program, l->step);
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

static int advance(struct cuda_route *l, bool *waits, dray_error *error)
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
    int rc = DRAY_OK;
    if (l->program->paced)
        rc = dray__program_keep_pace(l->program, l->step, l->transfer->options.within_ns,
                                     l->transfer->opened_ns, &l->released, error);
    if (rc == DRAY_OK)
        rc = dray__program_poll(l->program, l->step, error);
    *waits = rc == DRAY_EAGAIN && !dray__program_ends_soon(l->program, dray__now());
    return rc ? rc : end_step(l, error);
}

static int route_step(dray__route *route, int64_t until_ns, dray_error *error)
{
    struct cuda_route *l = route->state;
    int rc;
    do {
        pthread_mutex_lock(&l->lock);
        rc = advance(l, &route->waits, error);
        pthread_mutex_unlock(&l->lock);
    } while (rc == DRAY_EAGAIN && !route->waits && dray__now() < until_ns);
    return rc;
}

const dray__source_type dray__source_gpu = {.name = "gpu",
                                            .bytes = sizeof(struct cuda_route),
                                            .reaches = gpu_reaches,
                                            .open = route_open,
                                            .step = route_step,
                                            .close = route_close};
