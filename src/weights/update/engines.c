/* The router's view: the engines, their versions, and whether they can take requests.
 *
 * A restarted coordinator knows no engines until they have registered again. For some time, engines
 * that were serving stay in the list, because they continue to serve. */
#include "base/clock.h"
#include "base/error.h"
#include "base/waker.h"
#include "weights/internal.h"
#include "weights/messages.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>

/* The time that engines have to register again; the interval and the duration of attempts to reach
 * the coordinator. */
#define GRACE_NS DRAY__LEASE_DEFAULT
#define LOOK_EVERY_NS (200 * DRAY__MILLISECOND)
#define LOOK_NS (100 * DRAY__MILLISECOND)

struct dray_engines {
    dray_context *context;
    dray__channel *channel; /* NULL while there is no coordinator */
    bool asked;             /* a request to the coordinator has no answer yet */
    uint64_t sequence;
    dray__waker waker;        /* of the channel, and a time */
    int64_t away_ns, look_ns; /* when it went away; the next attempt to reach it */
    int64_t grace_ns;         /* until when missing engines stay in the list; 0 when they do not */
    bool held;                /* the list has such engines */
    dray_engine_info *items;
    uint32_t count;
};

static void free_items(dray_engine_info *items, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        free((char *)items[i].model);
        free((char *)items[i].group);
    }
    free(items);
}

static int open_channel(dray_engines *e, int64_t deadline_ns, dray_error *error)
{
    int rc = dray__channel_open_until(e->context, deadline_ns, &e->channel, error);
    if (rc == DRAY_OK)
        rc = dray__waker_add(&e->waker, dray__channel_fd(e->channel), error);
    return rc;
}

int dray_engines_open(dray_context *context, dray_engines **out, dray_error *error)
{
    if (!context || !out)
        return dray__fail(error, DRAY_EINVALID, "context and out must be given");
    dray_engines *e = calloc(1, sizeof *e);
    if (!e)
        return dray__nomem(error);
    e->context = context;
    e->waker = DRAY__WAKER_CLOSED;
    int rc = dray__waker_open(&e->waker, true, error);
    if (rc == DRAY_OK)
        rc = open_channel(e, dray__context_deadline(context, DRAY_WAIT_DEFAULT), error);
    if (rc)
        dray_engines_close(e);
    else
        *out = e;
    return rc;
}

void dray_engines_close(dray_engines *e)
{
    if (!e)
        return;
    dray__channel_close(e->channel);
    dray__waker_close(&e->waker);
    free_items(e->items, e->count);
    free(e);
}

static bool copy_engine(const dray__engine_told *told, dray_engine_info *out)
{
    *out = (dray_engine_info){.size = sizeof *out,
                              .model = strdup(told->model),
                              .group = strdup(told->group),
                              .version = told->version,
                              .incarnation = told->incarnation,
                              .epoch = told->epoch,
                              .ranks = told->ranks,
                              .world = told->world,
                              .state = told->state,
                              .serving = told->serving,
                              .leaving = told->leaving};
    return out->model && out->group;
}

static const dray_engine_info *find(const dray_engine_info *items, uint32_t count,
                                    const dray_engine_info *like)
{
    for (uint32_t i = 0; i < count; i++)
        if (strcmp(items[i].model, like->model) == 0 && strcmp(items[i].group, like->group) == 0)
            return &items[i];
    return NULL;
}

static void tell(const dray_engine_info *before, const dray_engine_info *now, dray_engines_fn fn,
                 void *user)
{
    bool served = before && before->serving, serves = now && now->serving;
    if (served && !serves)
        fn(user, DRAY_ENGINE_LEFT, now ? now : before);
    else if (!served && serves)
        fn(user, DRAY_ENGINE_JOINED, now);
    else if (serves && (before->version != now->version || before->incarnation != now->incarnation))
        fn(user, DRAY_ENGINE_UPDATED, now);
    if (now && now->state == DRAY_GROUP_TORN && (!before || before->state != DRAY_GROUP_TORN))
        fn(user, DRAY_ENGINE_TORN, now);
}

/* Keeps engines in the list that were serving and have not registered again yet. */
static bool hold(dray_engines *e, dray_engine_info *items, uint32_t *count)
{
    e->held = false;
    for (uint32_t i = 0; i < e->count && dray__now() < e->grace_ns; i++) {
        dray_engine_info kept = e->items[i];
        dray_engine_info *now = (dray_engine_info *)find(items, *count, &kept);
        if (!kept.serving || (now && (now->serving || now->leaving || now->ranks == now->world)))
            continue;
        char *model = strdup(kept.model), *group = strdup(kept.group);
        if (!model || !group) {
            free(model);
            free(group);
            return false;
        }
        kept.model = model;
        kept.group = group;
        if (now) {
            free((char *)now->model);
            free((char *)now->group);
        } else {
            now = &items[(*count)++];
        }
        *now = kept;
        e->held = true;
    }
    if (!e->held && e->grace_ns && e->count)
        e->grace_ns = 0; /* all are back */
    dray__waker_at(&e->waker, e->held ? e->grace_ns : 0);
    return true;
}

