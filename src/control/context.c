/* A session with the coordinator, seen from the client: dray.h's context. */
#include "control/context.h"
#include "control/messages.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/options.h"
#include "base/thread.h"
#include "base/words.h"
#include "net/carrier.h"

#include <dray/trace.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEFAULT_TIMEOUT (60 * DRAY__SECOND)
#define DATA_RATE_MIN 65536

/* ---- opening --------------------------------------------------------------------------------- */

/* Returns a number that is the same for all processes of this machine until it restarts, and
 * differs on other machines. */
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

/* Reads the answer to HELLO or RETURN. *data is the key that members show each other; empty for
 * sessions that do not move weights. */
static int read_hello(dray__reader *r, dray__arena *texts, dray__hello_told *out,
                      dray__tls_key *data, dray_error *error)
{
    dray__get_fields(r, texts, &dray__hello_told_fields, out);
    int status = dray__reader_finish(r, "HELLO", error);
    if (status)
        return status;
    if (out->key_size != (out->identity[0] ? sizeof data->bytes : 0) ||
        strlen(out->identity) >= sizeof data->identity)
        return dray__fail(error, DRAY_EPROTO, "HELLO: a data key of %zu bytes", out->key_size);
    if (out->key_size) {
        strcpy(data->identity, out->identity);
        memcpy(data->bytes, out->key, out->key_size);
    }
    return DRAY_OK;
}

/* Returns the role that was given, or else the token's; "task" for the master token, and without a
 * token. */
static const char *own_role(const dray_context *context, const dray__channel *channel)
{
    const char *role = dray__channel_role(channel);
    return context->role ? context->role : (role[0] && strcmp(role, "master") != 0 ? role : "task");
}

/* Makes this channel the session's own, and closes the former ones. */
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

/* Sends HELLO, or RETURN with the session that the context has. */
static int greet(dray_context *context, dray__channel *channel, uint16_t type, int64_t deadline_ns,
                 dray__reply *reply, dray_error *error)
{
    dray__writer w = {0};
    dray__put_fields(&w, &dray__spoken_fields,
                     &(dray__spoken){DRAY__PROTOCOL_OLDEST, DRAY__PROTOCOL_VERSION});
    dray__put_fields(&w, &dray__hello_fields,
                     &(dray__hello){context->name, own_role(context, channel), context->rank,
                                    context->host, getpid()});
    if (type == DRAY__MSG_RETURN)
        dray__put_fields(&w, &dray__return_fields,
                         &(dray__session_claim){context->member, context->epoch, context->token,
                                                sizeof context->token});
    int status = dray__call(channel, type, &w, NULL, 0, deadline_ns, reply, error);
    dray__writer_free(&w);
    return status;
}

/* Begins a new session over the channel, which becomes the context's. */
static int say_hello(dray_context *context, dray__channel *channel, int64_t deadline_ns,
                     dray_error *error)
{
    dray__reply reply;
    int status = greet(context, channel, DRAY__MSG_HELLO, deadline_ns, &reply, error);
    if (status)
        return status;
    dray__arena texts = {0};
    dray__hello_told told;
    status = read_hello(&reply.payload, &texts, &told, &context->data, error);
    if (!status && (told.claim.token_size != sizeof context->token ||
                    told.version > DRAY__PROTOCOL_VERSION || told.version < DRAY__PROTOCOL_OLDEST))
        status = dray__fail(error, DRAY_EPROTO, "HELLO: version %u and a token of %zu bytes",
                            told.version, told.claim.token_size);
    /* The keeper's path from the first session is kept, because other threads read it. */
    if (!status && !context->keeper && !(context->keeper = strdup(told.keeper)))
        status = dray__nomem(error);
    dray__arena_free(&texts);
    if (status)
        return status;
    context->takes_back = told.takes_back;
    pthread_mutex_lock(&context->lock);
    __atomic_store_n(&context->member, told.claim.member, __ATOMIC_RELAXED);
    __atomic_store_n(&context->epoch, told.claim.epoch, __ATOMIC_RELAXED);
    memcpy(context->token, told.claim.token, sizeof context->token);
    pthread_mutex_unlock(&context->lock);
    change_main(context, channel);
    return DRAY_OK;
}

