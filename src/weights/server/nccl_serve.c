/* A data server's end of NCCL's pairs (nccl.h). Its thread takes one request after the other: packs
 * the rectangles into a slot, has NCCL send it, and answers with their sums as soon as that is in
 * the stream, so that the next request is packed into the other slot while this one is sent. */
#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"
#include "mover/cuda/cuda.h"
#include "weights/server/nccl.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { POLL_US = 50 };
#define LOOK_NS (20 * DRAY__MILLISECOND) /* whether the reader is gone */

struct dray__nccl_session {
    dray__worker worker; /* its lock is of what follows up to the blank line */
    dray__data_request header;
    uint8_t *body;
    bool asked, answered;
    int wake;

    dray__writer answer;
    dray__packer *packer;
    dray__nccl_pair *pair;
    uint64_t slot_bytes;
    uint32_t turn;
    bool used[DRAY__NCCL_SLOTS];
    dray__nccl_jobs jobs;
};

dray__cuda_device *dray__nccl_device_of(const dray_region *region)
{
    uint8_t uuid[DRAY__CUDA_UUID];
    dray__cuda_device *device;
    return dray_region_get_kind(region) == DRAY_REGION_CUDA &&
                   dray_region_device(region, uuid, NULL) == DRAY_OK &&
                   dray__cuda_device_find(uuid, &device, NULL) == DRAY_OK
               ? device
               : NULL;
}

static bool stops(dray__nccl_session *s)
{
    pthread_mutex_lock(&s->worker.lock);
    bool yes = s->worker.ending;
    pthread_mutex_unlock(&s->worker.lock);
    return yes;
}

static int gone(dray_error *error)
{
    return dray__fail(error, DRAY_ECLOSED, "the reader is gone");
}

/* ---- joining --------------------------------------------------------------------------------- */

/* All of a member's regions that can be sent lie on one GPU. */
static int device_of(const dray__local *local, dray__cuda_device **out, dray_error *error)
{
    const dray_layout *layout = dray__local_layout(local);
    *out = NULL;
    for (uint32_t i = 0; i < dray_layout_region_count(layout); i++) {
        dray__cuda_device *device = dray__nccl_device_of(dray__local_region(local, i));
        if (!device || (*out && device != *out))
            return dray__fail(error, DRAY_EUNSUPPORTED,
                              "region %u is not memory of the one GPU that the others are of", i);
        *out = device;
    }
    return *out ? DRAY_OK : dray__fail(error, DRAY_EUNSUPPORTED, "it has no regions");
}

static int join(dray__nccl_session *s, const dray__local *local, dray__reader *in,
                dray_error *error)
{
    int version, theirs = (int)dray__get_u32(in);
    uint64_t slot_bytes = dray__get_u64(in);
    const void *id = dray__get_bytes(in, DRAY__NCCL_ID);
    int rc = dray__reader_finish(in, "a request to join", error);
    if (rc == DRAY_OK)
        rc = dray__nccl_find(&version, error);
    if (rc)
        return rc;
    if (version / 100 != theirs / 100)
        return dray__fail(error, DRAY_EUNSUPPORTED, "NCCL %d here, %d there", version, theirs);
    if (s->pair || slot_bytes < DRAY__NCCL_SLOT_MIN || slot_bytes > DRAY__NCCL_SLOT_MAX)
        return dray__fail(error, DRAY_EINVALID, "a pair already, or slots of %llu bytes",
                          (unsigned long long)slot_bytes);
    dray__cuda_device *device;
    rc = device_of(local, &device, error);
    if (rc == DRAY_OK)
        rc = dray__nccl_open(device, id, 1, slot_bytes, &s->pair, error);
    s->slot_bytes = slot_bytes;
    return rc;
}

static void end_pair(dray__nccl_session *s)
{
    dray__nccl_close(s->pair);
    dray__nccl_jobs_clear(&s->jobs);
    s->pair = NULL;
    memset(s->used, 0, sizeof s->used);
}

/* ---- fetching -------------------------------------------------------------------------------- */

/* Until the communicator is ready, or (slot not NONE) the slot's last transfer is over. */
#define NONE UINT32_MAX
static int wait_for(dray__nccl_session *s, uint32_t slot, dray_error *error)
{
    for (;; usleep(POLL_US)) {
        int rc = slot == NONE     ? dray__nccl_ready(s->pair, error)
                 : !s->used[slot] ? DRAY_OK
                                  : dray__nccl_done(s->pair, slot, error);
        if (rc != DRAY_EAGAIN)
            return rc;
        if (stops(s))
            return gone(error);
    }
}

