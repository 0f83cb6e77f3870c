#include "run/join/files.h"

#include "base/arena.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/io.h"
#include "base/words.h"
#include "run/paths.h"
#include "trace/spans.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { AT_ONCE = 4 << 20, PROBE = 64 << 10 };

typedef struct file {
    char *name; /* "trace/engine-0-1.spans" */
    int64_t sent, taken;
    uint64_t head, head_taken; /* hash of the head that was sent last; 0 when none was */
    bool unkept;               /* the run could not write the last part of it */
} file;

struct dray__host_files {
    char *folder;
    file *items;
    uint64_t count, room;
};

int dray__host_files_open(const char *folder, dray__host_files **out, dray_error *error)
{
    dray__host_files *files = calloc(1, sizeof *files);
    if (files)
        files->folder = strdup(folder);
    if (!files || !files->folder) {
        dray__host_files_close(files);
        return dray__nomem(error);
    }
    *out = files;
    return DRAY_OK;
}

void dray__host_files_close(dray__host_files *files)
{
    if (!files)
        return;
    for (uint64_t i = 0; i < files->count; i++)
        free(files->items[i].name);
    free(files->items);
    free(files->folder);
    free(files);
}

static file *find_or_add(dray__host_files *files, const char *name)
{
    for (uint64_t i = 0; i < files->count; i++)
        if (strcmp(files->items[i].name, name) == 0)
            return &files->items[i];
    char *copy = strdup(name);
    if (!copy || !dray__append(&files->items, sizeof *files->items, files->count, &files->room)) {
        free(copy);
        return NULL;
    }
    files->items[files->count] = (file){.name = copy};
    return &files->items[files->count++];
}

/* ---- taking ---------------------------------------------------------------------------------- */

static int add_part(dray__host_files_part *out, const char *name, int fd, int64_t at, int64_t size,
                    dray_error *error)
{
    uint64_t need = out->size + (uint64_t)size;
    if (need > out->room) {
        uint8_t *grown = realloc(out->bytes, need);
        if (!grown)
            return dray__nomem(error);
        out->bytes = grown;
        out->room = need;
    }
    if (dray__read_at(fd, out->bytes + out->size, (size_t)size, (off_t)at))
        return dray__fail_errno(error, errno, "%s", name);
    json_t *entry =
        json_pack("{s:s, s:I, s:I}", "name", name, "at", (json_int_t)at, "size", (json_int_t)size);
    if (!entry || json_array_append_new(out->list, entry))
        return dray__nomem(error);
    out->size = need;
    return DRAY_OK;
}

/* Adds the file's head to the part if it has changed. */
static int add_head(file *f, int fd, int64_t clock_ns, int64_t error_ns, dray__host_files_part *out,
                    dray_error *error)
{
    uint64_t at = out->size;
    int64_t clock[2] = {clock_ns, error_ns};
    int rc = add_part(out, f->name, fd, 0, DRAY__SPANS_HEAD, error);
    if (rc)
        return rc;
    memcpy(out->bytes + at + DRAY__SPANS_CLOCK_AT, clock, sizeof clock);
    f->head_taken = dray__hash(out->bytes + at, DRAY__SPANS_HEAD) | 1;
    if (f->head_taken == f->head) {
        out->size = at;
        json_array_remove(out->list, json_array_size(out->list) - 1);
    }
    return DRAY_OK;
}

static int take_file(file *f, int fd, int64_t clock_ns, int64_t error_ns,
                     dray__host_files_part *out, dray_error *error)
{
    struct stat st;
    bool spans = dray__ends_with(f->name, ".spans");
    int64_t least = spans ? DRAY__SPANS_HEAD : 0;
    int rc = DRAY_OK;
    f->taken = f->sent;
    f->head_taken = f->head;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_size < least)
        return DRAY_OK;
    if (spans)
        rc = add_head(f, fd, clock_ns, error_ns, out, error);
    int64_t from = f->sent > least ? f->sent : least, size = st.st_size - from;
    int64_t most = AT_ONCE - (int64_t)out->size;
    if (f->unkept && most > PROBE)
        most = PROBE;
    if (size > most) {
        size = most > 0 ? most : 0;
        out->more = out->more || !f->unkept; /* the others are tried at the next call */
    }
    if (!rc && size > 0)
        rc = add_part(out, f->name, fd, from, size, error);
    if (!rc)
        f->taken = from + size;
    return rc;
}

