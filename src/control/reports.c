/* The service of messages 0x0100..0x01FF: a ring of the newest reports, and requests that wait for
 * the next one. */
#include "control/reports.h"

#include "base/arena.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/json.h"
#include "control/coordinator.h"
#include "control/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    KIND_MAX = DRAY__REPORT_KIND_MAX,
    REPORT_MAX = 64 << 10, /* bytes of a report as posted */
    RING_BYTES = 8 << 20,
    BATCH_BYTES = 1 << 20 /* of one answer */
};

typedef struct report {
    size_t size; /* of the text */
    char kind[KIND_MAX + 1];
    char text[];
} report;

typedef struct report_watcher {
    struct report_watcher *next;
    dray__request *request;
    uint64_t cursor;         /* the number wanted next */
    char kind[KIND_MAX + 1]; /* "" for all */
} report_watcher;

/* Reports are numbered consecutively, so a report's place in the ring follows from its number. A
 * watcher reads only the reports that are new to it. */
typedef struct reports {
    report **ring;
    uint32_t room;         /* a power of two */
    uint64_t oldest, next; /* numbers from 1: the first one that is kept, and the next one given */
    size_t bytes;
    report_watcher *watchers;
} reports;

static report **at(const reports *self, uint64_t number)
{
    return &self->ring[number & (self->room - 1)];
}

/* ---- posting --------------------------------------------------------------------------------- */

static void drop_oldest(reports *self)
{
    report *old = *at(self, self->oldest++);
    self->bytes -= sizeof *old + old->size;
    free(old);
}

static bool make_room(reports *self)
{
    if (self->next - self->oldest < self->room)
        return true;
    reports grown = *self;
    grown.room = self->room ? 2 * self->room : 64;
    grown.ring = calloc(grown.room, sizeof(*grown.ring));
    for (uint64_t n = self->oldest; grown.ring && n < self->next; n++)
        *at(&grown, n) = *at(self, n);
    if (!grown.ring)
        return false;
    free(self->ring);
    *self = grown;
    return true;
}

static int64_t wall_clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * DRAY__SECOND + t.tv_nsec;
}

static char *complete(json_t *object, const char *kind, const dray__session *session)
{
    json_int_t member = (json_int_t)dray__session_member(session);
    if (json_object_set_new(object, "kind", json_string(kind)) ||
        json_object_set_new(object, "member", json_integer(member)) ||
        json_object_set_new(object, "name", json_string(dray__session_name(session))) ||
        json_object_set_new(object, "time_ns", json_integer(wall_clock())))
        return NULL;
    return dray__json_text(object, JSON_COMPACT);
}

static int append(reports *self, json_t *object, const char *kind, const dray__session *session,
                  dray_error *error)
{
    char *text = complete(object, kind, session);
    size_t size = text ? strlen(text) : 0;
    report *new = text &&make_room(self) ? malloc(sizeof *new + size + 1) : NULL;
    if (!new) {
        free(text);
        return dray__nomem(error);
    }
    new->size = size;
    snprintf(new->kind, sizeof new->kind, "%s", kind);
    memcpy(new->text, text, size + 1);
    free(text);
    *at(self, self->next++) = new;
    self->bytes += sizeof *new + size;
    while (self->bytes > RING_BYTES && self->oldest + 1 < self->next)
        drop_oldest(self);
    return DRAY_OK;
}

/* ---- watching -------------------------------------------------------------------------------- */

static bool wanted(const report_watcher *w, const report *r)
{
    return !w->kind[0] || strcmp(w->kind, r->kind) == 0;
}

/* Answers when there are reports for the watcher, or when some were lost. With `must`, it always
 * answers, if need be with only the cursor, which is advanced past reports that do not match. */
static bool answer(reports *self, report_watcher *w, bool must)
{
    uint64_t lost = w->cursor < self->oldest ? self->oldest - w->cursor : 0;
    dray__reports_told said = {.cursor = self->next, .lost = lost};
    dray__report_told *items = NULL;
    uint64_t room = 0, first = w->cursor + lost;
    size_t bytes = 0;
    bool nomem = false;
    for (uint64_t n = first; !nomem && n < self->next && said.cursor == self->next; n++) {
        const report *r = *at(self, n);
        if (!wanted(w, r))
            continue;
        if (said.count && bytes + r->size > BATCH_BYTES)
            said.cursor = n;
        else if (!dray__append(&items, sizeof *items, said.count, &room))
            nomem = true;
        else
            items[said.count++] = (dray__report_told){r->text, r->size};
        bytes += r->size;
    }
    said.items = items;
    w->cursor = said.cursor;
    bool now = said.count || lost || must || nomem;
    if (now) {
        dray__writer payload = {.failed = nomem};
        dray__put_fields(&payload, &dray__reports_told_fields, &said);
        dray__request_reply(w->request, &payload, NULL, 0);
        dray__writer_free(&payload);
    }
    free(items);
    return now;
}

static void serve_watchers(reports *self)
{
    for (report_watcher **link = &self->watchers; *link;) {
        report_watcher *w = *link;
        if (answer(self, w, false)) {
            *link = w->next;
            free(w);
        } else {
            link = &w->next;
        }
    }
}

