/* The supervisor: starts the coordinator and the roles, keeps the descriptors of the queue's
 * chunks, starts engines and desks anew when they die, and sees to it that nothing outlives the
 * run. */
#include "base/clock.h"
#include "base/error.h"
#include "group/group.h"
#include "queue/keeper.h"
#include "run/checkpoint.h"
#include "run/desk.h"
#include "run/process.h"
#include "run/reporter.h"
#include "run/run.h"
#include "run/spawn.h"
#include "run/tasks.h"

#include <dirent.h>
#include <dray/trace.h>
#include <event2/event.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef struct supervisor supervisor;

typedef struct process {
    struct instance *instance; /* NULL: the coordinator */
    supervisor *owner;
    dray__child child;
    struct event *event; /* its end */
    char log[PATH_MAX];
    off_t log_begin; /* before it wrote there */
    uint32_t rank;
    bool done; /* ended with status 0 */
} process;

typedef struct instance {
    const dray__job_role *spec;
    int program; /* dray__program */
    uint32_t epoch;
    process *ranks;
    uint32_t deaths;   /* in a row without progress */
    uint64_t progress; /* when it was started */
} instance;

struct supervisor {
    const dray__run_options *options;
    dray__folder folder;
    dray__job *job;
    struct event_base *base;
    dray__keeper *keeper;
    process coordinator;
    instance *instances;
    dray__reporter *reporter;
    char address[128], keeper_path[112];
    struct event *signals[3], *tick;
    int64_t ticked_ns, awake_ns; /* the last tick; since when ticks have come in time */
    int interrupts;
    bool over; /* the loop is to end */
    int code;
    dray_error failure;
};

enum { TICK_MS = 200, LATE_MS = 1000, CONNECT_SECONDS = 20, STOP_SECONDS = 10, FILES_LEAST = 64 };

/* ---- the end --------------------------------------------------------------------------------- */

static void end_loop(supervisor *s)
{
    s->over = true;
    event_base_loopbreak(s->base);
}

