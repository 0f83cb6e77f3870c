/* A session with the coordinator, seen from the client: dray.h's context. */
#include "control/context.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/options.h"
#include "base/wait.h"
#include "base/words.h"
#include "control/token.h"

#include <dray/trace.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define DEFAULT_TIMEOUT (60 * DRAY__SECOND)

/* ---- opening --------------------------------------------------------------------------------- */

/* The same for all processes of one machine since it was started, and for no others. */
static uint64_t this_host(void)
{
    char identity[512] = "";
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, identity, 64);
    if (fd >= 0)
        close(fd);
    size_t size = n > 0 && n <= 64 ? (size_t)n : 0;
    gethostname(identity + size, sizeof identity - size - 1);
    return dray__hash(identity, strlen(identity));
}

/* What members show each other; empty for those who do not move weights. */
static int get_data_token(dray__reader *r, dray__tls_key *out, bool *takes_back, dray_error *error)
{
    size_t size;
    char *identity = dray__get_string(r, sizeof out->identity - 1);
    const void *bytes = dray__get_blob(r, &size);
    *takes_back = dray__get_u8(r) != 0;
    int status = dray__reader_finish(r, "HELLO", error);
    if (!status && size != (identity[0] ? sizeof out->bytes : 0))
        status = dray__fail(error, DRAY_EPROTO, "HELLO: a data key of %zu bytes", size);
    if (!status && size) {
        strcpy(out->identity, identity);
        memcpy(out->bytes, bytes, size);
    }
    free(identity);
    return status;
}

/* The one that was given, or else the one of the token that was shown. */
static const char *own_role(const dray_context *context, const dray__channel *channel)
{
    const char *role = dray__channel_role(channel);
    return context->role ? context->role : (role[0] && strcmp(role, "master") != 0 ? role : "task");
}

/* What a first session learned stays where it is: other threads read it. */
static int keep_once(char **at, char *text, dray_error *error)
{
    if (*at)
        free(text);
    else
        *at = text;
    return *at ? DRAY_OK : dray__nomem(error);
}

/* The session goes on over this channel; those of before are of no use any more. */
static void change_main(dray_context *context, dray__channel *channel)
{
    dray__channel *old[DRAY__SPARE_CHANNELS + 1];
    uint32_t count = 0;
    pthread_mutex_lock(&context->lock);
    old[count++] = context->main;
    context->main = channel;
    while (context->spare_count)
        old[count++] = context->spare[--context->spare_count];
    pthread_mutex_unlock(&context->lock);
    while (count)
        dray__channel_close(old[--count]);
}

/* HELLO, or RETURN of the session that the context has. */
static int greet(dray_context *context, dray__channel *channel, uint16_t type, int64_t deadline_ns,
                 dray__reply *reply, dray_error *error)
{
    dray__writer w = {0};
    dray__put_u32(&w, DRAY__PROTOCOL_OLDEST);
    dray__put_u32(&w, DRAY__PROTOCOL_VERSION);
    dray__put_string(&w, context->name);
    dray__put_string(&w, own_role(context, channel));
    dray__put_u32(&w, context->rank);
    dray__put_u64(&w, context->host);
    dray__put_i64(&w, getpid());
    if (type == DRAY__MSG_RETURN) {
        dray__put_u64(&w, context->member);
        dray__put_u64(&w, context->epoch);
        dray__put_blob(&w, context->token, sizeof context->token);
    }
    int status = dray__call(channel, type, &w, NULL, 0, deadline_ns, reply, error);
    dray__writer_free(&w);
    return status;
}

