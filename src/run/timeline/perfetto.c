#include "base/array.h"
#include "base/error.h"
#include "base/io.h"
#include "base/wire.h"
#include "run/timeline/timeline.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- flows ----------------------------------------------------------------------------------- */

/* Rows of a partition, in the order of rollout's commits, because the first ones are trained
 * first. */
typedef struct rows {
    dray__tl_mark *items;
    uint32_t count;
    uint64_t room;
} rows;

static const dray__tl_span *span_of(const dray__timeline *t, const dray__tl_mark *mark)
{
    return &t->tracks[mark->track].spans[mark->span];
}

/* Finds the commits of the task that trains. */
static int find_trained(const dray__timeline *t, rows *out, dray_error *error)
{
    uint32_t actor = dray__tl_find(t, "actor");
    for (uint32_t i = 0; i < t->commits.count; i++) {
        const dray__tl_span *s = span_of(t, &t->commits.items[i]);
        if (s->task == actor && actor != DRAY__TL_NONE && s->rows > 0 &&
            !DRAY__PUSH(out->items, out->count, out->room, t->commits.items[i]))
            return dray__nomem(error);
    }
    return DRAY_OK;
}

/* The rows of a partition's commits that no step has trained yet. */
typedef struct open_rows {
    uint32_t commit; /* index among the commits */
    int64_t left;    /* rows of it that are left */
} open_rows;

int dray__tl_flows(const dray__timeline *timeline, dray__tl_flow **out, uint32_t *count,
                   dray_error *error)
{
    rows trained = {0};
    uint64_t room = 0;
    uint32_t rollout = dray__tl_find(timeline, "rollout");
    open_rows *at = calloc(timeline->text_count + (size_t)1, sizeof(*at)); /* by partition */
    *out = NULL;
    *count = 0;
    int rc = at ? find_trained(timeline, &trained, error) : dray__nomem(error);
    for (uint32_t i = 0; i < trained.count && !rc; i++) {
        const dray__tl_span *by = span_of(timeline, &trained.items[i]);
        int64_t want = by->rows;
        if (by->partition == DRAY__TL_NONE)
            continue;
        for (open_rows *o = &at[by->partition]; want > 0;) {
            while (!o->left && o->commit < timeline->commits.count) {
                const dray__tl_span *s = span_of(timeline, &timeline->commits.items[o->commit++]);
                if (s->partition == by->partition && s->task == rollout && s->rows > 0)
                    o->left = s->rows;
            }
            if (!o->left)
                break;
            const dray__tl_mark *from = &timeline->commits.items[o->commit - 1];
            int64_t take = want < o->left ? want : o->left;
            want -= take;
            o->left -= take;
            if (from->ns < trained.items[i].ns &&
                !DRAY__PUSH(*out, *count, room,
                            (dray__tl_flow){.from = *from, .to = trained.items[i]})) {
                rc = dray__nomem(error);
                break;
            }
        }
    }
    free(at);
    free(trained.items);
    return rc;
}

/* ---- protobuf: the encoding of Protocol Buffers (protobuf.dev/programming-guides/encoding) --- */

enum { VARINT = 0, FIXED64 = 1, LENGTH = 2 };

static void put_varint(dray__writer *w, uint64_t value)
{
    for (; value >= 0x80; value >>= 7)
        dray__put_u8(w, (uint8_t)(value | 0x80));
    dray__put_u8(w, (uint8_t)value);
}

static void put_number(dray__writer *w, uint32_t field, uint64_t value)
{
    put_varint(w, field << 3 | VARINT);
    put_varint(w, value);
}

static void put_fixed(dray__writer *w, uint32_t field, uint64_t value)
{
    put_varint(w, field << 3 | FIXED64);
    dray__put_u64(w, value);
}

static void put_part(dray__writer *w, uint32_t field, const void *data, size_t size)
{
    put_varint(w, field << 3 | LENGTH);
    put_varint(w, size);
    dray__put_bytes(w, data, size);
}

static void put_text(dray__writer *w, uint32_t field, const char *text)
{
    put_part(w, field, text, strlen(text));
}

static void put_message(dray__writer *w, uint32_t field, const dray__writer *message)
{
    put_part(w, field, message->data, message->size);
}

/* ---- packets: field numbers of trace_packet.proto, track_event.proto, track_descriptor.proto - */