static void fail(supervisor *s, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void fail(supervisor *s, int code, const char *format, ...)
{
    if (s->code)
        return;
    char message[DRAY_ERROR_MESSAGE_MAX];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    s->code = dray__fail(&s->failure, code, "%s", message);
    end_loop(s);
}

/* "dray run --resume FOLDER", as the person may type it. */
static void advice(const supervisor *s, char *out, size_t capacity)
{
    bool any = dray__folder_checkpoint(&s->folder, &(int64_t){0}, NULL) == DRAY_OK;
    snprintf(out, capacity, "%s: dray run --resume %s",
             any ? "go on from the last checkpoint" : "no checkpoint yet; from the beginning again",
             s->folder.path);
}

/* ---- processes ------------------------------------------------------------------------------- */

static void on_end(evutil_socket_t fd, short what, void *user);

static void end_process(process *p)
{
    if (p->event)
        event_free(p->event);
    p->event = NULL;
    dray__child_end(&p->child);
}

/* Its log is p->log. */
static int start_process(supervisor *s, process *p, const char *const *arguments, int fd,
                         dray_error *error)
{
    struct stat st;
    p->log_begin = stat(p->log, &st) == 0 ? st.st_size : 0;
    int rc = dray__child_start(arguments, p->log, fd, &p->child, error);
    if (rc)
        return rc;
    p->event = event_new(s->base, p->child.pidfd, EV_READ, on_end, p);
    if (p->event && event_add(p->event, NULL) == 0)
        return DRAY_OK;
    end_process(p);
    return dray__fail(error, DRAY_ESYS, "supervisor: cannot watch a process");
}

static int start_coordinator(supervisor *s, dray_error *error)
{
    char path[112], parent[32];
    snprintf(path, sizeof(path), "%s/coordinator.socket", s->folder.sockets);
    snprintf(s->keeper_path, sizeof(s->keeper_path), "%s/keeper.socket", s->folder.sockets);
    snprintf(s->address, sizeof(s->address), "unix:%s", path);
    snprintf(parent, sizeof(parent), "--parent=%ld", (long)getpid());
    unlink(path); /* of a run that was killed: the folder's lock says that none is alive */
    int rc = dray__keeper_new(s->base, s->keeper_path, 0, &s->keeper, error);
    if (rc)
        return rc;
    const char *arguments[14] = {"host", parent,     "--coordinator", "--address",
                                 path,   "--keeper", s->keeper_path};
    int count = 7;
    char journal[PATH_MAX], store[PATH_MAX];
    dray__folder_path(&s->folder, "queue", journal);
    if (s->job->queue.durability > DRAY_DURABILITY_NONE) {
        arguments[count++] = "--journal";
        arguments[count++] = journal;
    }
    if (s->job->queue.backend == DRAY_BACKEND_REDIS) {
        dray__path(store, sizeof store, "redis:%s", s->job->queue.backend_address);
        arguments[count++] = "--store";
        arguments[count++] = store;
    }
    if (s->job->queue.metrics[0]) {
        arguments[count++] = "--metrics";
        arguments[count++] = s->job->queue.metrics;
    }
    process *p = &s->coordinator;
    p->owner = s;
    dray__folder_path(&s->folder, "logs/coordinator.log", p->log);
    return start_process(s, p, arguments, -1, error);
}

/* What the checkpoint that the run goes on from says of the queue. NULL: nothing. */
static const char *saved_queue(const supervisor *s, char path[PATH_MAX])
{
    dray__checkpoint_queue(s->folder.path, s->folder.first_step, path, PATH_MAX);
    bool saved = s->folder.resumed && s->job->queue.durability == DRAY_DURABILITY_CHECKPOINT;
    return saved && access(path, R_OK) == 0 ? path : NULL;
}

static int go_back(const supervisor *s, dray_error *error)
{
    dray_options options = DRAY_OPTIONS_INIT;
    dray_context *context = NULL;
    dray_queue *queue = NULL;
    char path[PATH_MAX];
    void *cursor = NULL;
    size_t size = 0;
    options.address = s->address;
    options.name = "supervisor";
    options.timeout_ns = dray__job_wait_ns(s->job);
    int rc = dray_open(&options, &context, error);
    if (!rc)
        rc = dray__job_queue_restore(context, s->job, saved_queue(s, path), &queue, error);
    if (!rc)
        rc = dray__checkpoint_cursor(s->folder.path, s->folder.first_step, &cursor, &size, error);
    if (!rc)
        rc = dray__driver_resume(queue, cursor, size, s->folder.eval_from <= s->folder.first_step,
                                 error);
    free(cursor);
    dray_queue_close(queue);
    dray_close(context);
    return rc;
}

typedef struct going_back {
    const supervisor *s;
    int rc;
    dray_error error;
    atomic_bool done;
} going_back;

static void *go_back_main(void *user)
{
    going_back *g = user;
    g->rc = go_back(g->s, &g->error);
    atomic_store(&g->done, true);
    return NULL;
}

static void turn_loop(const supervisor *s, int64_t us)
{
    struct timeval turn = {.tv_usec = us};
    event_base_loopexit(s->base, &turn);
    event_base_dispatch(s->base);
}

/* In a thread: the bytes of what is restored go into this process's keeper meanwhile. */
static int go_back_beside(const supervisor *s, dray_error *error)
{
    going_back g = {.s = s};
    pthread_t thread;
    int problem = pthread_create(&thread, NULL, go_back_main, &g);
    if (problem)
        return dray__fail_errno(error, problem, "supervisor: no thread");
    while (!atomic_load(&g.done))
        turn_loop(s, 2000);
    pthread_join(thread, NULL);
    if (g.rc)
        *error = g.error;
    return g.rc;
}

/* A coordinator listens within milliseconds, but one that reads a journal answers nobody before it
 * is through, and puts what it reads into this process's keeper meanwhile. */
static int wait_for_coordinator(supervisor *s, int64_t patience_ns, dray_error *error)
{
    int64_t deadline = dray__deadline(patience_ns), slice_ns = 20 * DRAY__MILLISECOND;
    dray_options options = DRAY_OPTIONS_INIT;
    dray_context *context = NULL;
    options.address = s->address;
    options.name = "supervisor";
    options.role = "tool";
    while (!s->code) {
        options.timeout_ns = slice_ns;
        int rc = dray_open(&options, &context, error);
        if (!rc)
            break;
        if ((rc != DRAY_ECLOSED && rc != DRAY_ETIMEDOUT) || dray__now() > deadline)
            return rc;
        turn_loop(s, 2 * slice_ns / 1000);
        if (slice_ns < 160 * DRAY__MILLISECOND)
            slice_ns *= 2;
    }
    dray_close(context);
    if (s->code)
        *error = s->failure;
    return s->code;
}

static int64_t patience_of(const supervisor *s)
{
    bool journal = s->job->queue.durability > DRAY_DURABILITY_NONE;
    return journal ? dray__job_wait_ns(s->job) : CONNECT_SECONDS * DRAY__SECOND;
}

static int start_rank(supervisor *s, instance *i, uint32_t rank, int group, dray_error *error)
{
    char parent[32], rank_text[32], epoch[32], first[48], eval[48], name[96], fd[32];
    snprintf(parent, sizeof(parent), "--parent=%ld", (long)getpid());
    snprintf(rank_text, sizeof(rank_text), "--rank=%u", rank);
    snprintf(epoch, sizeof(epoch), "--epoch=%u", i->epoch);
    snprintf(first, sizeof(first), "--first-step=%lld", (long long)s->folder.first_step);
    snprintf(fd, sizeof(fd), "--group-fd=%d", group < 0 ? -1 : DRAY__CHILD_FD);
    const char *arguments[16] = {"host",    parent,        "--folder",  s->folder.path,
                                 "--name",  i->spec->name, "--address", s->address,
                                 rank_text, epoch,         first,       fd};
    int count = 12;
    snprintf(eval, sizeof(eval), "--eval-from=%lld", (long long)s->folder.eval_from);
    arguments[count++] = eval;
    if (s->interrupts)
        arguments[count++] = "--stopping";
    process *p = &i->ranks[rank];
    *p = (process){.instance = i, .owner = s, .rank = rank, .child.pidfd = -1};
    snprintf(name, sizeof(name), "logs/%s-%u.log", i->spec->name, rank);
    dray__folder_path(&s->folder, name, p->log);
    return start_process(s, p, arguments, group, error);
}

static int start_instance(supervisor *s, instance *i, dray_error *error)
{
    int group = -1, rc = DRAY_OK;
    i->epoch++;
    i->progress = dray__reporter_progress(s->reporter);
    if (i->spec->ranks > 1)
        rc = dray__group_create((uint32_t)i->spec->ranks, 0, &group, error);
    for (uint32_t rank = 0; rank < i->spec->ranks && !rc; rank++)
        rc = start_rank(s, i, rank, group, error);
    if (group >= 0)
        close(group);
    return rc;
}

/* ---- deaths ---------------------------------------------------------------------------------- */

static void describe_end(const process *p, int status, char *out, size_t capacity)
{
    char why[320] = "";
    if (WIFSIGNALED(status)) {
        snprintf(out, capacity, "was killed by signal %d (%s)", WTERMSIG(status),
                 strsignal(WTERMSIG(status)));
        return;
    }
    dray__log_error(p->log, p->log_begin, why, sizeof(why));
    snprintf(out, capacity, "failed with status %d%s%s", WEXITSTATUS(status), why[0] ? ": " : "",
             why[0] ? why : "");
}

static bool all_done(const supervisor *s)
{
    for (uint32_t i = 0; i < s->job->role_count; i++)
        for (uint32_t rank = 0; rank < s->instances[i].spec->ranks; rank++)
            if (!s->instances[i].ranks[rank].done)
                return false;
    return true;
}

static void rank_died(supervisor *s, process *p, int status)
{
    instance *i = p->instance;
    char how[400], what[PATH_MAX + 96];
    describe_end(p, status, how, sizeof(how));
    for (uint32_t rank = 0; rank < i->spec->ranks; rank++)
        end_process(&i->ranks[rank]);
    if (i->program == DRAY__PROGRAM_TRAINER) {
        advice(s, what, sizeof(what));
        fail(s, DRAY_EDEAD, "%s rank %u %s; %s", i->spec->name, p->rank, how, what);
        return;
    }
    i->deaths = dray__reporter_progress(s->reporter) > i->progress ? 1 : i->deaths + 1;
    if (i->deaths >= (uint32_t)s->job->limits.restarts) {
        fail(s, DRAY_EDEAD, "%s died %u times in a row without a step done; last: rank %u %s",
             i->spec->name, i->deaths, p->rank, how);
        return;
    }
    dray__reporter_say(s->reporter, "restart", "%s rank %u %s: starting %s anew", i->spec->name,
                       p->rank, how, i->spec->name);
    dray_error error;
    if (start_instance(s, i, &error))
        fail(s, error.code, "%s", error.message);
}

static void coordinator_died(supervisor *s, int status)
{
    char how[400], what[PATH_MAX + 96];
    describe_end(&s->coordinator, status, how, sizeof(how));
    advice(s, what, sizeof(what));
    fail(s, DRAY_EDEAD, "the coordinator %s; %s", how, what);
}

static void on_end(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    process *p = user;
    supervisor *s = p->owner;
    int status = 0;
    if (!dray__child_ended(&p->child, &status)) {
        event_add(p->event, NULL);
        return;
    }
    event_free(p->event);
    p->event = NULL;
    if (!p->instance) {
        coordinator_died(s, status);
    } else if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        p->done = true;
        if (all_done(s))
            end_loop(s);
    } else {
        rank_died(s, p, status);
    }
}