/* A new session over the channel, which becomes the context's. */
static int say_hello(dray_context *context, dray__channel *channel, int64_t deadline_ns,
                     dray_error *error)
{
    dray__reply reply;
    int status = greet(context, channel, DRAY__MSG_HELLO, deadline_ns, &reply, error);
    if (status)
        return status;
    dray__reader *r = &reply.payload;
    uint32_t version = dray__get_u32(r);
    uint64_t member = dray__get_u64(r), epoch = dray__get_u64(r);
    size_t size;
    const void *token = dray__get_blob(r, &size);
    char *keeper = dray__get_string(r, 4096);
    status = get_data_token(r, &context->data, &context->takes_back, error);
    if (!status && (size != sizeof context->token || version > DRAY__PROTOCOL_VERSION ||
                    version < DRAY__PROTOCOL_OLDEST))
        status = dray__fail(error, DRAY_EPROTO, "HELLO: version %u and a token of %zu bytes",
                            version, size);
    if (status)
        free(keeper);
    else
        status = keep_once(&context->keeper, keeper, error);
    if (status)
        return status;
    pthread_mutex_lock(&context->lock);
    __atomic_store_n(&context->member, member, __ATOMIC_RELAXED);
    __atomic_store_n(&context->epoch, epoch, __ATOMIC_RELAXED);
    memcpy(context->token, token, sizeof context->token);
    pthread_mutex_unlock(&context->lock);
    change_main(context, channel);
    return DRAY_OK;
}

static int begin_session(dray_context *context, int64_t deadline_ns, dray_error *error)
{
    dray__channel *channel;
    int status = dray__channel_connect(context->address, deadline_ns, &channel, error);
    if (status)
        return status;
    status = say_hello(context, channel, deadline_ns, error);
    if (status)
        dray__channel_close(channel);
    return status;
}

static int check_options(const dray_options *options, dray_error *error)
{
    if (options->timeout_ns < 0)
        return dray__fail(error, DRAY_EINVALID, "dray_options: timeout of %lld ns",
                          (long long)options->timeout_ns);
    const char *texts[] = {options->name, options->role};
    const size_t limits[] = {256, 64};
    for (size_t i = 0; i < 2; i++)
        if (texts[i] &&
            (strlen(texts[i]) > limits[i] || !dray__utf8_valid(texts[i], strlen(texts[i]))))
            return dray__fail(error, DRAY_EINVALID,
                              "dray_options: %s of at most %zu bytes of UTF-8 expected",
                              i ? "role" : "name", limits[i]);
    return DRAY_OK;
}

static int transport_of(const char *name, int *out, dray_error *error)
{
    static const char *const names[] = {[DRAY__TRANSPORT_AUTO] = "auto",
                                        [DRAY__TRANSPORT_STREAM] = "stream",
                                        [DRAY__TRANSPORT_UCX] = "ucx"};
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++)
        if (strcmp(name, names[i]) == 0) {
            *out = i;
            return DRAY_OK;
        }
    return dray__fail(error, DRAY_EINVALID, "transport \"%.40s\": auto, stream or ucx expected",
                      name);
}

int dray_transport_find(const char *transport, char *detail, size_t size, dray_error *error)
{
    int kind = DRAY__TRANSPORT_AUTO;
    dray__ucx_version v;
    int rc = transport_of(transport, &kind, error);
    if (rc == DRAY_OK && kind == DRAY__TRANSPORT_UCX)
        rc = dray__ucx_find(&v, error);
    if (rc || !size)
        return rc;
    if (kind == DRAY__TRANSPORT_UCX)
        snprintf(detail, size, "%u.%u.%u, transports %s", v.major, v.minor, v.release,
                 dray__ucx_transports());
    else
        snprintf(detail, size, "TCP");
    return DRAY_OK;
}

static int get_transport(const dray_options *options, int *out, dray_error *error)
{
    const char *given = options->transport ? options->transport : getenv("DRAY_TRANSPORT");
    *out = DRAY__TRANSPORT_AUTO;
    if (!given || !given[0])
        return DRAY_OK;
    int rc = dray_transport_find(given, NULL, 0, error);
    return rc ? rc : transport_of(given, out, error);
}

/* What the variable says, which is one of the words, or nothing. */
static int check_variable(const char *variable, const char *const *words, const char **out,
                          dray_error *error)
{
    char hint[128];
    size_t count = 0;
    const char *text = getenv(variable);
    *out = text && text[0] ? text : NULL;
    while (words[count]) {
        if (*out && strcmp(*out, words[count]) == 0)
            return DRAY_OK;
        count++;
    }
    return *out ? dray__fail(error, DRAY_EINVALID, "$%s: unknown word '%.40s'%s", variable, *out,
                             dray__word_hint_or_all(*out, words, count, hint, sizeof hint))
                : DRAY_OK;
}