static int wait_idle(dray__nccl_session *s, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < DRAY__NCCL_SLOTS && rc == DRAY_OK; i++)
        rc = wait_for(s, i, error);
    return rc;
}

static int wait_job(dray__nccl_session *s, dray__cuda_job *job, dray_error *error)
{
    int rc;
    while ((rc = dray__cuda_job_wait(job, dray__deadline(LOOK_NS), error)) == DRAY_EAGAIN)
        if (stops(s))
            return gone(error);
    return rc;
}

static int find_job(dray__nccl_session *s, const dray__local *local, uint64_t token,
                    const dray_copy *copies, uint32_t count, uint32_t slot, dray__cuda_job **out,
                    dray_error *error)
{
    dray__cuda_item *items = calloc(count, sizeof *items);
    if (!items)
        return dray__nomem(error);
    for (uint32_t i = 0; i < count; i++)
        items[i] = (dray__cuda_item){.copy = copies[i],
                                     .source_base = dray_region_device_address(
                                         dray__local_region(local, copies[i].source_region)),
                                     .destination_base = dray__nccl_slot(s->pair, slot)};
    int rc = DRAY_EAGAIN;
    for (int may_make = 0; may_make <= 1 && rc == DRAY_EAGAIN; may_make++) {
        rc = may_make ? wait_idle(s, error) : DRAY_OK;
        if (rc == DRAY_OK)
            rc = dray__nccl_jobs_get(
                &s->jobs, token, dray__nccl_device(s->pair), dray__local_layout(local), items,
                count, DRAY__CUDA_SUM_SOURCE | DRAY__CUDA_SUM_WRITTEN, may_make, out, error);
    }
    free(items);
    return rc;
}

static void put_sums(dray__nccl_session *s, const dray__cuda_job *job, uint32_t count)
{
    const uint64_t *read = dray__cuda_job_sums(job, DRAY__CUDA_SUM_SOURCE);
    const uint64_t *written = dray__cuda_job_sums(job, DRAY__CUDA_SUM_WRITTEN);
    dray__writer_reset(&s->answer);
    dray__answer_put(&s->answer, 0, s->header.id, count * dray__pull_head_bytes(true, false), 0);
    for (uint32_t i = 0; i < count; i++) {
        dray__put_u64(&s->answer, read[i]);
        dray__put_u64(&s->answer, written[i]);
    }
}

/* Packs what is asked for into the slot; into *bytes how many. */
static int pack(dray__nccl_session *s, const dray__local *local, uint64_t token, dray__reader *in,
                uint32_t slot, uint64_t *bytes, dray_error *error)
{
    const dray_copy *copies;
    dray__cuda_job *job = NULL;
    uint32_t count;
    dray__cuda_device *device;
    int rc = device_of(local, &device, error); /* it may be another member than who joined */
    if (rc == DRAY_OK && device != dray__nccl_device(s->pair))
        rc = dray__fail(error, DRAY_EINVALID, "it lies on another GPU than what was joined for");
    if (rc == DRAY_OK)
        rc = dray__pull_get_rects(s->packer, in, s->slot_bytes, dray__local_layout(local), &copies,
                                  &count, bytes, error);
    if (rc == DRAY_OK && dray__pull_quantises(s->packer))
        rc = dray__fail(error, DRAY_EINVALID, "what is quantised does not go over NCCL");
    if (rc == DRAY_OK)
        rc = find_job(s, local, token, copies, count, slot, &job, error);
    if (rc == DRAY_OK)
        rc = dray__cuda_job_start(job, NULL, 0, error);
    if (rc == DRAY_OK)
        rc = wait_job(s, job, error);
    if (rc == DRAY_OK)
        put_sums(s, job, count);
    else
        end_pair(s); /* the job may be under way */
    return rc;
}

static int send_slot(dray__nccl_session *s, uint32_t slot, uint64_t bytes, dray_error *error)
{
    int rc = wait_for(s, NONE, error);
    if (rc == DRAY_OK)
        rc = dray__nccl_begin(s->pair, slot, bytes, true, error);
    if (rc == DRAY_OK)
        s->used[slot] = true;
    return rc ? rc : wait_for(s, NONE, error);
}

/* ---- the thread ------------------------------------------------------------------------------ */

/* The member's memory, of which the reader may read this update's. */
static int hold(uint64_t token, uint64_t attempt, dray__local **out, dray_error *error)
{
    dray__local *local = dray__local_hold(token);
    if (!local)
        return dray__fail(error, DRAY_EDEAD, "it closed, or this ticket never was one");
    int rc = dray__local_check(local, attempt, error);
    if (rc)
        dray__local_release(local);
    else
        *out = local;
    return rc;
}