/* ---- signals and time ------------------------------------------------------------------------ */

static void ask_driver(supervisor *s)
{
    for (uint32_t i = 0; i < s->job->role_count; i++)
        if (dray__role_has(s->instances[i].spec, "driver") &&
            s->instances[i].ranks[0].child.pid > 0)
            kill(s->instances[i].ranks[0].child.pid, SIGTERM);
}

static void on_signal(evutil_socket_t number, short what, void *user)
{
    (void)number, (void)what;
    supervisor *s = user;
    s->interrupts++;
    if (s->interrupts > 1 || !dray__reporter_ready(s->reporter)) {
        s->interrupts = 2;
        end_loop(s);
        return;
    }
    dray__reporter_say(s->reporter, "stopping",
                       "stopping after this step and its checkpoint (once more: at once)");
    ask_driver(s);
}

static void on_tick(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    supervisor *s = user;
    dray_error error;
    if (dray__reporter_failed(s->reporter, &error)) {
        fail(s, error.code, "%s", error.message);
        return;
    }
    int64_t now = dray__now(), heard = dray__reporter_heard_ns(s->reporter);
    if (now - s->ticked_ns > LATE_MS * DRAY__MILLISECOND)
        s->awake_ns = now; /* this process was stopped, and so was who listens to the others */
    s->ticked_ns = now;
    int64_t silent = now - (heard > s->awake_ns ? heard : s->awake_ns);
    if (silent > dray__job_wait_ns(s->job)) {
        char advised[PATH_MAX + 96];
        advice(s, advised, sizeof(advised));
        fail(s, DRAY_ETIMEDOUT, "nothing moved for %.0f s (limits.wait_seconds; logs: %s/logs); %s",
             (double)silent / (double)DRAY__SECOND, s->folder.path, advised);
    }
}

