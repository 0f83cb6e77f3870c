/* The loop of the built-in programs: claims batches for the tasks of the role, and has the program
 * work on them, on all ranks. */
#include "base/clock.h"
#include "base/error.h"
#include "base/json.h"
#include "run/data/samples.h"
#include "run/fault.h"
#include "run/host/host.h"
#include "run/job/columns.h"
#include "run/job/contract.h"
#include "run/job/schedule.h"
#include "run/process.h"
#include "run/report/spent.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

static const dray__program_kind *const roles[DRAY__PROGRAM_COUNT] = {
    [DRAY__PROGRAM_ENGINE] = &dray__engine_program,
    [DRAY__PROGRAM_TRAINER] = &dray__trainer_program,
    [DRAY__PROGRAM_CRITIC] = &dray__critic_program,
    [DRAY__PROGRAM_DESK] = &dray__desk_program,
};

/* Followers wait for the leader to find work, and must wait longer than the leader does. */
enum {
    FOLLOWER_EXTRA_SECONDS = 15,
    FLUSH_SECONDS = 1,
    AGAIN_MS = 20,
    IDLE_MS = 100,
    PUT_BACK_MS = 2
};

/* ---- SIGTERM -----------------------------------------------------------------------------------
 *
 * After SIGTERM the process claims no more rows, commits those that are complete or may be
 * committed in part, and ends. Rank 0 decides for all ranks. */

static volatile sig_atomic_t leaving;
static volatile sig_atomic_t claiming_now; /* a wait that SIGTERM ends */

static void on_leave(int number)
{
    (void)number;
    leaving = 1;
}

static int ask_whether_leaving(void)
{
    return leaving && claiming_now;
}

static void watch_leave(void)
{
    struct sigaction action = {.sa_handler = on_leave};
    sigaction(SIGTERM, &action, NULL);
    dray_set_interrupt(ask_whether_leaving);
}

/* ---- claims ---------------------------------------------------------------------------------- */

/* Advantages need whole groups, in any order. Steps that train complete groups first do, too. */
static int32_t policy_of(const dray__job *job, const dray__task_kind *kind)
{
    static const char *const whole[] = {"value", "advantage", "actor", "critic"};
    bool groups = false;
    for (size_t i = 0; i < sizeof(whole) / sizeof(whole[0]); i++)
        groups = groups || strcmp(kind->name, whole[i]) == 0;
    if (kind->policy == DRAY_POLICY_ORDERED && dray__schedule_of(job).first_complete)
        return groups ? DRAY_POLICY_GROUP : DRAY_POLICY_FIFO;
    if (kind->policy != DRAY_POLICY_ORDERED || job->queue.policy == DRAY_POLICY_ORDERED)
        return kind->policy;
    if (strcmp(kind->name, "advantage") == 0)
        return DRAY_POLICY_GROUP;
    bool balanced = job->queue.policy == DRAY_POLICY_TOKEN_BALANCED;
    return balanced && !kind->trains ? DRAY_POLICY_FIFO : job->queue.policy;
}

void dray__task_claim(const dray__host *host, const dray__task_kind *kind,
                      const dray__task_work *work, uint32_t rows, dray_claim_options *out)
{
    const dray__job *job = host->job;
    *out = (dray_claim_options)DRAY_CLAIM_OPTIONS_INIT;
    out->task = kind->name;
    out->count = rows;
    out->policy = policy_of(job, kind);
    out->timeout_ns = host->wait_ns;
    out->token_cap = out->policy == DRAY_POLICY_TOKEN_BALANCED ? (uint64_t)job->queue.token_cap : 0;
    bool as_there_are =
        strcmp(kind->name, "rollout") == 0 && job->rollout.batching == DRAY__BATCHING_CONTINUOUS;
    out->up_to = as_there_are ||
                 (dray__schedule_of(job).first_complete && kind->policy == DRAY_POLICY_ORDERED);
    dray_steps_rules rules = dray__schedule_rules(job);
    if (work->version)
        dray__rules_consume(&rules, work->version(host) + 1, out);
    /* The queue may have the next step's samples, but their old log-probs need parameters that do
     * not exist yet. */
    out->partition = work->partition ? work->partition(host) : NULL;
    if (work->newest && work->newest(host))
        dray__rules_leave_old(out);
}

