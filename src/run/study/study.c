#include "run/study/study.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/io.h"
#include "base/json.h"
#include "run/host/host.h"
#include "run/study/study_list.h"
#include "run/supervisor/spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SIGNALS = 3 };

static const int numbers[SIGNALS] = {SIGINT, SIGTERM, SIGHUP};

static volatile sig_atomic_t interrupts;

static void on_signal(int number)
{
    (void)number;
    interrupts = interrupts + 1;
}

static void tell(const dray__study_options *o, const char *event, json_t *object)
{
    o->tell(o->user, event, object);
    json_decref(object);
}

/* ---- one run --------------------------------------------------------------------------------- */

/* Waits for the run, and stops it when the study is interrupted. Ctrl-C reaches this process alone,
 * because the run has its own process group. */
static int wait_for(const dray__study_options *o, dray__child *child)
{
    struct pollfd fd = {.fd = child->pidfd, .events = POLLIN};
    int told = 0, status = 0;
    while (!dray__child_ended(child, &status)) {
        if (told < interrupts) {
            if (told++ == 0)
                tell(o, "stopping",
                     json_pack("{s:s}", "message",
                               "stopping after this step and its checkpoint (once more: at once)"));
            dray__child_signal(child, SIGINT);
        }
        poll(&fd, 1, 200);
    }
    return status;
}

static int start(const dray__study_entry *e, const dray__study_trial *t, const char *log,
                 dray__child *child, dray_error *error)
{
    char parent[32], seed[32], job[PATH_MAX], config[PATH_MAX];
    snprintf(parent, sizeof(parent), "--parent=%ld", (long)getpid());
    snprintf(seed, sizeof(seed), "--seed=%lld", (long long)t->seed);
    dray__path(job, sizeof(job), "%s/job.yaml", e->folder);
    dray__path(config, sizeof(config), "%s/config.yaml", t->folder);
    const char *fresh[] = {"run", parent, job, seed, "--out", t->folder, NULL};
    const char *resumed[] = {"run", parent, "--resume", t->folder, NULL};
    if (mkdir(t->folder, 0777) < 0 && errno != EEXIST)
        return dray__fail_errno(error, errno, "%s", t->folder);
    const dray__child_start start = {
        .arguments = access(config, F_OK) == 0 ? resumed : fresh, .log = log, .fd = -1};
    return dray__child_begin(&start, child, error);
}

/* Makes one run. A run that fails is a result of the trial; a returned error is one of the study
 * itself. */
static int run_trial(dray__study_plan *plan, dray__study_entry *e, dray__study_trial *t,
                     dray_error *error)
{
    char log[PATH_MAX];
    dray__child child = {.pidfd = -1};
    dray__path(log, sizeof(log), "%s/run.log", t->folder);
    int rc = start(e, t, log, &child, error);
    if (rc)
        return rc;
    int status = wait_for(plan->options, &child);
    dray__study_run_free(&t->run);
    rc = dray__study_read(t->folder, e->job, &t->run, error);
    plan->stopped = interrupts > 0;
    if (rc || t->run.finished || plan->stopped)
        return rc;
    if (WIFSIGNALED(status))
        snprintf(t->error, sizeof(t->error), "was killed by signal %d", WTERMSIG(status));
    else
        dray__log_last(log, 0, "dray run: ", false, t->error, sizeof(t->error));
    if (!t->error[0])
        snprintf(t->error, sizeof(t->error), "ended with status %d before its last step",
                 WEXITSTATUS(status));
    return DRAY_OK;
}

/* ---- all of them ----------------------------------------------------------------------------- */