static int watch_signals(supervisor *s, dray_error *error)
{
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    struct timeval every = {.tv_usec = TICK_MS * 1000};
    bool ok = true;
    for (int i = 0; i < 3; i++) {
        s->signals[i] = evsignal_new(s->base, numbers[i], on_signal, s);
        ok = ok && s->signals[i] && event_add(s->signals[i], NULL) == 0;
    }
    s->ticked_ns = s->awake_ns = dray__now();
    s->tick = event_new(s->base, -1, EV_PERSIST, on_tick, s);
    ok = ok && s->tick && event_add(s->tick, &every) == 0;
    return ok ? DRAY_OK : dray__fail(error, DRAY_ESYS, "supervisor: cannot watch signals");
}

/* ---- a run ----------------------------------------------------------------------------------- */

static int prepare(supervisor *s, dray_error *error)
{
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    s->base = event_base_new();
    s->coordinator.child.pidfd = -1;
    s->instances = calloc(s->job->role_count, sizeof(*s->instances));
    if (!s->base || !s->instances)
        return dray__nomem(error);
    for (uint32_t i = 0; i < s->job->role_count; i++) {
        instance *at = &s->instances[i];
        at->spec = &s->job->roles[i];
        at->program = dray__task_find(at->spec->tasks[0])->program;
        at->ranks = calloc((size_t)at->spec->ranks, sizeof(*at->ranks));
        if (!at->ranks)
            return dray__nomem(error);
        for (uint32_t rank = 0; rank < at->spec->ranks; rank++)
            at->ranks[rank].child.pidfd = -1;
    }
    return DRAY_OK;
}