/* ---- the loop -------------------------------------------------------------------------------- */

/* The leader's broadcast before every batch and every turn. */
typedef struct order {
    uint32_t task; /* index of the task; END when no more batches come; IDLE when none came yet;
                      TURN for a turn without a batch */
    uint32_t reserved;
    uint64_t bytes;   /* of the batch's description, which follows */
    int64_t decision; /* TURN */
} order;

enum {
    END = UINT32_MAX,
    IDLE = UINT32_MAX - 1,
    TURN = UINT32_MAX - 2,
    TASKS = DRAY__TASK_COUNT + 1
};

typedef struct loop {
    dray__host *host;
    const dray__program_kind *program;
    const dray__task_kind *tasks[TASKS];
    const dray__task_work *works[TASKS];
    dray__task_view views[DRAY__JOB_TASKS]; /* of the job's tasks, with their columns */
    uint32_t view_count;
    uint32_t count;
    uint32_t of_option[TASKS]; /* the task of each option of the last claim */
    bool claiming;             /* a claim was started between two turns, and has no answer yet */
    /* Without streaming: the step whose samples are all there for the task, and how many are
     * left. */
    int64_t whole[TASKS];
    uint32_t left[TASKS];
    int64_t flushed_ns;
    int64_t again_ns; /* while there is other work, nothing is claimed before this time, because a
                         batch was put back */
} loop;

/* ANSWER_NS is how long a turn is delayed for the answer to a claim. A claim of rows that are ready
 * is answered sooner. KEEP_NS is how long idle devices are kept while others wait for them. Rows of
 * this program's own samples come back from a grader sooner. */
#define ANSWER_NS (DRAY__MILLISECOND / 2)
#define KEEP_NS (2 * DRAY__MILLISECOND)

/* Returns whether the task waits until all samples of a step are ready for it. */
static bool waits_for_all(const loop *l, uint32_t task)
{
    const dray__task_kind *kind = l->tasks[task];
    return !l->host->job->stream && kind->policy == DRAY_POLICY_ORDERED &&
           kind->program != DRAY__PROGRAM_ENGINE;
}

/* To see that a step is complete, all that is left of it is claimed at once and given back. After
 * that it is claimed as in a run that streams. Returns true when this was that first claim. */
static bool saw_all(loop *l, uint32_t task, const dray_batch *batch, int64_t step)
{
    if (!waits_for_all(l, task) || (l->left[task] && l->whole[task] == step))
        return false;
    l->left[task] = l->left[task] ? 0 : dray_batch_rows(batch);
    l->whole[task] = step;
    return true;
}

static void note_done(loop *l, uint32_t task, uint32_t rows)
{
    l->left[task] -= rows < l->left[task] ? rows : l->left[task];
}

/* Fills in the claims that may be made now, and returns their number. It is 0 when there are none
 * or, with `busy`, when not every task may claim. */
static uint32_t claims_of(loop *l, bool busy, dray_claim_options *options)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < l->count; i++) {
        uint32_t rows = l->works[i]->count(l->host);
        if (!rows && busy) /* a claim that waits would keep this task from claiming */
            return 0;
        if (!rows)
            continue;
        bool all = waits_for_all(l, i) && !l->left[i];
        if (all)
            rows = (uint32_t)dray__job_batch(l->host->job);
        dray__task_claim(l->host, l->tasks[i], l->works[i], rows, &options[count]);
        if (all) {
            options[count].policy = DRAY_POLICY_FIFO;
            options[count].token_cap = 0;
        }
        l->of_option[count++] = i;
    }
    return count;
}

