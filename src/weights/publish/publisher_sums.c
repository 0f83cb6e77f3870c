/* Computes the checksums of an announced version. Readers begin at once, while GPUs and a thread of
 * the publisher compute the sums. The coordinator lets no group commit before it has the sums.
 * Until it is joined, only the thread uses the publisher's channel; every later call joins it
 * first. */
#include "base/clock.h"
#include "base/error.h"
#include "weights/publish/publisher.h"

#include <inttypes.h>

/* The longest attempt to reach the coordinator, so that closing a publisher waits no longer. */
#define TRY_NS DRAY__SECOND

static int send_sums(dray_publisher *p, const dray_error *outcome, int64_t deadline,
                     dray_error *error)
{
    dray__writer w = {0};
    const dray__summing message = {p->key, p->summing.version, outcome->code,
                                   outcome->code ? outcome->message : ""};
    dray__put_fields(&w, &dray__summing_fields, &message);
    dray__sums_put_known(&w, &p->sums, &p->sent);
    int rc = dray__call(p->channel, DRAY__MSG_PUBLISH_SUMS, &w, NULL, 0, deadline, NULL, error);
    dray__writer_free(&w);
    if (rc)
        dray__sums_forms_clear(&p->sent);
    return rc;
}

/* Sends the sums, to the next coordinator if this one is gone: a rank that registers again sends
 * them with its claim. */
static int tell(dray_publisher *p, dray__summing_up *s, dray_error *error)
{
    int64_t deadline = dray__publisher_deadline(p, DRAY_WAIT_DEFAULT);
    int rc;
    do {
        int64_t soon = dray__deadline(TRY_NS);
        rc = dray__publisher_ensure(p, soon < deadline ? soon : deadline, error);
        if (rc == DRAY_OK)
            rc = send_sums(p, &s->outcome, dray__answer_deadline(soon), error);
    } while (rc && !s->closing && !s->patience.ended && dray__now() < deadline &&
             (rc == DRAY_ETIMEDOUT || dray__publisher_again(p, rc, deadline)));
    return rc;
}

static void take_and_tell(dray_publisher *p)
{
    dray__summing_up *s = &p->summing;
    dray__sums sums = {0};
    dray_error told = {0};
    dray__sums_expect(&sums, s->form);
    dray__hook_step("summing");
    int rc = dray__sum_started(p->layout, p->regions, &p->pieces, p->gpu_sums, &s->patience, &sums,
                               &s->outcome);
    dray__hook_step("summed");
    if (rc == DRAY_OK)
        rc = dray__patience_ends(&s->patience, &s->outcome);
    if (rc == DRAY_OK) {
        p->sums = sums;
        sums = (dray__sums){0};
    } else {
        p->withdrawn = true; /* no group can commit it */
    }
    dray__sums_free(&sums);
    if (s->outcome.code != DRAY_ECANCELED && tell(p, s, &told) && s->outcome.code == DRAY_OK)
        s->outcome = told;
    dray__hook_step("sums told");
}

static void *run(void *publisher)
{
    dray_publisher *p = publisher;
    dray__summing_up *s = &p->summing;
    take_and_tell(p);
    pthread_mutex_lock(&s->lock);
    s->done = true;
    pthread_cond_broadcast(&s->is_done);
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

void dray__publisher_sums_init(dray_publisher *p)
{
    pthread_mutex_init(&p->summing.lock, NULL);
    dray__cond_init(&p->summing.is_done);
}

int dray__publisher_sums_start(dray_publisher *p, uint64_t version, int64_t deadline_ns,
                               dray_error *error)
{
    dray__summing_up *s = &p->summing;
    s->version = version;
    s->patience.deadline_ns = deadline_ns;
    atomic_store(&s->patience.ended, false);
    s->outcome = (dray_error){0};
    int rc = p->gpu_sums
                 ? DRAY_OK
                 : dray__source_sums_new(p->layout, p->regions, &p->pieces, &p->gpu_sums, error);
    return rc || !p->gpu_sums ? rc
                              : dray__source_sums_start(p->gpu_sums, p->fence, &s->patience, error);
}

void dray__publisher_sums_go(dray_publisher *p)
{
    dray__summing_up *s = &p->summing;
    s->done = false;
    dray__sums_form_drop(s->form);
    s->form = dray__sums_form_keep(p->sums.form);
    dray__sums_free(&p->sums); /* of the last version */
    if (dray__thread_start(&s->thread, run, p, "checksums of the published version", NULL))
        take_and_tell(p);
}

/* Waits until the thread is done, or the deadline. */
static bool await(dray__summing_up *s, int64_t deadline_ns)
{
    pthread_mutex_lock(&s->lock);
    while (!s->done && dray__now() < deadline_ns && !dray__interrupted()) {
        int64_t slice = dray__deadline(DRAY__SLICE_MS * DRAY__MILLISECOND);
        dray__cond_wait(&s->is_done, &s->lock, slice < deadline_ns ? slice : deadline_ns);
    }
    bool done = s->done;
    pthread_mutex_unlock(&s->lock);
    return done;
}

int dray__publisher_sums_end(dray_publisher *p, int64_t deadline_ns, dray_error *error)
{
    dray__summing_up *s = &p->summing;
    if (s->thread.begun) {
        await(s, deadline_ns);
        atomic_store(&s->patience.ended, true);
        dray__thread_join(&s->thread);
    }
    dray_error outcome = s->outcome;
    s->outcome = (dray_error){0};
    if (outcome.code && error)
        *error = outcome;
    return outcome.code;
}

int dray__publisher_sums_wait(dray_publisher *p, int64_t deadline_ns, dray_error *error)
{
    if (p->summing.thread.begun && !await(&p->summing, deadline_ns))
        return dray__fail(error, DRAY_ETIMEDOUT,
                          "the checksums of version %" PRIu64 " are still being computed",
                          p->summing.version);
    return dray__publisher_sums_end(p, deadline_ns, error);
}

void dray__publisher_sums_forgo(dray_publisher *p, int64_t deadline_ns)
{
    dray_error given_up;
    dray__fail(&given_up, DRAY_ECANCELED,
               "they were not complete when the publisher took its "
               "memory back");
    send_sums(p, &given_up, deadline_ns, NULL);
}

void dray__publisher_sums_free(dray_publisher *p)
{
    p->summing.closing = true;
    dray__publisher_sums_end(p, 0, NULL);
    dray__sums_form_drop(p->summing.form);
    pthread_cond_destroy(&p->summing.is_done);
    pthread_mutex_destroy(&p->summing.lock);
}
