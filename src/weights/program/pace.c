/* Programs that are spread over a time (program.h): a job's launches are enqueued one by one, when
 * they are due. Bursts at full rate slow other kernels less than the same bytes moved by a few
 * thread blocks for a long time, because those occupy places on the GPU, so that other kernels need
 * one wave more. */
#include "weights/program/program.h"

#include "base/clock.h"

enum { PIECES = 256 };
#define LEAST ((uint64_t)64 << 10)
#define MOST ((uint64_t)32 << 20)

uint64_t dray__pace_bytes(uint64_t bytes)
{
    uint64_t piece = bytes / PIECES;
    return piece < LEAST ? LEAST : piece > MOST ? MOST : piece;
}

static double span_of(int64_t within_ns)
{
    return (double)within_ns / 16 * 15;
}

uint64_t dray__pace_due(uint64_t count, int64_t within_ns, int64_t elapsed_ns)
{
    double share = (double)elapsed_ns / span_of(within_ns);
    if (share >= 1)
        return count;
    uint64_t due = 1 + (uint64_t)(share > 0 ? share * (double)count : 0);
    return due < count ? due : count;
}

int64_t dray__pace_at(uint64_t count, int64_t within_ns, uint64_t index)
{
    return count ? (int64_t)(span_of(within_ns) * (double)index / (double)count) + 1 : 0;
}

int dray__program_keep_pace(const dray__program *p, uint32_t step, int64_t within_ns,
                            int64_t began_ns, uint64_t *released, dray_error *error)
{
    uint64_t count = 0, first = 0; /* launches of all steps, and of earlier steps */
    for (uint32_t i = 0; i < p->job_count; i++) {
        uint64_t launches = dray__cuda_job_launch_count(p->jobs[i].job);
        count += launches;
        first += p->jobs[i].step < step ? launches : 0;
    }
    uint64_t due = dray__pace_due(count, within_ns, dray__now() - began_ns);
    for (uint32_t i = 0; i < p->job_count; i++) {
        if (p->jobs[i].step != step)
            continue;
        uint64_t end = first + dray__cuda_job_launch_count(p->jobs[i].job);
        uint64_t until = due < end ? due : end;
        if (*released < until) {
            int rc = dray__cuda_job_release(p->jobs[i].job, until - *released, error);
            if (rc)
                return rc;
            *released = until;
        }
        first = end;
    }
    /* The next step's launches begin when this one has ended, which the GPUs report. */
    dray__waker_at(&p->waker, *released < first && *released < count
                                  ? began_ns + dray__pace_at(count, within_ns, *released)
                                  : 0);
    return DRAY_OK;
}
