#include "run/join/guest.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/io.h"
#include "base/json.h"
#include "base/words.h"
#include "run/job/job_roles.h"
#include "run/job/schedule.h"
#include "run/job/settings.h"
#include "run/join/launcher.h"
#include "run/join/uplink.h"
#include "run/paths.h"
#include "run/process.h"
#include "run/supervisor/supervisor.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    JUDGE_SECONDS = 3,
    KEEPER_SECONDS = 20,
    TICK_MS = 100,
    LEAVE_SECONDS = 30,
    FILES_LEAST = 64
};

typedef struct guest {
    dray__supervisor s;
    const dray__guest_options *o;
    char *text; /* the resolved job file */
    char address[320], name[64];
    json_t *roles; /* {"rollout": 2} */
    struct event *tick;
    bool own_folder;
    int64_t ticks_ns;
    bool lost;
    bool kept;  /* a keeper of this host has run before */
    bool alone; /* this process had no children when it began, as a shell that became it may have */
    dray__launcher launcher;
    char token_paths[3][PATH_MAX];
    const char *tokens[3];
} guest;

/* ---- output for people
 * --------------------------------------------------------------------------- */

static bool says_json; /* of this process's guest; there is only one */

static void print_line(const char *event, const char *text)
{
    json_t *line = says_json ? json_pack("{s:s, s:s}", "event", event, "message", text) : NULL;
    char *json = line ? json_dumps(line, JSON_COMPACT) : NULL;
    printf("%s\n", json ? json : text);
    fflush(stdout);
    free(json);
    json_decref(line);
}

/* ---- the job --------------------------------------------------------------------------------- */

/* Reads "rollout:2"; "grader" alone means one place. */
static int read_role(guest *g, const char *text, const dray__places *at, dray_error *error)
{
    const char *known[16], *colon = strchr(text, ':');
    size_t length = colon ? (size_t)(colon - text) : strlen(text);
    char name[64], hint[256], *end = NULL;
    long count = colon ? strtol(colon + 1, &end, 10) : 1;
    snprintf(name, sizeof name, "%.*s", (int)(length < 63 ? length : 63), text);
    if (colon && (end == colon + 1 || *end || count < 1 || count > 1024))
        return dray__fail(error, DRAY_EINVALID,
                          "--roles '%.80s': expected NAME or NAME:COUNT, COUNT from 1 to 1024",
                          text);
    for (uint32_t r = 0; r < g->s.job->role_count; r++) {
        const dray__job_role *role = &g->s.job->roles[r];
        known[r] = role->name;
        if (strcmp(role->name, name) != 0)
            continue;
        return json_object_set_new(g->roles, name, json_integer(count))
                   ? dray__nomem(error)
                   : dray__role_there(role, at, error);
    }
    return dray__fail(error, DRAY_ENOENT, "--roles %s: the job has no such role%s", name,
                      dray__word_hint_or_all(name, known, g->s.job->role_count, hint, sizeof hint));
}

static int read_roles(guest *g, dray_error *error)
{
    dray__places *at = NULL;
    int rc = dray__places_open(g->o->job, &at, error);
    g->roles = json_object();
    if (!rc && !g->roles)
        rc = dray__nomem(error);
    for (uint32_t i = 0; i < g->o->role_count && !rc; i++) {
        bool is = true;
        const char *text = g->o->roles[i];
        rc = dray__launcher_is_for(text, g->o->launched ? g->launcher.rank : 0, &is, &text, error);
        if (!rc && is)
            rc = read_role(g, text, at, error);
    }
    dray__places_close(at);
    return rc;
}

/* For a process that a launcher started: finds the run's address, and the tokens in its folder. */
static int follow(guest *g, dray_error *error)
{
    static const char *const names[] = {"engine", "trainer", "task"};
    int rc = dray__launcher_find(&g->launcher, error);
    if (!rc)
        rc = dray__launcher_follow(&g->launcher, g->o->shared, g->o->address ? g->address : NULL,
                                   g->o->wait_seconds, error);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        dray__path(g->token_paths[i], PATH_MAX, "%s/tokens/%s.token", g->o->shared, names[i]);
        g->tokens[i] = g->token_paths[i];
    }
    /* The tokens are made after run.json. */
    int64_t deadline = dray__deadline((int64_t)(g->o->wait_seconds * (double)DRAY__SECOND));
    for (size_t i = 0; !rc && i < sizeof names / sizeof *names; i++)
        while (access(g->tokens[i], R_OK) && dray__now() < deadline)
            poll(NULL, 0, TICK_MS);
    return rc;
}

static void take_address(guest *g, const char *address)
{
    snprintf(g->address, sizeof g->address, "%s%.300s",
             strncmp(address, "tcp:", 4) == 0 ? "" : "tcp:", address);
    snprintf(g->s.address, sizeof g->s.address, "%.127s", g->address);
}

