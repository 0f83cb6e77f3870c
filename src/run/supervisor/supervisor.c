/* The supervisor starts the coordinator and the roles, keeps the descriptors of the queue's chunks,
 * and makes sure that no process waits for ever or outlives the run. */
#include "run/supervisor/supervisor.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"
#include "control/token.h"
#include "net/address.h"
#include "queue/storage/backend.h"
#include "run/desk/desk.h"
#include "run/job/schedule.h"
#include "run/job/settings.h"
#include "run/job/tasks.h"
#include "run/page/page.h"
#include "run/paths.h"
#include "run/process.h"
#include "run/run.h"
#include "run/supervisor/coordinator.h"
#include "run/trainer/checkpoint.h"

#include <dirent.h>
#include <dray/trace.h>
#include <errno.h>
#include <fcntl.h>
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

typedef dray__supervisor supervisor;

enum {
    TICK_MS = 200,
    LATE_MS = 1000,
    DEATH_MS = 100,
    CONNECT_SECONDS = 20,
    STOP_SECONDS = 10,
    HOSTS_SECONDS = 10, /* for joined hosts to learn of the end, and to send their last files */
    FILES_LEAST = 64
};

/* ---- the end --------------------------------------------------------------------------------- */

void dray__supervisor_end(supervisor *s)
{
    s->over = true;
    event_base_loopbreak(s->base);
}

void dray__supervisor_fail(supervisor *s, int code, const char *format, ...)
{
    if (s->code)
        return;
    char message[DRAY_ERROR_MESSAGE_MAX];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    s->code = dray__fail(&s->failure, code, "%s", message);
    dray__supervisor_end(s);
}

void dray__supervisor_say(supervisor *s, const char *event, const char *format, ...)
{
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    if (s->reporter)
        dray__reporter_say(s->reporter, event, "%s", text);
    else
        dray__uplink_say(s->link, event, text);
}

uint64_t dray__supervisor_progress(const supervisor *s)
{
    return s->reporter ? dray__reporter_progress(s->reporter) : dray__uplink_progress(s->link);
}

char *dray__supervisor_advice(const supervisor *s, char out[DRAY__ADVICE_BYTES])
{
    if (s->link) {
        snprintf(out, DRAY__ADVICE_BYTES, "logs: %s/logs", s->folder.path);
        return out;
    }
    bool any = dray__folder_checkpoint(&s->folder, &(int64_t){0}, NULL) == DRAY_OK;
    snprintf(out, DRAY__ADVICE_BYTES, "%s: dray run --resume %s",
             any ? "go on from the last checkpoint" : "no checkpoint yet; from the beginning again",
             s->folder.path);
    return out;
}

/* ---- the coordinator ------------------------------------------------------------------------- */

/* Returns the path of the master token's file, the user's or the run's own. */
static const char *master_path(const supervisor *s, char out[PATH_MAX])
{
    const char *given = getenv("DRAY_TOKEN_FILE");
    if (given && given[0])
        return given;
    dray__folder_path(&s->folder, "tokens/master.token", out);
    return out;
}

static int start_coordinator(supervisor *s, dray_error *error)
{
    char path[112], parent[32];
    snprintf(path, sizeof(path), "%s/coordinator.socket", s->folder.sockets);
    snprintf(s->keeper_path, sizeof(s->keeper_path), "%s/keeper.socket", s->folder.sockets);
    snprintf(s->address, sizeof(s->address), "unix:%s", path);
    snprintf(parent, sizeof(parent), "--parent=%ld", (long)getpid());
    unlink(path); /* the socket of a run that was killed; the folder's lock shows that none is
                     running */
    int rc = dray__keeper_new(s->base, s->keeper_path, 0, &s->keeper, error);
    if (rc)
        return rc;
    const char *arguments[20] = {"host", parent,     "--coordinator", "--address",
                                 path,   "--keeper", s->keeper_path};
    int count = 7;
    char journal[PATH_MAX], store[PATH_MAX];
    dray__folder_path(&s->folder, "queue", journal);
    if (s->job->queue.durability > DRAY_DURABILITY_NONE) {
        arguments[count++] = "--journal";
        arguments[count++] = journal;
    }
    if (s->job->queue.backend > DRAY_BACKEND_BUILTIN) {
        dray__path(store, sizeof store, "%s:%s", dray__backend_name(s->job->queue.backend),
                   s->job->queue.backend_address);
        arguments[count++] = "--store";
        arguments[count++] = store;
    }
    if (s->job->queue.metrics[0]) {
        arguments[count++] = "--metrics";
        arguments[count++] = s->job->queue.metrics;
    }
    char master[PATH_MAX];
    if (s->job->listen[0]) {
        arguments[count++] = "--listen";
        arguments[count++] = s->job->listen + strlen("tcp:");
        arguments[count++] = "--master";
        arguments[count++] = master_path(s, master);
    }
    dray__process *p = &s->coordinator;
    p->owner = s;
    dray__folder_path(&s->folder, "logs/coordinator.log", p->log);
    return dray__process_start(s, p, (dray__child_start){.arguments = arguments, .fd = -1}, error);
}

