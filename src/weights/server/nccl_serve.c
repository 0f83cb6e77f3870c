/* A data server's end of NCCL's pairs (nccl.h). Its thread takes one request after the other, and
 * starts a job that packs the rectangles, quantised if they are wanted so, into the slot that the
 * request names. NCCL sends the slots in order; the GPU, not the thread, waits until a slot is
 * packed. Once a send is enqueued, the request is answered with the sums. Meanwhile later requests
 * are packed into other slots. */
#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"
#include "mover/cuda/cuda.h"
#include "weights/server/nccl.h"
#include "weights/server/pull_quant.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#define POLL_NS (DRAY__MILLISECOND / 40)

enum { REQUESTS = DRAY__NCCL_SLOTS };

/* A request, until its answer is taken. */
struct entry {
    enum { FREE, ASKED, PACKING, ANSWERED } state; /* changes with the lock */
    dray__data_request header;
    uint8_t *body;
    dray__writer answer;
    /* Used by the thread: */
    dray__local *local; /* held while its memory is read */
    uint32_t slot, count;
    uint64_t turn; /* of its send */
};

struct dray__nccl_session {
    dray__worker worker; /* its lock guards the entries' states and the fields up to `next` */
    struct entry entries[REQUESTS];
    uint64_t asked, answered; /* requests that were sent, and those whose answers were taken */
    int wake;                 /* -1 when the data server has left */
    bool ended;               /* the thread does nothing more */

    struct dray__nccl_session *next; /* in the caller's list of ending sessions */

    /* Used by the thread: */
    uint64_t begun, packed; /* requests */
    dray__packer *packer;
    dray__nccl_pair *pair;
    uint64_t slot_bytes;
    bool used[DRAY__NCCL_SLOTS]; /* it was sent before */
    dray__cuda_job *jobs[DRAY__NCCL_SLOTS];
    /* The sends, in turns. */
    struct {
        uint32_t slot;
        uint64_t bytes;
    } sends[DRAY__NCCL_SLOTS];
    bool waits[DRAY__NCCL_SLOTS]; /* [slot]: its send is not enqueued yet */
    uint64_t to_send, sent;
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

/* ---- joining --------------------------------------------------------------------------------- */

/* Gives the GPU of a member's regions. Fails when they are on several. */
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
    return *out ? DRAY_OK
                : dray__fail(error, DRAY_EUNSUPPORTED,
                             "member: regions in GPU memory expected, found none");
}

static void end_pair(dray__nccl_session *s)
{
    dray__nccl_close(s->pair, s->jobs);
    s->pair = NULL;
    s->to_send = s->sent;
    memset(s->used, 0, sizeof s->used);
    memset(s->waits, 0, sizeof s->waits);
}

/* Makes a job for each slot; each request replaces the job's items. */
static int make_jobs(dray__nccl_session *s, const dray_layout *layout, uint32_t ctas,
                     dray_error *error)
{
    const dray__cuda_job_options options = {.sums = DRAY__CUDA_SUM_SOURCE | DRAY__CUDA_SUM_WRITTEN |
                                                    DRAY__CUDA_SUM_SCALES,
                                            .spared = ctas,
                                            .launch_bytes = DRAY__NCCL_LAUNCH,
                                            .reserve_bytes = DRAY__NCCL_RESERVE(s->slot_bytes)};
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < DRAY__NCCL_SLOTS && rc == DRAY_OK; i++)
        rc = dray__cuda_job_new(dray__nccl_device(s->pair), layout, NULL, 0, &options, &s->jobs[i],
                                error);
    return rc;
}

static int join(dray__nccl_session *s, const dray__local *local, dray__reader *in,
                dray_error *error)
{
    int version, theirs = (int)dray__get_u32(in);
    uint64_t slot_bytes = dray__get_u64(in);
    uint32_t ctas = dray__get_u32(in);
    const void *id = dray__get_bytes(in, DRAY__NCCL_ID);
    int rc = dray__reader_finish(in, "a request to join", error);
    if (rc == DRAY_OK)
        rc = dray__nccl_find(&version, error);
    if (rc)
        return rc;
    if (version / 100 != theirs / 100)
        return dray__fail(error, DRAY_EUNSUPPORTED, "NCCL %d here, %d there", version, theirs);
    if (s->pair || slot_bytes < DRAY__NCCL_SLOT_MIN || slot_bytes > DRAY__NCCL_SLOT_MAX || !ctas ||
        ctas > DRAY__NCCL_CTAS)
        return dray__fail(error, DRAY_EINVALID,
                          "a pair already, or slots of %llu bytes, or %u thread blocks",
                          (unsigned long long)slot_bytes, ctas);
    dray__cuda_device *device;
    rc = device_of(local, &device, error);
    if (rc == DRAY_OK)
        rc = dray__nccl_open(device, id, 1, slot_bytes, ctas, &s->pair, error);
    if (rc)
        return rc;
    s->slot_bytes = slot_bytes;
    rc = make_jobs(s, dray__local_layout(local), ctas, error);
    if (rc)
        end_pair(s);
    return rc;
}