static int load(guest *g, dray_error *error)
{
    if (g->o->address)
        take_address(g, g->o->address);
    int rc = g->o->launched ? follow(g, error) : DRAY_OK;
    if (!rc)
        rc = dray__job_load(g->o->job, g->o->settings, g->o->setting_count, &g->s.job, NULL, error);
    if (!rc)
        rc = dray__settings_yaml(g->s.job, &g->text, error);
    if (!rc)
        rc = read_roles(g, error);
    if (rc || g->o->address)
        return rc;
    if (!g->s.job->listen[0])
        return dray__fail(error, DRAY_EINVALID,
                          "no address: the job file has no `listen`, where runs wait for hosts");
    take_address(g, g->s.job->listen);
    return DRAY_OK;
}

/* ---- the folder ------------------------------------------------------------------------------ */

/* Gives the absolute path of a folder, which may not be there yet: links to it are read from
 * another folder. */
static int absolute(const char *given, char out[PATH_MAX], dray_error *error)
{
    char here[PATH_MAX] = "";
    if (realpath(given, out))
        return DRAY_OK;
    if (errno != ENOENT || (given[0] != '/' && !getcwd(here, sizeof here)))
        return dray__fail_errno(error, errno, "--shared %s", given);
    dray__path(out, PATH_MAX, "%s%s%s", here, here[0] ? "/" : "", given);
    return DRAY_OK;
}

/* Makes the link `from`, which points to `to`. A link that an earlier run left there is replaced
 * when it points elsewhere. A file or a folder there stays. */
static int link_to(const char *to, const char *from, dray_error *error)
{
    char old[PATH_MAX];
    ssize_t length = readlink(from, old, sizeof old - 1);
    if (length >= 0) {
        old[length] = 0;
        if (strcmp(old, to) == 0)
            return DRAY_OK;
        if (unlink(from))
            return dray__fail_errno(error, errno, "%s", from);
    }
    return symlink(to, from) && errno != EEXIST ? dray__fail_errno(error, errno, "%s", from)
                                                : DRAY_OK;
}

static int link_shared(const guest *g, dray_error *error)
{
    /* The rows, the groups that were trained, and the file that ends a run are for trainers. */
    static const char *const names[] = {"checkpoints",      "critic",    "metrics.jsonl",
                                        DRAY__ROWS_PENDING, "feed.json", "stop"};
    char from[PATH_MAX], to[PATH_MAX], shared[PATH_MAX];
    int rc = g->o->shared ? absolute(g->o->shared, shared, error) : DRAY_OK;
    for (size_t i = 0; i < sizeof names / sizeof *names && g->o->shared && rc == DRAY_OK; i++) {
        dray__path(to, sizeof to, "%.*s/%s", PATH_MAX - 32, shared, names[i]);
        dray__folder_path(&g->s.folder, names[i], from);
        rc = link_to(to, from, error);
    }
    return rc;
}

static int make_folder(guest *g, dray_error *error)
{
    char path[PATH_MAX];
    const char *temporary = getenv("TMPDIR");
    if (g->o->folder)
        dray__path(path, sizeof path, "%s", g->o->folder);
    else
        dray__path(path, sizeof path, "%s/dray-join-XXXXXX",
                   temporary && temporary[0] ? temporary : "/tmp");
    g->own_folder = !g->o->folder;
    if (g->own_folder && !mkdtemp(path))
        return dray__fail_errno(error, errno, "%s", path);
    int rc = g->own_folder ? DRAY_OK : dray__make_folders(path, error);
    return rc ? rc : dray__folder_of_guest(&g->s.folder, path, g->s.job, g->text, error);
}

/* ---- signals and time --------------------------------------------------------------------------
 *
 * The handler only counts: the loop takes the signals at its next tick, and waits outside of the
 * loop are interrupted. */

static volatile sig_atomic_t signals; /* that have come */
static volatile sig_atomic_t joining; /* no place is had yet: nothing is to be left in order */

static void on_signal(int number)
{
    (void)number;
    signals++;
}

static int ask_whether_over(void)
{
    return signals > (joining ? 0 : 1);
}

static void watch_signals(void)
{
    struct sigaction action = {.sa_handler = on_signal}, was;
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    /* Hangups are ignored where they were to be when this process began, as by nohup(1). */
    if (sigaction(SIGHUP, NULL, &was) == 0 && was.sa_handler != SIG_IGN)
        sigaction(SIGHUP, &action, NULL);
    dray_set_interrupt(ask_whether_over);
}

static void take_signal(guest *g)
{
    g->s.interrupts++;
    if (g->s.interrupts > 1) {
        dray__supervisor_end(&g->s);
        return;
    }
    print_line("leaving", "leaving: no more rows are taken (once more: at once)");
    dray__roles_leave(&g->s);
    dray__roles_check_end(&g->s);
}