/* Waits for the answer to the started claim. Returns DRAY_EAGAIN when there is none yet. */
static int answer_of(loop *l, int64_t timeout_ns, uint32_t *which, dray_batch **out,
                     dray_error *error)
{
    struct pollfd fd = {.fd = dray_queue_fd(l->host->queue), .events = POLLIN};
    int64_t deadline = dray__deadline(timeout_ns);
    int rc;
    dray_trace_wait_briefly(DRAY_CAUSE_SAMPLES, "queue claim", -1);
    while ((rc = dray_queue_claim_poll(l->host->queue, which, out, error)) == DRAY_EAGAIN) {
        int64_t left = deadline - dray__now();
        if (left <= 0 || leaving)
            break;
        ppoll(&fd, 1,
              &(struct timespec){.tv_sec = left / DRAY__SECOND, .tv_nsec = left % DRAY__SECOND},
              NULL);
    }
    if (!rc) {
        dray_trace_waited_for(dray_batch_waited_for(*out));
        dray_trace_samples(dray_batch_partition(*out), l->tasks[l->of_option[*which]]->name,
                           dray_batch_rows(*out));
    } else if (rc == DRAY_ETIMEDOUT && error->origin == DRAY_ORIGIN_WAIT) {
        dray_trace_waited_for((dray_wait_cause)error->raw);
    }
    dray_trace_leave();
    l->claiming = rc == DRAY_EAGAIN;
    return rc;
}

/* Starts a claim between two turns, and looks for its answer after each turn. */
static int claim_between(loop *l, uint32_t *which, dray_batch **out, dray_error *error)
{
    bool asked = l->claiming;
    if (!asked) {
        dray_claim_options options[TASKS];
        uint32_t count = claims_of(l, true, options);
        if (!count)
            return DRAY_EAGAIN;
        int rc = dray_queue_claim_start(l->host->queue, options, count, error);
        if (rc)
            return rc;
        l->claiming = true;
    }
    int rc = answer_of(l, asked ? 0 : ANSWER_NS, which, out, error);
    return rc == DRAY_ETIMEDOUT ? DRAY_EAGAIN : rc; /* there is other work */
}

/* Claims for any task. After a resume a partition may not exist before the driver makes it
 * again. */
static int claim_any(loop *l, const dray_claim_options *options, uint32_t count, uint32_t *which,
                     dray_batch **out, dray_error *error)
{
    int64_t deadline = dray__deadline(l->host->wait_ns);
    int rc;
    claiming_now = 1;
    while ((rc = dray_queue_claim_any(l->host->queue, options, count, which, out, error)) ==
               DRAY_EGONE &&
           dray__now() < deadline) {
        claiming_now = 0;
        if (dray__host_queue_ended(l->host))
            return DRAY_EEND;
        nanosleep(&(struct timespec){.tv_nsec = AGAIN_MS * DRAY__MILLISECOND}, NULL);
        claiming_now = 1;
    }
    claiming_now = 0;
    return rc;
}

/* Waits a moment for the end of the queue, for a role that claims nothing: that of the driver
 * alone, or of a reference that is off. */
static int nothing_to_claim(loop *l)
{
    if (dray__host_queue_ended(l->host))
        return DRAY_EEND;
    nanosleep(&(struct timespec){.tv_nsec = IDLE_MS * DRAY__MILLISECOND}, NULL);
    return DRAY_ETIMEDOUT;
}

/* Claims without waiting, while the program has its turn on shared devices. It does not keep the
 * turn while it waits. */
static int claim_in_turn(loop *l, uint32_t *which, dray_batch **out, dray_error *error)
{
    dray_claim_options options[TASKS];
    uint32_t count = l->claiming ? 0 : claims_of(l, false, options);
    int rc = DRAY_EAGAIN;
    if (count && (rc = dray_queue_claim_start(l->host->queue, options, count, error)) == DRAY_OK)
        l->claiming = true;
    if (l->claiming)
        rc = answer_of(l, KEEP_NS, which, out, error);
    if (rc != DRAY_EAGAIN && rc != DRAY_EGONE)
        return rc;
    rc = dray__turn_give(l->host, error);
    return rc ? rc : DRAY_EAGAIN;
}