/* ---- packing --------------------------------------------------------------------------------- */

/* Returns true when no send is under way. An allocation may wait for a send, which the reader may
 * never receive. */
static bool is_idle(const dray__nccl_session *s)
{
    for (uint32_t i = 0; i < DRAY__NCCL_SLOTS; i++)
        if (s->waits[i] || (s->used[i] && dray__nccl_done(s->pair, i, NULL)))
            return false;
    return true;
}

/* Gives the slot's job these rectangles to pack. Returns DRAY_EAGAIN while the reader has not
 * received earlier ones. */
static int remake_job(dray__nccl_session *s, const dray__local *local, const dray_copy *copies,
                      const struct entry *e, dray_error *error)
{
    const dray__pull_quant *quants;
    uint32_t quantised = dray__pull_quants(s->packer, &quants);
    uint64_t slot = dray__nccl_slot(s->pair, e->slot);
    if (quantised && quantised < e->count)
        return dray__fail(error, DRAY_EINVALID,
                          "a request over NCCL: %u rectangles to be quantised or none expected, "
                          "found %u",
                          e->count, quantised);
    dray__cuda_item *items = calloc((size_t)e->count + 1, sizeof *items);
    dray__cuda_quant *boxes = calloc((size_t)quantised + 1, sizeof *boxes);
    int rc = items && boxes ? DRAY_OK : dray__nomem(error);
    for (uint32_t i = 0; i < e->count && rc == DRAY_OK; i++) {
        uint64_t from =
            dray_region_device_address(dray__local_region(local, copies[i].source_region));
        if (quantised && dray__pull_quant_cell(&quants[i]) < DRAY__NCCL_CELL_MIN)
            rc = dray__fail(error, DRAY_EINVALID,
                            "rectangle %u: cells of at least %d bytes expected over NCCL", i,
                            DRAY__NCCL_CELL_MIN);
        else if (quantised)
            boxes[i] = dray__pull_quant_work(&copies[i], &quants[i], from, slot);
        else
            items[i] =
                (dray__cuda_item){.copy = copies[i], .source_base = from, .destination_base = slot};
    }
    if (rc == DRAY_OK)
        rc = dray__cuda_job_remake(s->jobs[e->slot], dray__local_layout(local), items,
                                   quantised ? 0 : e->count, boxes, quantised, is_idle(s), error);
    free(items);
    free(boxes);
    return rc;
}

/* Holds the member, and checks that this update may still read it. */
static int hold(uint64_t token, uint64_t attempt, dray__local **out, dray_error *error)
{
    dray__local *local = NULL;
    int rc = dray__local_hold_ticket(token, &local, error);
    if (rc)
        return rc;
    rc = dray__local_check(local, attempt, error);
    if (rc)
        dray__local_release(local);
    else
        *out = local;
    return rc;
}

/* Starts the packing of a request, and queues its send. */
static int begin_packing(dray__nccl_session *s, struct entry *e, dray__reader *in,
                         dray_error *error)
{
    const dray_copy *copies;
    uint64_t bytes;
    dray__cuda_device *device;
    int rc = device_of(e->local, &device, error); /* the member may differ from the one that was
                                                   * joined */
    if (rc == DRAY_OK && device != dray__nccl_device(s->pair))
        rc = dray__fail(
            error, DRAY_EINVALID,
            "member: memory of the GPU of this communicator expected, found another GPU's");
    if (rc == DRAY_OK)
        rc = dray__pull_get_rects(s->packer, in, s->slot_bytes, s->slot_bytes,
                                  dray__local_layout(e->local), &copies, &e->count, &bytes, error);
    if (rc == DRAY_OK)
        rc = remake_job(s, e->local, copies, e, error);
    if (rc == DRAY_OK)
        rc = dray__cuda_job_start(s->jobs[e->slot], NULL, 0, error);
    if (rc)
        return rc;
    e->turn = s->to_send++;
    s->sends[e->turn % DRAY__NCCL_SLOTS].slot = e->slot;
    s->sends[e->turn % DRAY__NCCL_SLOTS].bytes = bytes;
    s->waits[e->slot] = true;
    return DRAY_OK;
}

/* Returns DRAY_OK when the slot can be packed into, else DRAY_EAGAIN. */
static int slot_is_free(dray__nccl_session *s, uint32_t slot, dray_error *error)
{
    if (s->waits[slot])
        return DRAY_EAGAIN;
    return s->used[slot] ? dray__nccl_done(s->pair, slot, error) : DRAY_OK;
}

/* Begins the next send. Returns false when there is none, or NCCL is still enqueuing the last one.
 */