/* Takes over the coordinator's list, and reports the changes. */
static int take(dray_engines *e, dray__reader *r, dray_engines_fn fn, void *user, dray_error *error)
{
    dray__engines_told told;
    dray__arena texts = {0};
    dray__get_fields(r, &texts, &dray__engines_told_fields, &told);
    int rc = dray__reader_finish(r, "ENGINES_WATCH", error);
    uint32_t count = rc ? 0 : told.count;
    dray_engine_info *items = calloc((size_t)count + e->count + 1, sizeof *items);
    bool kept = items != NULL;
    for (uint32_t i = 0; i < count && kept; i++)
        kept = copy_engine(&told.items[i], &items[i]);
    dray__arena_free(&texts);
    if (rc == DRAY_OK && !kept)
        rc = dray__nomem(error);
    if (rc == DRAY_OK && !hold(e, items, &count))
        rc = dray__nomem(error);
    if (rc) {
        if (items)
            free_items(items, count);
        return rc;
    }
    for (uint32_t i = 0; fn && i < e->count; i++)
        if (!find(items, count, &e->items[i]))
            tell(&e->items[i], NULL, fn, user);
    for (uint32_t i = 0; fn && i < count; i++)
        tell(find(e->items, e->count, &items[i]), &items[i], fn, user);
    free_items(e->items, e->count);
    e->items = items;
    e->count = count;
    e->sequence = told.sequence;
    return DRAY_OK;
}

static int ask(dray_engines *e, dray_error *error)
{
    /* after this time it answers in any case, and is asked again */
    const dray__watching message = {e->sequence, 3600 * DRAY__SECOND};
    int rc = dray__ask_start(e->channel, DRAY__MSG_ENGINES_WATCH, &dray__watching_fields, &message,
                             error);
    e->asked = rc == DRAY_OK;
    return rc;
}

static void drop_channel(dray_engines *e)
{
    dray__channel_close(e->channel); /* this removes it from the waker */
    e->channel = NULL;
    e->asked = false;
    e->sequence = 0;
}

/* Returns DRAY_EAGAIN while the coordinator is not back. */
static int come_back(dray_engines *e, dray_error *error)
{
    dray_error why;
    int64_t now = dray__now();
    if (e->channel)
        return DRAY_OK;
    if (now < e->look_ns)
        return DRAY_EAGAIN;
    int rc = open_channel(e, dray__deadline(LOOK_NS), &why);
    if (rc == DRAY_OK) {
        if (e->away_ns)
            e->grace_ns = dray__deadline(GRACE_NS);
        e->away_ns = 0;
        dray__waker_at(&e->waker, 0);
        return DRAY_OK;
    }
    drop_channel(e);
    e->away_ns = e->away_ns ? e->away_ns : now;
    e->look_ns = dray__deadline(LOOK_EVERY_NS);
    dray__waker_at(&e->waker, e->look_ns);
    int64_t grace = dray__context_deadline(e->context, DRAY_WAIT_DEFAULT) - dray__now();
    bool missing = rc == DRAY_ECLOSED || rc == DRAY_ETIMEDOUT || rc == DRAY_EBUSY;
    if (missing && now - e->away_ns < grace)
        return DRAY_EAGAIN;
    if (error)
        *error = why;
    return rc;
}

/* Called when the coordinator does not answer. Returns DRAY_EAGAIN when another one may come. */
static int went_away(dray_engines *e)
{
    if (!dray__channel_broken(e->channel) || dray__channel_ended(e->channel) ||
        !dray__context_takes_back(e->context))
        return DRAY_ECLOSED;
    drop_channel(e);
    e->away_ns = dray__now();
    e->look_ns = 0;
    dray__waker_at(&e->waker, 1);
    return DRAY_EAGAIN;
}

int dray_engines_poll(dray_engines *e, dray_engines_fn fn, void *user, dray_error *error)
{
    if (!e)
        return dray__fail(error, DRAY_EINVALID, "engines must be given");
    if (e->held && dray__now() >= e->grace_ns) {
        drop_channel(e); /* engines that are not back have ended: takes the list as it is */
        e->held = false; /* the answer to this request comes at a later call */
    }
    int rc = come_back(e, error);
    if (rc == DRAY_OK && !e->asked)
        rc = ask(e, error);
    dray__reply reply;
    if (rc == DRAY_OK)
        rc = dray__call_poll(e->channel, &reply, error);
    if (rc == DRAY_OK) {
        e->asked = false;
        rc = take(e, &reply.payload, fn, user, error);
        if (rc == DRAY_OK)
            rc = ask(e, error);
    }
    return rc == DRAY_ECLOSED && e->channel ? went_away(e) : rc;
}

int dray_engines_fd(dray_engines *e)
{
    return e ? e->waker.fd : -1;
}

int dray_engines_wait(dray_engines *e, int64_t timeout_ns, dray_engines_fn fn, void *user,
                      dray_error *error)
{
    if (!e || (timeout_ns < 0 && timeout_ns != DRAY_WAIT_DEFAULT))
        return dray__fail(error, DRAY_EINVALID, "engines must be given, timeout not negative");
    int64_t deadline = dray__context_deadline(e->context, timeout_ns);
    for (;;) {
        int rc = dray_engines_poll(e, fn, user, error);
        if (rc != DRAY_EAGAIN)
            return rc;
        struct pollfd p = {.fd = dray_engines_fd(e), .events = POLLIN};
        if (dray__wait(&p, 1, deadline) == 0)
            return dray__fail(error, DRAY_ETIMEDOUT, "no engine came, changed or left");
    }
}

uint32_t dray_engines_count(const dray_engines *e)
{
    return e ? e->count : 0;
}

int dray_engines_entry(const dray_engines *e, uint32_t index, dray_engine_info *out,
                       dray_error *error)
{
    if (!e || index >= e->count || !out)
        return dray__fail(error, DRAY_EINVALID, "no engine %u", index);
    int rc = DRAY__OPTIONS_CHECK(dray_engine_info, leaving, out, error);
    if (rc == DRAY_OK)
        dray__options_fill(out, &e->items[index], sizeof e->items[index]);
    return rc;
}
