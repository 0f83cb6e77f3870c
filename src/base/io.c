#include "base/io.h"

#include "base/error.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

int dray__read_at(int fd, void *data, size_t size, off_t at)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = pread(fd, (char *)data + done, size - done, at + (off_t)done);
        if (n == 0)
            errno = EIO;
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return -1;
        done += (size_t)n;
    }
    return 0;
}

int dray__write_all(int fd, const void *data, size_t size)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = write(fd, (const char *)data + done, size - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -1;
        done += (size_t)n;
    }
    return 0;
}

int dray__copy_rest(int from, int to)
{
    char block[1 << 16];
    ssize_t n;
    while ((n = read(from, block, sizeof block)) != 0) {
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 || dray__write_all(to, block, (size_t)n) < 0)
            return -1;
    }
    return 0;
}

int dray__open_beneath(int folder, const char *name, int flags, mode_t mode)
{
    flags |= O_CLOEXEC | O_NOFOLLOW;
    const struct open_how how = {.flags = (unsigned)flags,
                                 .mode = flags & O_CREAT ? mode : 0,
                                 .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS};
    long fd = syscall(SYS_openat2, folder, name, &how, sizeof how);
    if (fd >= 0 || (errno != ENOSYS && errno != EPERM))
        return (int)fd;
    if (strchr(name, '/') || strcmp(name, "..") == 0) {
        errno = EXDEV; /* the errno of openat2 for this */
        return -1;
    }
    return openat(folder, name, flags, mode);
}

FILE *dray__open_stream(const char *path, const char *mode)
{
    int flags = mode[0] == 'r'   ? O_RDONLY
                : mode[0] == 'w' ? O_WRONLY | O_CREAT | O_TRUNC
                                 : O_WRONLY | O_CREAT | O_APPEND;
    int fd = open(path, flags | O_CLOEXEC | O_NOFOLLOW, 0666);
    FILE *file = fd < 0 ? NULL : fdopen(fd, mode);
    if (fd >= 0 && !file)
        close(fd);
    return file;
}

static int remove_entry(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)st, (void)flag, (void)ftw;
    return remove(path) && errno != ENOENT ? -1 : 0;
}

int dray__read_stream(FILE *file, const char *path, size_t most, char **out, size_t *size,
                      dray_error *error)
{
    if (!file)
        return errno == ENOENT ? dray__fail(error, DRAY_ENOENT, "%s: no such file", path)
                               : dray__fail_errno(error, errno, "%s", path);
    size_t room = 4096, done = 0;
    char *text = malloc(room);
    while (text && (done += fread(text + done, 1, room - done, file)) == room && room <= most) {
        char *grown = realloc(text, room *= 2);
        if (!grown)
            free(text);
        text = grown;
    }
    int rc = !text          ? dray__nomem(error)
             : ferror(file) ? dray__fail_errno(error, errno, "%s", path)
             : done > most  ? dray__fail(error, DRAY_EFORMAT, "%s: more than %zu bytes", path, most)
                            : DRAY_OK;
    fclose(file);
    if (rc) {
        free(text);
        return rc;
    }
    text[done] = 0; /* there is room: the buffer is not full */
    *out = text;
    *size = done;
    return DRAY_OK;
}

/* "folder/.name.partial" */
static void partial_of(const char *path, char out[PATH_MAX])
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    snprintf(out, PATH_MAX, "%.*s.%s.partial", (int)(name - path), path, name);
}

FILE *dray__begin_file(const char *path)
{
    char partial[PATH_MAX];
    partial_of(path, partial);
    return dray__open_stream(partial, "w");
}

int dray__end_file(FILE *file, bool written, const char *path, dray_error *error)
{
    char partial[PATH_MAX];
    if (!file)
        return dray__fail_errno(error, errno, "%s", path);
    partial_of(path, partial);
    bool ok = written && fflush(file) == 0 && fsync(fileno(file)) == 0;
    int problem = errno;
    ok = fclose(file) == 0 && ok;
    if (ok && rename(partial, path) == 0)
        return DRAY_OK;
    problem = ok ? errno : problem;
    unlink(partial);
    return dray__fail_errno(error, problem, "%s", path);
}

int dray__remove_tree(const char *path, dray_error *error)
{
    struct stat st;
    if (lstat(path, &st) < 0)
        return errno == ENOENT ? DRAY_OK : dray__fail_errno(error, errno, "%.300s", path);
    if (nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS) && errno != ENOENT)
        return dray__fail_errno(error, errno, "removing %.300s", path);
    return DRAY_OK;
}

bool dray__cache_folder(char *out, size_t size)
{
    const char *own = getenv("DRAY_CACHE"), *base = getenv("XDG_CACHE_HOME"),
               *home = getenv("HOME");
    bool given = own && *own == '/', cache = base && *base == '/';
    if (!given && !cache && !(home && *home == '/'))
        return false;
    int n = given ? snprintf(out, size, "%s", own)
                  : snprintf(out, size, "%s%s", cache ? base : home, cache ? "" : "/.cache");
    if (n < 0 || (size_t)n + 8 > size || (mkdir(out, 0700) && errno != EEXIST))
        return false;
    if (given)
        return true;
    strcat(out, "/dray");
    return mkdir(out, 0700) == 0 || errno == EEXIST;
}

int dray__sync_folder(const char *path, dray_error *error)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc = fd < 0 || fsync(fd) ? dray__fail_errno(error, errno, "%.300s: fsync", path) : DRAY_OK;
    if (fd >= 0)
        close(fd);
    return rc;
}
