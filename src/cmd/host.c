/* dray host: one process of a job. `dray run` starts it; users do not. */
#include "run/host/host.h"

#include "cmd/cmd.h"
#include "run/job/contract.h"
#include "run/supervisor/coordinator.h"
#include "run/supervisor/spawn.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct arguments {
    const char *address, *listen, *master, *keeper, *journal, *metrics, *command;
    cmd_list stores;
    int64_t parent, nice;
    bool coordinator;
} arguments;

/* Prints the error. The supervisor takes the last such line of a log as the reason of a process's
 * end. */
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

/* Becomes a program that the job names (a role's command, reward.command), with only the standard
 * descriptors. Its end is already tied to the parent's. contract.c removes the variables that it
 * must not see. */
static int become(const char *command)
{
    syscall(SYS_close_range, STDERR_FILENO + 1, ~0U, 0); /* a function of glibc since 2.34 only */
    unsetenv("DRAY_GROUP_FD"); /* for the collectives of built-in programs */
    signal(SIGXFSZ, SIG_DFL);  /* main.c ignores it */
    execl("/bin/sh", "sh", "-c", command, (char *)NULL);
    fprintf(stderr, "error: /bin/sh: %s\n", strerror(errno));
    return CMD_FAILED;
}

int cmd_host(int argc, char **argv)
{
    static const cmd_option options[] = {
        CMD_TEXT(arguments, address, "address", 0, "ADDRESS",
                 "The coordinator's (with --coordinator)"),
        CMD_TEXT(arguments, listen, "listen", 0, "HOST:PORT", "The coordinator's, for other hosts"),
        CMD_TEXT(arguments, master, "master", 0, "FILE", "Of the master token (with --listen)"),
        CMD_NUMBER(arguments, parent, "parent", 0, 1, INT32_MAX, "PID",
                   "The process that this one ends with"),
        CMD_NUMBER(arguments, nice, "nice", 0, 0, 19, "N", "Added to the process's nice value"),
        CMD_FLAG(arguments, coordinator, "coordinator", 0,
                 "Be the coordinator, listening at --address"),
        CMD_TEXT(arguments, keeper, "keeper", 0, "PATH", "The queue's keeper"),
        CMD_TEXT(arguments, journal, "journal", 0, "FOLDER",
                 "Folder of durable queues (with --coordinator)"),
        CMD_LIST(arguments, stores, "store", 0, "STORE", "Of queues' bytes (with --coordinator)"),
        CMD_TEXT(arguments, metrics, "metrics", 0, "ADDRESS",
                 "Where to answer GET /metrics (with --coordinator)"),
        CMD_TEXT(arguments, command, "exec", 0, "COMMAND", "Become this shell command"),
        CMD_END};
    static const cmd_usage usage = {.options = options,
                                    .doc = "One process of a job; 'dray run' starts it."};
    arguments a = {0};
    dray__host_options host = {0};
    dray_error error;
    cmd_parse(&usage, argc, argv, &a);
    if (!a.parent || (a.coordinator && !a.address))
        return cmd_failf("host", "started by 'dray run', not by hand"), CMD_USAGE;
    if (dray__child_follow((pid_t)a.parent, &error))
        return failed(&error);
    /* Set before anything else runs, because processes inherit the nice value. */
    if (a.nice && setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + (int)a.nice) < 0)
        return fprintf(stderr, "error: setpriority: %s\n", strerror(errno)), CMD_FAILED;
    /* A role's command: the shell may start it as a process of its own. */
    if (a.command && getpgrp() == getpid() && dray__child_guard((pid_t)a.parent, &error))
        return failed(&error);
    if (a.command)
        return become(a.command);
    dray_set_log(log_line, NULL, DRAY_LOG_INFO);
    dray__serve_options serve = {.unix_path = a.address,
                                 .keeper_path = a.keeper,
                                 .journal = a.journal,
                                 .stores = a.stores.items,
                                 .metrics = a.metrics,
                                 .tcp_address = a.listen,
                                 .token_path = a.master,
                                 .hosts = a.listen != NULL};
    int rc = a.coordinator ? dray__serve(&serve, &error) : dray__contract_read(&host, &error);
    if (!rc && !a.coordinator)
        rc = dray__host_main(&host, &error);
    return rc ? failed(&error) : CMD_OK;
}