/* Of a run that ended well nothing is left to go on with. */
static void remove_journal(const supervisor *s)
{
    char path[PATH_MAX];
    dray__folder_path(&s->folder, "queue", path);
    DIR *dir = opendir(path);
    for (struct dirent *entry; dir && (entry = readdir(dir));)
        if (strncmp(entry->d_name, "queue-", 6) == 0 || strncmp(entry->d_name, "step-", 5) == 0 ||
            strcmp(entry->d_name, "stores") == 0)
            unlinkat(dirfd(dir), entry->d_name, 0);
    if (dir)
        closedir(dir);
    rmdir(path);
}

static int start_all(supervisor *s, dray_error *error)
{
    int rc = start_coordinator(s, error);
    if (!rc)
        rc = wait_for_coordinator(s, patience_of(s), error);
    if (!rc && s->folder.resumed)
        rc = go_back_beside(s, error);
    if (!rc)
        rc = dray__reporter_start(&s->folder, s->job, s->address, s->options->json, &s->reporter,
                                  error);
    if (!rc)
        rc = watch_signals(s, error);
    if (!rc)
        dray__reporter_say(s->reporter, "start", "%s %s: %lld steps, from step %lld, in %s",
                           s->folder.resumed ? "going on with" : "job", s->job->name,
                           (long long)s->job->steps, (long long)s->folder.first_step,
                           s->folder.path);
    for (uint32_t i = 0; i < s->job->role_count && !rc; i++)
        rc = start_instance(s, &s->instances[i], error);
    return rc;
}

static void end_instances(supervisor *s)
{
    for (uint32_t i = 0; s->instances && i < s->job->role_count; i++) {
        for (uint32_t rank = 0; s->instances[i].ranks && rank < s->instances[i].spec->ranks; rank++)
            end_process(&s->instances[i].ranks[rank]);
        free(s->instances[i].ranks);
    }
    free(s->instances);
    s->instances = NULL;
}