enum {
    TRACE_PACKET = 1,
    PACKET_TIMESTAMP = 8,
    PACKET_SEQUENCE = 10,
    PACKET_EVENT = 11,
    PACKET_INTERNED = 12,
    PACKET_FLAGS = 13,
    PACKET_DESCRIPTOR = 60,
    FLAG_CLEARED = 1,
    FLAG_NEEDS_STATE = 2,
    DESCRIPTOR_UUID = 1,
    DESCRIPTOR_PROCESS = 3,
    DESCRIPTOR_THREAD = 4,
    DESCRIPTOR_PARENT = 5,
    EVENT_CATEGORY = 3,
    EVENT_ANNOTATION = 4,
    EVENT_TYPE = 9,
    EVENT_NAME = 10,
    EVENT_TRACK = 11,
    EVENT_FLOW = 47,
    EVENT_FLOW_END = 48,
    TYPE_BEGIN = 1,
    TYPE_END = 2,
    ANNOTATION_INT = 4,
    ANNOTATION_TEXT = 6,
    ANNOTATION_NAME = 10,
    INTERNED_CATEGORIES = 1,
    INTERNED_NAMES = 2,
    SEQUENCE = 1
};

typedef struct writer {
    const dray__timeline *t;
    FILE *out;
    dray__writer packet, part, whole;
} writer;

static uint64_t track_uuid(uint32_t track)
{
    return UINT64_C(1) << 32 | track;
}

static uint64_t process_uuid(uint32_t process)
{
    return UINT64_C(2) << 32 | process;
}

/* Writes packets one by one, because memory may not have room for a second copy of the trace. */
static bool end_packet(writer *w)
{
    put_number(&w->packet, PACKET_SEQUENCE, SEQUENCE);
    dray__writer_reset(&w->whole);
    put_message(&w->whole, TRACE_PACKET, &w->packet);
    bool good = !w->whole.failed && !w->packet.failed && !w->part.failed &&
                fwrite(w->whole.data, 1, w->whole.size, w->out) == w->whole.size;
    dray__writer_reset(&w->packet);
    return good;
}

static bool put_descriptor(writer *w, uint64_t uuid, uint64_t parent, uint32_t field)
{
    dray__writer descriptor = {0};
    put_number(&descriptor, DESCRIPTOR_UUID, uuid);
    if (parent)
        put_number(&descriptor, DESCRIPTOR_PARENT, parent);
    put_message(&descriptor, field, &w->part);
    put_message(&w->packet, PACKET_DESCRIPTOR, &descriptor);
    bool good = !descriptor.failed && end_packet(w);
    dray__writer_free(&descriptor);
    return good;
}

/* Writes the tracks. A process's index is used as its pid, because two processes of a run may have
 * had the same pid. */
static bool put_tracks(writer *w)
{
    bool good = true;
    for (uint32_t i = 0; i < w->t->process_count && good; i++) {
        dray__writer_reset(&w->part);
        put_number(&w->part, 1, i + 1);
        put_text(&w->part, 6, w->t->processes[i].label);
        good = put_descriptor(w, process_uuid(i), 0, DESCRIPTOR_PROCESS);
    }
    for (uint32_t i = 0; i < w->t->track_count && good; i++) {
        const dray__tl_track *track = &w->t->tracks[i];
        dray__writer_reset(&w->part);
        put_number(&w->part, 1, track->process + 1);
        put_number(&w->part, 2, (track->process + 1) * UINT64_C(1000) + track->thread + 1);
        put_text(&w->part, 5, track->name);
        good = put_descriptor(w, track_uuid(i), process_uuid(track->process), DESCRIPTOR_THREAD);
    }
    return good;
}

static void put_interned(dray__writer *to, uint32_t field, uint64_t number, const char *text)
{
    dray__writer one = {0};
    put_number(&one, 1, number);
    put_text(&one, 2, text);
    put_message(to, field, &one);
    to->failed = to->failed || one.failed;
    dray__writer_free(&one);
}

static bool put_names(writer *w)
{
    dray__writer_reset(&w->part);
    for (int kind = DRAY_SPAN_BUSY; kind <= DRAY_SPAN_TRANSFER; kind++)
        put_interned(&w->part, INTERNED_CATEGORIES, (uint64_t)kind + 1,
                     dray__span_kind_name((dray_span_kind)kind));
    for (uint32_t i = 0; i < w->t->text_count; i++)
        put_interned(&w->part, INTERNED_NAMES, i + UINT64_C(1), w->t->texts[i]);
    put_message(&w->packet, PACKET_INTERNED, &w->part);
    put_number(&w->packet, PACKET_FLAGS, FLAG_CLEARED);
    return end_packet(w);
}

static void put_annotation(dray__writer *event, const char *name, const char *text, int64_t value)
{
    dray__writer one = {0};
    put_text(&one, ANNOTATION_NAME, name);
    if (text)
        put_text(&one, ANNOTATION_TEXT, text);
    else
        put_number(&one, ANNOTATION_INT, (uint64_t)value);
    put_message(event, EVENT_ANNOTATION, &one);
    event->failed = event->failed || one.failed;
    dray__writer_free(&one);
}

