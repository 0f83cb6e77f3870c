/* dray host: one process of a job. `dray run` starts it; nobody types it. */
#include "run/host.h"

#include "cmd/cmd.h"
#include "run/contract.h"
#include "run/coordinator.h"
#include "run/spawn.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct arguments {
    const char *address, *keeper, *journal, *metrics, *command;
    const char *stores[2]; /* NULL at the end */
    pid_t parent;
    bool coordinator;
} arguments;

enum { ADDRESS = 1001, PARENT, COORDINATOR, KEEPER, JOURNAL, METRICS, STORE, EXEC };

static error_t parse(int key, char *text, struct argp_state *state)
{
    arguments *a = state->input;
    switch (key) {
    case ADDRESS:
        a->address = text;
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
    case PARENT:
        a->parent = (pid_t)cmd_number(state, "process", text, 1, INT32_MAX);
        return 0;
    case COORDINATOR:
        a->coordinator = true;
        return 0;
    case ARGP_KEY_END:
        if (!a->parent || (a->coordinator && !a->address))
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

/* A program that the job names (a role's command, reward.command), whose life is tied to ours. What
 * it is not told is contract.c's to say; of our descriptors it has the standard ones alone. */
static int become(const char *command)
{
    close_range(STDERR_FILENO + 1, ~0U, 0);
    unsetenv("DRAY_GROUP_FD"); /* of the built-in programs' collectives */
    signal(SIGXFSZ, SIG_DFL);  /* ignored by us (main.c) */
    execl("/bin/sh", "sh", "-c", command, (char *)NULL);
    fprintf(stderr, "error: /bin/sh: %s\n", strerror(errno));
    return CMD_FAILED;
}

int cmd_host(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"address", ADDRESS, "ADDRESS", 0, "The coordinator's (with --coordinator)", 0},
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
    arguments a = {0};
    dray__host_options host = {0};
    dray_error error;
    cmd_parse(&argp, argc, argv, &a);
    if (dray__child_follow(a.parent, &error))
        return failed(&error);
    /* A role's command: the shell may start it as a process of its own. */
    if (a.command && getpgrp() == getpid() && dray__child_guard(a.parent, &error))
        return failed(&error);
    if (a.command)
        return become(a.command);
    dray_set_log(log_line, NULL, DRAY_LOG_INFO);
    dray__serve_options serve = {.unix_path = a.address,
                                 .keeper_path = a.keeper,
                                 .journal = a.journal,
                                 .stores = a.stores,
                                 .metrics = a.metrics};
    int rc = a.coordinator ? dray__serve(&serve, &error) : dray__contract_read(&host, &error);
    if (!rc && !a.coordinator)
        rc = dray__host_main(&host, &error);
    return rc ? failed(&error) : CMD_OK;
}
