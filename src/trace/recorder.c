/* Recording spans: a ring per thread, which that thread alone fills and dray_trace_flush alone
 * empties, so that writing one is a few stores. A full ring drops new spans, and counts them.
 *
 * The entered spans of a thread are a stack. One piece runs at a time: that of the span on top. It
 * ends, and goes into the ring, when a span is entered or left. */
#include <dray/trace.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "trace/account.h"
#include "trace/lengths.h"
#include "trace/spans.h"
#include "trace/tracing.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { RING = 1 << 15, THREAD_NAME = 16, DEPTH = 16, BRIEF_NS = 100000, NAMES_MOST = 1024 };

typedef struct record {
    const char *name;
    uint32_t partition, task; /* numbers of names of the file `opening`, from 1; 0 for none */
    uint32_t opening;
    int64_t begin_ns, end_ns, step, rows, tokens, cpu_ns, queued_ns;
    uint16_t kind, cause;
    bool brief; /* a wait that becomes no piece of its own when it is short */
} record;

/* The readings of a thread's clocks at one moment. */
typedef struct moment {
    int64_t ns, cpu_ns, queued_ns; /* queued_ns is -1 when it is not recorded */
} moment;

typedef struct ring {
    struct ring *next;
    _Atomic uint32_t head; /* the number of spans that the thread has written */
    _Atomic uint32_t tail; /* the number of spans that the flush has read */
    _Atomic uint64_t lost;
    atomic_bool over; /* the thread has ended */
    uint32_t number;  /* the thread's number in this file; UINT32_MAX while it has none */
    char name[THREAD_NAME];
    /* Only the thread uses these: the stack of spans that it has entered, and when the piece of
     * the top one began. */
    record entered[DEPTH];
    uint32_t depth;   /* May be more than DEPTH; spans deeper than that are not recorded. */
    uint32_t opening; /* the file that the stack belongs to */
    moment piece;
    bool
        unsettled; /* a brief wait is on top, and the piece before it has not ended yet: it began */
    moment before;
    /* Queued_ns is read from this depth on; 0 when it is not read. */
    uint32_t watched;
    int schedstat;                      /* the descriptor of the file with queued_ns */
    int64_t counted_ns, counted_cpu_ns; /* the moment up to which the account is complete */
    dray__account *account;             /* NULL when this thread does not have the account */
    record records[RING];
} ring;

atomic_bool dray__tracing;
/* The number of files opened so far. Spans that were entered before the last one are dropped. */
static _Atomic uint32_t openings;
static _Thread_local ring *mine;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards everything below */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t ended; /* its destructor runs when a thread with a ring ends */
static ring *rings;
static int file = -1;
static dray__map names;        /* -> number in the file */
static dray__writer new_names; /* the names that are not in the file yet */
static uint32_t new_count;
static uint32_t name_count, thread_count; /* in the file */
static uint64_t lost;                     /* the spans that rings lost that are freed now */
static dray__account *account;
/* The ring of the thread that opened the file; the account is of this thread's time. */
static ring *owner;

/* ---- recording ------------------------------------------------------------------------------- */

static void thread_ended(void *user)
{
    ring *r = user;
    mine = NULL;
    atomic_store_explicit(&r->over, true, memory_order_release);
}

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&lock);
}

/* The file belongs to the parent. A child that wants to record opens a file of its own. */
static void in_child(void)
{
    atomic_store(&dray__tracing, false);
    if (file >= 0)
        close(file);
    file = -1;
    while (rings) {
        ring *r = rings;
        rings = r->next;
        free(r);
    }
    mine = owner = NULL;
    dray__lengths_open(NULL);
    dray__account_unmap(account);
    account = NULL;
    pthread_setspecific(ended, NULL);
    pthread_mutex_unlock(&lock);
}

static void prepare(void)
{
    pthread_key_create(&ended, thread_ended);
    pthread_atfork(before_fork, after_fork, in_child);
}

static bool can_follow(const ring *r, const char *name)
{
    return atomic_load_explicit(&r->over, memory_order_acquire) && r != owner &&
           strcmp(r->name, name) == 0 && atomic_load(&r->head) - atomic_load(&r->tail) <= RING / 4;
}