int dray__data_encrypt(bool *always, dray_error *error)
{
    static const char *const words[] = {"always", NULL};
    const char *word;
    int rc = check_variable("DRAY_DATA_ENCRYPT", words, &word, error);
    *always = word != NULL;
    return rc;
}

/* What is read where nobody can be told that it is wrong. */
static int check_reads(dray_error *error)
{
    static const char *const words[] = {"auto", "never", "always", NULL};
    const char *word;
    return check_variable("DRAY_UCX_READS", words, &word, error);
}

static void locks_init(dray_context *context)
{
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&context->quiet, &clock);
    pthread_condattr_destroy(&clock);
    pthread_mutex_init(&context->lock, NULL);
}

int dray_open(const dray_options *given, dray_context **out, dray_error *error)
{
    dray_options own = DRAY_OPTIONS_INIT, *options = &own;
    int status =
        dray__options_read(options, sizeof *options, dray__end_of(dray_options, timeout_ns), given,
                           "dray_options", error);
    if (!status)
        status = check_options(options, error);
    dray__networks trusted;
    if (!status)
        status = dray__networks_parse(options->trusted_networks ? options->trusted_networks
                                                                : getenv("DRAY_TRUSTED_NETWORKS"),
                                      &trusted, error);
    int transport = DRAY__TRANSPORT_AUTO;
    if (!status)
        status = get_transport(options, &transport, error);
    bool encrypt = false;
    if (!status)
        status = dray__data_encrypt(&encrypt, error);
    if (!status)
        status = check_reads(error);
    if (status)
        return status;
    const char *address = options->address ? options->address : getenv("DRAY_ADDRESS");
    if (!address || !address[0])
        return dray__fail(error, DRAY_EINVALID,
                          "no coordinator's address: neither options.address nor $DRAY_ADDRESS, "
                          "which `dray serve` prints");
    dray_context *context = calloc(1, sizeof *context);
    if (!context)
        return dray__nomem(error);
    locks_init(context);
    context->pid = getpid();
    context->keys = (dray__stream_keys){.key = &context->data,
                                        .trusted = &context->trusted,
                                        .transport = transport,
                                        .always = encrypt};
    context->timeout_ns = options->timeout_ns ? options->timeout_ns : DEFAULT_TIMEOUT;
    const char *host = options->host ? options->host : getenv("DRAY_HOST");
    context->host_named = host && host[0];
    context->host = context->host_named ? dray__hash(host, strlen(host)) : this_host();
    int64_t deadline_ns = dray__deadline(context->timeout_ns);
    context->address = strdup(address);
    context->name = strdup(options->name ? options->name : program_invocation_short_name);
    context->role = options->role ? strdup(options->role) : NULL;
    context->rank = options->rank;
    context->trusted = trusted;
    bool copied = context->address && context->name && (context->role || !options->role);
    status = copied ? begin_session(context, deadline_ns, error) : dray__nomem(error);
    if (status)
        dray_close(context);
    else
        *out = context;
    return status;
}

void dray_close(dray_context *context)
{
    if (!context)
        return;
    if (context->server)
        context->server_free(context->server);
    for (uint32_t i = 0; i < context->spare_count; i++)
        dray__channel_close(context->spare[i]);
    dray__channel_close(context->main);
    if (context->pid == getpid()) { /* a fork may have copied the lock while it was held */
        pthread_cond_destroy(&context->quiet);
        pthread_mutex_destroy(&context->lock);
    }
    free(context->address);
    free(context->keeper);
    free(context->name);
    free(context->role);
    dray__forget_bytes(context, sizeof *context);
    free(context);
}

/* ---- whose turn it is ------------------------------------------------------------------------ */

/* Over the session's own connection one thread talks at a time; the others wait until their own
 * deadlines, which the one that talks need not know. The lock is held for moments only. */
static int begin_talk(dray_context *context, int64_t deadline_ns, dray_error *error)
{
    bool over = false;
    pthread_mutex_lock(&context->lock);
    while (context->talking && !over && dray__now() < deadline_ns) {
        int64_t slice = dray__deadline(DRAY__SLICE_MS * DRAY__MILLISECOND);
        int64_t until = slice < deadline_ns ? slice : deadline_ns;
        struct timespec at = {.tv_sec = until / DRAY__SECOND, .tv_nsec = until % DRAY__SECOND};
        pthread_cond_timedwait(&context->quiet, &context->lock, &at);
        pthread_mutex_unlock(&context->lock); /* who is asked may take long */
        over = dray__interrupted();
        pthread_mutex_lock(&context->lock);
    }
    bool mine = !context->talking;
    context->talking = true;
    pthread_mutex_unlock(&context->lock);
    return mine ? DRAY_OK
                : dray__fail(error, DRAY_ETIMEDOUT,
                             "another thread still waits for the coordinator at %s",
                             context->address);
}