/* Politely first, so that it removes its socket. */
static void end_coordinator(supervisor *s)
{
    process *p = &s->coordinator;
    int status;
    int64_t deadline = dray__deadline(STOP_SECONDS * DRAY__SECOND);
    if (p->event)
        event_free(p->event);
    p->event = NULL;
    if (p->child.pid > 0)
        kill(p->child.pid, SIGTERM);
    while (p->child.pid > 0 && dray__now() < deadline && !dray__child_ended(&p->child, &status)) {
        event_base_loop(s->base, EVLOOP_NONBLOCK);
        nanosleep(&(struct timespec){.tv_nsec = DRAY__MILLISECOND}, NULL);
    }
    dray__child_end(&p->child);
}

/* Orphans of roles came to this process (it is their subreaper): none may stay. */
static void end_orphans(void)
{
    char path[64], list[4096];
    snprintf(path, sizeof(path), "/proc/self/task/%ld/children", (long)getpid());
    for (int round = 0; round < 100; round++) {
        while (waitpid(-1, NULL, WNOHANG) > 0) {
        }
        FILE *file = fopen(path, "re");
        bool any = file && fgets(list, sizeof(list), file);
        if (file)
            fclose(file);
        if (!any)
            return;
        char *at = list, *end;
        /* A number that the list was cut in is another process's. */
        for (long pid = strtol(at, &end, 10); end != at && *end == ' ';
             pid = strtol(at, &end, 10)) {
            kill((pid_t)pid, SIGKILL);
            at = end;
        }
        nanosleep(&(struct timespec){.tv_nsec = 2 * DRAY__MILLISECOND}, NULL);
    }
}

static void merge_traces(supervisor *s)
{
    char folder[PATH_MAX], out[PATH_MAX];
    dray_error error;
    dray__folder_path(&s->folder, "trace", folder);
    dray__folder_path(&s->folder, "trace.json", out);
    if (dray_trace_merge(folder, out, &error) && s->reporter)
        dray__reporter_say(s->reporter, "warning", "no timeline: %s", error.message);
}

static void end_all(supervisor *s)
{
    dray_error late;
    end_instances(s);
    if (s->reporter && dray__reporter_stop(s->reporter, &late))
        fail(s, late.code, "%s", late.message);
    for (int i = 0; i < 3; i++)
        if (s->signals[i])
            event_free(s->signals[i]);
    if (s->tick)
        event_free(s->tick);
    merge_traces(s);
    if (s->reporter && (!s->code || dray__reporter_ready(s->reporter)))
        dray__reporter_summary(s->reporter, &s->folder,
                               s->code         ? "failed"
                               : s->interrupts ? "stopped"
                                               : "done");
    dray__reporter_free(s->reporter);
    end_coordinator(s);
    if (!s->code && s->job && s->interrupts < 2)
        remove_journal(s);
    dray__keeper_free(s->keeper);
    if (s->base)
        event_base_free(s->base);
    end_orphans();
}

int dray__run(const dray__run_options *options, dray__run_end *end, dray_error *error)
{
    dray_error scratch;
    if (!error)
        error = &scratch;
    supervisor s = {.options = options, .folder.lock = -1};
    dray__process_begin();
    int rc = dray__process_may_open(FILES_LEAST, error);
    if (rc)
        return rc;
    rc = dray__folder_open(options, &s.folder, &s.job, error);
    if (rc)
        return rc;
    rc = prepare(&s, error);
    if (!rc)
        rc = start_all(&s, error);
    while (!rc && !s.over)
        if (event_base_dispatch(s.base) < 0)
            rc = dray__fail(error, DRAY_ESYS, "supervisor: the event loop failed");
    if (rc) {
        s.failure = *error;
        s.code = rc;
    }
    end_all(&s);
    if (s.code)
        *error = s.failure;
    else
        *end = s.interrupts > 1    ? DRAY__RUN_KILLED
               : s.interrupts == 1 ? DRAY__RUN_STOPPED
                                   : DRAY__RUN_DONE;
    dray__folder_close(&s.folder);
    dray__job_free(s.job);
    return s.code;
}
