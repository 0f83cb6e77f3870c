/* dray host: one process of a job. `dray run` starts it; nobody types it. */
#include "run/host.h"

#include "cmd/cmd.h"
#include "run/coordinator.h"
#include "run/spawn.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct arguments {
    dray__host_options host;
    const char *keeper, *journal, *metrics, *command;
    const char *stores[2]; /* NULL at the end */
    pid_t parent;
    bool coordinator;
} arguments;

enum {
    FOLDER = 'f',
    NAME = 'n',
    ADDRESS = 'a',
    RANK = 'r',
    EPOCH = 'e',
    GROUP = 'g',
    FIRST = 's',
    PARENT = 'p',
    EVAL_FROM = 1001,
    STOPPING,
    COORDINATOR,
    KEEPER,
    JOURNAL,
    METRICS,
    STORE,
    EXEC
};

static error_t parse(int key, char *text, struct argp_state *state)
{
    arguments *a = state->input;
    switch (key) {
    case FOLDER:
        a->host.folder = text;
        return 0;
    case NAME:
        a->host.name = text;
        return 0;
    case ADDRESS:
        a->host.address = text;
        return 0;
    case KEEPER:
        a->keeper = text;
        return 0;
    case JOURNAL:
        a->journal = text;
        return 0;
    case STORE:
        a->stores[0] = text;
        return 0;
    case METRICS:
        a->metrics = text;
        return 0;
    case EXEC:
        a->command = text;
        return 0;
    case RANK:
        a->host.rank = (uint32_t)cmd_number(state, "rank", text, 0, 63);
        return 0;
    case EPOCH:
        a->host.epoch = (uint32_t)cmd_number(state, "epoch", text, 1, UINT32_MAX);
        return 0;
    case GROUP:
        a->host.group_fd = (int)cmd_number(state, "descriptor", text, -1, 1 << 20);
        return 0;
    case FIRST:
        a->host.first_step = cmd_number(state, "step", text, 0, INT64_C(1) << 40);
        return 0;
    case PARENT:
        a->parent = (pid_t)cmd_number(state, "process", text, 1, INT32_MAX);
        return 0;
    case EVAL_FROM:
        a->host.eval_from = cmd_number(state, "version", text, 0, INT64_C(1) << 40);
        return 0;
    case STOPPING:
        a->host.stopping = true;
        return 0;
    case COORDINATOR:
        a->coordinator = true;
        return 0;
    case ARGP_KEY_END:
        if (!a->parent || !(a->command || (a->host.address && (a->coordinator || a->host.folder))))
            argp_error(state, "started by 'dray run', not by hand");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* The supervisor finds the reason of a process's end as the last such line of its log. */
static int failed(const dray_error *error)
{
    fprintf(stderr, "error: %s\n", error->message);
    return CMD_FAILED;
}

static void log_line(void *user, dray_log_level level, const char *line)
{
    static const char *const names[] = {"ERROR", "WARN", "INFO", "DEBUG"};
    (void)user;
    fprintf(stderr, "%s %s\n", names[level], line);
}

/* A program that the job names (reward.command), whose life is tied to ours. What it is not told
 * is reward.c's to say; of our descriptors it has the standard ones alone. */
static int become(const char *command)
{
    close_range(STDERR_FILENO + 1, ~0U, 0);
    signal(SIGXFSZ, SIG_DFL); /* ignored by us (main.c) */
    execl("/bin/sh", "sh", "-c", command, (char *)NULL);
    fprintf(stderr, "error: /bin/sh: %s\n", strerror(errno));
    return CMD_FAILED;
}

int cmd_host(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"folder", FOLDER, "DIR", 0, "The run's folder", 0},
        {"name", NAME, "ROLE", 0, "Which role of the job", 0},
        {"address", ADDRESS, "ADDRESS", 0, "The coordinator's", 0},
        {"rank", RANK, "N", 0, "Rank within the role", 0},
        {"epoch", EPOCH, "N", 0, "How often the role was started", 0},
        {"group-fd", GROUP, "FD", 0, "Descriptor of the ranks' group; -1: none", 0},
        {"first-step", FIRST, "N", 0, "The checkpoint to start from", 0},
        {"eval-from", EVAL_FROM, "N", 0, "Versions from this one on are to be evaluated", 0},
        {"stopping", STOPPING, NULL, 0, "Make no new step", 0},
        {"parent", PARENT, "PID", 0, "The process that this one ends with", 0},
        {"coordinator", COORDINATOR, NULL, 0, "Be the coordinator, listening at --address", 0},
        {"keeper", KEEPER, "PATH", 0, "The queue's keeper", 0},
        {"journal", JOURNAL, "FOLDER", 0, "Folder of durable queues (with --coordinator)", 0},
        {"store", STORE, "STORE", 0, "Of queues' bytes (with --coordinator)", 0},
        {"metrics", METRICS, "ADDRESS", 0, "Where to answer GET /metrics (with --coordinator)", 0},
        {"exec", EXEC, "COMMAND", 0, "Become this shell command", 0},
        {0}};
    static const struct argp argp = {
        .options = options, .parser = parse, .doc = "One process of a job; 'dray run' starts it."};
    arguments a = {.host = {.group_fd = -1, .epoch = 1}};
    dray_error error;
    cmd_parse(&argp, argc, argv, &a);
    if (dray__child_follow(a.parent, &error))
        return failed(&error);
    if (a.command)
        return become(a.command);
    dray_set_log(log_line, NULL, DRAY_LOG_INFO);
    dray__serve_options serve = {.unix_path = a.host.address,
                                 .keeper_path = a.keeper,
                                 .journal = a.journal,
                                 .stores = a.stores,
                                 .metrics = a.metrics};
    int rc = a.coordinator ? dray__serve(&serve, &error) : dray__host_main(&a.host, &error);
    return rc ? failed(&error) : CMD_OK;
}
