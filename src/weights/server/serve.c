/* The answers of a process's data server about weights (serve.h).
 *
 * Readers on this host may have the answer in the publisher's staging arena instead (arena.h).
 * Readers that wait for a slot queue: the first one gets the next slot. */
#include "weights/server/serve.h"

#include "base/error.h"
#include "control/context.h"
#include "net/server.h"
#include "weights/server/arena.h"
#include "weights/server/exports.h"
#include "weights/server/nccl.h"
#include "weights/server/pull.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* The slot of an arena that has an answer. */
struct held {
    dray__staging *arena; /* NULL when there is none */
    dray_region *slot;
    uint32_t id;
    int64_t since_ns;
};

/* The state of one connection. */
struct state {
    dray__nccl_session *nccl; /* the session that sends over NCCL; NULL when there is none */
    dray__export *export;     /* the regions that its reader reads one-sidedly; NULL until there are
                               * any */
    struct held held[DRAY__ARENA_HELD];
    uint64_t place; /* in the line for a slot; 0 when not in it */
};

/* The state of the context. */
struct serving {
    dray__server *server;
    dray__packer *packer;
    dray__nccl_session *ending; /* of readers that have left */
    uint64_t last_place;
};

static struct state *state_of(const dray__data_reader *r)
{
    return r->state;
}

static void give_slot(struct held *held)
{
    if (held->arena)
        dray__arena_give(held->arena, held->slot);
    *held = (struct held){0};
}

static void end(void *user, dray__data_reader *r)
{
    struct serving *all = user;
    struct state *s = state_of(r);
    for (size_t i = 0; i < DRAY__ARENA_HELD; i++)
        give_slot(&s->held[i]);
    dray__nccl_session_leave(s->nccl, &all->ending);
    dray__nccl_sessions_free(&all->ending, false);
    dray__export_free(s->export);
}

/* Handles the messages that a reader has copied its answer out of the arena, or ends its one-sided
 * reads. */
static int told(void *user, dray__data_reader *r, const dray__data_request *told)
{
    struct state *s = state_of(r);
    (void)user;
    if (told->type == DRAY__DATA_KEYS_DONE && s->export) {
        dray__export_done(s->export);
        return 0;
    }
    for (size_t i = 0; i < DRAY__ARENA_HELD && told->type == DRAY__DATA_TAKEN; i++)
        if (s->held[i].arena && s->held[i].id == told->id) {
            give_slot(&s->held[i]);
            return 0;
        }
    return -EPROTO;
}

/* ---- slots of arenas ------------------------------------------------------------------------- */

static bool is_first_in_line(const dray__data_reader *r)
{
    const struct state *s = state_of(r);
    for (const dray__data_reader *o = dray__server_readers(r->server); o; o = o->next) {
        uint64_t place = state_of(o)->place;
        if (o != r && place && (!s->place || place < s->place) &&
            dray__pull_token(o) == dray__pull_token(r))
            return false;
    }
    return true;
}

/* Takes a slot for the answer to the connection's request. Returns -EAGAIN when it must
 * wait. *held is NULL when there is no such arena (any more); the answer is then an error. */
static int take_slot(struct serving *all, dray__data_reader *r, struct held **held, uint64_t *at)
{
    struct state *s = state_of(r);
    struct held *own = s->held;
    while (own < s->held + DRAY__ARENA_HELD && own->arena)
        own++;
    if (own == s->held + DRAY__ARENA_HELD)
        return -EPROTO;
    dray__local *local = dray__local_hold(dray__pull_token(r));
    dray__staging *arena = local ? dray__local_arena(local) : NULL;
    if (arena && is_first_in_line(r))
        own->slot = dray__arena_take(arena, at);
    bool waits = arena && !own->slot;
    if (waits && !s->place)
        s->place = ++all->last_place;
    if (!waits)
        s->place = 0;
    if (own->slot)
        *own = (struct held){arena, own->slot, r->request.id, dray__now()};
    dray__local_release(local);
    *held = own->slot ? own : NULL;
    r->waits = waits ? DRAY__WAITS_IN_LINE : r->waits;
    return waits ? -EAGAIN : 0;
}

static bool ready(void *user, const dray__data_reader *r)
{
    (void)user;
    if (r->taken && dray__nccl_session_answered(state_of(r)->nccl))
        return true;
    if (r->waits != DRAY__WAITS_IN_LINE)
        return false;
    dray__local *local = dray__local_hold(dray__pull_token(r));
    dray__staging *arena = local ? dray__local_arena(local) : NULL;
    bool has = !arena || (is_first_in_line(r) && dray__arena_has_free(arena));
    dray__local_release(local);
    return has;
}

static bool overdue(const dray__data_reader *r, int64_t now_ns)
{
    bool any = false;
    for (size_t i = 0; i < DRAY__ARENA_HELD; i++) {
        const struct held *held = &state_of(r)->held[i];
        any |= held->arena && now_ns - held->since_ns > DRAY__ARENA_RECLAIM_NS;
    }
    return any;
}

/* ---- requests -------------------------------------------------------------------------------- */