/* Takes the queue's state from the run, as the run's own supervisor sees it. */
static void take_sight(guest *g, const dray__uplink_sight *sight)
{
    dray__supervisor *s = &g->s;
    if (sight->lost && !g->lost) {
        g->lost = true;
        print_line("lost", sight->why);
        dray__supervisor_end(s);
    } else if (sight->over) {
        if (sight->why[0])
            dray__supervisor_fail(s, DRAY_ECLOSED, "the run is over: %s", sight->why);
        dray__supervisor_end(s);
    } else {
        /* The news of the queue's end comes a moment late. */
        dray__sight seen = {.open = true,
                            .ended = sight->ended,
                            .begun_ns = sight->asked_ns - JUDGE_SECONDS * DRAY__SECOND};
        dray__roles_judge(s, &seen);
    }
}

static void on_tick(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    guest *g = user;
    dray__uplink_sight sight;
    int64_t now = dray__now();
    if (now - g->s.ticked_ns > DRAY__SECOND)
        g->s.awake_ns = now;
    g->s.ticked_ns = now;
    while (!g->s.over && g->s.interrupts < signals)
        take_signal(g);
    if (g->s.over)
        return;
    dray__uplink_look(g->s.link, &sight);
    take_sight(g, &sight);
    if (g->s.over)
        return;
    dray__roles_tick(&g->s, now);
    if (g->s.moved_ns > g->ticks_ns) /* a process has computed */
        dray__uplink_busy(g->s.link);
    g->ticks_ns = g->s.moved_ns;
}

static int watch(guest *g, dray_error *error)
{
    struct timeval every = {.tv_usec = TICK_MS * 1000};
    watch_signals();
    g->tick = event_new(g->s.base, -1, EV_PERSIST, on_tick, g);
    return g->tick && event_add(g->tick, &every) == 0
               ? DRAY_OK
               : dray__fail(error, DRAY_ESYS, "join: cannot watch signals");
}

/* ---- the keeper ------------------------------------------------------------------------------ */

static void end_keeper(guest *g)
{
    dray__join_free(g->s.join);
    dray__keeper_free(g->s.keeper);
    g->s.join = NULL;
    g->s.keeper = NULL;
}

/* Starts this host's keeper, unless another process keeps this host's samples already. */
static int start_keeper(guest *g, dray_error *error)
{
    dray__supervisor *s = &g->s;
    snprintf(s->keeper_path, sizeof s->keeper_path, "%s/keeper.socket", s->folder.sockets);
    unlink(s->keeper_path);
    int rc = dray__keeper_new(s->base, s->keeper_path, 0, &s->keeper, error);
    const dray__join_options o = {.address = g->address, .path = s->keeper_path};
    int64_t deadline = dray__deadline(g->kept ? (int64_t)KEEPER_SECONDS * DRAY__SECOND : 0);
    if (!rc)
        rc = dray__join_start(s->keeper, &o, &s->join, error);
    while (rc == DRAY_EEXIST && dray__now() < deadline && !signals) { /* our own former keeper */
        poll(NULL, 0, TICK_MS);
        rc = dray__join_start(s->keeper, &o, &s->join, error);
    }
    g->kept = !rc;
    if (rc)
        end_keeper(g);
    return rc == DRAY_EEXIST ? DRAY_OK : rc;
}

/* ---- a run ----------------------------------------------------------------------------------- */

static int place_all(guest *g, const json_t *told, dray_error *error)
{
    dray__supervisor *s = &g->s;
    size_t i;
    const json_t *place;
    const char *name = dray__json_string(told, "name");
    snprintf(g->name, sizeof g->name, "%s", name ? name : "?");
    s->folder.first_step = dray__json_integer(told, "first_step");
    s->folder.eval_from = dray__json_integer(told, "eval_from");
    json_array_foreach(json_object_get(told, "places"), i, place)
    {
        const char *role = dray__json_string(place, "role");
        long long number = dray__json_integer(place, "number"),
                  epoch = dray__json_integer(place, "epoch");
        uint32_t r = 0;
        while (role && r < s->job->role_count && strcmp(s->job->roles[r].name, role) != 0)
            r++;
        if (!role || r == s->job->role_count || number < 0 ||
            number >= dray__role_places(&s->job->roles[r]) || epoch < 0 || epoch > INT32_MAX)
            return dray__fail(error, DRAY_EPROTO, "join: the run gives a place that is none");
        dray__roles_place(s, r, (uint32_t)number, (uint32_t)epoch);
    }
    return DRAY_OK;
}

static void describe(const guest *g, const json_t *told)
{
    char text[512];
    snprintf(text, sizeof text, "joined job %s at %s as host %s: %zu places", g->s.job->name,
             g->address, g->name, json_array_size(json_object_get(told, "places")));
    print_line("joined", text);
}

