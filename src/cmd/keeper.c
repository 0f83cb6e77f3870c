/* dray keeper: the keeper of samples on a host other than the coordinator's. */
#include "cmd/cmd.h"
#include "run/supervisor/coordinator.h"

#include <stdlib.h>
#include <unistd.h>

typedef struct arguments {
    const char *path, *listen;
    int64_t max_bytes;
    bool json;
} arguments;

static void put_path(const struct argp_state *state, const cmd_option *option, void *to,
                     const char *text)
{
    (void)option;
    if (text[0] != '/')
        argp_error(state, "--socket '%s': an absolute path expected", text);
    ((arguments *)to)->path = text;
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
    static const cmd_option options[] = {
        CMD_CALL(put_path, "socket", 's', "PATH",
                 "Absolute path of the Unix socket for processes of this host. Default: "
                 "$XDG_RUNTIME_DIR/dray.socket.PID.keeper, or in /tmp"),
        CMD_TEXT(
            arguments, listen, "data-address", 'd', "ADDRESS",
            "Where processes of other hosts read: a numeric address, with or without a port. "
            "Default: $DRAY_DATA_ADDRESS, or the address from which the coordinator is reached"),
        CMD_NUMBER(arguments, max_bytes, "max-bytes", 'm', 1, INT64_MAX, "N",
                   "Hold no more than this. Default: what memory there is"),
        CMD_JSON(arguments, json), CMD_END};
    static const cmd_usage usage = {
        .options = options,
        .doc = "Holds the samples that processes of this host put into queues, for the coordinator "
               "at $DRAY_ADDRESS (on another host, over TCP, with $DRAY_TOKEN_FILE), until "
               "Ctrl-C.\vOne a host, started before its producers; the coordinator's own host has "
               "one already, in `dray serve`. Consumers of other hosts read here exactly the cells "
               "that they ask for. When it ends, what it held is lost: the rows are refilled, or "
               "dropped, as the queue's on_loss says."};
    arguments a = {0};
    char path[300], socket[256];
    cmd_parse(&usage, argc, argv, &a);
    snprintf(path, sizeof path, "%s.%d.keeper", dray__default_socket(socket, sizeof socket),
             (int)getpid());
    a.path = a.path ? a.path : path;
    dray__keep_options keep = {.path = a.path,
                               .listen = a.listen,
                               .max_bytes = (uint64_t)a.max_bytes,
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
