/* Where targets keep the files that they read (fuzz.h). */
#include "fuzz/fuzz.h"

#include <fcntl.h>
#include <ftw.h>
#include <string.h>

static char folder[64];

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *at)
{
    (void)st, (void)kind;
    return at->level ? remove(path) : 0;
}

void fuzz_empty_folder(void)
{
    nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static void clean_up(void)
{
    fuzz_empty_folder();
    rmdir(folder);
}

const char *fuzz_folder(void)
{
    const char *tmp = getenv("TMPDIR");
    if (folder[0])
        return folder;
    if (!tmp || strlen(tmp) > 30) /* in memory, where syncing takes no time */
        tmp = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    snprintf(folder, sizeof folder, "%s/dray-fuzz-XXXXXX", tmp);
    MUST(mkdtemp(folder));
    atexit(clean_up);
    return folder;
}

const char *fuzz_path(const char *name)
{
    static char path[192];
    snprintf(path, sizeof path, "%s/%s", fuzz_folder(), name);
    return path;
}

void fuzz_write(const char *path, const void *data, size_t size)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    MUST(fd >= 0 && write(fd, data, size) == (ssize_t)size && close(fd) == 0);
}
