#include "run/paths.h"

#include "base/error.h"
#include "base/io.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>

void dray__path(char *out, size_t capacity, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(out, capacity, format, arguments);
    va_end(arguments);
}

void dray__checkpoint_path(const char *folder, int64_t step, char *out, size_t capacity)
{
    dray__path(out, capacity, "%s/checkpoints/step-%06lld", folder, (long long)step);
}

int dray__make_folders(const char *path, dray_error *error)
{
    char part[PATH_MAX];
    dray__path(part, sizeof(part), "%s", path);
    for (char *end = part; end;) {
        end = strchr(end + 1, '/');
        if (end)
            *end = 0;
        if (mkdir(part, 0777) < 0 && errno != EEXIST)
            return dray__fail_errno(error, errno, "%s", part);
        if (end)
            *end = '/';
    }
    return DRAY_OK;
}

int dray__lock_folder(const char *folder, const char *what, int *lock, dray_error *error)
{
    char path[PATH_MAX];
    dray__path(path, sizeof(path), "%s/.lock", folder);
    *lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (*lock >= 0 && flock(*lock, LOCK_EX | LOCK_NB) == 0)
        return DRAY_OK;
    return *lock >= 0 && errno == EWOULDBLOCK
               ? dray__fail(error, DRAY_EBUSY, "%s: %s is going on there", folder, what)
               : dray__fail_errno(error, errno, "%s", path);
}

int dray__write_text(const char *folder, const char *name, const char *text, dray_error *error)
{
    char path[PATH_MAX];
    dray__path(path, sizeof(path), "%s/%s", folder, name);
    FILE *file = dray__begin_file(path);
    return dray__end_file(file, file && fputs(text, file) >= 0, path, error);
}

int dray__folder_name_check(const char *name, const char *what, dray_error *error)
{
    if (name[0] && name[0] != '.' && !strchr(name, '/') && strlen(name) <= NAME_MAX - 8)
        return DRAY_OK;
    return dray__fail(
        error, DRAY_EINVALID,
        "the job's name, '%.64s', is none for a folder: --out DIR says where the %s goes", name,
        what);
}
