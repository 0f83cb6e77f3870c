/* The fake driver's streams: each a thread that does its work in order. The default stream and the
 * blocking ones of a context wait for each other, as the reference says. */
#include "fake.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct work {
    work *next;
    work_fn run;
    char argument[];
};

typedef struct stream {
    struct stream *next; /* of the context's */
    context *owner;
    bool blocking;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    work *first, *last;
    uint64_t submitted, completed;
    bool ending;
    atomic_uint users;
} stream;

static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;

static void put_down(stream *s)
{
    if (atomic_fetch_sub(&s->users, 1) != 1)
        return;
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->changed);
    free(s);
}

static void maybe_delay(unsigned *state)
{
    uint64_t most = fake_number("FAKE_CUDA_DELAY", 0);
    if (most)
        usleep((useconds_t)((unsigned)rand_r(state) % (most + 1)));
}

static void *run_stream(void *user)
{
    stream *s = user;
    unsigned state = (unsigned)(uintptr_t)s;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->first && !s->ending)
            pthread_cond_wait(&s->changed, &s->lock);
        work *w = s->first;
        if (!w)
            break;
        s->first = w->next;
        pthread_mutex_unlock(&s->lock);
        maybe_delay(&state);
        CUresult rc = w->run(s->owner, w->argument);
        if (rc)
            fake_break(s->owner, rc);
        free(w);
        pthread_mutex_lock(&s->lock);
        s->completed++;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    put_down(s);
    return NULL;
}

static stream *make(context *c, bool blocking)
{
    stream *s = calloc(1, sizeof *s);
    pthread_attr_t attributes;
    pthread_t thread;
    if (!s)
        return NULL;
    s->owner = c;
    s->blocking = blocking;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    atomic_store(&s->users, 2);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 1 << 20);
    if (pthread_create(&thread, &attributes, run_stream, s)) {
        free(s);
        s = NULL;
    }
    pthread_attr_destroy(&attributes);
    return s;
}

/* ---- handles --------------------------------------------------------------------------------- */

/* Under streams_lock. The default stream is made when it is first used. */
static stream *find(context *c, CUstream given)
{
    if ((uintptr_t)given <= 2) {
        if (!c->legacy)
            c->legacy = (CUstream)make(c, true);
        return (stream *)c->legacy;
    }
    for (int i = 0; i < fake_visible(); i++)
        for (stream *s = (stream *)fake_context(i)->streams; s; s = s->next)
            if ((CUstream)s == given)
                return s;
    return NULL;
}

static stream *pick_up(context *c, CUstream given)
{
    pthread_mutex_lock(&streams_lock);
    stream *s = find(c, given);
    if (s)
        atomic_fetch_add(&s->users, 1);
    pthread_mutex_unlock(&streams_lock);
    return s;
}

context *fake_stream_owner(context *c, CUstream given)
{
    pthread_mutex_lock(&streams_lock);
    const stream *s = find(c, given);
    context *owner = s ? s->owner : NULL;
    pthread_mutex_unlock(&streams_lock);
    return owner;
}

/* ---- work ------------------------------------------------------------------------------------ */

static bool push(stream *s, work_fn run, const void *argument, size_t size)
{
    work *w = malloc(sizeof *w + size);
    if (!w)
        return false;
    w->next = NULL;
    w->run = run;
    if (size)
        memcpy(w->argument, argument, size);
    pthread_mutex_lock(&s->lock);
    if (s->first)
        s->last->next = w;
    else
        s->first = w;
    s->last = w;
    s->submitted++;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return true;
}