static void watch_no_more(ring *r)
{
    if (r->watched)
        close(r->schedstat);
    r->watched = 0;
}

/* Takes the ring of an ended thread of the same name, if most of it is free. The caller holds
 * the lock. Threads that follow each other then share one line of the timeline, and the memory
 * of one ring. */
static ring *take_ring(const char *name)
{
    for (ring *r = rings; r; r = r->next)
        if (can_follow(r, name)) {
            r->depth = 0;
            r->unsettled = false;
            watch_no_more(r);
            r->account = NULL;
            atomic_store(&r->over, false);
            return r;
        }
    ring *r = calloc(1, sizeof *r); /* The kernel adds its pages as spans are written. */
    if (!r)
        return NULL;
    r->number = UINT32_MAX;
    memcpy(r->name, name, THREAD_NAME);
    r->next = rings;
    return rings = r;
}

static ring *make_ring(void)
{
    char name[THREAD_NAME] = "";
    prctl(PR_GET_NAME, name);
    pthread_mutex_lock(&lock);
    ring *r = take_ring(name);
    if (r)
        pthread_setspecific(ended, r);
    pthread_mutex_unlock(&lock);
    return mine = r;
}

static void add(const record *span)
{
    ring *r = mine ? mine : make_ring();
    if (!r)
        return;
    uint32_t head = atomic_load_explicit(&r->head, memory_order_relaxed);
    if (head - atomic_load_explicit(&r->tail, memory_order_acquire) == RING) {
        atomic_fetch_add_explicit(&r->lost, 1, memory_order_relaxed);
        return;
    }
    record *to = &r->records[head % RING];
    *to = *span;
    to->begin_ns = span->begin_ns < 0 ? 0 : span->begin_ns;
    to->end_ns = span->end_ns < to->begin_ns ? to->begin_ns : span->end_ns;
    to->step = span->step < 0 ? -1 : span->step;
    atomic_store_explicit(&r->head, head + 1, memory_order_release);
}

/* ---- names: under the lock ------------------------------------------------------------------- */

/* Puts text for readers: long text is cut, and bytes that are not UTF-8 are replaced. */
static void put_text(dray__writer *w, const char *text)
{
    char copy[DRAY__SPAN_NAME_MAX];
    size_t size = strnlen(text, sizeof copy);
    memcpy(copy, text, size);
    if (!dray__utf8_valid(copy, size))
        for (size_t i = 0; i < size; i++)
            if (copy[i] & 0x80)
                copy[i] = '?';
    dray__put_blob(w, copy, size);
}

static uint32_t name_id(const char *name)
{
    uint32_t id;
    if (dray__map_get(&names, name, &id))
        return id;
    id = name_count + new_count;
    if (!dray__map_set(&names, name, id))
        new_names.failed = true;
    put_text(&new_names, name);
    new_count++;
    return id;
}

/* Names of partitions keep changing. When there are too many, all names are dropped and get new
 * numbers. */
static void names_written(void)
{
    dray__writer_free(&new_names);
    name_count += new_count;
    new_count = 0;
    if (names.index.count > NAMES_MOST)
        dray__map_free(&names);
}

static void forget_names(void)
{
    dray__writer_free(&new_names);
    dray__map_free(&names);
    name_count = new_count = 0;
}

/* ---- entered spans of a thread
 * ------------------------------------------------------------------- */

