#include "run/supervisor/vital.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEPTH = 8 };

static bool read_line(const char *path, char *out, size_t capacity)
{
    FILE *file = fopen(path, "re");
    bool ok = file && fgets(out, (int)capacity, file);
    if (file)
        fclose(file);
    return ok;
}

/* proc(5): PID (COMM) STATE ...; COMM may hold any characters. Returns NULL when there is no such
 * line. */
static const char *state_in(const char *path, char *line, size_t capacity)
{
    const char *behind = read_line(path, line, capacity) ? strrchr(line, ')') : NULL;
    return behind && behind[1] == ' ' ? behind + 2 : NULL;
}

/* Linux, Documentation/scheduler/sched-stats.rst: time on a core, and in a queue for one, in ns. */
static void add_thread(pid_t pid, const char *thread, dray__vital *out)
{
    char path[320], line[1024];
    unsigned long long ran, waited;
    snprintf(path, sizeof(path), "/proc/%ld/task/%s/stat", (long)pid, thread);
    const char *state = state_in(path, line, sizeof(line));
    out->on_disk = out->on_disk || (state && *state == 'D');
    snprintf(path, sizeof(path), "/proc/%ld/task/%s/schedstat", (long)pid, thread);
    if (read_line(path, line, sizeof(line)) && sscanf(line, "%llu %llu", &ran, &waited) == 2)
        out->wanted_ns += ran + waited;
}

static void add_threads(pid_t pid, dray__vital *out)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%ld/task", (long)pid);
    DIR *threads = opendir(path);
    for (struct dirent *at; threads && (at = readdir(threads));)
        if (at->d_name[0] != '.')
            add_thread(pid, at->d_name, out);
    if (threads)
        closedir(threads);
}

/* utime and stime are fields 14 and 15 of proc(5). */
static bool add_one(pid_t pid, dray__vital *out)
{
    char path[64], line[1024], state;
    unsigned long long user, kernel;
    snprintf(path, sizeof(path), "/proc/%ld/stat", (long)pid);
    const char *at = state_in(path, line, sizeof(line));
    if (!at || sscanf(at, "%c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu", &state, &user,
                      &kernel) != 3)
        return false;
    out->stopped = out->stopped || state == 'T';
    out->ticks += user + kernel;
    add_threads(pid, out);
    return true;
}

static void add_children(pid_t pid, int depth, dray__vital *out)
{
    char path[96], list[4096];
    snprintf(path, sizeof(path), "/proc/%ld/task/%ld/children", (long)pid, (long)pid);
    if (!depth || !read_line(path, list, sizeof(list)))
        return;
    char *at = list, *end;
    for (long child = strtol(at, &end, 10); end != at && *end == ' ';
         child = strtol(at, &end, 10)) {
        if (add_one((pid_t)child, out))
            add_children((pid_t)child, depth - 1, out);
        at = end;
    }
}

bool dray__vital_of(pid_t pid, dray__vital *out)
{
    *out = (dray__vital){0};
    if (!add_one(pid, out))
        return false;
    add_children(pid, DEPTH, out);
    return true;
}
