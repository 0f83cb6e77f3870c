#include "run/supervisor/vital.h"

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

/* proc(5): PID (COMM) STATE PPID ..., utime and stime are fields 14 and 15. COMM may hold anything.
 */
static bool add_one(pid_t pid, dray__vital *out)
{
    char path[64], line[1024], state;
    unsigned long long user, kernel;
    snprintf(path, sizeof(path), "/proc/%ld/stat", (long)pid);
    if (!read_line(path, line, sizeof(line)))
        return false;
    const char *behind = strrchr(line, ')');
    if (!behind || sscanf(behind + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu",
                          &state, &user, &kernel) != 3)
        return false;
    out->stopped = out->stopped || state == 'T';
    out->ticks += user + kernel;
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
