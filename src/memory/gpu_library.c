#include "memory/gpu_library.h"

#include <dlfcn.h>
#include <glob.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST 4

static const struct {
    const char *variable;
    const char *names[MOST + 1];  /* names for the loader */
    const char *places[MOST + 1]; /* paths below a folder of Python's packages */
} libraries[] = {
    [DRAY__GPU_NVRTC] = {"DRAY_NVRTC_LIBRARY",
                         {"libnvrtc.so.13", "libnvrtc.so.12",
                          "/usr/local/cuda/lib64/libnvrtc.so.13",
                          "/usr/local/cuda/lib64/libnvrtc.so.12"},
                         {"nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cuda_nvrtc/lib/libnvrtc.so.13",
                          "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"}},
    [DRAY__GPU_NCCL] = {"DRAY_NCCL_LIBRARY", {"libnccl.so.2"}, {"nvidia/nccl/lib/libnccl.so.2"}},
};

typedef struct search {
    dray__gpu_library which;
    void *found;
} search;

static void *try_folder(dray__gpu_library which, const char *folder, int length)
{
    for (int i = 0; libraries[which].places[i]; i++) {
        char path[PATH_MAX];
        int n = snprintf(path, sizeof path, "%.*s/%s", length, folder, libraries[which].places[i]);
        void *found = NULL;
        if (n > 0 && (size_t)n < sizeof path && access(path, R_OK) == 0)
            found = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (found)
            return found;
    }
    return NULL;
}

/* Looks beside libraries of such packages that this process has loaded:
 * .../site-packages/nvidia/... or .../site-packages/torch/... */
static int look_beside(struct dl_phdr_info *info, size_t size, void *user)
{
    static const char *const parts[] = {"/nvidia/", "/torch/"};
    search *s = user;
    (void)size;
    for (size_t i = 0; i < sizeof parts / sizeof *parts && info->dlpi_name && !s->found; i++) {
        const char *part = strstr(info->dlpi_name, parts[i]);
        if (part)
            s->found = try_folder(s->which, info->dlpi_name, (int)(part - info->dlpi_name));
    }
    return s->found != NULL;
}

static void *look_in(dray__gpu_library which, const char *pattern)
{
    void *found = NULL;
    glob_t list;
    if (glob(pattern, 0, NULL, &list) != 0)
        return NULL;
    for (size_t i = 0; i < list.gl_pathc && !found; i++)
        found = try_folder(which, list.gl_pathv[i], (int)strlen(list.gl_pathv[i]));
    globfree(&list);
    return found;
}

/* Looks in the packages of the active environment, then in those of the system. */
static void *look_in_packages(dray__gpu_library which)
{
    const char *environment = getenv("VIRTUAL_ENV");
    char pattern[PATH_MAX];
    void *found = NULL;
    if (environment &&
        snprintf(pattern, sizeof pattern, "%s/lib/python3*/site-packages", environment) < PATH_MAX)
        found = look_in(which, pattern);
    return found ? found : look_in(which, "/usr/local/lib/python3*/*-packages");
}

const char *dray__gpu_library_variable(dray__gpu_library which)
{
    return libraries[which].variable;
}

void *dray__gpu_library_open(dray__gpu_library which)
{
    const char *wish = getenv(libraries[which].variable);
    if (wish)
        return *wish ? dlopen(wish, RTLD_NOW | RTLD_LOCAL) : NULL;
    for (int i = 0; libraries[which].names[i]; i++) {
        void *found = dlopen(libraries[which].names[i], RTLD_NOW | RTLD_LOCAL);
        if (found)
            return found;
    }
    search s = {which, NULL};
    dl_iterate_phdr(look_beside, &s);
    return s.found ? s.found : look_in_packages(which);
}