static bool send_next(dray__nccl_session *s)
{
    uint32_t slot = s->sends[s->sent % DRAY__NCCL_SLOTS].slot;
    if (!s->pair || s->sent == s->to_send)
        return false;
    int rc = dray__nccl_ready(s->pair, NULL);
    if (rc == DRAY_OK)
        rc = dray__nccl_begin(s->pair, slot, s->sends[s->sent % DRAY__NCCL_SLOTS].bytes, true,
                              dray__cuda_job_moved(s->jobs[slot]), NULL);
    if (rc == DRAY_EAGAIN)
        return false;
    if (rc) {
        end_pair(s);
        return true;
    }
    s->used[slot] = true;
    s->waits[slot] = false;
    s->sent++;
    return true;
}

/* Begins a fetch. Returns DRAY_EAGAIN, without holding the member, while the slot is in use:
 * closing or revoking memory waits for all holds, so that no hold may last until the reader
 * receives. */
static int fetch(dray__nccl_session *s, struct entry *e, uint64_t token, uint64_t attempt,
                 dray__reader *in, dray_error *error)
{
    e->slot = dray__get_u8(in);
    if (!s->pair || in->failed || e->slot >= DRAY__NCCL_SLOTS ||
        (s->jobs[e->slot] && dray__cuda_job_is_running(s->jobs[e->slot])))
        return dray__fail(error, DRAY_EINVALID,
                          "no communicator was joined, or slot %u of %d is in use", e->slot,
                          DRAY__NCCL_SLOTS);
    int rc = slot_is_free(s, e->slot, error);
    if (rc == DRAY_OK)
        rc = hold(token, attempt, &e->local, error);
    if (rc)
        return rc;
    rc = begin_packing(s, e, in, error);
    if (rc) {
        dray__local_release(e->local);
        e->local = NULL;
    }
    return rc;
}

static void put_sums(struct entry *e, const dray__cuda_job *job)
{
    const uint64_t *read = dray__cuda_job_sums(job, DRAY__CUDA_SUM_SOURCE);
    const uint64_t *written = dray__cuda_job_sums(job, DRAY__CUDA_SUM_WRITTEN);
    const uint64_t *scales = dray__cuda_job_sums(job, DRAY__CUDA_SUM_SCALES);
    dray__answer_put(&e->answer, 0, e->header.id, e->count * dray__pull_head_bytes(true, false), 0);
    for (uint32_t i = 0; i < e->count; i++) {
        dray__put_u64(&e->answer, read[i]);
        dray__put_u64(&e->answer, written[i] + scales[i]);
    }
}

/* ---- the thread ------------------------------------------------------------------------------ */

static void set_state(dray__nccl_session *s, struct entry *e, int state)
{
    uint64_t one = 1;
    pthread_mutex_lock(&s->worker.lock);
    e->state = state;
    ssize_t written = state == ANSWERED && s->wake >= 0 ? write(s->wake, &one, sizeof one) : 0;
    pthread_mutex_unlock(&s->worker.lock);
    (void)written; /* when it is full, it is readable already */
}

static int carry_out(dray__nccl_session *s, struct entry *e, dray_error *error)
{
    dray__reader in = dray__reader_of(e->body, e->header.body_bytes);
    uint64_t token = dray__get_u64(&in), attempt = dray__get_u64(&in);
    uint8_t what = dray__get_u8(&in);
    if (in.failed || what > DRAY__NCCL_FETCH)
        return dray__fail(error, DRAY_EINVALID, "a request %u of %u bytes", what,
                          e->header.body_bytes);
    if (what == DRAY__NCCL_FETCH)
        return fetch(s, e, token, attempt, &in, error);
    dray__local *local = NULL;
    int rc = hold(token, attempt, &local, error);
    if (rc)
        return rc;
    rc = join(s, local, &in, error);
    dray__local_release(local);
    if (rc == DRAY_OK)
        dray__answer_put(&e->answer, 0, e->header.id, 0, 0);
    return rc;
}

/* Begins the next request. Returns false when there is none, or it must wait. */
static bool begin_next(dray__nccl_session *s)
{
    struct entry *e = &s->entries[s->begun % REQUESTS];
    dray_error error;
    pthread_mutex_lock(&s->worker.lock);
    bool is_there = e->state == ASKED;
    pthread_mutex_unlock(&s->worker.lock);
    if (!is_there)
        return false;
    int rc = carry_out(s, e, &error);
    if (rc == DRAY_EAGAIN)
        return false;
    if (rc)
        dray__answer_refuse(&e->answer, e->header.id, &error);
    s->begun++;
    set_state(s, e, rc || !e->local ? ANSWERED : PACKING);
    return true;
}