static int64_t cpu_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* Returns how long the thread has waited for a core, if that is recorded: the second number of its
 * schedstat ("sched-stats", Linux's documentation of its scheduler). */
static int64_t queued_now(const ring *r)
{
    char text[96];
    ssize_t n = r->watched ? pread(r->schedstat, text, sizeof text - 1, 0) : 0;
    if (n <= 0)
        return -1;
    text[n] = 0;
    const char *second = strchr(text, ' ');
    return second ? strtoll(second, NULL, 10) : -1;
}

static moment moment_now(const ring *r)
{
    return (moment){.ns = dray__now(), .cpu_ns = cpu_now(), .queued_ns = queued_now(r)};
}

/* Returns the calling thread's ring, or NULL when recording is off. */
static ring *of_thread(void)
{
    if (!atomic_load_explicit(&dray__tracing, memory_order_acquire))
        return NULL;
    ring *r = mine ? mine : make_ring();
    uint32_t opening = atomic_load_explicit(&openings, memory_order_relaxed);
    if (r && r->opening != opening) {
        r->opening = opening;
        r->depth = 0;
        r->unsettled = false;
        r->account = NULL;
        watch_no_more(r);
    }
    return r;
}

static record *top_of(ring *r)
{
    uint32_t depth = r->depth < DEPTH ? r->depth : DEPTH;
    return depth ? r->entered + (depth - 1) : NULL;
}

/* Switches the account to another state from `now` on. */
static void account_for(ring *r, int64_t now, int64_t cpu, const record *next)
{
    if (r->account)
        dray__account_switch(
            r->account, now, cpu - r->counted_cpu_ns,
            next ? dray__state_of((dray_span_kind)next->kind, (dray_wait_cause)next->cause) : 0,
            next ? (next->name ? next->name : "?") : NULL);
    r->counted_ns = now;
    r->counted_cpu_ns = cpu;
}

static void put_piece(record *span, const moment *begin, const moment *end)
{
    if (end->ns <= begin->ns && span->rows < 0 && span->tokens < 0)
        return;
    bool watched = begin->queued_ns >= 0 && end->queued_ns >= 0;
    record piece = *span;
    piece.begin_ns = begin->ns;
    piece.end_ns = end->ns;
    piece.cpu_ns = end->cpu_ns - begin->cpu_ns;
    piece.queued_ns = watched ? end->queued_ns - begin->queued_ns : -1;
    add(&piece);
    span->rows = span->tokens = -1; /* reported only once */
}

/* The wait on top is long enough for a piece, so the piece before it ended when the wait began. */
static void settle(ring *r)
{
    if (r->unsettled)
        put_piece(&r->entered[r->depth - 2], &r->before, &r->piece);
    r->unsettled = false;
}

/* Counts the thread's time to the span at `depth` from now on, which is `span` when one is
 * entered. */
static void turn_to(ring *r, uint32_t depth, const record *span)
{
    const moment now = moment_now(r);
    bool brief = span && span->brief && r->depth;
    bool dropped = r->unsettled && depth < r->depth && now.ns - r->piece.ns < BRIEF_NS;
    if (!dropped)
        settle(r);
    if (!dropped && !brief && r->depth)
        put_piece(top_of(r), &r->piece, &now);
    const moment piece = dropped ? r->before : now;
    r->unsettled = brief;
    r->before = r->piece;
    r->piece = piece;
    if (span)
        r->entered[depth - 1] = *span;
    r->depth = depth;
    if (depth < r->watched)
        watch_no_more(r);
    account_for(r, now.ns, now.cpu_ns, top_of(r));
}

/* Ends the calling thread's current piece, and begins a new one for the same span. */
static void end_running(void)
{
    ring *r = mine ? of_thread() : NULL;
    if (r && r->depth)
        turn_to(r, r->depth, NULL);
}

static void enter(const record *span)
{
    ring *r = of_thread();
    if (r && r->depth >= DEPTH)
        r->depth++;
    else if (r)
        turn_to(r, r->depth + 1, span);
}

void dray_trace_enter(dray_span_kind kind, const char *name, int64_t step)
{
    enter(&(record){.name = name, .step = step, .rows = -1, .tokens = -1, .kind = (uint16_t)kind});
}

static void enter_wait(dray_wait_cause cause, const char *name, int64_t step, bool brief)
{
    enter(&(record){.name = name,
                    .step = step,
                    .rows = -1,
                    .tokens = -1,
                    .kind = DRAY_SPAN_WAIT,
                    .cause = (uint16_t)cause,
                    .brief = brief});
}

void dray_trace_wait(dray_wait_cause cause, const char *name, int64_t step)
{
    enter_wait(cause, name, step, false);
}

void dray_trace_wait_briefly(dray_wait_cause cause, const char *name, int64_t step)
{
    enter_wait(cause, name, step, true);
}

void dray_trace_waited_for(dray_wait_cause cause)
{
    ring *r = of_thread();
    record *top = r && r->depth <= DEPTH ? top_of(r) : NULL;
    if (!top || top->kind != DRAY_SPAN_WAIT || (unsigned)cause >= DRAY__WAIT_CAUSES)
        return;
    top->cause = (uint16_t)cause;
    if (r->account)
        dray__account_restate(r->account, dray__state_of(DRAY_SPAN_WAIT, cause));
}

void dray_trace_leave(void)
{
    ring *r = of_thread();
    if (r && r->depth > DEPTH)
        r->depth--;
    else if (r && r->depth)
        turn_to(r, r->depth - 1, NULL);
}

void dray_trace_queued(void)
{
    ring *r = of_thread();
    if (!r || !r->depth || r->depth > DEPTH || r->watched)
        return;
    r->schedstat = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (r->schedstat < 0)
        return;
    r->watched = r->depth;
    r->piece.queued_ns = queued_now(r);
}

static void add_to(int64_t *sum, int64_t count)
{
    if (count >= 0)
        *sum = (*sum < 0 ? 0 : *sum) + count;
}

void dray_trace_worked(int64_t rows, int64_t tokens)
{
    ring *r = of_thread();
    record *top = r && r->depth <= DEPTH ? top_of(r) : NULL;
    if (!top)
        return;
    add_to(&top->rows, rows);
    add_to(&top->tokens, tokens);
}

void dray_trace_samples(const char *partition, const char *task, int64_t rows)
{
    ring *r = of_thread();
    record *top = r && r->depth <= DEPTH ? top_of(r) : NULL;
    if (!top)
        return;
    pthread_mutex_lock(&lock);
    top->partition = partition && *partition ? name_id(partition) + 1 : 0;
    top->task = task && *task ? name_id(task) + 1 : 0;
    top->opening = r->opening;
    pthread_mutex_unlock(&lock);
    add_to(&top->rows, rows);
}

/* Interpolates a moment within a piece. CPU time and time without a core are divided in proportion
 * to the time, because it is not recorded when the thread had them. */
static moment between(const moment *begin, const moment *end, int64_t ns)
{
    double part = (double)(ns - begin->ns) / (double)(end->ns - begin->ns);
    bool watched = begin->queued_ns >= 0 && end->queued_ns >= 0;
    return (moment){
        .ns = ns,
        .cpu_ns = begin->cpu_ns + (int64_t)(part * (double)(end->cpu_ns - begin->cpu_ns)),
        .queued_ns = watched ? begin->queued_ns +
                                   (int64_t)(part * (double)(end->queued_ns - begin->queued_ns))
                             : -1};
}

/* Cuts a span that is over out of the current piece. */
static void cut_out(ring *r, record *span)
{
    settle(r);
    const moment now = moment_now(r);
    int64_t first = span->begin_ns > r->piece.ns ? span->begin_ns : r->piece.ns;
    int64_t last = span->end_ns < now.ns ? span->end_ns : now.ns;
    if (last <= first)
        return;
    const moment begin = between(&r->piece, &now, first), end = between(&r->piece, &now, last);
    put_piece(top_of(r), &r->piece, &begin);
    put_piece(span, &begin, &end);
    r->piece = end;
    first = first > r->counted_ns ? first : r->counted_ns;
    if (last > first) {
        account_for(r, first, r->counted_cpu_ns, span);
        account_for(r, last, r->counted_cpu_ns, top_of(r));
    }
}

void dray_trace_span(dray_span_kind kind, const char *name, int64_t begin_ns, int64_t end_ns,
                     int64_t step)
{
    ring *r = of_thread();
    record span = {.name = name,
                   .begin_ns = begin_ns,
                   .end_ns = end_ns,
                   .step = step,
                   .rows = -1,
                   .tokens = -1,
                   .cpu_ns = -1,
                   .queued_ns = -1,
                   .kind = (uint16_t)kind};
    if (r && r->depth)
        cut_out(r, &span);
    else if (r)
        add(&span);
}

void dray_trace_response(int64_t step, uint32_t slot, uint64_t prompt_tokens, uint64_t tokens,
                         int64_t begin_ns, int64_t end_ns)
{
    if (!dray_trace_is_on() || !tokens || tokens > UINT32_MAX || prompt_tokens > UINT32_MAX ||
        step < 0 || step > UINT32_MAX || begin_ns < 0 || end_ns <= begin_ns)
        return;
    pthread_mutex_lock(&lock);
    dray__lengths_add(step, slot, prompt_tokens, tokens, begin_ns, end_ns);
    pthread_mutex_unlock(&lock);
}

int dray_trace_is_on(void)
{
    return atomic_load_explicit(&dray__tracing, memory_order_relaxed);
}

int64_t dray_trace_now(void)
{
    return dray__now();
}

/* ---- flushing: under the lock ---------------------------------------------------------------- */

typedef struct drained {
    dray__writer threads, spans;
    uint32_t thread_count, span_count;
    uint64_t lost;
} drained;

static void free_chunk(drained *c)
{
    dray__writer_free(&c->threads);
    dray__writer_free(&c->spans);
}

static void drain(drained *c, ring *r)
{
    uint32_t tail = atomic_load_explicit(&r->tail, memory_order_relaxed);
    uint32_t head = atomic_load_explicit(&r->head, memory_order_acquire);
    if (head != tail && r->number == UINT32_MAX) {
        r->number = thread_count + c->thread_count++;
        put_text(&c->threads, r->name);
    }
    for (; tail != head; tail++) {
        const record *span = &r->records[tail % RING];
        bool known = span->opening == atomic_load(&openings); /* the names belong to this file */
        dray__put_u8(&c->spans,
                     (uint8_t)(span->kind > DRAY_SPAN_TRANSFER ? DRAY_SPAN_BUSY : span->kind));
        dray__put_u8(&c->spans, (uint8_t)(span->cause < DRAY__WAIT_CAUSES ? span->cause : 0));
        dray__put_u32(&c->spans, name_id(span->name ? span->name : "?"));
        dray__put_u32(&c->spans, r->number);
        dray__put_i64(&c->spans, span->begin_ns);
        dray__put_i64(&c->spans, span->end_ns);
        dray__put_i64(&c->spans, span->step);
        dray__put_u32(&c->spans, known ? span->partition : 0);
        dray__put_u32(&c->spans, known ? span->task : 0);
        dray__put_i64(&c->spans, span->rows);
        dray__put_i64(&c->spans, span->tokens);
        dray__put_i64(&c->spans, span->cpu_ns);
        dray__put_i64(&c->spans, span->queued_ns);
        c->span_count++;
    }
    atomic_store_explicit(&r->tail, tail, memory_order_release);
}

static int write_all(const char *what, const void *data, size_t size, dray_error *error)
{
    ssize_t n;
    do
        n = write(file, data, size);
    while (n < 0 && errno == EINTR);
    if (n == (ssize_t)size)
        return DRAY_OK;
    return dray__fail_errno(error, n < 0 ? errno : ENOSPC, "%s", what);
}

static int write_chunk(const drained *c, dray_error *error)
{
    static const uint8_t later[16] = {0};
    dray__writer out = {0};
    dray__put_bytes(&out, later, sizeof later); /* magic, size, sum */
    dray__put_u32(&out, new_count);
    dray__put_bytes(&out, new_names.data, new_names.size);
    dray__put_u32(&out, c->thread_count);
    dray__put_bytes(&out, c->threads.data, c->threads.size);
    dray__put_u64(&out, c->lost);
    dray__put_u32(&out, c->span_count);
    dray__put_bytes(&out, c->spans.data, c->spans.size);
    bool failed = out.failed || new_names.failed || c->threads.failed || c->spans.failed ||
                  out.size > UINT32_MAX;
    int status = failed ? dray__nomem(error) : DRAY_OK;
    if (!status) {
        size_t size = out.size - sizeof later;
        uint32_t head[2] = {htole32(DRAY__SPANS_CHUNK), htole32((uint32_t)size)};
        uint64_t sum = htole64(dray__hash(out.data + sizeof later, size));
        memcpy(out.data, head, sizeof head);
        memcpy(out.data + sizeof head, &sum, sizeof sum);
        status = write_all("writing spans", out.data, out.size, error);
    }
    dray__writer_free(&out);
    return status;
}

/* When a chunk could not be written, later chunks would be unreadable, so recording ends. */
static int flush(dray_error *error)
{
    drained c = {.lost = lost};
    end_running();
    if (owner) /* this is the file's first thread */
        drain(&c, owner);
    for (ring **link = &rings; *link;) {
        ring *r = *link;
        bool over = atomic_load_explicit(&r->over, memory_order_acquire);
        drain(&c, r);
        c.lost += atomic_load_explicit(&r->lost, memory_order_relaxed);
        if (!over) {
            link = &r->next;
            continue;
        }
        lost += atomic_load_explicit(&r->lost, memory_order_relaxed);
        *link = r->next;
        if (r == owner)
            owner = NULL;
        free(r);
    }
    int status = DRAY_OK;
    if (file >= 0 && c.span_count)
        status = write_chunk(&c, error);
    if (c.span_count)
        names_written();
    thread_count += c.thread_count;
    if (status) {
        atomic_store(&dray__tracing, false);
        close(file);
        file = -1;
    }
    free_chunk(&c);
    return status;
}

int dray_trace_flush(dray_error *error)
{
    pthread_mutex_lock(&lock);
    int status = flush(error);
    dray__lengths_flush();
    pthread_mutex_unlock(&lock);
    return status;
}

/* ---- opening --------------------------------------------------------------------------------- */

static int open_file(const char *path, const char *process, dray_error *error)
{
    file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (file < 0)
        return dray__fail_errno(error, errno, "%s", path);
    dray__writer header = {0};
    dray__put_bytes(&header, "DRAYSPAN", 8);
    dray__put_u32(&header, DRAY__SPANS_VERSION);
    dray__put_u32(&header, (uint32_t)getpid());
    put_text(&header, process ? process : program_invocation_short_name);
    static const uint8_t account_to_come[DRAY__SPANS_HEAD];
    if (!header.failed)
        dray__put_bytes(&header, account_to_come, DRAY__SPANS_HEAD - header.size);
    int status = dray__writer_check(&header, error);
    if (!status)
        status = write_all(path, header.data, header.size, error);
    dray__writer_free(&header);
    if (status) {
        close(file);
        file = -1;
    }
    return status;
}

static int close_file(dray_error *error)
{
    int status = flush(error);
    dray__lengths_flush();
    dray__lengths_open(NULL);
    if (file >= 0)
        close(file);
    file = -1;
    if (owner && owner == mine) { /* Another thread may be writing there. */
        owner->account = NULL;
        dray__account_unmap(account);
    }
    owner = NULL;
    account = NULL;
    forget_names();
    thread_count = 0;
    lost = 0;
    for (ring *r = rings; r; r = r->next) {
        r->number = UINT32_MAX;
        atomic_store(&r->lost, 0);
    }
    return status;
}

/* Makes the account that of the calling thread's time. */
static void own_account(void)
{
    ring *r = mine ? mine : make_ring();
    if (!r)
        return;
    pthread_mutex_lock(&lock);
    owner = r;
    r->opening = atomic_load(&openings);
    r->depth = 0;
    r->unsettled = false;
    r->account = account;
    r->counted_cpu_ns = cpu_now();
    pthread_mutex_unlock(&lock);
}

int dray_trace_open(const char *path, const char *process, dray_error *error)
{
    pthread_once(&once, prepare);
    end_running();
    pthread_mutex_lock(&lock);
    atomic_store(&dray__tracing, false);
    int status = close_file(error);
    if (!status && path)
        status = open_file(path, process, error);
    atomic_fetch_add(&openings, 1);
    if (!status && path) {
        account = dray__account_map(file);
        dray__lengths_open(path);
        atomic_store_explicit(&dray__tracing, true, memory_order_release);
    }
    pthread_mutex_unlock(&lock);
    if (!status && path)
        own_account();
    return status;
}
