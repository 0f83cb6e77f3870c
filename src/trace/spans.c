#include "trace/spans.h"

#include "base/array.h"
#include "base/error.h"
#include "base/hash.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* A greater number of lost spans is damage; sums of these must fit JSON's numbers. */
#define MOST_LOST (UINT64_C(1) << 48)

typedef struct names {
    char **items;
    uint32_t count;
    uint64_t capacity;
} names;

struct dray__spans {
    void *data;
    size_t size;
    dray__reader file, chunk;
    uint32_t left; /* spans of the chunk that are not read yet */
    uint32_t pid;
    char *label;
    names names, threads;
    uint64_t lost;
    size_t unread;
    int64_t clock_ns, clock_error_ns; /* of another host's process */
};

const char *dray__span_kind_name(dray_span_kind kind)
{
    static const char *const texts[] = {"busy", "wait", "transfer"};
    return (size_t)kind < sizeof texts / sizeof *texts ? texts[kind] : "?";
}

static bool add_name(names *list, char *name)
{
    return DRAY__PUSH(list->items, list->count, list->capacity, name);
}

static void free_names(names *list)
{
    for (uint32_t i = 0; i < list->count; i++)
        free(list->items[i]);
    free(list->items);
}

static int map_file(dray__spans *spans, const char *path, dray_error *error)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT)
        return dray__fail(error, DRAY_ENOENT, "%s: no such file", path);
    if (fd < 0)
        return dray__fail_errno(error, errno, "%s", path);
    struct stat st;
    int status = DRAY_OK;
    if (fstat(fd, &st) < 0) {
        status = dray__fail_errno(error, errno, "%s", path);
    } else if (!S_ISREG(st.st_mode) || st.st_size <= 0) {
        status = dray__fail(error, DRAY_EFORMAT, "%s: no file of spans", path);
    } else {
        spans->data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (spans->data == MAP_FAILED) {
            spans->data = NULL;
            status = dray__fail_errno(error, errno, "%s", path);
        }
        spans->size = (size_t)st.st_size;
    }
    close(fd);
    return status;
}

static int read_header(dray__spans *spans, const char *path, dray_error *error)
{
    dray__reader *r = &spans->file;
    *r = dray__reader_of(spans->data, spans->size);
    const void *magic = dray__get_bytes(r, 8);
    if (!magic || memcmp(magic, "DRAYSPAN", 8) != 0)
        return dray__fail(error, DRAY_EFORMAT, "%s: no file of spans", path);
    uint32_t version = dray__get_u32(r);
    if (!r->failed && version != DRAY__SPANS_VERSION)
        return dray__fail(error, DRAY_EVERSION, "%s: version %u expected, found %u", path,
                          DRAY__SPANS_VERSION, version);
    spans->pid = dray__get_u32(r);
    spans->label = dray__get_prose(r, DRAY__SPAN_NAME_MAX);
    if (r->failed || spans->size < DRAY__SPANS_HEAD)
        return dray__fail(error, DRAY_EFORMAT, "%s: truncated header", path);
    r->at = DRAY__SPANS_CLOCK_AT;
    spans->clock_ns = dray__get_i64(r);
    spans->clock_error_ns = dray__get_i64(r);
    r->at = DRAY__SPANS_HEAD;
    return DRAY_OK;
}

int dray__spans_open(const char *path, dray__spans **out, dray_error *error)
{
    dray__spans *spans = calloc(1, sizeof *spans);
    if (!spans)
        return dray__nomem(error);
    int status = map_file(spans, path, error);
    if (!status)
        status = read_header(spans, path, error);
    if (status)
        dray__spans_close(spans);
    else
        *out = spans;
    return status;
}

void dray__spans_close(dray__spans *spans)
{
    if (!spans)
        return;
    if (spans->data)
        munmap(spans->data, spans->size);
    free_names(&spans->names);
    free_names(&spans->threads);
    free(spans->label);
    free(spans);
}

static int read_names(dray__reader *r, names *list, dray_error *error)
{
    uint32_t count = dray__get_count(r, sizeof(uint32_t));
    for (uint32_t i = 0; i < count && !r->failed; i++) {
        char *name = dray__get_prose(r, DRAY__SPAN_NAME_MAX);
        if (name && !add_name(list, name)) {
            free(name);
            return dray__nomem(error);
        }
    }
    return DRAY_OK;
}