/* Returns the path of the queue's part of the checkpoint that the run resumes from; NULL when there
 * is none. */
static const char *saved_queue(const supervisor *s, char path[PATH_MAX])
{
    dray__checkpoint_queue(s->folder.path, s->folder.first_step, path, PATH_MAX);
    bool saved = s->folder.resumed && s->job->queue.durability == DRAY_DURABILITY_CHECKPOINT;
    return saved && access(path, R_OK) == 0 ? path : NULL;
}

/* Prepares the queue at the run's start: a resumed run's is taken back to the checkpoint. Admits
 * rollout by the version with which the run begins. */
static int begin_queue(const supervisor *s, dray_error *error)
{
    dray_options options = DRAY_OPTIONS_INIT;
    dray_context *context = NULL;
    dray_queue *queue = NULL;
    char path[PATH_MAX];
    void *cursor = NULL;
    size_t size = 0;
    json_t *state = NULL, *card = NULL;
    dray_steps_rules rules = dray__schedule_rules(s->job);
    options.address = s->address;
    options.name = "supervisor";
    options.timeout_ns = dray__job_wait_ns(s->job);
    int rc = dray_open(&options, &context, error);
    if (!rc)
        rc = dray__job_queue_restore(context, s->job, saved_queue(s, path), &queue, error);
    if (!rc)
        rc = dray__checkpoint_cursor(s->folder.path, s->folder.first_step, &cursor, &size, error);
    if (!rc)
        rc = dray__driver_resume(queue, s->job, cursor, size,
                                 s->folder.eval_from <= s->folder.first_step, error);
    if (!rc)
        rc = dray__driver_admit(queue, s->job, s->folder.first_step, error);
    if (!rc)
        rc = dray__queue_state(queue, &state, error);
    if (!rc)
        rc = dray__checkpoint_feed(s->folder.path, s->folder.first_step, &card, error);
    if (!rc)
        rc = dray__feed_begin(&rules, s->folder.path, card, state, error);
    json_decref(card);
    json_decref(state);
    free(cursor);
    dray_queue_close(queue);
    dray_close(context);
    return rc;
}

typedef struct beginning {
    const supervisor *s;
    int rc;
    dray_error error;
    atomic_bool done;
} beginning;

static void *begin_main(void *user)
{
    beginning *g = user;
    g->rc = begin_queue(g->s, &g->error);
    atomic_store(&g->done, true);
    return NULL;
}

static void turn_loop(const supervisor *s, int64_t us)
{
    struct timeval turn = {.tv_usec = us};
    event_base_loopexit(s->base, &turn);
    event_base_dispatch(s->base);
}

/* Runs begin_queue in a thread, because the restored bytes go into this process's keeper, which
 * needs the loop. */
static int begin_beside(const supervisor *s, dray_error *error)
{
    beginning g = {.s = s};
    dray__thread thread;
    int rc = dray__thread_start(&thread, begin_main, &g, "the supervisor", error);
    if (rc)
        return rc;
    while (!atomic_load(&g.done))
        turn_loop(s, 2000);
    dray__thread_join(&thread);
    if (g.rc)
        *error = g.error;
    return g.rc;
}

/* Waits for the coordinator, which listens within milliseconds. One that reads a journal does not
 * answer before it has finished, and puts the bytes into this process's keeper meanwhile. */