/* Ends the oldest request that was begun, once it is packed. */
static bool end_oldest(dray__nccl_session *s)
{
    struct entry *e = &s->entries[s->packed % REQUESTS];
    dray_error error;
    if (s->packed == s->begun)
        return false;
    if (e->local) {
        dray__cuda_job *job = s->jobs[e->slot];
        if (job && s->sent <= e->turn)
            return false;
        int rc = job ? dray__cuda_job_poll(job, &error)
                     : dray__fail(&error, DRAY_ECLOSED, "NCCL failed, or an earlier send");
        if (rc == DRAY_EAGAIN)
            return false;
        dray__local_release(e->local);
        e->local = NULL;
        if (rc)
            dray__answer_refuse(&e->answer, e->header.id, &error);
        else
            put_sums(e, job);
        if (rc && job)
            end_pair(s);
        set_state(s, e, ANSWERED);
    }
    s->packed++;
    return true;
}

/* Waits for a request, or, while some are under way, for a short time. Call it with the lock. */
static void pause_thread(dray__nccl_session *s)
{
    if (s->worker.ending)
        return;
    if (s->entries[s->begun % REQUESTS].state != ASKED && s->packed == s->begun)
        pthread_cond_wait(&s->worker.wake, &s->worker.lock);
    else
        dray__worker_pause(&s->worker, POLL_NS);
}

static void *run(void *user)
{
    dray__nccl_session *s = user;
    prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL); /* else short waits take three times as long */
    pthread_mutex_lock(&s->worker.lock);
    while (!s->worker.ending) {
        pthread_mutex_unlock(&s->worker.lock);
        bool moved = send_next(s);
        moved |= end_oldest(s);
        moved |= begin_next(s);
        pthread_mutex_lock(&s->worker.lock);
        if (!moved)
            pause_thread(s);
    }
    pthread_mutex_unlock(&s->worker.lock);
    end_pair(s);
    for (uint32_t i = 0; i < REQUESTS; i++) {
        dray__local_release(s->entries[i].local);
        s->entries[i].local = NULL;
    }
    pthread_mutex_lock(&s->worker.lock);
    s->ended = true;
    pthread_mutex_unlock(&s->worker.lock);
    return NULL;
}

static void free_session(dray__nccl_session *s)
{
    dray__worker_end(&s->worker);
    dray__packer_free(s->packer);
    for (uint32_t i = 0; i < REQUESTS; i++) {
        dray__writer_free(&s->entries[i].answer);
        free(s->entries[i].body);
    }
    free(s);
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
        free_session(s);
        return NULL;
    }
    return s;
}

void dray__nccl_session_leave(dray__nccl_session *s, dray__nccl_session **ending)
{
    if (!s)
        return;
    pthread_mutex_lock(&s->worker.lock);
    s->wake = -1;
    pthread_mutex_unlock(&s->worker.lock);
    dray__worker_stop(&s->worker);
    s->next = *ending;
    *ending = s;
}

void dray__nccl_sessions_free(dray__nccl_session **ending, bool all)
{
    while (*ending) {
        dray__nccl_session *s = *ending;
        pthread_mutex_lock(&s->worker.lock);
        bool over = s->ended || all;
        pthread_mutex_unlock(&s->worker.lock);
        if (over) {
            *ending = s->next;
            free_session(s);
        } else {
            ending = &s->next;
        }
    }
}

int dray__nccl_session_ask(dray__nccl_session *s, const dray__data_request *header,
                           const uint8_t *body)
{
    struct entry *e = &s->entries[s->asked % REQUESTS];
    uint8_t *copy = malloc(header->body_bytes);
    if (!copy)
        return -ENOMEM;
    memcpy(copy, body, header->body_bytes);
    pthread_mutex_lock(&s->worker.lock);
    bool free_one = e->state == FREE;
    if (free_one) {
        free(e->body);
        e->body = copy;
        e->header = *header;
        e->state = ASKED;
        dray__writer_reset(&e->answer);
        s->asked++;
        pthread_cond_signal(&s->worker.wake);
    }
    pthread_mutex_unlock(&s->worker.lock);
    if (!free_one)
        free(copy);
    return free_one ? 0 : -EPROTO;
}

bool dray__nccl_session_answered(dray__nccl_session *s)
{
    pthread_mutex_lock(&s->worker.lock);
    bool answered = s->entries[s->answered % REQUESTS].state == ANSWERED;
    pthread_mutex_unlock(&s->worker.lock);
    return answered;
}

bool dray__nccl_session_answer(dray__nccl_session *s, dray__writer *out)
{
    struct entry *e = &s->entries[s->answered % REQUESTS];
    if (!dray__nccl_session_answered(s))
        return false;
    dray__writer_reset(out);
    dray__put_bytes(out, e->answer.data, e->answer.size);
    out->failed |= e->answer.failed;
    s->answered++;
    set_state(s, e, FREE);
    return true;
}