/* Waits for the run and for places. A signal ends the wait. */
static int join_run(guest *g, const json_t **told, dray_error *error)
{
    joining = 1;
    int rc = dray__uplink_join(g->s.link, told, error);
    joining = 0;
    g->s.interrupts = rc ? (int)signals : 0;
    return rc;
}

/* Joins and serves until the run or the session ends. */
static int serve_once(guest *g, dray_error *error)
{
    dray__supervisor *s = &g->s;
    const json_t *told = NULL;
    s->over = g->lost = false;
    s->ended_ns = 0;
    int rc = join_run(g, &told, error);
    if (rc && s->interrupts) {
        dray__uplink_end(s->link);
        return DRAY_OK;
    }
    if (!rc)
        rc = dray__roles_open(s, error);
    if (!rc)
        rc = place_all(g, told, error);
    if (!rc && s->job->queue.backend == DRAY_BACKEND_BUILTIN)
        rc = start_keeper(g, error);
    s->ticked_ns = s->awake_ns = s->moved_ns = dray__now();
    if (!rc)
        rc = dray__uplink_begin(s->link, error);
    if (!rc)
        describe(g, told);
    if (!rc)
        rc = dray__roles_advance(s, error);
    while (!rc && !s->over)
        if (event_base_dispatch(s->base) < 0)
            rc = dray__fail(error, DRAY_ESYS, "join: the event loop failed");
    if (rc && !s->code) {
        s->failure = *error;
        s->code = rc;
    }
    dray__roles_free(s);
    if (g->alone)
        dray__orphans_end();
    if (s->join && !g->lost)
        dray__join_leave(s->join);
    if (!g->lost)
        dray__uplink_leave(s->link, s->code && s->code != DRAY_ECLOSED ? s->failure.message : NULL,
                           dray__deadline(LEAVE_SECONDS * DRAY__SECOND));
    dray__uplink_end(s->link);
    end_keeper(g); /* its samples are lost with the session */
    return s->code;
}

/* Whether a second signal asks to leave at once. */
static bool hurries(void)
{
    return signals > 1;
}

static int open_all(guest *g, dray_error *error)
{
    dray__supervisor *s = &g->s;
    char host[65] = "host";
    int rc = load(g, error);
    if (!rc)
        rc = make_folder(g, error);
    if (!rc)
        rc = link_shared(g, error);
    if (!g->o->name)
        gethostname(host, sizeof host - 1);
    const dray__uplink_options link = {
        .job = s->job,
        .text = g->text,
        .address = g->address,
        .name = g->o->name         ? g->o->name
                : g->launcher.host ? g->launcher.host
                                   : host,
        .tokens = g->o->launched ? g->tokens : g->o->tokens,
        .token_count = g->o->launched ? 3 : g->o->token_count,
        .roles = g->roles,
        .folder = s->folder.path,
        .say = print_line,
        .hurries = hurries,
        .wait_ns = (int64_t)(g->o->wait_seconds * (double)DRAY__SECOND),
    };
    if (!rc)
        rc = dray__uplink_open(&link, &s->link, error);
    if (!rc && !(s->base = event_base_new()))
        rc = dray__nomem(error);
    return rc ? rc : watch(g, error);
}

static void close_all(guest *g)
{
    dray__supervisor *s = &g->s;
    dray_set_interrupt(NULL);
    if (g->tick)
        event_free(g->tick);
    if (s->base)
        event_base_free(s->base);
    dray__uplink_close(s->link);
    if (g->own_folder && s->folder.path[0])
        dray__remove_tree(s->folder.path, NULL);
    dray__folder_close(&s->folder);
    dray__job_free(s->job);
    json_decref(g->roles);
    free(g->text);
}

int dray__guest(const dray__guest_options *options, bool *left, dray_error *error)
{
    dray_error scratch;
    if (!error)
        error = &scratch;
    guest g = {.o = options, .s.folder.lock = -1};
    g.s.coordinator.child.pidfd = -1;
    says_json = options->json;
    dray__process_begin();
    int rc = dray__process_may_open(FILES_LEAST, error);
    g.alone = waitid(P_ALL, 0, &(siginfo_t){0}, WEXITED | WNOHANG | WNOWAIT) < 0 && errno == ECHILD;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    if (!rc)
        rc = open_all(&g, error);
    bool again = !rc;
    while (again && !rc) {
        rc = serve_once(&g, error);
        again = !rc && g.lost && !g.s.interrupts; /* the connection was lost: joins again */
    }
    *left = g.s.interrupts > 0;
    if (g.s.code)
        *error = g.s.failure;
    if (*left && g.s.interrupts == 1 && !g.s.code)
        print_line("left", "left the run");
    close_all(&g);
    return rc;
}
