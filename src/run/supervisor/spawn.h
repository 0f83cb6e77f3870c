/* Child processes of the supervisor. A child is this program again, in a process group of its own,
 * with its output in a file. The kernel ends it when the supervisor ends. */
#pragma once

#include <dray/dray.h>
#include <stdbool.h>
#include <sys/types.h>

enum { DRAY__CHILD_FD = 3 }; /* the number of the inherited descriptor in the child */

typedef struct dray__child {
    pid_t pid; /* 0 when there is none */
    int pidfd;
} dray__child;

typedef struct dray__child_start {
    const char *const *arguments; /* of `dray`, without the program's name; ended by NULL */
    char *const *environment;     /* NULL for this process's */
    const char *folder;           /* to start in; NULL for this process's */
    const char *log;              /* gets stdout and stderr, appended */
    int fd;                       /* inherited as DRAY__CHILD_FD; -1 for none */
} dray__child_start;

/* Call it on the main thread, because the kernel ends the child when the thread that made it
 * ends. */
int dray__child_begin(const dray__child_start *start, dray__child *out, dray_error *error);
/* Sends a signal to the child and the processes it started. */
void dray__child_signal(const dray__child *child, int number);
/* Reaps a child that ended. Returns 1 with its wait status, or 0 while it runs. */
int dray__child_ended(dray__child *child, int *status);
/* Returns whether a signal ended the child and it is not reaped yet. */
bool dray__child_was_killed(const dray__child *child);
/* Sends SIGKILL to the child and the processes that it started, and reaps it. */
void dray__child_end(dray__child *child);
/* Whether this process waits for the child itself. */
typedef bool dray__child_known(const void *user, pid_t pid);
/* Reaps children that ended and are not known: orphans of other children, whose subreaper this
 * process is. They would stay as zombies until its end. */
void dray__orphans_reap(dray__child_known *known, const void *user);
/* Ends all children with SIGKILL, when only orphans are left. */
void dray__orphans_end(void);
/* For the child: asks the kernel to end this process with its parent. Returns 0, or DRAY_EDEAD when
 * the parent is gone already. */
int dray__child_follow(pid_t parent, dray_error *error);
/* For a process that leads a group. Forks, and returns in the child, which may start other
 * processes. The first process ends with the child's status and ignores SIGTERM and SIGINT, which
 * are for the child. When its parent ends it kills the whole group; the kernel would signal the
 * child alone. */
int dray__child_guard(pid_t parent, dray_error *error);
/* Gets the last line of a log from byte `begin` on, without the prefix if it has it; with `only`,
 * the last line that has the prefix. It is "" when there is none. */
void dray__log_last(const char *path, off_t begin, const char *prefix, bool only, char *out,
                    size_t capacity);