static int begin_session(dray_context *context, int64_t deadline_ns, dray_error *error)
{
    dray__channel *channel;
    int status = dray__channel_connect(context->address, deadline_ns, &channel, error);
    if (status == DRAY_ECLOSED)
        return dray__fail_prefix(error, status,
                                 "no session with a coordinator, which `dray serve` starts: ");
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

/* Gets the name of the only transport to use; NULL when every transport may be used. A named
 * transport must be usable. */
static int get_transport(const dray_options *options, const char **out, dray_error *error)
{
    const char *given = options->transport ? options->transport : getenv("DRAY_TRANSPORT");
    *out = NULL;
    if (!given || !given[0])
        return DRAY_OK;
    return dray__transport_find(given, out, NULL, 0, error);
}

int dray__data_encrypt(bool *always, dray_error *error)
{
    static const char *const words[] = {"always", NULL};
    const char *word;
    int rc = dray__word_of_variable("DRAY_DATA_ENCRYPT", words, &word, error);
    *always = word != NULL;
    return rc;
}

int dray__data_rate(uint64_t *rate, dray_error *error)
{
    const char *text = getenv("DRAY_DATA_RATE");
    char *end = NULL;
    *rate = 0;
    if (!text || !text[0])
        return DRAY_OK;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || errno || value < DATA_RATE_MIN)
        return dray__fail(error, DRAY_EINVALID,
                          "$DRAY_DATA_RATE \"%.40s\": expected bytes a second, at least %d", text,
                          DATA_RATE_MIN);
    *rate = value;
    return DRAY_OK;
}