static int claim_alone(loop *l, uint32_t *which, dray_batch **out, dray_error *error)
{
    dray_claim_options options[TASKS];
    int rc = dray__turn_is_mine(l->host) ? claim_in_turn(l, which, out, error) : DRAY_EAGAIN;
    if (rc != DRAY_EAGAIN)
        return rc;
    if (l->claiming) {
        rc = answer_of(l, l->host->wait_ns, which, out, error);
        if (rc != DRAY_EGONE && rc != DRAY_ECLOSED) /* a claim that was started is sent again */
            return rc;
    }
    dray_trace_wait(DRAY_CAUSE_SAMPLES, "wait for samples", -1);
    uint32_t count = claims_of(l, false, options);
    rc = count ? claim_any(l, options, count, which, out, error) : nothing_to_claim(l);
    dray_trace_leave();
    return rc;
}

static int claim(loop *l, bool busy, uint32_t *task, dray_batch **out, dray_error *error)
{
    uint32_t which = 0;
    if (leaving)
        return DRAY_EEND;
    int rc = busy ? claim_between(l, &which, out, error) : claim_alone(l, &which, out, error);
    if (!rc)
        *task = l->of_option[which];
    return rc;
}

static int tell(const loop *l, const order *o, dray_error *error)
{
    order told = *o;
    return dray__group_world(l->host->group) == 1
               ? DRAY_OK
               : dray__host_broadcast(l->host, &told, sizeof(told), DRAY_WAIT_DEFAULT, error);
}

static int turn(loop *l, int64_t decision, dray_error *error)
{
    int rc = dray__turn_begin(l->host, -1, error);
    return rc ? rc : l->program->turn(l->host, decision, error);
}

static int lead_turn(loop *l, bool last, dray_error *error)
{
    dray__host *host = l->host;
    order o = {.task = TURN, .decision = last ? DRAY__TURN_LAST : l->program->decide(host)};
    int rc = tell(l, &o, error);
    return rc ? rc : turn(l, o.decision, error);
}

/* Sends the batch's description to the other ranks. The leader's batch must exist until they have
 * read it (run_all). */
static int share(loop *l, uint32_t task, const dray_batch *batch, dray_error *error)
{
    dray__host *host = l->host;
    if (dray__group_world(host->group) == 1)
        return DRAY_OK;
    void *blob = NULL;
    size_t size = 0;
    int rc = batch ? dray_batch_export(batch, &blob, &size, error) : DRAY_OK;
    order o = {.task = task, .bytes = size};
    if (!rc)
        rc = tell(l, &o, error);
    if (!rc && size)
        rc = dray__host_broadcast(host, blob, size, DRAY_WAIT_DEFAULT, error);
    free(blob);
    return rc;
}

/* Runs the task on all ranks, and waits until none of them reads the batch any more. */
static int run_all(loop *l, uint32_t task, dray_batch *batch, dray_error *error)
{
    dray__host *host = l->host;
    const dray__task_work *work = l->works[task];
    int64_t step = 0;
    host->put_back = host->kept = false;
    int rc = dray__batch_step(batch, &step, error);
    if (!rc && work->prepare)
        rc = work->prepare(host, batch, step, error);
    if (!rc && !host->put_back)
        rc = dray__turn_begin(host, step, error);
    if (!rc && !host->put_back) {
        if (work->spanned)
            dray_trace_enter(DRAY_SPAN_BUSY, work->task, step);
        rc = work->run(host, batch, step, error);
        if (work->spanned)
            dray_trace_leave();
    }
    return rc ? rc : dray__host_meet(host, error);
}

static int after(loop *l, uint32_t task, dray_error *error)
{
    return l->works[task]->after ? l->works[task]->after(l->host, error) : DRAY_OK;
}