static void wait_until(stream *s, uint64_t count)
{
    pthread_mutex_lock(&s->lock);
    while (s->completed < count)
        pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

typedef struct other {
    stream *s;
    uint64_t count;
} other;

static CUresult wait_for_other(context *c, void *argument)
{
    const other *o = argument;
    (void)c;
    wait_until(o->s, o->count);
    put_down(o->s);
    return CUDA_SUCCESS;
}

/* What is submitted to `s` next comes after all that was submitted to `before`. */
static void order_after(stream *s, stream *before)
{
    pthread_mutex_lock(&before->lock);
    other o = {before, before->submitted};
    bool idle = before->completed == before->submitted;
    pthread_mutex_unlock(&before->lock);
    if (idle)
        return;
    atomic_fetch_add(&before->users, 1);
    push(s, wait_for_other, &o, sizeof o);
}

CUresult fake_submit(context *c, CUstream given, work_fn run, const void *argument, size_t size)
{
    pthread_mutex_lock(&streams_lock);
    stream *s = find(c, given);
    if (!s) {
        pthread_mutex_unlock(&streams_lock);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    context *owner = s->owner;
    if ((CUstream)s == owner->legacy) {
        for (stream *b = (stream *)owner->streams; b; b = b->next)
            if (b->blocking)
                order_after(s, b);
    } else if (s->blocking && owner->legacy) {
        order_after(s, (stream *)owner->legacy);
    }
    bool pushed = push(s, run, argument, size);
    pthread_mutex_unlock(&streams_lock);
    return pushed ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult fake_stream_wait(context *c, CUstream given)
{
    stream *s = pick_up(c, given);
    if (!s)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&s->lock);
    uint64_t count = s->submitted;
    pthread_mutex_unlock(&s->lock);
    wait_until(s, count);
    put_down(s);
    return __atomic_load_n(&c->sticky, __ATOMIC_SEQ_CST);
}

/* The k-th of a context's streams, the default one first; NULL: there are no more. */
static stream *nth(context *c, int k)
{
    pthread_mutex_lock(&streams_lock);
    stream *s = (stream *)c->streams;
    if (c->legacy && k-- == 0)
        s = (stream *)c->legacy;
    else
        while (s && k-- > 0)
            s = s->next;
    if (s)
        atomic_fetch_add(&s->users, 1);
    pthread_mutex_unlock(&streams_lock);
    return s;
}

CUresult fake_drain(context *c)
{
    stream *s;
    for (int k = 0; (s = nth(c, k)); k++) {
        pthread_mutex_lock(&s->lock);
        uint64_t count = s->submitted;
        pthread_mutex_unlock(&s->lock);
        wait_until(s, count);
        put_down(s);
    }
    return __atomic_load_n(&c->sticky, __ATOMIC_SEQ_CST);
}

static void end(stream *s)
{
    pthread_mutex_lock(&s->lock);
    s->ending = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    put_down(s);
}

void fake_streams_end(context *c)
{
    fake_drain(c);
    pthread_mutex_lock(&streams_lock);
    for (stream *s = (stream *)c->streams, *next; s; s = next) {
        next = s->next;
        end(s);
    }
    if (c->legacy)
        end((stream *)c->legacy);
    c->streams = c->legacy = NULL;
    pthread_mutex_unlock(&streams_lock);
}

/* ---- the driver's functions ------------------------------------------------------------------ */

static CUresult create(CUstream *out, unsigned int flags)
{
    CURRENT(c);
    if (flags & ~1u)
        return CUDA_ERROR_INVALID_VALUE;
    stream *s = make(c, !(flags & CU_STREAM_NON_BLOCKING));
    if (!s)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&streams_lock);
    s->next = (stream *)c->streams;
    c->streams = (CUstream)s;
    pthread_mutex_unlock(&streams_lock);
    *out = (CUstream)s;
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *out, unsigned int flags)
{
    ENTER(cuStreamCreate);
    return create(out, flags);
}

CUresult cuStreamDestroy_v2(CUstream given)
{
    ENTER(cuStreamDestroy);
    stream *found = NULL;
    pthread_mutex_lock(&streams_lock);
    for (int i = 0; i < fake_visible() && !found; i++) {
        CUstream *head = &fake_context(i)->streams;
        for (stream **link = (stream **)(void *)head; *link; link = &(*link)->next)
            if ((CUstream)*link == given) {
                found = *link;
                *link = found->next;
                break;
            }
    }
    pthread_mutex_unlock(&streams_lock);
    if (!found)
        return CUDA_ERROR_INVALID_HANDLE;
    end(found); /* what was submitted is still done */
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream given)
{
    ENTER(cuStreamSynchronize);
    CURRENT(c);
    return fake_stream_wait(c, given);
}

CUresult cuStreamQuery(CUstream given)
{
    ENTER(cuStreamQuery);
    CURRENT(c);
    stream *s = pick_up(c, given);
    if (!s)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&s->lock);
    bool idle = s->submitted == s->completed;
    pthread_mutex_unlock(&s->lock);
    put_down(s);
    return idle ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

typedef struct host_call {
    CUhostFn function;
    void *user;
} host_call;

static CUresult call_host(context *c, void *argument)
{
    const host_call *h = argument;
    if (__atomic_load_n(&c->sticky, __ATOMIC_SEQ_CST))
        return CUDA_SUCCESS; /* after an error it is not called */
    fake_in_host_function = true;
    h->function(h->user);
    fake_in_host_function = false;
    return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream given, CUhostFn function, void *user)
{
    ENTER(cuLaunchHostFunc);
    CURRENT(c);
    host_call h = {function, user};
    return fake_submit(c, given, call_host, &h, sizeof h);
}

typedef struct callback {
    CUstreamCallback function;
    CUstream stream;
    void *user;
} callback;

static CUresult call_back(context *c, void *argument)
{
    const callback *b = argument; /* after an error, too, which it is told */
    fake_in_host_function = true;
    b->function(b->stream, __atomic_load_n(&c->sticky, __ATOMIC_SEQ_CST), b->user);
    fake_in_host_function = false;
    return CUDA_SUCCESS;
}

CUresult cuStreamAddCallback(CUstream given, CUstreamCallback function, void *user,
                             unsigned int flags)
{
    ENTER(cuStreamAddCallback);
    CURRENT(c);
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    callback b = {function, given, user};
    return fake_submit(c, given, call_back, &b, sizeof b);
}

typedef struct awaited {
    uintptr_t address;
    unsigned int value;
} awaited;

/* No more than the reference says: the stream looks until the word is there, cyclically. */
static CUresult await_word(context *c, void *argument)
{
    const awaited *a = argument;
    (void)c;
    while ((int)(__atomic_load_n((const unsigned int *)a->address, __ATOMIC_SEQ_CST) - a->value) <
           0)
        usleep(100);
    return CUDA_SUCCESS;
}

CUresult cuStreamWaitValue32_v2(CUstream given, CUdeviceptr address, unsigned int value,
                                unsigned int flags)
{
    ENTER(cuStreamWaitValue32);
    CURRENT(c);
    if (flags != CU_STREAM_WAIT_VALUE_GEQ || address % sizeof value)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = fake_may(c, address, sizeof value, true, false);
    awaited a = {address, value};
    return rc ? rc : fake_submit(c, given, await_word, &a, sizeof a);
}