static json_t *describe(const dray__study_plan *plan, const dray__study_entry *e,
                        const dray__study_trial *t, uint32_t number)
{
    json_t *o = json_pack("{s:I, s:I, s:s, s:I, s:s}", "number", (json_int_t)number, "of",
                          (json_int_t)plan->entry_count * plan->seed_count, "schedule", e->text,
                          "seed", (json_int_t)t->seed, "folder", t->folder);
    if (t->error[0])
        dray__json_set(&o, "error", json_string(t->error));
    if (!t->run.finished)
        return o;
    dray__json_set(&o, "measures", json_incref(t->run.measures));
    if (t->run.diverged[0])
        dray__json_set(&o, "diverged", json_string(t->run.diverged));
    return o;
}

static int take_trial(dray__study_plan *plan, uint32_t seed, uint32_t entry, dray_error *error)
{
    dray__study_entry *e = &plan->entries[entry];
    dray__study_trial *t = &e->trials[seed];
    uint32_t number = seed * plan->entry_count + entry + 1;
    int rc = dray__study_read(t->folder, e->job, &t->run, error);
    bool before = t->run.finished;
    if (rc || (!before && plan->stopped))
        return rc;
    int64_t begin = dray__now();
    if (!before) {
        tell(plan->options, "begin", describe(plan, e, t, number));
        rc = run_trial(plan, e, t, error);
    }
    if (rc || (!t->run.finished && !t->error[0]))
        return rc;
    json_t *said = describe(plan, e, t, number);
    dray__json_set(&said, "took_seconds",
                   json_real((double)(dray__now() - begin) / (double)DRAY__SECOND));
    dray__json_set(&said, "before", json_boolean(before));
    tell(plan->options, "run", said);
    return DRAY_OK;
}

/* Makes the runs seed by seed, so that a machine that becomes slower affects all schedules
 * alike. */
static int run_all(dray__study_plan *plan, dray_error *error)
{
    int rc = DRAY_OK;
    tell(plan->options, "start",
         json_pack("{s:s, s:I, s:I, s:I}", "folder", plan->folder, "runs",
                   (json_int_t)plan->entry_count * plan->seed_count, "schedules",
                   (json_int_t)plan->entry_count, "seeds", (json_int_t)plan->seed_count));
    for (uint32_t seed = 0; seed < plan->seed_count && !rc; seed++)
        for (uint32_t entry = 0; entry < plan->entry_count && !rc; entry++)
            rc = take_trial(plan, seed, entry, error);
    return rc;
}

static int write_result(const dray__study_plan *plan, json_t **result, dray_error *error)
{
    int rc = dray__study_summary(plan, result, error);
    char *text = rc ? NULL : dray__json_text(*result, JSON_INDENT(1));
    if (!rc && !text)
        rc = dray__nomem(error);
    if (!rc)
        rc = dray__write_text(plan->folder, "study.json", text, error);
    free(text);
    return rc;
}

int dray__study(const dray__study_options *options, dray__run_end *end, json_t **result,
                char **folder, dray_error *error)
{
    struct sigaction action = {.sa_handler = on_signal}, before[SIGNALS];
    dray__study_plan plan = {0};
    json_t *made = NULL;
    int lock = -1, rc = dray__study_plan_open(options, &plan, error);
    if (rc)
        return rc;
    interrupts = 0;
    for (int i = 0; i < SIGNALS; i++)
        sigaction(numbers[i], &action, &before[i]);
    rc = dray__study_plan_place(&plan, error);
    if (!rc)
        rc = dray__lock_folder(plan.folder, "a study", &lock, error);
    if (!rc)
        rc = run_all(&plan, error);
    if (!rc)
        rc = write_result(&plan, &made, error);
    for (int i = 0; i < SIGNALS; i++)
        sigaction(numbers[i], &before[i], NULL);
    if (lock >= 0)
        close(lock);
    *end = !plan.stopped ? DRAY__RUN_DONE : interrupts > 1 ? DRAY__RUN_KILLED : DRAY__RUN_STOPPED;
    if (!rc) {
        *result = made;
        *folder = plan.folder;
        plan.folder = NULL;
    } else {
        json_decref(made);
    }
    dray__study_plan_close(&plan);
    return rc;
}
