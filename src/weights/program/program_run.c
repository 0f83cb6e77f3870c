/* Runs a program's jobs, step by step, and enters their results (program.h). */
#include "weights/program/program.h"

#include "base/clock.h"

enum { JOBS_OF_STEP = 8 };

void dray__program_stop(const dray__program *p)
{
    for (uint32_t i = 0; i < p->job_count; i++)
        if (p->jobs[i].running)
            dray__cuda_job_abort(p->jobs[i].job);
    for (uint32_t i = 0; i < p->job_count; i++) {
        if (p->jobs[i].running)
            dray__cuda_job_wait(p->jobs[i].job, INT64_MAX, NULL);
        p->jobs[i].running = false;
    }
}

static int start_after(const dray__program *p, uint32_t step, const CUevent *events, uint32_t count,
                       dray_error *error)
{
    for (uint32_t i = 0; i < p->job_count; i++) {
        dray__program_job *job = &p->jobs[i];
        if (job->step != step)
            continue;
        if (p->most_count)
            dray__cuda_job_set_most(job->job, p->most);
        int rc = dray__cuda_job_start(job->job, events, count, error);
        if (rc)
            return rc;
        job->running = true;
    }
    return DRAY_OK;
}

int dray__program_start(const dray__program *p, uint32_t step, dray_error *error)
{
    return start_after(p, step, NULL, 0, error);
}

int dray__program_follow(const dray__program *p, uint32_t step, uint32_t before, dray_error *error)
{
    CUevent events[JOBS_OF_STEP];
    uint32_t count = 0;
    for (uint32_t i = 0; i < p->job_count && count < JOBS_OF_STEP; i++)
        if (p->jobs[i].step == before && p->jobs[i].running)
            events[count++] = dray__cuda_job_moved(p->jobs[i].job);
    return start_after(p, step, events, count, error);
}

int64_t dray__program_device_ns(const dray__program *p, uint32_t step)
{
    int64_t longest = 0;
    for (uint32_t i = 0; i < p->job_count; i++) {
        dray__cuda_job_times times;
        if (p->jobs[i].step != step)
            continue;
        dray__cuda_job_times_of(p->jobs[i].job, &times);
        longest = times.device_ns > longest ? times.device_ns : longest;
    }
    return longest;
}

/* The time around the expected end in which jobs are polled without sleeping. */
#define EARLIER(ns) ((ns) / 32 + DRAY__MILLISECOND / 10)
#define LATER(ns) ((ns) / 16 + DRAY__MILLISECOND)

void dray__program_expect(dray__program *p, uint32_t step, int64_t now)
{
    int64_t took = dray__program_device_ns(p, step);
    p->look_from_ns = took ? now + took - EARLIER(took) : 0;
    p->look_until_ns = took ? now + took + LATER(took) : 0;
    dray__waker_at(&p->waker, p->look_from_ns);
}

bool dray__program_ends_soon(const dray__program *p, int64_t now)
{
    bool begun = p->look_from_ns && now >= p->look_from_ns;
    if (begun)
        dray__waker_at(&p->waker, 0);
    return begun && now < p->look_until_ns;
}

void dray__program_expect_nothing(dray__program *p)
{
    p->look_from_ns = 0;
    dray__waker_at(&p->waker, 0);
}

int dray__program_poll(const dray__program *p, uint32_t step, dray_error *error)
{
    bool all = true;
    for (uint32_t i = 0; i < p->job_count; i++) {
        dray__program_job *job = &p->jobs[i];
        if (job->step != step)
            continue;
        int rc = job->running ? dray__cuda_job_poll(job->job, error) : DRAY_OK;
        if (rc && rc != DRAY_EAGAIN)
            return rc;
        job->running = rc == DRAY_EAGAIN;
        all = all && !job->running;
    }
    return all ? DRAY_OK : DRAY_EAGAIN;
}

/* ---- the books ------------------------------------------------------------------------------- */