static void put_arguments(const writer *w, dray__writer *event, const dray__tl_span *s)
{
    if (s->step >= 0)
        put_annotation(event, "step", NULL, s->step);
    if (s->rows >= 0)
        put_annotation(event, "rows", NULL, s->rows);
    if (s->tokens >= 0)
        put_annotation(event, "tokens", NULL, s->tokens);
    if (s->partition != DRAY__TL_NONE)
        put_annotation(event, "partition", dray__tl_text(w->t, s->partition), 0);
    if (s->task != DRAY__TL_NONE)
        put_annotation(event, "task", dray__tl_text(w->t, s->task), 0);
    if (s->kind == DRAY_SPAN_WAIT)
        put_annotation(event, "cause", dray__cause_name((dray_wait_cause)s->cause), 0);
}

static bool end_event(writer *w, uint32_t track, int64_t ns, uint32_t type)
{
    put_number(&w->part, EVENT_TYPE, type);
    put_number(&w->part, EVENT_TRACK, track_uuid(track));
    put_number(&w->packet, PACKET_TIMESTAMP, (uint64_t)(ns > 0 ? ns : 0));
    put_message(&w->packet, PACKET_EVENT, &w->part);
    put_number(&w->packet, PACKET_FLAGS, FLAG_NEEDS_STATE);
    return end_packet(w);
}

/* A span at one end of a flow. */
typedef struct flow_end {
    uint32_t track, span;
    uint64_t flow; /* from 1 */
    bool last;
} flow_end;

static int by_span(const void *a, const void *b)
{
    const flow_end *x = a, *y = b;
    if (x->track != y->track)
        return x->track < y->track ? -1 : 1;
    return (x->span > y->span) - (x->span < y->span);
}

static bool put_spans(writer *w, const flow_end *flow, const flow_end *end)
{
    bool good = true;
    for (uint32_t i = 0; i < w->t->track_count; i++)
        for (uint32_t k = 0; k < w->t->tracks[i].count && good; k++) {
            const dray__tl_span *s = &w->t->tracks[i].spans[k];
            dray__writer_reset(&w->part);
            put_number(&w->part, EVENT_CATEGORY, s->kind + UINT64_C(1));
            if (s->name != DRAY__TL_NONE)
                put_number(&w->part, EVENT_NAME, s->name + UINT64_C(1));
            put_arguments(w, &w->part, s);
            for (; flow < end && flow->track == i && flow->span == k; flow++)
                put_fixed(&w->part, flow->last ? EVENT_FLOW_END : EVENT_FLOW, flow->flow);
            good = end_event(w, i, s->begin_ns, TYPE_BEGIN);
            dray__writer_reset(&w->part);
            good = good && end_event(w, i, s->end_ns, TYPE_END);
        }
    return good;
}

static int write_all(writer *w, dray_error *error)
{
    dray__tl_flow *flows = NULL;
    uint32_t count = 0;
    int rc = dray__tl_flows(w->t, &flows, &count, error);
    flow_end *ends = rc ? NULL : calloc(2 * (size_t)count + 1, sizeof(*ends));
    if (!rc && !ends)
        rc = dray__nomem(error);
    for (uint32_t i = 0; i < count && !rc; i++) {
        ends[2 * i] = (flow_end){flows[i].from.track, flows[i].from.span, i + UINT64_C(1), false};
        ends[2 * i + 1] = (flow_end){flows[i].to.track, flows[i].to.span, i + UINT64_C(1), true};
    }
    if (!rc)
        qsort(ends, 2 * (size_t)count, sizeof(*ends), by_span);
    if (!rc && !(put_tracks(w) && put_names(w) && put_spans(w, ends, ends + 2 * (size_t)count)))
        rc = w->part.failed || w->packet.failed || w->whole.failed
                 ? dray__nomem(error)
                 : dray__fail_errno(error, errno, "the file of Perfetto's packets");
    free(ends);
    free(flows);
    return rc;
}

int dray__tl_write_perfetto(const dray__timeline *timeline, const char *path, dray_error *error)
{
    writer w = {.t = timeline, .out = dray__begin_file(path)};
    if (!w.out)
        return dray__fail_errno(error, errno, "%s", path);
    int rc = write_all(&w, error);
    int ended = dray__end_file(w.out, !rc, path, rc ? NULL : error);
    dray__writer_free(&w.packet);
    dray__writer_free(&w.part);
    dray__writer_free(&w.whole);
    return rc ? rc : ended;
}