static void end_talk(dray_context *context)
{
    pthread_mutex_lock(&context->lock);
    context->talking = false;
    pthread_cond_signal(&context->quiet);
    pthread_mutex_unlock(&context->lock);
}

/* ---- coming back ----------------------------------------------------------------------------- */

/* What the next coordinator says must be what the session is. */
static int take_welcome(dray_context *context, dray__reader *r, dray_error *error)
{
    dray__tls_key data = {{0}, {0}};
    size_t size;
    bool takes_back;
    dray__get_u32(r);
    uint64_t member = dray__get_u64(r);
    dray__get_u64(r);
    dray__get_blob(r, &size);
    char *keeper = dray__get_string(r, 4096);
    int status = get_data_token(r, &data, &takes_back, error);
    if (!status && (member != context->member || memcmp(&data, &context->data, sizeof data) != 0))
        status = dray__fail(error, DRAY_EPROTO, "RETURN: the session of another member");
    dray__forget_bytes(&data, sizeof data);
    free(keeper); /* the one of the first session stays */
    return status;
}

/* Who talks goes on with the session at whoever listens there now. */
static int return_once(dray_context *context, int64_t deadline_ns, bool *again, dray_error *error)
{
    dray__channel *channel;
    dray__reply reply;
    *again = false;
    int status = dray__channel_connect(context->address, deadline_ns, &channel, error);
    if (status)
        return status;
    status = greet(context, channel, DRAY__MSG_RETURN, deadline_ns, &reply, error);
    if (!status)
        status = take_welcome(context, &reply.payload, error);
    if (status) { /* it died, too; or has not yet seen that an earlier try did */
        *again = dray__channel_broken(channel) || status == DRAY_EBUSY;
        dray__channel_close(channel);
        return status;
    }
    change_main(context, channel);
    __atomic_add_fetch(&context->returns, 1, __ATOMIC_ACQ_REL);
    return DRAY_OK;
}

/* For who talks. Is the session's own connection there, and if not, can it be made again? */
static int main_there(dray_context *context, int64_t deadline_ns, dray_error *error)
{
    if (dray__channel_alive(context->main))
        return DRAY_OK;
    if (!context->takes_back || dray__channel_ended(context->main))
        return dray__fail(error, DRAY_ECLOSED, "the coordinator at %s has ended", context->address);
    bool again = true;
    int status = DRAY_ECLOSED;
    for (int pause_ms = 1; again; pause_ms = pause_ms < 50 ? 2 * pause_ms : 50) {
        status = return_once(context, deadline_ns, &again, error);
        int left = dray__left_ms(deadline_ns);
        if (!left || dray__interrupted())
            break;
        if (again)
            poll(NULL, 0, pause_ms < left ? pause_ms : left);
    }
    if (status)
        dray__fail_prefix(error, status, "the coordinator went away: ");
    return status;
}

int dray__context_return_to(dray_context *context, int64_t deadline_ns, bool *returned,
                            dray_error *error)
{
    int status = begin_talk(context, deadline_ns, error);
    if (status)
        return status;
    *returned = context->takes_back;
    if (context->takes_back && dray__channel_alive(context->main)) {
        dray__writer w = {0}; /* a connection's end may be seen later than another's */
        status = dray__call(context->main, DRAY__MSG_PING, &w, NULL, 0, deadline_ns, NULL, error);
        dray__writer_free(&w);
        if (status == DRAY_ECLOSED)
            status = DRAY_OK;
    }
    if (!status && context->takes_back)
        status = main_there(context, deadline_ns, error);
    end_talk(context);
    return status;
}

bool dray__context_takes_back(const dray_context *context)
{
    return context->takes_back;
}

uint64_t dray__context_returns(const dray_context *context)
{
    return __atomic_load_n(&context->returns, __ATOMIC_ACQUIRE);
}

