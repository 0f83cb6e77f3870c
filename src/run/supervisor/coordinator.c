#include "run/supervisor/coordinator.h"

#include "base/error.h"
#include "base/network.h"
#include "base/thread.h"
#include "control/coordinator.h"
#include "control/relay.h"
#include "control/token.h"
#include "queue/server/controller.h"
#include "queue/storage/join.h"
#include "run/process.h"
#include "run/report/metrics.h"
#include "run/supervisor/sandbox.h"
#include "weights/registry/registry.h"

#include <event2/event.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

char *dray__default_socket(char *out, size_t capacity)
{
    const char *folder = getenv("XDG_RUNTIME_DIR");
    if (folder && folder[0] == '/')
        snprintf(out, capacity, "%s/dray.socket", folder);
    else
        snprintf(out, capacity, "/tmp/dray-%u.socket", (unsigned)getuid());
    return out;
}

int dray__make_token(const char *master, const char *role, const char *path, char **text,
                     dray_error *error)
{
    dray__token token;
    int status;
    if (!master || !master[0])
        master = getenv("DRAY_TOKEN_FILE");
    if (strcmp(role, "master") == 0)
        status = dray__token_draw(&token, error);
    else if (!master || !master[0])
        status = dray__fail(
            error, DRAY_ENOENT,
            "no master token: neither --master FILE nor $DRAY_TOKEN_FILE says where it is");
    else if (!(status = dray__token_read(master, &token, error)))
        status = dray__token_derive(&token, role, &token, error);
    if (!status && path)
        status = dray__token_write(path, &token, error);
    if (!status && !path && !(*text = malloc(DRAY__TOKEN_TEXT)))
        status = dray__nomem(error);
    if (!status && !path)
        dray__token_print(&token, *text);
    dray__forget_bytes(&token, sizeof token);
    return status;
}

bool dray__is_local_address(const char *text)
{
    dray__address address;
    return dray__address_parse(text, &address, NULL) == DRAY_OK &&
           (address.local || dray__is_loopback((const struct sockaddr *)&address.socket));
}

/* ---- the queue's keeper, in a thread with a loop of its own ---------------------------------- */

typedef struct keeper_thread {
    struct event_base *base;
    struct event *stop;
    dray__keeper *keeper;
    dray__join *join; /* for other hosts; NULL when there are none */
    int wake;
    dray__thread thread;
} keeper_thread;

/* Called for a descriptor or a signal. */
static void on_stop(evutil_socket_t which, short what, void *base)
{
    (void)which, (void)what;
    event_base_loopbreak(base);
}

static void *run_keeper(void *user)
{
    const keeper_thread *k = user;
    event_base_dispatch(k->base);
    return NULL;
}

static void stop_keeper(keeper_thread *k)
{
    uint64_t one = 1;
    dray__join_free(k->join);
    if (k->thread.begun && write(k->wake, &one, sizeof one) == (ssize_t)sizeof one)
        dray__thread_join(&k->thread);
    dray__keeper_free(k->keeper);
    if (k->stop)
        event_free(k->stop);
    if (k->base)
        event_base_free(k->base);
    if (k->wake >= 0)
        close(k->wake);
}

static int start_keeper(keeper_thread *k, const char *path, dray_error *error)
{
    k->base = event_base_new();
    k->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    k->stop =
        k->base && k->wake >= 0 ? event_new(k->base, k->wake, EV_READ, on_stop, k->base) : NULL;
    if (!k->stop || event_add(k->stop, NULL) < 0)
        return dray__fail(error, DRAY_ESYS, "keeper: no event loop");
    int status = dray__keeper_new(k->base, path, 0, &k->keeper, error);
    return status ? status : dray__thread_start(&k->thread, run_keeper, k, "a keeper", error);
}

/* Gets the address at which this process itself reaches the coordinator, and the address at which
 * its keeper listens for other hosts, which is the coordinator's with another port. */