int dray_open(const dray_options *given, dray_context **out, dray_error *error)
{
    dray_options own = DRAY_OPTIONS_INIT, *options = &own;
    int status = DRAY__OPTIONS_READ(dray_options, timeout_ns, options, given, error);
    if (!status)
        status = check_options(options, error);
    dray__networks trusted;
    if (!status)
        status = dray__networks_parse(options->trusted_networks ? options->trusted_networks
                                                                : getenv("DRAY_TRUSTED_NETWORKS"),
                                      &trusted, error);
    const char *transport = NULL;
    if (!status)
        status = get_transport(options, &transport, error);
    bool encrypt = false;
    if (!status)
        status = dray__data_encrypt(&encrypt, error);
    uint64_t rate = 0;
    if (!status)
        status = dray__data_rate(&rate, error);
    if (!status)
        status = dray__carriers_check(error);
    if (status)
        return status;
    const char *address = options->address ? options->address : getenv("DRAY_ADDRESS");
    if (!address || !address[0])
        return dray__fail(error, DRAY_EINVALID,
                          "no coordinator's address is given: set $DRAY_ADDRESS to the one that "
                          "`dray serve` prints, or give an address to this call");
    dray_context *context = calloc(1, sizeof *context);
    if (!context)
        return dray__nomem(error);
    dray__cond_init(&context->quiet);
    pthread_mutex_init(&context->lock, NULL);
    context->pid = getpid();
    context->keys = (dray__stream_keys){.key = &context->data,
                                        .trusted = &context->trusted,
                                        .transport = transport,
                                        .always = encrypt,
                                        .rate = rate};
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

/* ---- turns on the session's connection ------------------------------------------------------- */

/* Waits for this thread's turn on the session's own connection, which one thread uses at a time.
 * Each waits until its own deadline. The lock itself is held only for moments. */
static int begin_talk(dray_context *context, int64_t deadline_ns, dray_error *error)
{
    bool over = false;
    pthread_mutex_lock(&context->lock);
    while (context->talking && !over && dray__now() < deadline_ns) {
        int64_t slice = dray__deadline(DRAY__SLICE_MS * DRAY__MILLISECOND);
        dray__cond_wait(&context->quiet, &context->lock, slice < deadline_ns ? slice : deadline_ns);
        pthread_mutex_unlock(&context->lock); /* the answer may take long */
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

/* Reads the answer to RETURN, which must be for the same session. */
static int take_welcome(dray_context *context, dray__reader *r, dray_error *error)
{
    dray__tls_key data = {{0}, {0}};
    dray__arena texts = {0};
    dray__hello_told told; /* the keeper's path of the first session is kept */
    int status = read_hello(r, &texts, &told, &data, error);
    if (!status &&
        (told.claim.member != context->member || memcmp(&data, &context->data, sizeof data) != 0))
        status = dray__fail(error, DRAY_EPROTO, "RETURN: the session of another member");
    dray__forget_bytes(&data, sizeof data);
    dray__arena_free(&texts);
    return status;
}

/* Tries once to go on with the session at the coordinator that now listens. */
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
    if (status) { /* this coordinator died, too, or has not noticed yet that an earlier try ended */
        *again = dray__channel_broken(channel) || status == DRAY_EBUSY;
        dray__channel_close(channel);
        return status;
    }
    change_main(context, channel);
    __atomic_add_fetch(&context->returns, 1, __ATOMIC_ACQ_REL);
    return DRAY_OK;
}

/* Returns 0 when the session's own connection works, or could be made again. Called by the thread
 * that has the turn. */
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
        dray__writer w = {0}; /* the ends of two connections may be seen at different times */
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
    /* The session ended with the coordinator, so a new one begins. */
    if (status && status != DRAY_ENOMEM) {
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

static int keep_party(dray__party_of *party, const dray__meeting *met, dray_error *error)
{
    uint64_t *members = calloc(met->member_count + 1u, sizeof *members);
    if (!members)
        return dray__nomem(error);
    memcpy(members, met->members, met->member_count * sizeof *members);
    free(party->members);
    party->members = members;
    party->count = met->member_count;
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
    /* The request is sent even with no time to wait. */
    int status = dray__context_borrow(context, dray__answer_deadline(deadline_ns), &channel, error);
    if (status)
        return status;
    int64_t left = deadline_ns - dray__now();
    const dray__meeting m = {.name = name,
                             .count = count,
                             .timeout_ns = left > 0 ? left : 0,
                             .members = party ? party->members : NULL,
                             .member_count = party ? party->count : 0};
    dray__meeting met;
    dray__arena members = {0};
    status =
        dray__ask(channel, DRAY__MSG_BARRIER, &dray__meeting_fields, &m,
                  dray__answer_deadline(deadline_ns), &members, &dray__met_fields, &met, error);
    if (!status && party)
        status = keep_party(party, &met, error);
    dray__arena_free(&members);
    dray__context_return(context, channel);
    return status;
}

/* Sends a request that the coordinator answers at once, or a notice, on a channel on which no
 * request waits for long. */
static int quick_call(dray_context *context, uint16_t type, bool notice, dray__writer *w,
                      char **text, dray_error *error)
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
        status = notice ? dray__notify(context->main, type, w, error)
                        : dray__call(context->main, type, w, NULL, 0, deadline_ns, &reply, error);
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

static int post(dray_context *context, const char *kind, const char *json, bool notice,
                dray_error *error)
{
    if (!kind || !json)
        return dray__fail(error, DRAY_EINVALID, "dray_report_post: a kind and an object expected");
    dray__writer w = {0};
    const dray__posting message = {kind, json, strlen(json)};
    dray__put_fields(&w, &dray__posting_fields, &message);
    return quick_call(context, DRAY__MSG_REPORT_POST, notice, &w, NULL, error);
}

int dray_report_post(dray_context *context, const char *kind, const char *json, dray_error *error)
{
    return post(context, kind, json, false, error);
}

int dray__report_tell(dray_context *context, const char *kind, const char *json, dray_error *error)
{
    return post(context, kind, json, true, error);
}

int dray_context_status(dray_context *context, char **json, dray_error *error)
{
    dray__writer w = {0};
    char *text;
    int status = quick_call(context, DRAY__MSG_STATUS, false, &w, &text, error);
    if (!status)
        *json = text;
    return status;
}

void dray_free(void *memory)
{
    free(memory);
}

/* ---- the context's properties ---------------------------------------------------------------- */

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
    /* A thread that talks reads the connection itself, and learns of the end. */
    if (begin_talk(context, 0, NULL))
        return false;
    bool ended = !dray__channel_alive(context->main) && dray__channel_ended(context->main);
    end_talk(context);
    return ended;
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

uint64_t dray__context_host(const dray_context *context)
{
    return context->host;
}

bool dray__context_find(dray_context *context, bool peer, struct sockaddr_storage *out)
{
    socklen_t size = sizeof *out;
    pthread_mutex_lock(&context->lock); /* keeps main from changing */
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

int dray__data_address(dray_context *context, char out[DRAY__STREAM_ADDRESS], bool *elsewhere,
                       dray_error *error)
{
    struct sockaddr_storage own;
    const char *given = getenv("DRAY_DATA_ADDRESS");
    if (given && strlen(given) >= DRAY__STREAM_ADDRESS)
        return dray__fail(error, DRAY_EINVALID,
                          "$DRAY_DATA_ADDRESS \"%.20s...\": at most %d bytes expected, not %zu",
                          given, DRAY__STREAM_ADDRESS - 1, strlen(given));
    *elsewhere = true;
    if (given && given[0]) {
        strcpy(out, given);
    } else if (!dray__context_find(context, false, &own) ||
               !dray__address_host(&own, out, DRAY__STREAM_ADDRESS, NULL)) {
        strcpy(out, "127.0.0.1");
        *elsewhere = context->host_named;
    }
    return DRAY_OK;
}