/* Who closes or revokes the memory waits for those who hold it: so nobody holds it while waiting
 * for the reader, which takes the slot's last answer, and then this one, when it likes. */
static int carry_out(dray__nccl_session *s, dray_error *error)
{
    dray__reader in = dray__reader_of(s->body, s->header.body_bytes);
    uint64_t token = dray__get_u64(&in), attempt = dray__get_u64(&in), bytes = 0;
    uint8_t what = dray__get_u8(&in);
    uint32_t slot = s->turn % DRAY__NCCL_SLOTS;
    dray__local *local = NULL;
    if (in.failed || what > DRAY__NCCL_FETCH)
        return dray__fail(error, DRAY_EINVALID, "a request %u of %u bytes", what,
                          s->header.body_bytes);
    if (what == DRAY__NCCL_FETCH && !s->pair)
        return dray__fail(error, DRAY_EINVALID, "nobody joined");
    int rc = what == DRAY__NCCL_FETCH ? wait_for(s, slot, error) : DRAY_OK;
    if (rc == DRAY_OK)
        rc = hold(token, attempt, &local, error);
    if (rc)
        return rc;
    dray__writer_reset(&s->answer);
    dray__answer_put(&s->answer, 0, s->header.id, 0, 0);
    rc = what == DRAY__NCCL_JOIN ? join(s, local, &in, error)
                                 : pack(s, local, token, &in, slot, &bytes, error);
    dray__local_release(local);
    if (rc || what == DRAY__NCCL_JOIN)
        return rc;
    s->turn++;
    return send_slot(s, slot, bytes, error);
}

static void *run(void *user)
{
    dray__nccl_session *s = user;
    pthread_mutex_lock(&s->worker.lock);
    while (!s->worker.ending) {
        if (!s->asked || s->answered) {
            pthread_cond_wait(&s->worker.wake, &s->worker.lock);
            continue;
        }
        pthread_mutex_unlock(&s->worker.lock);
        dray_error error;
        int rc = carry_out(s, &error);
        if (rc) {
            dray__writer_reset(&s->answer);
            dray__answer_refuse(&s->answer, s->header.id, &error);
        }
        pthread_mutex_lock(&s->worker.lock);
        s->answered = true;
        uint64_t one = 1;
        ssize_t written = write(s->wake, &one, sizeof one);
        (void)written; /* full: it is readable then */
    }
    pthread_mutex_unlock(&s->worker.lock);
    end_pair(s);
    return NULL;
}

dray__nccl_session *dray__nccl_session_new(int wake)
{
    dray__nccl_session *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->wake = wake;
    s->packer = dray__packer_new();
    dray__worker_init(&s->worker);
    if (!s->packer || dray__thread_start(&s->worker.thread, run, s, "NCCL", NULL)) {
        dray__nccl_session_free(s);
        return NULL;
    }
    return s;
}

void dray__nccl_session_free(dray__nccl_session *s)
{
    if (!s)
        return;
    dray__worker_end(&s->worker);
    dray__packer_free(s->packer);
    dray__writer_free(&s->answer);
    free(s->body);
    free(s);
}

bool dray__nccl_session_ask(dray__nccl_session *s, const dray__data_request *header,
                            const uint8_t *body)
{
    uint8_t *copy = malloc(header->body_bytes);
    if (!copy)
        return false;
    memcpy(copy, body, header->body_bytes);
    pthread_mutex_lock(&s->worker.lock);
    free(s->body);
    s->body = copy;
    s->header = *header;
    s->asked = true;
    s->answered = false;
    pthread_cond_signal(&s->worker.wake);
    pthread_mutex_unlock(&s->worker.lock);
    return true;
}

bool dray__nccl_session_asked(dray__nccl_session *s)
{
    pthread_mutex_lock(&s->worker.lock);
    bool asked = s->asked;
    pthread_mutex_unlock(&s->worker.lock);
    return asked;
}

bool dray__nccl_session_answered(dray__nccl_session *s)
{
    pthread_mutex_lock(&s->worker.lock);
    bool answered = s->answered;
    pthread_mutex_unlock(&s->worker.lock);
    return answered;
}

bool dray__nccl_session_answer(dray__nccl_session *s, dray__writer *out)
{
    pthread_mutex_lock(&s->worker.lock);
    bool answered = s->answered;
    if (answered)
        s->asked = s->answered = false;
    pthread_mutex_unlock(&s->worker.lock);
    if (!answered)
        return false;
    dray__writer_reset(out);
    dray__put_bytes(out, s->answer.data, s->answer.size);
    out->failed |= s->answer.failed;
    return true;
}
