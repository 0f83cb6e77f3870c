/* Child processes of the supervisor: this program again, in a process group of its own, with its
 * output in a file, ended by the kernel when the supervisor is. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>
#include <sys/types.h>

enum { DRAY__CHILD_FD = 3 }; /* where a descriptor that is handed down appears */

typedef struct dray__child {
    pid_t pid; /* 0 when there is none */
    int pidfd;
} dray__child;

typedef struct dray__child_start {
    const char *const *arguments; /* of `dray`, without the program's name; ended by NULL */
    char *const *environment;     /* NULL for this process's */
    const char *folder;           /* to start in; NULL for this process's */
    const char *log;              /* gets stdout and stderr, appended */
    int fd;                       /* handed down as DRAY__CHILD_FD; -1: none */
} dray__child_start;

/* Call it on the main thread: the child lives as long as the thread that made it. */
int dray__child_begin(const dray__child_start *start, dray__child *out, dray_error *error);
/* Sends a signal to the child and the processes it started. */
void dray__child_signal(const dray__child *child, int number);
/* Reaps a child that ended. Returns 1 and its wait status, or 0: it runs still. */
int dray__child_ended(dray__child *child, int *status);
/* Whether it was ended by a signal, and not reaped yet. */
bool dray__child_was_killed(const dray__child *child);
/* Sends SIGKILL to it and the processes that it started, and reaps it. */
void dray__child_end(dray__child *child);
/* For the child: asks the kernel to end this process with its parent. Returns 0, or DRAY_EDEAD when
 * the parent is gone already. */
int dray__child_follow(pid_t parent, dray_error *error);
/* For a process that leads a group: forks, and returns in the child, which may start others. The
 * process itself ends as the child does, ignores SIGTERM and SIGINT, which are for the child, and
 * ends the whole group when its parent does: the kernel would tell the child alone. */
int dray__child_guard(pid_t parent, dray_error *error);
/* The last line of a log, from byte `begin` on, without the prefix if it has it; only: the last one
 * that has it. "": there is none. */
void dray__log_last(const char *path, off_t begin, const char *prefix, bool only, char *out,
                    size_t capacity);
