/* Replaying a program's jobs, step by step, and what they found (program.h). */
#include "weights/program.h"

#include "base/clock.h"

#include <sys/timerfd.h>

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

/* How much earlier, or later, than the last time it may end to be found at once. */
#define EARLIER(ns) ((ns) / 32 + DRAY__MILLISECOND / 10)
#define LATER(ns) ((ns) / 16 + DRAY__MILLISECOND)

/* 0: not at all. */
static void set_timer(const dray__program *p, int64_t at_ns)
{
    struct itimerspec spec = {
        .it_value = {.tv_sec = at_ns / DRAY__SECOND, .tv_nsec = at_ns % DRAY__SECOND}};
    timerfd_settime(p->timer_fd, TFD_TIMER_ABSTIME, &spec, NULL);
}

void dray__program_expect(dray__program *p, uint32_t step, int64_t now)
{
    int64_t took = dray__program_device_ns(p, step);
    p->look_from_ns = took ? now + took - EARLIER(took) : 0;
    p->look_until_ns = took ? now + took + LATER(took) : 0;
    set_timer(p, p->look_from_ns);
}

bool dray__program_ends_soon(const dray__program *p, int64_t now)
{
    bool begun = p->look_from_ns && now >= p->look_from_ns;
    if (begun)
        set_timer(p, 0);
    return begun && now < p->look_until_ns;
}

void dray__program_expect_nothing(dray__program *p)
{
    p->look_from_ns = 0;
    set_timer(p, 0);
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

static void own(dray__haul *h, const dray__entry *e, uint64_t sum)
{
    struct dray__tensor_sum of = {e->dtype, false, e->elements, sum};
    if (e->owned)
        dray__tensor_sum_add(&h->tensors[e->tensor], &of);
}

static void enter_job(dray__haul *h, const dray__program_job *job)
{
    const uint64_t *read = dray__cuda_job_sums(job->job, DRAY__CUDA_SUM_SOURCE);
    const uint64_t *written = dray__cuda_job_sums(job->job, DRAY__CUDA_SUM_WRITTEN);
    const uint64_t *back = dray__cuda_job_sums(job->job, DRAY__CUDA_SUM_BACK);
    const uint64_t *scales = dray__cuda_job_sums(job->job, DRAY__CUDA_SUM_SCALES);
    const uint64_t *most = dray__cuda_job_sums(job->job, DRAY__CUDA_SUM_MOST);
    for (uint64_t i = 0; i < job->count; i++) {
        const dray__entry *e = &job->entries[i];
        switch ((enum dray__entry_kind)e->kind) {
        case DRAY__ENTRY_UNCHECKED:
            break;
        case DRAY__ENTRY_READ_BACK:
            h->expected[e->block] += back[i];
            h->found[e->block] += back[i];
            own(h, e, back[i]);
            break;
        case DRAY__ENTRY_SUMMED:
            h->found[e->block] += back[i];
            h->expected[e->block] += written[i] - (e->twice ? read[i] : 0);
            own(h, e, read[i]);
            break;
        case DRAY__ENTRY_FILL:
        case DRAY__ENTRY_SENT:
            h->expected[e->block] += written[i] - (e->twice ? read[i] : 0);
            own(h, e, read[i]);
            break;
        case DRAY__ENTRY_DRAIN:
            h->found[e->block] += back[i];
            break;
        case DRAY__ENTRY_ARRIVED:
            h->found[e->block] += read[i];
            break;
        case DRAY__ENTRY_AGAIN: /* what is taken away above, if it was read right */
            h->expected[e->block] += read[i];
            break;
        case DRAY__ENTRY_READ:
            h->expected[e->block] += written[i] - (e->twice ? read[i] : 0);
            own(h, e, read[i]);
            break;
        case DRAY__ENTRY_REQUANTISED: /* read out of the bucket what was written into it? */
            h->expected[e->block] += written[i] + most[i] - 2 * read[i];
            h->expected[e->scale_block] += scales[i];
            break;
        case DRAY__ENTRY_QUANTISED: /* cells that are read twice: the same both times? */
            h->expected[e->block] += written[i] + most[i] - (e->twice ? 2 : 1) * read[i];
            h->expected[e->scale_block] += scales[i];
            own(h, e, read[i]);
            break;
        case DRAY__ENTRY_DEQUANTISED:
            h->found[e->block] += back[i];
            h->expected[e->block] += written[i] - scales[i] - (e->twice ? read[i] : 0);
            own(h, e, read[i]);
            break;
        case DRAY__ENTRY_SCALES:
            h->expected[e->block] += read[i];
            break;
        case DRAY__ENTRY_PATCHED:
            h->told.delta_bytes += read[i];
            h->told.delta_covered_bytes += written[i];
            h->misplaced += back[i];
            break;
        case DRAY__ENTRY_LIES:
            h->expected[e->block] += read[i];
            h->found[e->block] += read[i];
            own(h, e, read[i]);
            break;
        }
    }
}

void dray__program_enter(dray__haul *h, const dray__program *p, uint32_t step)
{
    for (uint32_t i = 0; i < p->job_count; i++)
        if (p->jobs[i].step == step)
            enter_job(h, &p->jobs[i]);
}