int dray__context_come_back(dray_context *context, int64_t deadline_ns, dray__channel **out,
                            dray_error *error)
{
    if (context->pid != getpid() || context->takes_back)
        return dray__channel_open_until(context, deadline_ns, out, error);
    int status = begin_talk(context, deadline_ns, error);
    if (status)
        return status;
    /* Another thread may have come back already. */
    status = dray__channel_attach(context, deadline_ns, out, error);
    if (status && status != DRAY_ENOMEM) { /* the session ended with the coordinator: a new one */
        status = begin_session(context, deadline_ns, error);
        if (!status)
            status = dray__channel_attach(context, deadline_ns, out, error);
    }
    end_talk(context);
    return status;
}

/* ---- requests -------------------------------------------------------------------------------- */

int dray__context_borrow(dray_context *context, int64_t deadline_ns, dray__channel **out,
                         dray_error *error)
{
    dray__channel *channel = NULL;
    if (context->pid == getpid()) { /* a fork may have copied the lock while it was held */
        pthread_mutex_lock(&context->lock);
        while (!channel && context->spare_count) {
            channel = context->spare[--context->spare_count];
            if (context->takes_back && !dray__channel_alive(channel)) {
                dray__channel_close(channel);
                channel = NULL;
            }
        }
        pthread_mutex_unlock(&context->lock);
    }
    if (!channel)
        return dray__channel_open_until(context, deadline_ns, out, error);
    *out = channel;
    return DRAY_OK;
}

void dray__context_return(dray_context *context, dray__channel *channel)
{
    pthread_mutex_lock(&context->lock);
    if (!dray__channel_broken(channel) && context->spare_count < DRAY__SPARE_CHANNELS) {
        context->spare[context->spare_count++] = channel;
        channel = NULL;
    }
    pthread_mutex_unlock(&context->lock);
    dray__channel_close(channel);
}

/* Who was there. */
static int get_party(dray__reader *r, dray__party_of *party, dray_error *error)
{
    uint32_t count = dray__get_count(r, sizeof *party->members);
    uint64_t *members = calloc((size_t)count + 1, sizeof *members);
    if (!members)
        return dray__nomem(error);
    for (uint32_t i = 0; i < count; i++)
        members[i] = dray__get_u64(r);
    int status = dray__reader_finish(r, "BARRIER", error);
    if (status) {
        free(members);
        return status;
    }
    free(party->members);
    *party = (dray__party_of){members, count};
    return DRAY_OK;
}

int dray_barrier(dray_context *context, const char *name, uint32_t count, int64_t timeout_ns,
                 dray_error *error)
{
    return dray__meet(context, name, count, timeout_ns, NULL, error);
}

int dray__meet(dray_context *context, const char *name, uint32_t count, int64_t timeout_ns,
               dray__party_of *party, dray_error *error)
{
    if (!name || timeout_ns < DRAY_WAIT_DEFAULT)
        return dray__fail(error, DRAY_EINVALID, "dray_barrier: a name and a timeout expected");
    int64_t deadline_ns = dray__context_deadline(context, timeout_ns);
    dray__channel *channel;
    /* A barrier that is not waited for is asked about all the same. */
    int status = dray__context_borrow(context, dray__answer_deadline(deadline_ns), &channel, error);
    if (status)
        return status;
    int64_t left = deadline_ns - dray__now();
    dray__writer w = {0};
    dray__put_string(&w, name);
    dray__put_u32(&w, count);
    dray__put_i64(&w, left > 0 ? left : 0);
    dray__put_u32(&w, party ? party->count : 0);
    for (uint32_t i = 0; party && i < party->count; i++)
        dray__put_u64(&w, party->members[i]);
    dray__reply reply;
    status = dray__call(channel, DRAY__MSG_BARRIER, &w, NULL, 0, dray__answer_deadline(deadline_ns),
                        &reply, error);
    dray__writer_free(&w);
    if (!status && party)
        status = get_party(&reply.payload, party, error);
    dray__context_return(context, channel);
    return status;
}

