/* dray serve: a coordinator in the foreground. */
#include "cmd/cmd.h"
#include "run/supervisor/coordinator.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct arguments {
    const char *unix_path, *tcp_address, *token_path, *journal, *metrics, *limits;
    cmd_list stores;
    bool json;
} arguments;

static void put_address(const struct argp_state *state, const cmd_option *option, void *to,
                        const char *text)
{
    (void)option;
    arguments *a = to;
    const char **where = NULL;
    if (strncmp(text, "unix:", 5) == 0)
        where = &a->unix_path;
    else if (strncmp(text, "tcp:", 4) == 0)
        where = &a->tcp_address;
    else
        argp_error(state, "--listen '%s': unix:PATH or tcp:HOST:PORT expected", text);
    if (where && *where)
        argp_error(state, "--listen '%s': one Unix socket and one TCP port at most", text);
    else if (where)
        *where = strchr(text, ':') + 1;
}

static void ready(void *user, const char *unix_address, const char *tcp_address,
                  const char *metrics_url)
{
    const arguments *a = user;
    if (a->json) {
        cmd_json_line(json_pack("{s:s, s:s?, s:s?, s:s?, s:I}", "event", "listening", "unix",
                                unix_address, "tcp", tcp_address, "metrics", metrics_url, "pid",
                                (json_int_t)getpid()));
        return;
    }
    const char *addresses[] = {unix_address, tcp_address};
    for (int i = 0; i < 2; i++)
        if (addresses[i])
            printf("listening at %s\n", addresses[i]);
    if (metrics_url)
        printf("metrics at %s\n", metrics_url);
    printf("clients: export DRAY_ADDRESS=%s\n",
           unix_address ? unix_address : (tcp_address ? tcp_address : ""));
    fflush(stdout);
    if (tcp_address && !dray__is_local_address(tcp_address) && !a->token_path)
        fprintf(stderr, "dray serve: other hosts reach this coordinator, but its master token ends "
                        "with it, and theirs too: start it with --master FILE, and make them with "
                        "`dray token --role ROLE --master FILE --out FILE`\n");
}

int cmd_serve(int argc, char **argv)
{
    static const cmd_option options[] = {
        CMD_CALL(put_address, "listen", 'l', "ADDRESS",
                 "Where to listen: unix:PATH or tcp:HOST:PORT (port 0: any free one; 0.0.0.0 or "
                 "[::]: all of this host's addresses); one of each may be given. Default: "
                 "unix:$XDG_RUNTIME_DIR/dray.socket, or in /tmp"),
        CMD_TEXT(arguments, token_path, "master", 'm', "FILE",
                 "File of the master token, made when it is not there, and kept. Default: "
                 "$DRAY_TOKEN_FILE, or one for this time only, in $XDG_RUNTIME_DIR"),
        CMD_TEXT(arguments, journal, "journal", 'J', "FOLDER",
                 "Folder of the journals of durable queues, made when it is not there: started "
                 "anew with it, a coordinator goes on with the queues that it holds"),
        CMD_LIST(arguments, stores, "store", 'S', "redis:ADDRESS",
                 "Let queues have their bytes in Redis at unix:/PATH or tcp:HOST:PORT, or several, "
                 "separated by commas; may be given again. No other address is connected to, but "
                 "that of $DRAY_QUEUE_BACKEND"),
        CMD_TEXT(arguments, metrics, "metrics", 'M', "ADDRESS",
                 "Answer GET /metrics over HTTP, in the text format of Prometheus, at PORT of this "
                 "host (0: any free one), or at HOST:PORT, for networks in $DRAY_TRUSTED_NETWORKS"),
        CMD_TEXT(
            arguments, limits, "limits", 'L', "LIMITS",
            "What the sessions of one token may take together: NAME=NUMBER, separated by "
            "commas, of sessions (default 4096), queues (1024), rows (134217728), bytes of "
            "samples (this host's memory), table-bytes of the coordinator's own for rows (an "
            "eighth of it) and leases (1024). Default: $DRAY_LIMITS. `dray status` shows them"),
        CMD_JSON(arguments, json),
        CMD_END};
    static const cmd_usage usage = {
        .options = options,
        .doc = "Runs a coordinator in the foreground, until Ctrl-C: trainers, engines and tasks "
               "meet there (through $DRAY_ADDRESS).\vThe Unix socket is open to this user and root "
               "only. TCP is TLS 1.3, and clients prove that they know a token ($DRAY_TOKEN, else "
               "the file $DRAY_TOKEN_FILE, else dray-tcp-PORT.token in $XDG_RUNTIME_DIR, where "
               "this command leaves the master token while it runs without --master). For other "
               "hosts give it a --master, and make tokens of roles with `dray token`."};
    arguments a = {0};
    char path[256], keeper[300];
    cmd_parse(&usage, argc, argv, &a);
    dray__default_socket(path, sizeof path);
    if (!a.unix_path && !a.tcp_address)
        a.unix_path = path;
    /* Over TCP alone, several may serve: the process's number keeps their keepers apart. */
    if (a.unix_path)
        snprintf(keeper, sizeof keeper, "%s.keeper", a.unix_path);
    else
        snprintf(keeper, sizeof keeper, "%s.%d.keeper", path, (int)getpid());
    const char *file = getenv("DRAY_TOKEN_FILE");
    if (!a.token_path && file && file[0])
        a.token_path = file;
    dray__serve_options serve = {.token_path = a.token_path,
                                 .unix_path = a.unix_path,
                                 .tcp_address = a.tcp_address,
                                 .keeper_path = keeper,
                                 .journal = a.journal,
                                 .stores = a.stores.items,
                                 .metrics = a.metrics,
                                 .limits = a.limits,
                                 .sandbox = true,
                                 .start_keeper = true,
                                 .ready = ready,
                                 .user = &a};
    dray_error error;
    if (dray__serve(&serve, &error))
        return cmd_refuse("serve", &error);
    if (a.json)
        cmd_json_line(json_pack("{s:s}", "event", "stopped"));
    return CMD_OK;
}