/* The meaning of an item's sums in the books, by the kind of its entry. */
enum which { NONE, READ, BACK };
static const struct effect {
    int8_t read, written, back, scales, most; /* how often each counts in the expected sum */
    uint8_t found, own; /* the sum that is the found one, and the one of the source's bits */
    bool by_cell;       /* the scales are expected in a block of their own */
    bool second;        /* zero points, too, whose sum is MOST */
} effects[] = {
    [DRAY__ENTRY_UNCHECKED] = {0},
    [DRAY__ENTRY_READ_BACK] = {.back = 1, .found = BACK, .own = BACK},
    [DRAY__ENTRY_SUMMED] = {.written = 1, .found = BACK, .own = READ},
    [DRAY__ENTRY_SENT] = {.written = 1, .own = READ},
    [DRAY__ENTRY_DRAIN] = {.found = BACK},
    [DRAY__ENTRY_ARRIVED] = {.found = READ},
    [DRAY__ENTRY_AGAIN] = {.read = 1}, /* subtracted for sources that are read twice */
    [DRAY__ENTRY_QUANTISED] = {.read = -1, .written = 1, .most = 1, .own = READ, .by_cell = true},
    /* 0 in all when the bytes read from the bucket are those that were written into it. */
    [DRAY__ENTRY_REQUANTISED] = {.read = -2, .written = 1, .most = 1, .by_cell = true},
    [DRAY__ENTRY_GROUPED] = {.written = 1, .own = READ, .by_cell = true, .second = true},
    [DRAY__ENTRY_REGROUPED] = {.read = -1, .written = 1, .by_cell = true, .second = true},
    [DRAY__ENTRY_MOST] = {0},
    [DRAY__ENTRY_DEQUANTISED] = {.written = 1, .scales = -1, .found = BACK, .own = READ},
    [DRAY__ENTRY_SCALES] = {.read = 1},
    [DRAY__ENTRY_PATCHED] = {0},
    [DRAY__ENTRY_LIES] = {.read = 1, .found = READ, .own = READ},
};

static uint64_t at(const uint64_t *sums, uint64_t i)
{
    return sums ? sums[i] : 0;
}

static uint64_t times(int8_t count, uint64_t sum)
{
    return (uint64_t)(int64_t)count * sum;
}

static void enter(dray__transfer *h, const dray__entry *e, uint64_t read, uint64_t written,
                  uint64_t back, uint64_t scales, uint64_t most)
{
    const struct effect *f = &effects[e->kind];
    const uint64_t which[] = {[NONE] = 0, [READ] = read, [BACK] = back};
    bool twice = e->twice && f->written; /* subtracts the first read; ENTRY_AGAIN adds it again */
    h->expected[e->block] += times(f->read, read) + times(f->written, written) +
                             times(f->back, back) + times(f->scales, scales) +
                             times(f->most, most) - (twice ? read : 0);
    if (f->by_cell)
        h->expected[e->scale_block] += scales;
    if (f->second)
        h->expected[e->second_block] += most;
    h->found[e->block] += which[f->found];
    struct dray__tensor_sum of = {e->dtype, false, e->elements, which[f->own]};
    if (f->own && e->owned)
        dray__transfer_add(h, e->tensor, &of);
}

static void enter_job(dray__transfer *h, const dray__program_job *job)
{
    const uint64_t *read = dray__cuda_job_sums(job->job, DRAY__CUDA_SUM_SOURCE);
    const uint64_t *written = dray__cuda_job_sums(job->job, DRAY__CUDA_SUM_WRITTEN);
    const uint64_t *back = dray__cuda_job_sums(job->job, DRAY__CUDA_SUM_BACK);
    const uint64_t *scales = dray__cuda_job_sums(job->job, DRAY__CUDA_SUM_SCALES);
    const uint64_t *most = dray__cuda_job_sums(job->job, DRAY__CUDA_SUM_MOST);
    for (uint64_t i = 0; i < job->count; i++) {
        const dray__entry *e = &job->entries[i];
        if (e->kind == DRAY__ENTRY_PATCHED) {
            h->told.delta_bytes += read[i];
            h->told.delta_covered_bytes += written[i];
            h->misplaced += back[i];
        } else if (e->kind != DRAY__ENTRY_UNCHECKED && e->kind != DRAY__ENTRY_MOST) {
            enter(h, e, at(read, i), at(written, i), at(back, i), at(scales, i), at(most, i));
        }
    }
}

void dray__program_take_most(const dray__program *p, uint32_t step)
{
    for (uint32_t i = 0; i < p->job_count; i++) {
        const dray__program_job *job = &p->jobs[i];
        const uint64_t *found = dray__cuda_job_sums(job->job, DRAY__CUDA_SUM_MOST);
        for (uint64_t k = 0; job->step == step && found && k < job->count; k++) {
            uint32_t *most = &p->most[job->entries[k].scale_block];
            if (job->entries[k].kind == DRAY__ENTRY_MOST && found[k] > *most)
                *most = (uint32_t)found[k];
        }
    }
}

void dray__program_enter(dray__transfer *h, const dray__program *p, uint32_t step)
{
    for (uint32_t i = 0; i < p->job_count; i++)
        if (p->jobs[i].step == step)
            enter_job(h, &p->jobs[i]);
}
