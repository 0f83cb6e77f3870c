#include "queue/stores.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "queue/backend.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PATIENCE (3 * DRAY__SECOND) /* with one store */

/* One line a space: the backend's name, the space in hexadecimal, the store's address. */
static char *path_in(const char *folder, const char *ending)
{
    char *path;
    return asprintf(&path, "%s/stores%s", folder, ending) < 0 ? NULL : path;
}

static int append(const char *path, const char *line, dray_error *error)
{
    size_t size = strlen(line);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    bool written = fd >= 0 && write(fd, line, size) == (ssize_t)size && fdatasync(fd) == 0;
    int rc = written ? DRAY_OK : dray__fail_errno(error, errno, "noting a store in %s", path);
    if (fd >= 0)
        close(fd);
    return rc;
}

int dray__stores_note(const char *folder, const char *kind, const char *address, uint64_t space,
                      dray_error *error)
{
    if (!folder)
        return DRAY_OK;
    if (strchr(address, '\n'))
        return dray__fail(error, DRAY_EINVALID, "backend %s: an address of one line expected",
                          kind);
    char *path = path_in(folder, ""), *line;
    if (!path || asprintf(&line, "\n%s %016llx %s\n", kind, (unsigned long long)space, address) < 0)
        line = NULL;
    int rc = line ? append(path, line, error) : dray__nomem(error);
    free(path);
    free(line);
    return rc;
}

static int drop_all(const dray__backend_kind *kind, const char *address, uint64_t space,
                    dray_error *error)
{
    dray__backend *store;
    int rc = kind->open(address, space, &store, error);
    if (rc)
        return rc;
    rc = kind->sweep(store, 0, NULL, 0, dray__deadline(PATIENCE), error);
    kind->close(store);
    return rc;
}

/* Whether the line is to be kept. One that a power cut tore is of a space without objects. */
static bool still_needed(const char *line, bool (*used)(void *, uint64_t), void *user)
{
    unsigned long long space;
    int name = 0, end = 0;
    if (sscanf(line, "%*s%n %16llx %n", &name, &space, &end) != 1 || !end)
        return false;
    const dray__backend_kind *kind = dray__backend_named(line, (size_t)name);
    if (used(user, space))
        return true;
    dray_error error;
    if (kind && !drop_all(kind, line + end, space, &error))
        return false;
    dray__log(DRAY_LOG_WARN, "queue: what an earlier coordinator left in %s stays there: %s",
              line + end, kind ? error.message : "this build does not know its backend");
    return true;
}

static int replace(const char *path, const char *fresh, const char *text, size_t size,
                   dray_error *error)
{
    int fd = open(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    bool written = fd >= 0 && write(fd, text, size) == (ssize_t)size && fdatasync(fd) == 0 &&
                   rename(fresh, path) == 0;
    int rc = written ? DRAY_OK : dray__fail_errno(error, errno, "noting the stores in %s", path);
    if (fd >= 0)
        close(fd);
    return rc;
}

/* Reads the lines of `file`, and adds those that are still needed to `out`. */
static void filter(FILE *file, FILE *out, bool (*used)(void *, uint64_t), void *user)
{
    char *line = NULL;
    size_t capacity = 0;
    while (getline(&line, &capacity, file) > 0) {
        line[strcspn(line, "\n")] = 0;
        if (!*line || !still_needed(line, used, user))
            continue;
        fwrite(line, 1, strlen(line), out);
        fputc('\n', out);
    }
    free(line);
}

int dray__stores_clean(const char *folder, bool (*used)(void *, uint64_t), void *user,
                       dray_error *error)
{
    char *path = path_in(folder, ""), *fresh = path_in(folder, ".new"), *text = NULL;
    size_t size = 0;
    FILE *file = path ? fopen(path, "re") : NULL;
    FILE *out = file && fresh ? open_memstream(&text, &size) : NULL;
    int rc = DRAY_OK;
    if (out)
        filter(file, out, used, user);
    else if (!path || !fresh || file)
        rc = dray__nomem(error);
    if (out && fclose(out))
        rc = dray__nomem(error);
    if (out && !rc)
        rc = replace(path, fresh, text, size, error);
    if (file)
        fclose(file);
    free(path);
    free(fresh);
    free(text);
    return rc;
}