static int wait_for_coordinator(supervisor *s, int64_t timeout_ns, dray_error *error)
{
    int64_t deadline = dray__deadline(timeout_ns), slice_ns = 20 * DRAY__MILLISECOND;
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

static int64_t start_limit(const supervisor *s)
{
    bool journal = s->job->queue.durability > DRAY_DURABILITY_NONE;
    return journal ? dray__job_wait_ns(s->job) : CONNECT_SECONDS * DRAY__SECOND;
}

/* ---- other hosts ----------------------------------------------------------------------------- */

/* Gets this host's numeric address as other hosts reach it. They read this host's samples and
 * weights there, although its own processes reach the coordinator by its Unix socket. */
static int find_own_address(const supervisor *s, char out[64], dray_error *error)
{
    dray__address address;
    const char *data = getenv("DRAY_DATA_ADDRESS");
    int rc =
        dray__address_parse(data && data[0] ? "tcp:127.0.0.1:0" : s->job->listen, &address, error);
    if (rc)
        return rc;
    if (data && data[0])
        snprintf(out, 64, "%s", data);
    else
        dray__address_host(&address.socket, out, 64, NULL);
    if (strcmp(out, "0.0.0.0") == 0 || strcmp(out, "::") == 0)
        return dray__fail(error, DRAY_EINVALID,
                          "listen: %s: expected this host's address, as others reach it, or it in "
                          "$DRAY_DATA_ADDRESS",
                          s->job->listen);
    setenv("DRAY_DATA_ADDRESS", out, 0);
    return DRAY_OK;
}

/* Makes the files of tokens, each in one step, because processes wait for them. */
static int make_tokens(const supervisor *s, dray_error *error)
{
    static const char *const roles[] = {"trainer", "engine", "task"};
    char master[PATH_MAX], name[64], path[PATH_MAX], made[PATH_MAX];
    for (size_t i = 0; i < sizeof(roles) / sizeof(*roles); i++) {
        snprintf(name, sizeof(name), "tokens/%s.token", roles[i]);
        dray__folder_path(&s->folder, name, path);
        dray__path(made, sizeof(made), "%.*s.new", PATH_MAX - 8, path);
        unlink(made);
        int rc = dray__make_token(master_path(s, master), roles[i], made, NULL, error);
        if (!rc && rename(made, path) < 0) /* may replace one of another master token */
            rc = dray__fail_errno(error, errno, "%s", path);
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

static int make_token_folder(const supervisor *s, dray_error *error)
{
    char path[PATH_MAX];
    dray__folder_path(&s->folder, "tokens", path);
    if (mkdir(path, 0700) < 0 && errno != EEXIST)
        return dray__fail_errno(error, errno, "%s", path);
    dray__folder_path(&s->folder, "tokens/master.token", path);
    return dray__token_keep(path, error);
}

static int take_hosts(supervisor *s, dray_error *error)
{
    char own[64];
    int rc = find_own_address(s, own, error);
    if (!rc)
        rc = make_tokens(s, error);
    if (!rc)
        rc = dray__settings_yaml(s->job, &s->text, error);
    const dray__join_options join = {
        .address = s->address, .path = s->keeper_path, .listen = own, .own = true, .later = true};
    if (!rc && s->job->queue.backend == DRAY_BACKEND_BUILTIN)
        rc = dray__join_start(s->keeper, &join, &s->join, error);
    const dray__hosts_options hosts = {.folder = &s->folder,
                                       .job = s->job,
                                       .text = s->text,
                                       .address = s->address,
                                       .listen = own,
                                       .reporter = s->reporter};
    return rc ? rc : dray__hosts_start(&hosts, &s->hosts, error);
}

/* Waits for places that the run needs, longer than for anything else. */
static void wait_for_hosts(supervisor *s, int64_t now)
{
    const dray__hosts_sight *sight = &s->elsewhere;
    double waited = (double)(now - sight->missing_ns) / (double)DRAY__SECOND;
    if (!sight->missing_ns) {
        s->waiting_said = false;
        return;
    }
    s->moved_ns = now;
    s->step_ns = now;
    if (!s->waiting_said)
        dray__supervisor_say(s, "waiting",
                             "waiting for hosts: %s (on a host: dray join %s --job "
                             "FILE --roles ROLE:COUNT --token FILE; tokens: %s/tokens)",
                             sight->missing, s->job->listen, s->folder.path);
    s->waiting_said = true;
    if (waited > s->job->limits.join_seconds)
        dray__supervisor_fail(s, DRAY_ETIMEDOUT,
                              "no host has joined for %.0f s (limits.join_seconds): %s", waited,
                              sight->missing);
}

/* Returns how long joined hosts have to end their processes, and to send their last files. */
static int64_t leave_limit(const supervisor *s)
{
    double most = 0;
    for (uint32_t r = 0; r < s->job->role_count; r++)
        most = s->job->roles[r].grace_seconds > most ? s->job->roles[r].grace_seconds : most;
    return (int64_t)(2 * most * (double)DRAY__SECOND) + HOSTS_SECONDS * DRAY__SECOND;
}

static void look_at_hosts(supervisor *s, int64_t now)
{
    char advice[DRAY__ADVICE_BYTES];
    if (!s->hosts)
        return;
    dray__hosts_look(s->hosts, &s->elsewhere);
    if (s->elsewhere.failure.code)
        dray__supervisor_fail(s, s->elsewhere.failure.code, "%s; %s", s->elsewhere.failure.message,
                              dray__supervisor_advice(s, advice));
    if (s->elsewhere.moved_ns > s->moved_ns)
        s->moved_ns = s->elsewhere.moved_ns;
    if (s->ended_ns)
        dray__hosts_queue_ended(s->hosts);
    else
        wait_for_hosts(s, now);
    if (s->ended_ns && s->elsewhere.count && now - s->ended_ns > leave_limit(s)) {
        dray__supervisor_say(s, "warning", "not waited for any longer: %s", s->elsewhere.described);
        s->elsewhere.count = 0;
    }
    dray__roles_check_end(s);
}

/* ---- signals and time ------------------------------------------------------------------------ */

/* Makes the file `stop`, which the driver looks for before each step. */
static int ask_to_stop(const supervisor *s, dray_error *error)
{
    char path[PATH_MAX];
    dray__folder_path(&s->folder, "stop", path);
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd < 0)
        return dray__fail_errno(error, errno, "%s", path);
    close(fd);
    return DRAY_OK;
}

static void remove_stop(const supervisor *s)
{
    char path[PATH_MAX];
    dray__folder_path(&s->folder, "stop", path);
    unlink(path);
}

static void on_signal(evutil_socket_t number, short what, void *user)
{
    (void)number, (void)what;
    supervisor *s = user;
    s->interrupts++;
    if (s->interrupts > 1 || !dray__reporter_ready(s->reporter)) {
        s->interrupts = 2;
        dray__supervisor_end(s);
        return;
    }
    dray__reporter_say(s->reporter, "stopping",
                       "stopping after this step and its checkpoint (once more: at once)");
    dray_error error;
    if (ask_to_stop(s, &error))
        dray__supervisor_fail(s, error.code, "%s", error.message);
}

static void on_sight(evutil_socket_t fd, short what, void *user)
{
    (void)what;
    supervisor *s = user;
    uint64_t looks;
    dray__sight sight;
    dray_error error;
    if (read(fd, &looks, sizeof(looks)) < 0)
        return;
    if (dray__watch_last(s->watch, &sight, &error)) {
        dray__supervisor_fail(s, error.code, "%s", error.message);
        return;
    }
    if (sight.moved_ns > s->moved_ns)
        s->moved_ns = sight.moved_ns;
    dray__roles_judge(s, &sight);
}

/* Checks that the run makes progress. While rows are inserted or committed, or a process computes
 * or reports, it is only slow. Otherwise a process hangs, or all wait for each other. */
static void check_standstill(supervisor *s, int64_t now)
{
    char advice[DRAY__ADVICE_BYTES], held[512];
    int64_t heard = dray__reporter_heard_ns(s->reporter), since = s->awake_ns;
    since = heard > since ? heard : since;
    since = s->moved_ns > since ? s->moved_ns : since;
    int64_t quiet = now - since, most = dray__job_wait_ns(s->job);
    if (quiet > most / 4 * 3 && dray__roles_end_idle(s, now)) { /* before others give up */
        s->moved_ns = now;
        return;
    }
    if (quiet <= most)
        return;
    dray__watch_all_held(s->watch, held, sizeof(held));
    dray__supervisor_fail(s, DRAY_ETIMEDOUT,
                          "nothing moved for %.0f s: no rows come or go, and nobody computes or "
                          "reports (limits.wait_seconds; logs: %s/logs); held: %s%s%s; %s",
                          (double)quiet / (double)DRAY__SECOND, s->folder.path, held,
                          s->elsewhere.count ? "; " : "", s->elsewhere.described,
                          dray__supervisor_advice(s, advice));
}

static void check_step(supervisor *s, int64_t now)
{
    char advice[DRAY__ADVICE_BYTES], held[512];
    uint64_t progress = dray__reporter_progress(s->reporter);
    double limit = s->job->limits.step_seconds;
    if (progress != s->progress || !dray__reporter_ready(s->reporter) || s->awake_ns > s->step_ns) {
        s->progress = progress;
        s->step_ns = now;
    }
    if (limit <= 0 || (double)(now - s->step_ns) < limit * (double)DRAY__SECOND)
        return;
    dray__watch_all_held(s->watch, held, sizeof(held));
    dray__supervisor_fail(s, DRAY_ETIMEDOUT,
                          "no step was done for %.1f s (limits.step_seconds); held: %s; %s",
                          (double)(now - s->step_ns) / (double)DRAY__SECOND, held,
                          dray__supervisor_advice(s, advice));
}

static void on_tick(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    supervisor *s = user;
    dray_error error;
    if (dray__reporter_failed(s->reporter, &error)) {
        dray__supervisor_fail(s, error.code, "%s", error.message);
        return;
    }
    int64_t now = dray__now();
    if (now - s->ticked_ns > LATE_MS * DRAY__MILLISECOND)
        /* This process was stopped, and with it the thread that receives reports. */
        s->awake_ns = now;
    s->ticked_ns = now;
    look_at_hosts(s, now);
    dray__roles_tick(s, now);
    if (!s->code && !s->ended_ns) {
        check_step(s, now);
        check_standstill(s, now);
    }
}

static int watch_signals(supervisor *s, dray_error *error)
{
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP}; /* SIGHUP is the last */
    struct timeval every = {.tv_usec = TICK_MS * 1000};
    bool ok = true;
    for (int i = 0; i < (dray__process_ignores_hangups() ? 2 : 3); i++) {
        s->signals[i] = evsignal_new(s->base, numbers[i], on_signal, s);
        ok = ok && s->signals[i] && event_add(s->signals[i], NULL) == 0;
    }
    s->ticked_ns = s->awake_ns = s->moved_ns = s->step_ns = dray__now();
    s->tick = event_new(s->base, -1, EV_PERSIST, on_tick, s);
    ok = ok && s->tick && event_add(s->tick, &every) == 0;
    s->sight = event_new(s->base, dray__watch_fd(s->watch), EV_READ | EV_PERSIST, on_sight, s);
    ok = ok && s->sight && event_add(s->sight, NULL) == 0;
    return ok ? DRAY_OK : dray__fail(error, DRAY_ESYS, "supervisor: cannot watch signals");
}

/* ---- a run ----------------------------------------------------------------------------------- */

static int prepare(supervisor *s, dray_error *error)
{
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    s->base = event_base_new();
    s->coordinator.child.pidfd = -1;
    if (!s->base)
        return dray__nomem(error);
    remove_stop(s);
    int rc = s->job->listen[0] ? make_token_folder(s, error) : DRAY_OK;
    return rc ? rc : dray__roles_open(s, error);
}

/* Removes the journal of a run that ended well, because such a run is not resumed. */
static void remove_journal(const supervisor *s)
{
    char path[PATH_MAX];
    dray__folder_path(&s->folder, "queue", path);
    DIR *dir = opendir(path);
    for (struct dirent *entry; dir && (entry = readdir(dir));)
        if (strncmp(entry->d_name, "queue-", 6) == 0 || strncmp(entry->d_name, "step-", 5) == 0 ||
            strcmp(entry->d_name, "stores") == 0 || strcmp(entry->d_name, ".journals-lock") == 0)
            unlinkat(dirfd(dir), entry->d_name, 0);
    if (dir)
        closedir(dir);
    rmdir(path);
}

/* Opens the queue before any role starts, so that roles need not know how to make it. */
static int open_queue(supervisor *s, dray_error *error)
{
    dray__sight sight = {.open = false};
    int rc = dray__watch_start(s->job, s->address, &s->watch, error);
    while (!rc && !sight.open && !s->code) {
        turn_loop(s, 2000);
        rc = dray__watch_last(s->watch, &sight, error);
    }
    if (!rc && s->code)
        *error = s->failure;
    return rc ? rc : s->code;
}

static int start_all(supervisor *s, dray_error *error)
{
    const char *page = NULL;
    int rc = start_coordinator(s, error);
    if (!rc)
        rc = wait_for_coordinator(s, start_limit(s), error);
    if (!rc)
        rc = begin_beside(s, error);
    if (!rc)
        rc = dray__reporter_start(&s->folder, s->job, s->address, s->options->json, &s->reporter,
                                  &page, error);
    if (!rc && s->job->listen[0])
        rc = take_hosts(s, error);
    if (!rc)
        rc = open_queue(s, error);
    if (!rc)
        rc = watch_signals(s, error);
    if (!rc)
        dray__reporter_say(s->reporter, "start", "%s %s: %lld steps, from step %lld, in %s",
                           s->folder.resumed ? "going on with" : "job", s->job->name,
                           (long long)s->job->steps, (long long)s->folder.first_step,
                           s->folder.path);
    if (!rc && page)
        dray__reporter_say(s->reporter, "page", "watch it at %s", page);
    return rc ? rc : dray__roles_advance(s, error);
}

/* Ends the coordinator with SIGTERM first, so that it removes its socket. */
static void end_coordinator(supervisor *s)
{
    dray__process *p = &s->coordinator;
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

static void merge_traces(supervisor *s)
{
    char folder[PATH_MAX], out[PATH_MAX];
    dray_error error;
    dray__folder_path(&s->folder, "trace", folder);
    dray__folder_path(&s->folder, "trace.json", out);
    if (dray_trace_merge(folder, out, &error) && s->reporter)
        dray__reporter_say(s->reporter, "warning", "no timeline: %s", error.message);
}

/* Writes the page of the run. A page that cannot be written does not end the run. */
static void write_page(supervisor *s)
{
    char path[PATH_MAX];
    const char *const folder = s->folder.path;
    dray_error error;
    dray__folder_path(&s->folder, "report.html", path);
    if (dray__page_write_file(&folder, 1, path, &error))
        dray__reporter_say(s->reporter, "warning", "no report: %s", error.message);
}

static void end_all(supervisor *s)
{
    dray_error late;
    dray__roles_free(s);
    dray__hosts_end(s->hosts, s->code ? s->failure.message : "",
                    dray__deadline(HOSTS_SECONDS * DRAY__SECOND));
    dray__hosts_free(s->hosts);
    if (s->join)
        dray__join_leave(s->join);
    if (s->reporter && dray__reporter_stop(s->reporter, &late))
        dray__supervisor_fail(s, late.code, "%s", late.message);
    for (int i = 0; i < 3; i++)
        if (s->signals[i])
            event_free(s->signals[i]);
    if (s->tick)
        event_free(s->tick);
    if (s->sight)
        event_free(s->sight);
    dray__watch_free(s->watch);
    remove_stop(s);
    merge_traces(s);
    if (s->reporter)
        write_page(s);
    if (s->reporter && (!s->code || dray__reporter_ready(s->reporter)))
        dray__reporter_summary(s->reporter, &s->folder,
                               s->code         ? "failed"
                               : s->interrupts ? "stopped"
                                               : "done");
    dray__reporter_free(s->reporter);
    end_coordinator(s);
    if (!s->code && s->job && s->interrupts < 2)
        remove_journal(s);
    dray__join_free(s->join);
    dray__keeper_free(s->keeper);
    free(s->text);
    if (s->base)
        event_base_free(s->base);
    dray__orphans_end();
}

/* Notes the failure. The coordinator's death, which is seen a moment later, explains more than a
 * broken connection to it. */
static void note_failure(supervisor *s, int rc, const dray_error *error)
{
    int64_t deadline = dray__deadline(DEATH_MS * DRAY__MILLISECOND);
    while (rc == DRAY_ECLOSED && s->coordinator.event && !s->code && dray__now() < deadline)
        turn_loop(s, 2000);
    if (s->code)
        return;
    s->failure = *error;
    s->code = rc;
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
    if (rc)
        note_failure(&s, rc, error);
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