int dray__session_report(const dray__session *session, const char *kind, const char *text,
                         size_t size, dray_error *error)
{
    reports *self = session ? session->coordinator->reports : NULL;
    json_t *object = NULL;
    if (!self)
        return dray__fail(error, DRAY_EPROTO, "REPORT_POST: HELLO expected first");
    if (!kind[0] || size > REPORT_MAX)
        return dray__fail(error, DRAY_EINVALID,
                          "report '%s' of %zu bytes: a kind and at most %d bytes expected", kind,
                          size, REPORT_MAX);
    int status = dray__json_parse(text, size, "report", &object, error);
    if (!status && !json_is_object(object))
        status = dray__fail(error, DRAY_EFORMAT, "report '%s': a JSON object expected", kind);
    if (!status)
        status = append(self, object, kind, session, error);
    json_decref(object);
    if (!status)
        serve_watchers(self);
    return status;
}

static int post(void *self, dray__request *request, const void *message, dray_error *error)
{
    (void)self;
    const dray__posting *m = message;
    int status =
        dray__session_report(dray__request_session(request), m->kind, m->json, m->size, error);
    if (!status)
        dray__request_reply(request, NULL, NULL, 0);
    return status;
}

static report_watcher *new_watcher(reports *self, dray__request *request, const char *kind,
                                   uint64_t cursor)
{
    report_watcher *w = calloc(1, sizeof *w);
    if (!w)
        return NULL;
    w->request = request;
    snprintf(w->kind, sizeof w->kind, "%s", kind);
    w->cursor = cursor == DRAY__REPORTS_NOW ? self->next : (cursor ? cursor : 1);
    dray__request_set_data(request, w);
    return w;
}

static int watch(void *user, dray__request *request, const void *message, dray_error *error)
{
    reports *self = user;
    const dray__report_wish *m = message;
    report_watcher *w = new_watcher(self, request, m->kind, m->cursor);
    if (!w)
        return dray__nomem(error);
    if (answer(self, w, false)) {
        free(w);
        return DRAY_OK;
    }
    if (dray__request_expire_at(request, dray__deadline(m->timeout_ns)) < 0) {
        free(w);
        return dray__nomem(error);
    }
    w->next = self->watchers;
    self->watchers = w;
    return DRAY_OK;
}

static void expired(void *user, dray__request *request, int channel_gone)
{
    (void)channel_gone; /* an answer to a closed channel is dropped */
    reports *self = user;
    report_watcher *w = dray__request_data(request), **link = &self->watchers;
    while (*link != w)
        link = &(*link)->next;
    *link = w->next;
    answer(self, w, true);
    free(w);
}

/* ---- the service ----------------------------------------------------------------------------- */

static const dray__handler handlers[] = {
    {DRAY__MSG_REPORT_POST, &dray__posting_fields, post},
    {DRAY__MSG_REPORT_WATCH, &dray__report_wish_fields, watch},
    {0},
};

static void add_status(void *user, json_t *object)
{
    const reports *self = user;
    uint32_t watchers = 0;
    for (const report_watcher *w = self->watchers; w; w = w->next)
        watchers++;
    json_object_set_new(object, "reports",
                        json_pack("{s:I, s:I, s:I}", "posted", (json_int_t)(self->next - 1),
                                  "kept_bytes", (json_int_t)self->bytes, "watchers",
                                  (json_int_t)watchers));
}

static void free_reports(void *user)
{
    reports *self = user;
    while (self->oldest < self->next)
        drop_oldest(self);
    free(self->ring);
    free(self);
}

int dray__reports_add(dray__coordinator *coordinator, dray_error *error)
{
    static const dray__service service = {.name = "reports",
                                          .first = 0x0100,
                                          .last = 0x01FF,
                                          .handlers = handlers,
                                          .expired = expired,
                                          .status = add_status,
                                          .free = free_reports};
    reports *self = calloc(1, sizeof *self);
    if (!self)
        return dray__nomem(error);
    self->oldest = self->next = 1;
    int status = dray__coordinator_add(coordinator, &service, self, error);
    coordinator->reports = status ? NULL : self;
    if (status)
        free(self);
    return status;
}

/* ---- the watcher's side ---------------------------------------------------------------------- */

static int read_batch(const dray__reports_told *told, json_t *array, dray_error *error)
{
    json_int_t lost = (json_int_t)told->lost;
    if (lost)
        json_array_append_new(array, json_pack("{s:s, s:I}", "kind", "lost", "lost", lost));
    for (uint32_t i = 0; i < told->count; i++) {
        json_t *object;
        int status =
            dray__json_parse(told->items[i].text, told->items[i].size, "report", &object, error);
        if (status)
            return status;
        if (json_array_append_new(array, object) < 0)
            return dray__nomem(error);
    }
    return DRAY_OK;
}

int dray__reports_watch(dray__channel *channel, const char *kind, uint64_t *cursor,
                        int64_t deadline_ns, json_t **out, dray_error *error)
{
    int64_t left = deadline_ns - dray__now();
    const dray__report_wish wish = {kind, *cursor, left > 0 ? left : 0};
    dray__reports_told told;
    dray__arena items = {0};
    int status = dray__ask(channel, DRAY__MSG_REPORT_WATCH, &dray__report_wish_fields, &wish,
                           dray__answer_deadline(deadline_ns), &items, &dray__reports_told_fields,
                           &told, error);
    json_t *array = status ? NULL : json_array();
    if (!status)
        status = array ? read_batch(&told, array, error) : dray__nomem(error);
    dray__arena_free(&items);
    if (status) {
        json_decref(array);
        return status;
    }
    *cursor = told.cursor;
    if (json_array_size(array) == 0) {
        json_decref(array);
        return dray__fail(error, DRAY_ETIMEDOUT, "no report came before the deadline");
    }
    *out = array;
    return DRAY_OK;
}
