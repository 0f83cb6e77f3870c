/* Folders of this machine, or of a file system that hosts share. A version gets its name by rename,
 * and `latest` is a symbolic link. */
#include "store/store.h"

#include "base/array.h"
#include "base/error.h"
#include "base/io.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { ROOM = 256 }; /* bytes for the name that is appended to a folder's path */

static int files_open(const char *path, dray__store_file *out, dray_error *error)
{
    /* With O_NONBLOCK, a FIFO of that name does not block the call. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat st;
    if (fd < 0)
        return errno == ENOENT || errno == ENOTDIR
                   ? dray__fail(error, DRAY_ENOENT, "%.300s: no such file", path)
                   : dray__fail_errno(error, errno, "%.300s", path);
    int rc = fstat(fd, &st) ? dray__fail_errno(error, errno, "%.300s", path)
             : S_ISREG(st.st_mode)
                 ? DRAY_OK
                 : dray__fail(error, DRAY_EFORMAT, "%.300s: not a regular file", path);
    if (rc)
        close(fd);
    else
        *out = (dray__store_file){
            .store = &dray__store_files, .name = path, .fd = fd, .bytes = (uint64_t)st.st_size};
    return rc;
}

static int files_read(const dray__store_file *file, void *data, uint64_t bytes, uint64_t at,
                      const atomic_bool *stop, dray_error *error)
{
    (void)stop;
    return dray__read_at(file->fd, data, (size_t)bytes, (off_t)at)
               ? dray__fail_errno(error, errno, "%.300s: reading %llu bytes at %llu", file->name,
                                  (unsigned long long)bytes, (unsigned long long)at)
               : DRAY_OK;
}

static void files_close(dray__store_file *file)
{
    close(file->fd);
}

static int files_names(const char *folder, dray__store_name_fn fn, void *user, dray_error *error)
{
    DIR *dir = opendir(folder);
    if (!dir)
        return dray__fail_errno(error, errno, "%.300s", folder);
    for (struct dirent *entry; (entry = readdir(dir));)
        fn(user, entry->d_name);
    closedir(dir);
    return DRAY_OK;
}

static int files_resolve(const char *path, char *out, dray_error *error)
{
    if (realpath(path, out))
        return DRAY_OK;
    return errno == ENOENT || errno == ENOTDIR
               ? dray__fail(error, DRAY_ENOENT, "%.300s: no such file or folder", path)
               : dray__fail_errno(error, errno, "%.300s", path);
}

static int files_stage(const char *folder, char *out, dray_error *error)
{
    if ((mkdir(folder, 0777) && errno != EEXIST) || !realpath(folder, out))
        return dray__fail_errno(error, errno, "%.300s", folder);
    return DRAY_OK;
}

static int files_steps(const char *folder, bool clear, dray__store_step **out, size_t *count,
                       dray_error *error)
{
    char path[PATH_MAX];
    uint64_t capacity = 0, version;
    unsigned again;
    int rc = DRAY_OK;
    DIR *dir = opendir(folder);
    *out = NULL;
    *count = 0;
    if (!dir)
        return dray__fail_errno(error, errno, "%.300s", folder);
    errno = 0;
    for (struct dirent *entry; !rc && (entry = readdir(dir)); errno = 0) {
        dray__store_step one;
        struct stat st;
        snprintf(path, sizeof path, "%.*s/%.80s", PATH_MAX - ROOM, folder, entry->d_name);
        if (clear && strncmp(entry->d_name, ".step-", 6) == 0)
            rc = dray__remove_tree(path, error);
        if (rc || strlen(entry->d_name) >= sizeof one.name ||
            !dray__store_step_parse(entry->d_name, &version, &again) || stat(path, &st) ||
            !S_ISDIR(st.st_mode))
            continue;
        one.made = st.st_mtim;
        strcpy(one.name, entry->d_name);
        if (!DRAY__PUSH(*out, *count, capacity, one)) {
            rc = dray__nomem(error);
            break;
        }
    }
    if (!rc && errno) /* with an incomplete list, files that are still needed would be removed */
        rc = dray__fail_errno(error, errno, "%.300s", folder);
    closedir(dir);
    return rc;
}

static int files_place(const char *folder, const char *name, const char *finished,
                       dray_error *error)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%.*s/%.64s", PATH_MAX - ROOM, folder, name);
    if (rename(finished, path))
        return dray__fail_errno(error, errno, "%.300s", path);
    return dray__sync_folder(folder, error);
}

static int files_lead(const char *folder, const char *name, const dray__store_given *given,
                      dray_error *error)
{
    char link[PATH_MAX], path[PATH_MAX];
    (void)given;
    snprintf(link, sizeof link, "%.*s/.step-latest", PATH_MAX - ROOM, folder);
    snprintf(path, sizeof path, "%.*s/latest", PATH_MAX - ROOM, folder);
    if ((unlink(link) && errno != ENOENT) || symlink(name, link) || rename(link, path))
        return dray__fail_errno(error, errno, "%.300s", path);
    return dray__sync_folder(folder, error);
}

static int files_led(const char *folder, char *out, dray_error *error)
{
    char link[PATH_MAX];
    if (snprintf(link, sizeof link, "%s/latest", folder) >= (int)sizeof link)
        return dray__fail(error, DRAY_EINVALID, "%.300s...: path too long", folder);
    if (realpath(link, out))
        return DRAY_OK;
    return errno == ENOENT ? dray__fail(error, DRAY_ENOENT, "%.300s: no checkpoint", folder)
                           : dray__fail_errno(error, errno, "%.300s", link);
}

/* Removes a step. It is renamed first, so that no reader finds half of it. */
static int files_retire(const char *folder, const char *name, dray_error *error)
{
    char path[PATH_MAX], gone[PATH_MAX];
    snprintf(path, sizeof path, "%.*s/%.64s", PATH_MAX - ROOM, folder, name);
    snprintf(gone, sizeof gone, "%.*s/.%.64s.gone", PATH_MAX - ROOM, folder, name);
    if (rename(path, gone))
        return errno == ENOENT ? DRAY_OK : dray__fail_errno(error, errno, "%.300s", path);
    return dray__remove_tree(gone, error);
}

const dray__store dray__store_files = {.scheme = "",
                                       .open = files_open,
                                       .read = files_read,
                                       .close = files_close,
                                       .names = files_names,
                                       .resolve = files_resolve,
                                       .stage = files_stage,
                                       .steps = files_steps,
                                       .place = files_place,
                                       .lead = files_lead,
                                       .led = files_led,
                                       .retire = files_retire};