static void own_addresses(const dray__serve_options *options, const char *tcp, char *address,
                          char *listen, size_t size)
{
    const char *at = tcp + 4, *port = strrchr(tcp, ':');
    bool any = strncmp(at, "0.0.0.0:", 8) == 0 || strncmp(at, "[::]:", 5) == 0;
    snprintf(listen, size, *at == '[' ? "%.*s:0" : "%.*s", (int)(port - at), at);
    if (options->unix_path)
        snprintf(address, size, "unix:%s", options->unix_path);
    else if (any)
        snprintf(address, size, *at == '[' ? "tcp:[::1]%s" : "tcp:127.0.0.1%s", port);
    else
        snprintf(address, size, "%s", tcp);
}

/* Lets other hosts read the samples of this process's keeper. */
static int join_keeper(keeper_thread *k, const dray__serve_options *options, const char *tcp,
                       dray_error *error)
{
    char address[300], listen[300];
    own_addresses(options, tcp, address, listen, sizeof address);
    if (!options->unix_path && options->token_path)
        setenv("DRAY_TOKEN_FILE", options->token_path, 0);
    const char *data = getenv("DRAY_DATA_ADDRESS");
    dray__join_options o = {.address = address,
                            .path = options->keeper_path,
                            .listen = data && data[0] ? data : listen,
                            .own = true,
                            .later = true};
    return dray__join_start(k->keeper, &o, &k->join, error);
}

enum { STOPS = 3 }; /* signals that end a loop */

/* SIGINT and SIGTERM end the loop from here on, and so does the end of the terminal, unless
 * hangups are ignored: sockets and tokens are not left behind. */
static int watch_stop(struct event_base *base, struct event *events[STOPS], const char *who,
                      dray_error *error)
{
    static const int numbers[STOPS] = {SIGINT, SIGTERM, SIGHUP}; /* SIGHUP is the last */
    int status = DRAY_OK;
    for (int i = 0; i < (dray__process_ignores_hangups() ? STOPS - 1 : STOPS); i++) {
        events[i] = evsignal_new(base, numbers[i], on_stop, base);
        if (!events[i] || event_add(events[i], NULL) < 0)
            status = dray__fail(error, DRAY_ESYS, "%s: cannot watch signals", who);
    }
    return status;
}

static int run_loop(struct event_base *base, struct event *events[STOPS], int status,
                    const char *who, dray_error *error)
{
    if (!status && event_base_dispatch(base) < 0)
        status = dray__fail(error, DRAY_ESYS, "%s: the event loop failed", who);
    for (int i = 0; i < STOPS; i++)
        if (events[i])
            event_free(events[i]);
    return status;
}

int dray__keep(const dray__keep_options *options, dray_error *error)
{
    dray__process_begin();
    struct event_base *base = event_base_new();
    struct event *events[STOPS] = {0};
    dray__keeper *keeper = NULL;
    dray__join *join = NULL;
    dray__join_options o = {.path = options->path, .listen = options->listen};
    int status = base ? DRAY_OK : dray__fail(error, DRAY_ESYS, "keeper: no event loop");
    if (!status && options->sandbox)
        status = dray__sandbox(NULL, &options->path, 1, error);
    if (!status)
        status = dray__keeper_new(base, options->path, options->max_bytes, &keeper, error);
    if (!status)
        status = dray__join_start(keeper, &o, &join, error);
    if (!status)
        status = watch_stop(base, events, "keeper", error);
    if (!status)
        options->ready(options->user, dray__join_endpoint(join));
    status = run_loop(base, events, status, "keeper", error);
    dray__join_free(join);
    dray__keeper_free(keeper);
    if (base)
        event_base_free(base);
    return status;
}

/* ---- the coordinator ------------------------------------------------------------------------- */