/* Sends the next claim before the wait for the commit's answer, so that both answers come after one
 * round trip. It is not done when the claim depends on the commit or on its effects, or for an
 * engine. An engine's batches take long, and rows that it has claimed would wait for it if it
 * hung. */
static int claim_ahead(loop *l, uint32_t task, dray_error *error)
{
    dray__host *host = l->host;
    const dray__task_work *work = l->works[task];
    dray_claim_options options[TASKS];
    if (l->tasks[task]->program == DRAY__PROGRAM_ENGINE || !host->job->stream ||
        (l->program->busy && l->program->busy(host)) || dray__turn_is_mine(host) ||
        (work->commits_alone && work->commits_alone(host)))
        return DRAY_OK;
    uint32_t count = claims_of(l, false, options);
    int rc = count ? dray_queue_claim_start(host->queue, options, count, error) : DRAY_OK;
    l->claiming = !rc && count;
    return rc;
}

/* When other hosts take part, the bytes of a batch may be lost with one of them. So rank 0 reads
 * all columns before any rank begins. Rows that are lost are made again, and the batch is
 * dropped. */
static bool is_whole(const loop *l, uint32_t task, dray_batch *batch)
{
    dray_column column;
    int rc = DRAY_OK;
    for (uint32_t i = 0; l->host->job->listen[0] && i < l->view_count; i++) {
        const dray__task_view *view = &l->views[i];
        if (strcmp(view->name, l->tasks[task]->name) != 0)
            continue;
        for (uint32_t c = 0; c < view->need_count && rc != DRAY_EGONE; c++)
            rc = dray_batch_column(batch, view->needs[c], &column, NULL);
        /* The columns that an earlier claim of an open sample has written. */
        for (uint32_t c = 0; c < view->write_count && rc != DRAY_EGONE; c++)
            rc = dray_batch_column(batch, view->writes[c], &column, NULL);
    }
    return rc != DRAY_EGONE;
}

static int lead_once(loop *l, bool *ended, dray_error *error)
{
    dray_batch *batch = NULL;
    uint32_t task = 0;
    bool busy = l->program->busy && l->program->busy(l->host);
    int rc = busy && dray__now() < l->again_ns ? DRAY_EAGAIN : claim(l, busy, &task, &batch, error);
    if (busy && (rc == DRAY_EAGAIN || rc == DRAY_EEND))
        return lead_turn(l, rc == DRAY_EEND, error);
    if (rc == DRAY_EEND) {
        *ended = true;
        return share(l, END, NULL, error);
    }
    if (rc == DRAY_ETIMEDOUT ||
        rc == DRAY_EAGAIN) /* the supervisor finds out whether the run is stuck */
        return share(l, IDLE, NULL, error);
    int64_t step = 0;
    if (!rc)
        rc = dray__batch_step(batch, &step, error);
    if (!rc && (saw_all(l, task, batch, step) || !is_whole(l, task, batch))) {
        dray_batch_free(batch);
        return DRAY_OK;
    }
    if (!rc) {
        dray__fault_at("claimed", step);
        rc = share(l, task, batch, error);
    }
    if (!rc && (rc = run_all(l, task, batch, error))) /* the process ends with it */
        dray_batch_fail(batch, NULL, 0, error->message, NULL);
    if (!rc && l->host->kept)
        return DRAY_OK;
    bool done = !rc && !l->host->put_back;
    if (!rc && !done)
        l->again_ns = dray__now() + PUT_BACK_MS * DRAY__MILLISECOND;
    if (done)
        rc = claim_ahead(l, task, error);
    if (done && !rc)
        rc = dray_batch_commit(batch, error);
    /* A run that is stopped clears the batch. */
    if (done && rc == DRAY_EGONE && !l->works[task]->after) {
        dray_batch_free(batch);
        return DRAY_OK;
    }
    if (done && !rc) {
        int64_t of = l->works[task]->version ? l->works[task]->version(l->host) + 1 : step;
        dray__fault_record(l->tasks[task]->name, batch, NULL, 0, of, l->host->options.first_step);
        note_done(l, task, dray_batch_rows(batch));
        dray__fault_at("committed", step);
    }
    dray_batch_free(batch);
    return rc || !done ? rc : after(l, task, error);
}