/* A request that the coordinator answers at once, on a channel that nobody waits at for long. */
static int quick_call(dray_context *context, uint16_t type, dray__writer *w, char **text,
                      dray_error *error)
{
    if (context->pid != getpid())
        return dray__fail(error, DRAY_ECLOSED,
                          "the context belongs to process %d, this is its fork %d", context->pid,
                          getpid());
    dray__reply reply;
    int64_t deadline_ns = dray__deadline(context->timeout_ns);
    int status = begin_talk(context, deadline_ns, error);
    if (status) {
        dray__writer_free(w);
        return status;
    }
    if (context->takes_back)
        status = main_there(context, deadline_ns, error);
    dray_trace_wait_briefly(DRAY_CAUSE_CONTROLLER, "coordinator", -1);
    if (!status)
        status = dray__call(context->main, type, w, NULL, 0, deadline_ns, &reply, error);
    dray_trace_leave();
    if (!status && text) {
        *text = dray__get_prose(&reply.payload, DRAY__FRAME_MAX);
        status = dray__reader_finish(&reply.payload, dray__message_name(type), error);
        if (status)
            free(*text);
    }
    end_talk(context);
    dray__writer_free(w);
    return status;
}

int dray_report_post(dray_context *context, const char *kind, const char *json, dray_error *error)
{
    if (!kind || !json)
        return dray__fail(error, DRAY_EINVALID, "dray_report_post: a kind and an object expected");
    dray__writer w = {0};
    dray__put_string(&w, kind);
    dray__put_string(&w, json);
    return quick_call(context, DRAY__MSG_REPORT_POST, &w, NULL, error);
}

int dray_context_status(dray_context *context, char **json, dray_error *error)
{
    dray__writer w = {0};
    char *text;
    int status = quick_call(context, DRAY__MSG_STATUS, &w, &text, error);
    if (!status)
        *json = text;
    return status;
}

int dray_shutdown(dray_context *context, dray_error *error)
{
    dray__writer w = {0};
    return quick_call(context, DRAY__MSG_SHUTDOWN, &w, NULL, error);
}

void dray_free(void *memory)
{
    free(memory);
}

/* ---- what the context knows ------------------------------------------------------------------ */

uint64_t dray_context_member(const dray_context *context)
{
    return __atomic_load_n(&context->member, __ATOMIC_RELAXED);
}

uint64_t dray_context_epoch(const dray_context *context)
{
    return __atomic_load_n(&context->epoch, __ATOMIC_RELAXED);
}

bool dray__context_ended(dray_context *context)
{
    if (context->pid != getpid())
        return true;
    pthread_mutex_lock(&context->lock);
    bool ended = !dray__channel_alive(context->main) && dray__channel_ended(context->main);
    pthread_mutex_unlock(&context->lock);
    return ended;
}

int64_t dray__context_deadline(const dray_context *context, int64_t timeout_ns)
{
    return dray__deadline(timeout_ns == DRAY_WAIT_DEFAULT ? context->timeout_ns : timeout_ns);
}

int64_t dray__answer_deadline(int64_t deadline_ns)
{
    int64_t now = dray__now(), from = deadline_ns > now ? deadline_ns : now;
    return from > INT64_MAX - DRAY__SECOND ? INT64_MAX : from + DRAY__SECOND;
}

const char *dray__context_address(const dray_context *context)
{
    return context->address;
}

const char *dray__context_keeper(const dray_context *context)
{
    const char *keeper = __atomic_load_n(&context->keeper, __ATOMIC_ACQUIRE);
    return keeper && keeper[0] ? keeper : NULL;
}

const dray__tls_key *dray__context_data_key(const dray_context *context)
{
    return context->data.identity[0] ? &context->data : NULL;
}

uint64_t dray__context_host(const dray_context *context)
{
    return context->host;
}

bool dray__context_find(dray_context *context, bool peer, struct sockaddr_storage *out)
{
    socklen_t size = sizeof *out;
    pthread_mutex_lock(&context->lock); /* main stays */
    int fd = dray__channel_socket(context->main);
    int failed = peer ? getpeername(fd, (struct sockaddr *)out, &size)
                      : getsockname(fd, (struct sockaddr *)out, &size);
    pthread_mutex_unlock(&context->lock);
    return !failed && out->ss_family != AF_UNIX;
}

const dray__stream_keys *dray__context_keys(const dray_context *context)
{
    return &context->keys;
}
