/* The router's view: which engines there are, what they hold, which may be sent requests. */
#include "base/clock.h"
#include "base/error.h"
#include "weights/internal.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>

struct dray_engines {
    dray_context *context;
    dray__channel *channel;
    bool asked; /* the coordinator was, and has not answered */
    uint64_t sequence;
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

int dray_engines_open(dray_context *context, dray_engines **out, dray_error *error)
{
    if (!context || !out)
        return dray__fail(error, DRAY_EINVALID, "context and out must be given");
    dray_engines *e = calloc(1, sizeof *e);
    if (!e)
        return dray__nomem(error);
    e->context = context;
    int rc = dray__channel_open(context, &e->channel, error);
    if (rc) {
        free(e);
        return rc;
    }
    *out = e;
    return DRAY_OK;
}

void dray_engines_close(dray_engines *e)
{
    if (!e)
        return;
    dray__channel_close(e->channel);
    free_items(e->items, e->count);
    free(e);
}

static void get_engine(dray__reader *r, dray_engine_info *out)
{
    *out = (dray_engine_info){.size = sizeof *out};
    out->model = dray__get_string(r, 256);
    out->group = dray__get_string(r, 256);
    out->version = dray__get_u64(r);
    out->incarnation = dray__get_u64(r);
    out->epoch = dray__get_u64(r);
    out->ranks = dray__get_u32(r);
    out->world = dray__get_u32(r);
    out->state = dray__get_u8(r);
    out->serving = dray__get_u8(r);
    out->leaving = dray__get_u8(r);
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

/* Takes over what the coordinator said, and tells what it changes. */
static int take(dray_engines *e, dray__reader *r, dray_engines_fn fn, void *user, dray_error *error)
{
    uint64_t sequence = dray__get_u64(r);
    uint32_t count = dray__get_count(r, 43);
    dray_engine_info *items = calloc((size_t)count + 1, sizeof *items);
    if (!items)
        return dray__nomem(error);
    for (uint32_t i = 0; i < count; i++)
        get_engine(r, &items[i]);
    int rc = dray__reader_finish(r, "ENGINES_WATCH", error);
    if (rc) {
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
    e->sequence = sequence;
    return DRAY_OK;
}

static int ask(dray_engines *e, dray_error *error)
{
    dray__writer w = {0};
    dray__put_u64(&w, e->sequence);
    dray__put_i64(&w, 3600 * DRAY__SECOND); /* then it answers all the same, and is asked again */
    int rc = dray__call_start(e->channel, DRAY__MSG_ENGINES_WATCH, &w, NULL, 0, error);
    dray__writer_free(&w);
    e->asked = rc == DRAY_OK;
    return rc;
}

int dray_engines_poll(dray_engines *e, dray_engines_fn fn, void *user, dray_error *error)
{
    if (!e)
        return dray__fail(error, DRAY_EINVALID, "engines must be given");
    int rc = e->asked ? DRAY_OK : ask(e, error);
    if (rc)
        return rc;
    dray__reply reply;
    rc = dray__call_poll(e->channel, &reply, error);
    if (rc == DRAY_EAGAIN)
        return rc;
    e->asked = false;
    if (rc == DRAY_OK)
        rc = take(e, &reply.payload, fn, user, error);
    if (rc == DRAY_OK)
        rc = ask(e, error);
    return rc;
}

int dray_engines_fd(dray_engines *e)
{
    return e ? dray__channel_fd(e->channel) : -1;
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
        if (dray__now() >= deadline)
            return dray__fail(error, DRAY_ETIMEDOUT, "no engine came, changed or left");
        struct pollfd p = {.fd = dray_engines_fd(e), .events = POLLIN};
        poll(&p, 1, dray__left_ms(deadline));
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
    int rc = dray__options_check(out, dray__end_of(dray_engine_info, leaving), "dray_engine_info",
                                 error);
    if (rc == DRAY_OK)
        dray__options_fill(out, &e->items[index], sizeof e->items[index]);
    return rc;
}