static int follow_once(loop *l, bool *ended, dray_error *error)
{
    dray__host *host = l->host;
    order o;
    int64_t timeout_ns = host->wait_ns + FOLLOWER_EXTRA_SECONDS * DRAY__SECOND;
    int rc = dray__host_broadcast(host, &o, sizeof(o), timeout_ns, error);
    if (rc)
        return rc;
    if (o.task == TURN)
        return turn(l, o.decision, error);
    if (o.task >= l->count) {
        *ended = o.task == END;
        return DRAY_OK;
    }
    void *blob = malloc(o.bytes);
    dray_batch *batch = NULL;
    if (!blob)
        return dray__nomem(error);
    rc = dray__host_broadcast(host, blob, o.bytes, DRAY_WAIT_DEFAULT, error);
    if (!rc)
        rc = dray_batch_import(host->queue, blob, o.bytes, &batch, error);
    free(blob);
    if (!rc)
        rc = run_all(l, o.task, batch, error);
    dray_batch_free(batch);
    return rc || host->put_back || host->kept ? rc : after(l, o.task, error);
}

static void flush_trace(loop *l)
{
    if (dray__now() < l->flushed_ns + FLUSH_SECONDS * DRAY__SECOND)
        return;
    dray_trace_flush(NULL); /* a trace that cannot be written must not end the job */
    l->flushed_ns = dray__now();
}

static const dray__task_work *work_of(const dray__program_kind *program, const char *task)
{
    const dray__task_work *work = program->works;
    /* The table of tasks says that the program has this task. */
    while (strcmp(work->task, task) != 0)
        work++;
    return work;
}

static int run_loop(dray__host *host, const dray__program_kind *program, dray_error *error)
{
    loop l = {.host = host, .program = program, .flushed_ns = dray__now()};
    l.count = dray__tasks_of(host->job, host->spec, l.tasks);
    l.view_count = dray__job_tasks(host->job, l.views);
    for (uint32_t i = 0; i < l.count; i++)
        l.works[i] = work_of(program, l.tasks[i]->name);
    bool ended = false;
    int rc = dray__turn_end(host, error); /* the turn of opening, in which a trainer warms up */
    while (!rc && !ended) {
        rc = dray__host_leads(host) ? lead_once(&l, &ended, error) : follow_once(&l, &ended, error);
        flush_trace(&l);
    }
    return rc;
}

/* ---- opening --------------------------------------------------------------------------------- */

static int find_spec(dray__host *host, dray_error *error)
{
    for (uint32_t i = 0; i < host->job->role_count; i++)
        if (strcmp(host->job->roles[i].name, host->options.name) == 0)
            host->spec = &host->job->roles[i];
    if (!host->spec || host->spec->command[0])
        return dray__fail(error, DRAY_ENOENT, "the job has no built-in role '%s'",
                          host->options.name);
    dray__role_label(host->spec, host->options.instance, host->label);
    if (host->options.rank >= host->spec->ranks)
        return dray__fail(error, DRAY_EINVALID, "role %s has %lld ranks, found rank %u",
                          host->spec->name, (long long)host->spec->ranks, host->options.rank);
    return DRAY_OK;
}

static int program_of(const dray__host *host)
{
    return dray__task_find(host->spec->tasks[0])->program;
}

/* One rank alone is a group, too, so that tasks need no special case. */
static int open_group(dray__host *host, dray_error *error)
{
    int fd = host->options.group_fd, own = -1;
    uint32_t world = (uint32_t)host->spec->ranks;
    if (fd < 0 && world > 1)
        return dray__fail(error, DRAY_EINVALID, "role %s: no group descriptor for %u ranks",
                          host->spec->name, world);
    int rc = fd < 0 ? dray__group_create(1, 0, &own, error) : DRAY_OK;
    if (!rc)
        rc = dray__group_open(fd < 0 ? own : fd, host->options.rank, world, host->wait_ns,
                              &host->group, error);
    if (own >= 0)
        close(own);
    return rc;
}