static int answer_rects(struct serving *all, dray__data_reader *r)
{
    struct held *held = NULL;
    uint64_t at = 0;
    int rc = dray__pull_options(&r->request, r->body) & DRAY__PULL_ARENA
                 ? take_slot(all, r, &held, &at)
                 : 0;
    if (rc)
        return rc;
    if (!held && !dray__server_buffer(r))
        return -EAGAIN; /* until another connection gives a buffer back */
    if (!dray__pull_answer(all->packer, &r->request, r->body, held ? held->slot : r->data, at,
                           &r->head, &r->data_bytes))
        return -ENOMEM;
    if (held && !r->data_bytes) /* the answer is an error */
        give_slot(held);
    if (held)
        r->data_bytes = 0;
    return 0;
}

/* Answers requests for keys of one-sided reads, or for the descriptors of regions. */
static int answer_access(struct serving *all, dray__data_reader *r)
{
    dray_error error;
    dray__writer data = {0};
    (void)all;
    bool keys = r->request.type == DRAY__DATA_KEYS;
    dray__reader in = dray__reader_of(r->body, r->request.body_bytes);
    uint64_t token = dray__get_u64(&in), attempt = dray__get_u64(&in);
    if (in.failed || (keys && !dray__stream_carrier(r->stream)->get))
        return -EPROTO;
    if (!dray__server_buffer(r))
        return -EAGAIN;
    int rc = keys ? dray__export_give(&state_of(r)->export, r->stream, token, attempt,
                                      DRAY__VALUES_MAX, &data, &error)
                  : dray__pull_regions(token, DRAY__VALUES_MAX, &data, &error);
    if (rc) {
        dray__answer_refuse(&r->head, r->request.id, &error);
    } else {
        memcpy(dray_region_base(r->data), data.data, data.size);
        r->data_bytes = data.size;
        dray__answer_put(&r->head, 0, r->request.id, 0, data.size);
    }
    dray__writer_free(&data);
    return 0;
}

/* Gives the request to the connection's session, which answers it in a thread of its own. */
static int answer_nccl(struct serving *all, dray__data_reader *r)
{
    dray_error error;
    struct state *s = state_of(r);
    if (dray__stream_encrypts(r->stream)) {
        dray__fail(&error, DRAY_EUNSUPPORTED, "NCCL does not encrypt");
        dray__answer_refuse(&r->head, r->request.id, &error);
        return 0;
    }
    if (!s->nccl)
        s->nccl = dray__nccl_session_new(dray__server_wake(all->server));
    if (!s->nccl)
        return -ENOMEM;
    int rc = dray__nccl_session_ask(s->nccl, &r->request, r->body);
    return rc ? rc : -EINPROGRESS;
}

static int later(void *user, dray__data_reader *r)
{
    (void)user;
    return dray__nccl_session_answer(state_of(r)->nccl, &r->head) ? 0 : -EAGAIN;
}

static int answer(void *user, dray__data_reader *r)
{
    static int (*const answers[])(struct serving *,
                                  dray__data_reader *) = {[DRAY__DATA_RECTS] = answer_rects,
                                                          [DRAY__DATA_KEYS] = answer_access,
                                                          [DRAY__DATA_REGIONS] = answer_access,
                                                          [DRAY__DATA_NCCL] = answer_nccl,
                                                          [DRAY__DATA_CELLS] = NULL};
    if (r->taken && r->request.type != DRAY__DATA_NCCL)
        return -EPROTO; /* its answer would overtake earlier ones */
    return answers[r->request.type] ? answers[r->request.type](user, r) : -ENOTSUP;
}

static bool enter(const dray__data_reader *r)
{
    return dray__export_enter(state_of(r)->export);
}

/* ---- the context ----------------------------------------------------------------------------- */

static void serving_free(void *serving)
{
    struct serving *s = serving;
    dray__server_free(s->server);
    dray__nccl_sessions_free(&s->ending, true);
    dray__packer_free(s->packer);
    free(s);
}

static int serving_new(const char *address, const dray__stream_keys *keys, struct serving **out,
                       dray_error *error)
{
    struct serving *s = calloc(1, sizeof *s);
    if (!s)
        return dray__nomem(error);
    const dray__data_service service = {.user = s,
                                        .state_bytes = sizeof(struct state),
                                        .answer = answer,
                                        .later = later,
                                        .told = told,
                                        .ready = ready,
                                        .enter = enter,
                                        .leave = dray__export_leave,
                                        .overdue = overdue,
                                        .end = end};
    s->packer = dray__packer_new();
    int rc = s->packer ? dray__server_new(address, keys, &service, &s->server, error)
                       : dray__nomem(error);
    if (rc)
        serving_free(s);
    else
        *out = s;
    return rc;
}

int dray__serve_start(dray_context *context, bool needed, const char **endpoint, dray_error *error)
{
    char address[DRAY__STREAM_ADDRESS];
    bool elsewhere;
    struct serving *s = NULL;
    int rc = dray__data_address(context, address, &elsewhere, error);
    if (rc)
        return rc;
    pthread_mutex_lock(&context->lock);
    if (!context->server && (elsewhere || needed)) {
        rc = serving_new(address, &context->keys, &s, error);
        if (rc == DRAY_OK) {
            context->server = s;
            context->server_free = serving_free;
        }
    }
    s = context->server;
    pthread_mutex_unlock(&context->lock);
    if (rc)
        return rc;
    *endpoint = s ? dray__server_endpoint(s->server) : NULL;
    return DRAY_OK;
}