/* Takes the files of a folder that the run keeps, or those that it could not write. */
static int take_folder(dray__host_files *files, const char *folder, bool unkept, int64_t clock_ns,
                       int64_t error_ns, dray__host_files_part *out, dray_error *error)
{
    char path[PATH_MAX];
    dray__path(path, sizeof path, "%s/%s", files->folder, folder);
    DIR *listing = opendir(path);
    int rc = listing ? DRAY_OK : dray__fail_errno(error, errno, "%s", path);
    for (struct dirent *entry; !rc && (entry = readdir(listing));) {
        char name[300];
        snprintf(name, sizeof name, "%s/%s", folder, entry->d_name);
        int fd = entry->d_name[0] == '.' ? -1
                                         : openat(dirfd(listing), entry->d_name,
                                                  O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        if (fd < 0)
            continue;
        file *f = find_or_add(files, name);
        if (!f)
            rc = dray__nomem(error);
        else if (f->unkept == unkept)
            rc = take_file(f, fd, clock_ns, error_ns, out, error);
        close(fd);
    }
    if (listing)
        closedir(listing);
    return rc;
}

int dray__host_files_take(dray__host_files *files, int64_t clock_ns, int64_t error_ns,
                          dray__host_files_part *out, dray_error *error)
{
    json_decref(out->list);
    out->list = json_array();
    out->size = 0;
    out->more = false;
    int rc = out->list ? DRAY_OK : dray__nomem(error);
    /* Files that cannot be written at home come last, or the others would wait for them for ever.
     */
    for (int unkept = 0; unkept < 2 && !rc; unkept++) {
        rc = take_folder(files, "logs", unkept, clock_ns, error_ns, out, error);
        if (!rc)
            rc = take_folder(files, "trace", unkept, clock_ns, error_ns, out, error);
    }
    return rc;
}

static bool is_in(const json_t *names, const char *name)
{
    size_t i;
    const json_t *one;
    json_array_foreach(names, i, one)
    {
        if (json_is_string(one) && strcmp(json_string_value(one), name) == 0)
            return true;
    }
    return false;
}

void dray__host_files_took(dray__host_files *files, const json_t *unkept)
{
    for (uint64_t i = 0; i < files->count; i++) {
        files->items[i].unkept = is_in(unkept, files->items[i].name);
        if (files->items[i].unkept)
            continue;
        files->items[i].sent = files->items[i].taken;
        files->items[i].head = files->items[i].head_taken;
    }
}

void dray__host_files_part_free(dray__host_files_part *part)
{
    json_decref(part->list);
    free(part->bytes);
    *part = (dray__host_files_part){0};
}

/* ---- names ----------------------------------------------------------------------------------- */

bool dray__host_file_is_of(const char *name, const char *label)
{
    static const char digits[] = "0123456789";
    size_t length = strlen(label), count;
    const char *at = name + length;
    int numbers = 0;
    if (strncmp(name, label, length) != 0)
        return false;
    for (; *at == '-' && (count = strspn(at + 1, digits)); numbers++)
        at += 1 + count;
    bool timeline = strcmp(at, ".spans") == 0 || strcmp(at, ".lengths") == 0;
    return timeline ? numbers == 2 : numbers == 1 && strcmp(at, ".log") == 0;
}

/* ---- putting --------------------------------------------------------------------------------- */

static int put_at(int fd, const void *bytes, size_t size, int64_t at)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = pwrite(fd, (const uint8_t *)bytes + done, size - done, (off_t)at + (off_t)done);
        if (n < 0 && errno != EINTR)
            return -1;
        done += n > 0 ? (size_t)n : 0;
    }
    return 0;
}

/* Writes the head like a sequence lock: a reader (account.c) sees an odd sequence number while it
 * changes, and an even one after. */
static int put_head(int fd, const uint8_t *head)
{
    enum { SEQUENCE = DRAY__ACCOUNT_AT };
    uint32_t sequence;
    memcpy(&sequence, head + SEQUENCE, sizeof sequence);
    uint32_t even = sequence & ~1U, odd = even | 1;
    int rc = put_at(fd, &odd, sizeof odd, SEQUENCE);
    if (!rc)
        rc = put_at(fd, head, SEQUENCE, 0);
    if (!rc)
        rc = put_at(fd, head + SEQUENCE + 4, DRAY__SPANS_HEAD - SEQUENCE - 4, SEQUENCE + 4);
    return rc ? rc : put_at(fd, &even, sizeof even, SEQUENCE);
}

int dray__host_files_put(const char *folder, const char *name, const void *bytes, size_t size,
                         int64_t at, dray_error *error)
{
    char path[PATH_MAX];
    dray__path(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    bool head = at == 0 && size == DRAY__SPANS_HEAD && dray__ends_with(name, ".spans");
    int rc = fd < 0 || (head ? put_head(fd, bytes) : put_at(fd, bytes, size, at))
                 ? dray__fail_errno(error, errno, "%s", path)
                 : DRAY_OK;
    if (fd >= 0)
        close(fd);
    return rc;
}