static int open_context(dray__host *host, dray_error *error)
{
    static const char *const role_names[] = {"engine", "trainer", "trainer", "task"};
    char name[80];
    snprintf(name, sizeof(name), "%s/%u", host->label, host->options.rank);
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = host->options.address;
    options.name = name;
    options.role = role_names[program_of(host)];
    options.rank = host->options.rank;
    options.timeout_ns = host->wait_ns;
    return dray_open(&options, &host->context, error);
}

static int open_trace(dray__host *host, dray_error *error)
{
    char path[4096], name[80];
    dray__spans_path(host->options.folder, host->label, host->options.rank, host->options.epoch,
                     path, sizeof(path));
    /* The process was started through /proc/self/exe; without this it would be called "exe" in the
     * trace, ps and top. */
    snprintf(name, sizeof(name), "%s-%u", host->label, host->options.rank);
    prctl(PR_SET_NAME, name);
    snprintf(name, sizeof(name), "%s %u", host->label, host->options.rank);
    int rc = dray_trace_open(path, name, error);
    dray_trace_enter(DRAY_SPAN_BUSY, "open", -1);
    return rc;
}

static int open_host(dray__host *host, dray__job **job, dray_error *error)
{
    char config[4096];
    dray__host_path(host, config, sizeof(config), "config.yaml");
    int rc = dray__job_load(config, NULL, 0, job, NULL, error);
    if (rc)
        return rc;
    host->job = *job;
    host->wait_ns = dray__job_wait_ns(host->job);
    host->pace = dray__job_pace(host->job, &host->paced) ? &host->paced : NULL;
    rc = find_spec(host, error);
    if (!rc)
        rc = dray__fault_open(host->label, host->options.rank, host->options.epoch, error);
    if (!rc)
        rc = open_trace(host, error);
    if (!rc)
        rc = dray__job_tokenizer(host->job, &host->tokenizer, error);
    if (!rc)
        rc = open_group(host, error);
    if (!rc)
        rc = open_context(host, error);
    if (!rc)
        rc = dray__job_queue_open(host->context, host->job, &host->queue, error);
    if (!rc)
        rc = dray__turn_open(host->options.leases, &host->turn, error);
    return rc;
}

int dray__host_main(const dray__host_options *options, dray_error *error)
{
    dray_error scratch;
    if (!error)
        error = &scratch;
    dray__host host = {.options = *options};
    dray__job *job = NULL;
    dray__process_begin();
    watch_leave();
    /* Each rank computes on one core. OpenBLAS's threads would retry allocations for ever when
     * memory is short. */
    setenv("OPENBLAS_NUM_THREADS", "1", 1);
    int rc = open_host(&host, &job, error);
    const dray__program_kind *role = host.spec ? roles[program_of(&host)] : NULL;
    if (!rc)
        rc = role->open(&host, error);
    dray_trace_leave();
    dray_trace_enter(DRAY_SPAN_BUSY, "loop", -1); /* for the time that is in no other span */
    if (!rc)
        rc = run_loop(&host, role, error);
    dray_trace_leave();
    dray_trace_enter(DRAY_SPAN_BUSY, "close", -1);
    if (!rc && role->finish)
        rc = role->finish(&host, error);
    if (rc && host.group)
        dray__group_abort(host.group, error->message);
    if (role)
        role->close(&host);
    dray_queue_close(host.queue);
    dray__turn_close(host.turn);
    dray_close(host.context);
    dray__group_close(host.group);
    dray__tokenizer_close(host.tokenizer);
    dray_trace_flush(NULL);
    dray__job_free(job);
    return rc;
}
