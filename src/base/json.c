#include "base/json.h"

#include "base/error.h"
#include "base/io.h"
#include "base/wire.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Returns whether parsing fails in the same way again. jansson does not say which failures are
 * lacks of memory, but these happen at another place on a second try. */
static bool fails_again(const char *text, size_t size, const json_error_t *problem)
{
    json_error_t again;
    json_t *json = json_loadb(text, size, JSON_REJECT_DUPLICATES, &again);
    json_decref(json);
    return !json && problem->text[0] && problem->position == again.position &&
           strcmp(problem->text, again.text) == 0;
}

int dray__json_parse(const char *text, size_t size, const char *what, json_t **out,
                     dray_error *error)
{
    json_error_t problem;
    json_t *json = json_loadb(text, size, JSON_REJECT_DUPLICATES, &problem);
    if (!json && !fails_again(text, size, &problem))
        return dray__nomem(error);
    if (!json)
        return dray__fail(error, DRAY_EFORMAT, "%s: line %d, column %d: %s", what, problem.line,
                          problem.column, problem.text);
    *out = json;
    return DRAY_OK;
}

int dray__json_load(const char *path, size_t max_bytes, json_t **out, dray_error *error)
{
    /* With O_NONBLOCK, a FIFO of that name does not block the call. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT)
        return dray__fail(error, DRAY_ENOENT, "%s: no such file", path);
    if (fd < 0)
        return dray__fail_errno(error, errno, "%s", path);
    struct stat st;
    int status = DRAY_OK;
    char *text = NULL;
    if (fstat(fd, &st) < 0)
        status = dray__fail_errno(error, errno, "%s", path);
    else if (!S_ISREG(st.st_mode))
        status = dray__fail(error, DRAY_EFORMAT, "%s: not a regular file", path);
    else if ((uint64_t)st.st_size > max_bytes)
        status = dray__fail(error, DRAY_EFORMAT, "%s: %lld bytes, at most %zu expected", path,
                            (long long)st.st_size, max_bytes);
    else if (!(text = malloc((size_t)st.st_size + 1)))
        status = dray__nomem(error);
    else if (dray__read_at(fd, text, (size_t)st.st_size, 0) < 0)
        status = dray__fail_errno(error, errno, "%s", path);
    else
        status = dray__json_parse(text, (size_t)st.st_size, path, out, error);
    free(text);
    close(fd);
    return status;
}

static void drop_unless(int rc, json_t **container)
{
    if (!rc)
        return;
    json_decref(*container);
    *container = NULL;
}

void dray__json_set(json_t **object, const char *key, json_t *value)
{
    drop_unless(json_object_set_new(*object, key, value), object);
}

void dray__json_append(json_t **array, json_t *value)
{
    drop_unless(json_array_append_new(*array, value), array);
}

static int write_more(const char *text, size_t size, void *writer)
{
    dray__put_bytes(writer, text, size);
    return 0;
}

char *dray__json_text(const json_t *json, size_t flags)
{
    dray__writer w = {0};
    int rc = json_dump_callback(json, write_more, &w, flags);
    dray__put_u8(&w, 0);
    if (!rc && !w.failed)
        return (char *)w.data;
    dray__writer_free(&w);
    return NULL;
}
