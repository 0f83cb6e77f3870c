#include "run/report/live.h"

#include "base/error.h"
#include "base/json.h"
#include "base/thread.h"
#include "run/page/page.h"
#include "run/report/http.h"

#include <event2/event.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* RECENT is the number of rows that a new reader gets, more than are written between the page and
 * its first event. */
enum { RECENT = 256, LOOK_MS = 200 };

struct dray__live {
    char *folder;
    struct event_base *base;
    struct event *look;
    dray__http *http;
    dray__http_options options;
    dray__thread thread;
    atomic_bool stopping;
    pthread_mutex_t lock; /* protects the fields below */
    char *recent[RECENT]; /* ring buffer of events */
    uint64_t count, sent;
};

static char *page_of(const dray__live *live, size_t *size)
{
    char *text = NULL;
    const char *const folder = live->folder;
    FILE *out = open_memstream(&text, size);
    int rc = out ? dray__page_write(&folder, 1, true, out, NULL) : DRAY_ENOMEM;
    if (out && fclose(out) == 0 && !rc)
        return text;
    free(text);
    return NULL;
}

/* Returns the events from number `from` up to `to`, as far as the ring has them. The caller holds
 * the lock. */
static char *events_of(const dray__live *live, uint64_t from, uint64_t to, size_t *size)
{
    char *text = NULL;
    FILE *out = open_memstream(&text, size);
    if (live->count > RECENT && from < live->count - RECENT)
        from = live->count - RECENT;
    for (; out && from < to; from++)
        fputs(live->recent[from % RECENT], out);
    if (out && fclose(out) == 0)
        return text;
    free(text);
    return NULL;
}

static void answer(void *user, const char *path, dray__http_answer *out)
{
    dray__live *live = user;
    if (strcmp(path, "/") == 0) {
        out->type = "text/html; charset=utf-8";
        out->body = page_of(live, &out->size);
        out->status = out->body ? "200 OK" : "500 Internal Server Error";
    } else if (strcmp(path, "/events") == 0) {
        pthread_mutex_lock(&live->lock);
        out->type = "text/event-stream";
        out->status = "200 OK";
        out->stream = true;
        out->body = events_of(live, 0, live->sent, &out->size); /* later ones are pushed */
        pthread_mutex_unlock(&live->lock);
    }
}

static void on_look(evutil_socket_t fd, short what, void *user)
{
    (void)fd, (void)what;
    static const char end[] = "event: end\ndata: {}\n\n";
    dray__live *live = user;
    size_t size = 0;
    bool last = atomic_load(&live->stopping);
    pthread_mutex_lock(&live->lock);
    char *text = live->sent < live->count ? events_of(live, live->sent, live->count, &size) : NULL;
    live->sent = live->count;
    pthread_mutex_unlock(&live->lock);
    if (text && size)
        dray__http_push(live->http, text, size);
    free(text);
    if (!last)
        return;
    event_del(live->look); /* it must end only once */
    dray__http_push(live->http, end, sizeof(end) - 1);
    event_base_loopexit(live->base, &(struct timeval){.tv_usec = LOOK_MS * 1000});
}

static void *run(void *user)
{
    const dray__live *live = user;
    event_base_dispatch(live->base);
    return NULL;
}

static int open_live(dray__live *live, const char *folder, const char **url, dray_error *error)
{
    static const struct timeval often = {.tv_usec = LOOK_MS * 1000};
    live->folder = strdup(folder);
    live->base = event_base_new();
    live->look = live->base ? event_new(live->base, -1, EV_PERSIST, on_look, live) : NULL;
    if (!live->folder || !live->look || event_add(live->look, &often))
        return dray__nomem(error);
    live->options =
        (dray__http_options){.path = "/", .answer = answer, .user = live, .check_host = true};
    int rc = dray__http_new(live->base, "127.0.0.1:0", &live->options, &live->http, url, error);
    return rc ? rc : dray__thread_start(&live->thread, run, live, "the live page", error);
}

static void free_live(dray__live *live)
{
    dray__http_free(live->http);
    if (live->look)
        event_free(live->look);
    if (live->base)
        event_base_free(live->base);
    for (int i = 0; i < RECENT; i++)
        free(live->recent[i]);
    pthread_mutex_destroy(&live->lock);
    free(live->folder);
    free(live);
}

int dray__live_start(const char *folder, dray__live **out, const char **url, dray_error *error)
{
    dray__live *live = calloc(1, sizeof(*live));
    if (!live)
        return dray__nomem(error);
    pthread_mutex_init(&live->lock, NULL);
    int rc = open_live(live, folder, url, error);
    if (rc)
        free_live(live);
    else
        *out = live;
    return rc;
}

void dray__live_row(dray__live *live, const json_t *row)
{
    char *event = NULL, *text = live ? dray__json_text(row, JSON_COMPACT) : NULL;
    if (text && asprintf(&event, "event: row\ndata: %s\n\n", text) >= 0) {
        pthread_mutex_lock(&live->lock);
        char **place = &live->recent[live->count++ % RECENT];
        free(*place);
        *place = event;
        pthread_mutex_unlock(&live->lock);
    }
    free(text);
}

void dray__live_stop(dray__live *live)
{
    if (!live)
        return;
    atomic_store(&live->stopping, true);
    dray__thread_join(&live->thread);
    free_live(live);
}
