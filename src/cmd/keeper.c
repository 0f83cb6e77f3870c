/* dray keeper: the keeper of samples of a host that is not the coordinator's. */
#include "cmd/cmd.h"
#include "run/coordinator.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct arguments {
    const char *path, *listen;
    uint64_t max_bytes;
    bool json;
} arguments;

static error_t parse(int key, char *text, struct argp_state *state)
{
    arguments *a = state->input;
    if (key == 's' && text[0] != '/')
        argp_error(state, "--socket '%s': an absolute path expected", text);
    else if (key == 's')
        a->path = text;
    else if (key == 'd')
        a->listen = text;
    else if (key == 'm')
        a->max_bytes = (uint64_t)cmd_number(state, "--max-bytes", text, 1, INT64_MAX);
    else if (key == 'j')
        a->json = true;
    else if (key == ARGP_KEY_ARG)
        argp_error(state, "expected no arguments, found '%s'", text);
    else
        return ARGP_ERR_UNKNOWN;
    return 0;
}

static void ready(void *user, const char *endpoint)
{
    const arguments *a = user;
    if (a->json)
        cmd_json_line(json_pack("{s:s, s:s, s:s, s:I}", "event", "keeping", "socket", a->path,
                                "endpoint", endpoint, "pid", (json_int_t)getpid()));
    else
        printf("keeping samples of this host, %s, for others at %s\n", a->path, endpoint);
    fflush(stdout);
}

int cmd_keeper(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"socket", 's', "PATH", 0,
         "Absolute path of the Unix socket for processes of this host. Default: "
         "$XDG_RUNTIME_DIR/dray.socket.PID.keeper, or in /tmp",
         0},
        {"data-address", 'd', "ADDRESS", 0,
         "Where processes of other hosts read: a numeric address, with or without a port. Default: "
         "$DRAY_DATA_ADDRESS, or the address from which the coordinator is reached",
         0},
        {"max-bytes", 'm', "N", 0, "Hold no more than this. Default: what memory there is", 0},
        {"json", 'j', NULL, 0, "Print one object a line", 0},
        {0}};
    static const struct argp argp = {
        .options = options,
        .parser = parse,
        .doc = "Holds the samples that processes of this host put into queues, for the coordinator "
               "at $DRAY_ADDRESS (on another host, over TCP, with $DRAY_TOKEN_FILE), until Ctrl-C."
               "\vOne a host, started before its producers; the coordinator's own host has one "
               "already, in `dray serve`. Consumers of other hosts read here exactly the cells "
               "that they ask for. When it ends, what it held is lost: the rows are refilled, or "
               "dropped, as the queue's on_loss says."};
    arguments a = {0};
    char path[300], socket[256];
    cmd_parse(&argp, argc, argv, &a);
    snprintf(path, sizeof path, "%s.%d.keeper", dray__default_socket(socket, sizeof socket),
             (int)getpid());
    a.path = a.path ? a.path : path;
    dray__keep_options keep = {.path = a.path,
                               .listen = a.listen,
                               .max_bytes = a.max_bytes,
                               .sandbox = true,
                               .ready = ready,
                               .user = &a};
    dray_error error;
    const char *address = getenv("DRAY_ADDRESS");
    if (!address || !address[0])
        return cmd_failf("keeper", "for which coordinator? $DRAY_ADDRESS says where it is, as in "
                                   "DRAY_ADDRESS=tcp:HOST:PORT dray keeper"),
               CMD_USAGE;
    return dray__keep(&keep, &error) ? cmd_refuse("keeper", &error) : CMD_OK;
}