static int add_services(dray__coordinator *coordinator, struct event_base *base,
                        const dray__serve_options *options, dray_error *error)
{
    int status = dray__reports_add(coordinator, error);
    if (!status)
        status = dray__leases_add(coordinator, error);
    if (!status)
        status = dray__registry_add(coordinator, error);
    if (!status)
        status = dray__queue_add(coordinator, base, options->keeper_path, options->journal,
                                 options->stores, error);
    if (!status && options->hosts)
        status = dray__relay_add(coordinator, error);
    return status;
}

static int loop(struct event_base *base, const dray__serve_options *options,
                dray__coordinator *coordinator, const char *metrics, dray_error *error)
{
    struct event *events[STOPS] = {0};
    char unix_address[256] = "unix:";
    int status = watch_stop(base, events, "coordinator", error);
    if (options->unix_path)
        snprintf(unix_address, sizeof unix_address, "unix:%s", options->unix_path);
    if (!status && options->ready)
        options->ready(options->user, options->unix_path ? unix_address : NULL,
                       dray__coordinator_tcp(coordinator), metrics);
    return run_loop(base, events, status, "coordinator", error);
}

/* Enters the sandbox. The sockets, the token's file and the state beside them must exist
 * already. */
static int enter_sandbox(const dray__serve_options *options, const char *tcp, dray_error *error)
{
    char token[4200] = "";
    dray__address bound;
    const char *paths[] = {options->unix_path, options->token_path, options->keeper_path, NULL};
    if (tcp && !options->token_path && dray__address_parse(tcp, &bound, NULL) == DRAY_OK)
        paths[3] = dray__token_path(&bound, token, sizeof token) ? token : NULL;
    return dray__sandbox(options->journal, paths, sizeof paths / sizeof *paths, error);
}

int dray__serve(const dray__serve_options *options, dray_error *error)
{
    dray__process_begin();
    struct event_base *base = event_base_new();
    if (!base)
        return dray__fail(error, DRAY_ESYS, "coordinator: no event loop");
    dray__coordinator_options listening = {.unix_path = options->unix_path,
                                           .tcp_address = options->tcp_address,
                                           .token_path = options->token_path,
                                           .keeper_path = options->keeper_path};
    listening.limits = options->limits ? options->limits : getenv("DRAY_LIMITS");
    /* The state is beside the file that names the session, which is the socket or the master
     * token. */
    char state[4200];
    const char *beside = options->unix_path ? options->unix_path : options->token_path;
    if (beside) {
        snprintf(state, sizeof state, "%.4096s.state", beside);
        listening.state_path = state;
    }
    dray__coordinator *coordinator = NULL;
    keeper_thread keeper = {.wake = -1};
    /* Takes the coordinator's address first. If another coordinator serves there, this fails before
     * its keeper is touched. */
    int status = dray__coordinator_new(base, &listening, &coordinator, error);
    if (!status && options->sandbox) /* before there are threads */
        status = enter_sandbox(options, dray__coordinator_tcp(coordinator), error);
    if (!status && options->start_keeper && options->keeper_path)
        status = start_keeper(&keeper, options->keeper_path, error);
    if (!status) /* needs the keeper, which gets the bytes of a journal */
        status = add_services(coordinator, base, options, error);
    const char *tcp = status ? NULL : dray__coordinator_tcp(coordinator);
    if (tcp && keeper.keeper)
        status = join_keeper(&keeper, options, tcp, error);
    dray__metrics *metrics = NULL;
    const char *url = NULL;
    if (!status && options->metrics)
        status = dray__metrics_new(base, coordinator, options->metrics, &metrics, &url, error);
    bool begins = !status;
    if (begins)
        status = loop(base, options, coordinator, url, error);
    dray__metrics_free(metrics);
    if (keeper.join)
        dray__join_leave(keeper.join);
    if (begins)
        dray__coordinator_free(coordinator);
    else
        dray__coordinator_give_up(coordinator);
    event_base_free(base);
    stop_keeper(&keeper);
    return status;
}
