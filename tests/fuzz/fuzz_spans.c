/* Files of spans (trace/spans.h), and their merging. The first byte says what is put right: 0
 * nothing, 1 the head and the sums of all chunks whose size is that of what follows. What is read
 * is of the names that the file gives, and what they are merged into is JSON. */
#include "fuzz/fuzz.h"

#include "base/hash.h"
#include "base/json.h"
#include "trace/spans.h"

#include <string.h>

static void put_right(uint8_t *file, size_t size)
{
    dray__reader r = dray__reader_of(file, size);
    uint32_t version = htole32(DRAY__SPANS_VERSION), magic = htole32(DRAY__SPANS_CHUNK), length;
    if (size < DRAY__SPANS_HEAD)
        return;
    memcpy(file, "DRAYSPAN", 8);
    memcpy(file + 8, &version, 4);
    dray__get_bytes(&r, DRAY__SPANS_HEAD);
    while (!r.failed && r.size - r.at >= 16) {
        uint8_t *at = file + r.at;
        memcpy(&length, at + 4, 4);
        length = le32toh(length);
        if (length > r.size - r.at - 16) { /* then it is the last one */
            length = (uint32_t)(r.size - r.at - 16);
            memcpy(at + 4, &(uint32_t){htole32(length)}, 4);
        }
        memcpy(at, &magic, 4);
        uint64_t sum = htole64(dray__hash(at + 16, length));
        memcpy(at + 8, &sum, 8);
        dray__get_bytes(&r, 16 + (size_t)length);
    }
}

static void read_account(const char *path)
{
    dray__accounted is;
    if (!dray__account_read(path, 1000, &is))
        return;
    MUST(is.named_count <= DRAY__ACCOUNT_NAMES && strlen(is.label) < sizeof is.label);
    for (uint32_t i = 0; i < is.named_count; i++)
        MUST(strlen(is.named[i].name) < DRAY__ACCOUNT_NAME);
}

static void read_all(const char *path)
{
    dray__spans *spans;
    dray__span span;
    int rc;
    read_account(path);
    if (dray__spans_open(path, &spans, NULL))
        return;
    while ((rc = dray__spans_next(spans, &span, NULL)) == DRAY_OK) {
        MUST(strlen(span.name) <= DRAY__SPAN_NAME_MAX &&
             strcmp(dray__span_kind_name(span.kind), ""));
        MUST(span.thread < dray__spans_thread_count(spans) && span.end_ns >= span.begin_ns);
        MUST(dray__spans_thread_name(spans, span.thread));
    }
    MUST(rc == DRAY_EEND || rc == DRAY_EFORMAT);
    dray__spans_close(spans);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char in[192], out[192];
    json_t *merged;
    dray_error error;
    if (!size)
        return 0;
    uint8_t *copy = malloc(size);
    MUST(copy);
    memcpy(copy, data + 1, size - 1);
    if (data[0] & 1)
        put_right(copy, size - 1);
    snprintf(in, sizeof in, "%s", fuzz_path("a.spans"));
    snprintf(out, sizeof out, "%s", fuzz_path("merged.json"));
    fuzz_write(in, copy, size - 1);
    free(copy);
    read_all(in);
    if (dray_trace_merge(fuzz_folder(), out, NULL) == DRAY_OK) {
        if (dray__json_load(out, 1 << 28, &merged, &error)) {
            fprintf(stderr, "%s\n", error.message);
            abort();
        }
        json_decref(merged);
        unlink(out);
    }
    return 0;
}

static void put_span(dray__writer *w, uint32_t name, uint32_t partition, uint32_t task)
{
    dray__put_u8(w, partition ? DRAY_SPAN_WAIT : DRAY_SPAN_BUSY);
    dray__put_u8(w, partition ? DRAY_CAUSE_RANKS : DRAY_CAUSE_UNKNOWN);
    dray__put_u32(w, name);
    dray__put_u32(w, 0);
    dray__put_i64(w, 1000);
    dray__put_i64(w, 2000);
    dray__put_i64(w, 3);
    dray__put_u32(w, partition);
    dray__put_u32(w, task);
    dray__put_i64(w, 32);
    dray__put_i64(w, -1);
    dray__put_i64(w, 900);
    dray__put_i64(w, partition ? 5 : -1);
}

void fuzz_seeds(fuzz_put put, void *user)
{
    dray__writer file = {0}, body = {0};
    dray__put_bytes(&file, "DRAYSPAN", 8);
    dray__put_u32(&file, DRAY__SPANS_VERSION);
    dray__put_u32(&file, 4711);
    dray__put_string(&file, "engine 0");
    for (int i = 0; i < 1000; i++) /* an account that says something everywhere */
        dray__put_u64(&file, (uint64_t)i << 32 | 2);
    while (file.size < DRAY__SPANS_HEAD)
        dray__put_u8(&file, 0);
    for (int chunk = 0; chunk < 2; chunk++) {
        dray__writer_reset(&body);
        dray__put_u32(&body, 2);
        dray__put_string(&body, chunk ? "forward" : "wait \"\\\n");
        dray__put_string(&body, chunk ? "step-1" : "rollout");
        dray__put_u32(&body, chunk ? 0 : 1);
        if (!chunk)
            dray__put_string(&body, "main");
        dray__put_u64(&body, (uint64_t)chunk);
        dray__put_u32(&body, 2);
        put_span(&body, 0, 0, 0);
        put_span(&body, (uint32_t)chunk + 1, 2, 1);
        dray__put_u32(&file, DRAY__SPANS_CHUNK);
        dray__put_u32(&file, (uint32_t)body.size);
        dray__put_u64(&file, dray__hash(body.data, body.size));
        dray__put_bytes(&file, body.data, body.size);
    }
    fuzz_put_kind(put, user, 0, &file);
    fuzz_put_kind(put, user, 1, &file);
    dray__writer_free(&file);
    dray__writer_free(&body);
}