/* Reads the next chunk. Returns DRAY_EEND at the end of the file, or of its good part. */
static int next_chunk(dray__spans *spans, dray_error *error)
{
    dray__reader *r = &spans->file;
    size_t start = r->at;
    uint32_t magic = dray__get_u32(r), size = dray__get_u32(r);
    uint64_t sum = dray__get_u64(r);
    const uint8_t *body = dray__get_bytes(r, size);
    if (!body || magic != DRAY__SPANS_CHUNK || dray__hash(body, size) != sum) {
        spans->unread = spans->size - start;
        r->at = spans->size;
        return DRAY_EEND;
    }
    spans->chunk = dray__reader_of(body, size);
    int status = read_names(&spans->chunk, &spans->names, error);
    if (!status)
        status = read_names(&spans->chunk, &spans->threads, error);
    if (status)
        return status;
    uint64_t lost = dray__get_u64(&spans->chunk);
    spans->left = dray__get_count(&spans->chunk, DRAY__SPAN_BYTES);
    size_t rest = spans->chunk.size - spans->chunk.at;
    if (spans->chunk.failed || rest != (size_t)spans->left * DRAY__SPAN_BYTES || lost > MOST_LOST) {
        spans->left = 0;
        return dray__fail(error, DRAY_EFORMAT, "%s: malformed chunk at byte %zu", spans->label,
                          start);
    }
    spans->lost = lost;
    return DRAY_OK;
}

int dray__spans_next(dray__spans *spans, dray__span *out, dray_error *error)
{
    while (!spans->left) {
        int status = next_chunk(spans, error);
        if (status)
            return status;
    }
    dray__reader *r = &spans->chunk;
    uint8_t kind = dray__get_u8(r), cause = dray__get_u8(r);
    uint32_t name = dray__get_u32(r);
    out->thread = dray__get_u32(r);
    out->begin_ns = dray__get_i64(r);
    out->end_ns = dray__get_i64(r);
    out->step = dray__get_i64(r);
    uint32_t partition = dray__get_u32(r), task = dray__get_u32(r);
    out->rows = dray__get_i64(r);
    out->tokens = dray__get_i64(r);
    out->cpu_ns = dray__get_i64(r);
    out->queued_ns = dray__get_i64(r);
    spans->left--;
    if (partition > spans->names.count || task > spans->names.count || kind > DRAY_SPAN_TRANSFER ||
        cause >= DRAY__WAIT_CAUSES || name >= spans->names.count ||
        out->thread >= spans->threads.count || out->begin_ns < 0 || out->end_ns < out->begin_ns ||
        __builtin_add_overflow(out->begin_ns, spans->clock_ns, &out->begin_ns) ||
        __builtin_add_overflow(out->end_ns, spans->clock_ns, &out->end_ns) || out->begin_ns < 0)
        return dray__fail(error, DRAY_EFORMAT, "%s: malformed span", spans->label);
    out->kind = (dray_span_kind)kind;
    out->cause = (dray_wait_cause)cause;
    out->name = spans->names.items[name];
    out->partition = partition ? spans->names.items[partition - 1] : NULL;
    out->task = task ? spans->names.items[task - 1] : NULL;
    return DRAY_OK;
}

const char *dray__spans_label(const dray__spans *spans)
{
    return spans->label;
}

uint32_t dray__spans_pid(const dray__spans *spans)
{
    return spans->pid;
}

int64_t dray__spans_clock(const dray__spans *spans, int64_t *error_ns)
{
    *error_ns = spans->clock_error_ns;
    return spans->clock_ns;
}

uint32_t dray__spans_thread_count(const dray__spans *spans)
{
    return spans->threads.count;
}

const char *dray__spans_thread_name(const dray__spans *spans, uint32_t thread)
{
    return spans->threads.items[thread];
}

uint64_t dray__spans_lost(const dray__spans *spans)
{
    return spans->lost;
}

size_t dray__spans_unread(const dray__spans *spans)
{
    return spans->unread;
}
