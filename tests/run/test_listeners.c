/* Tests what strangers and rude clients may do to the listeners of `dray serve` and `dray
 * keeper`. */
#include <fcntl.h>

#include "run/served.h"

#include "control/channel.h"
#include "control/token.h"
#include "net/address.h"
#include "net/cells.h"

#include <dray/dray.h>
#include <errno.h>
#include <openssl/ssl.h>

static char folder[64], unix_address[128];

FIXTURE(make_folder)
{
    strcpy(folder, "/tmp/dray-listeners-XXXXXX");
    if (!getenv("DRAY_PROGRAM") || !mkdtemp(folder))
        return -1;
    return setenv("XDG_RUNTIME_DIR", folder, 1);
}

FIXTURE(remove_folder)
{
    return rmdir(folder); /* nothing is left there */
}

/* Each at a Unix socket of its own. */
static served serve(rlim_t descriptors)
{
    static int number;
    snprintf(unix_address, sizeof unix_address, "unix:%s/s%d", folder, number++);
    const char *const arguments[] = {"dray",       "serve",    "--json",          "--listen",
                                     unix_address, "--listen", "tcp:127.0.0.1:0", "--metrics",
                                     "0",          NULL};
    return served_start(arguments, descriptors);
}

/* ---- clients that leave ---------------------------------------------------------------------- */

static void scrape(const char *url)
{
    static const char ask[] = "GET /metrics HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n";
    char answer[64] = "";
    int fd = served_connect(url);
    struct pollfd p = {.fd = fd, .events = POLLIN};
    assert_int_equal(send(fd, ask, sizeof ask - 1, MSG_NOSIGNAL), sizeof ask - 1);
    assert_int_equal(poll(&p, 1, 30000), 1);
    assert_true(recv(fd, answer, sizeof answer - 1, 0) > 12);
    assert_memory_equal(answer, "HTTP/1.1 200", 12);
    close(fd);
}

TEST(a_scraper_that_leaves_ends_nobody)
{
    static const char ask[] = "GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n";
    served s = serve(0);
    for (int round = 0; round < 200; round++) {
        int fd = served_connect(served_says(&s, "metrics"));
        for (int i = 0; i < 50 && fd >= 0; i++) {
            send(fd, ask, sizeof ask - 1, MSG_NOSIGNAL);
            for (int64_t until = dray__now() + round % 64 * 1000; dray__now() < until;)
                continue;
        }
        close(fd);
    }
    for (int i = 0; i < 3 && waitpid(s.pid, NULL, WNOHANG | WNOWAIT) == 0; i++)
        scrape(served_says(&s, "metrics"));
    served_stop(&s);
}

static bool ignores(pid_t pid, int number)
{
    char path[64], line[256];
    unsigned long long ignored = 0;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file))
        sscanf(line, "SigIgn: %llx", &ignored);
    if (file)
        fclose(file);
    return ignored >> (number - 1) & 1;
}

TEST(broken_pipes_end_no_server)
{
    char keeper_path[128];
    snprintf(keeper_path, sizeof keeper_path, "%s/k", folder);
    const char *const arguments[] = {"dray", "keeper", "--json", "--socket", keeper_path, NULL};
    served s = serve(0);
    setenv("DRAY_ADDRESS", served_says(&s, "tcp"), 1);
    setenv("DRAY_HOST", "another", 1);
    served k = served_start(arguments, 0);
    unsetenv("DRAY_HOST");
    unsetenv("DRAY_ADDRESS");
    bool both = ignores(s.pid, SIGPIPE) && ignores(k.pid, SIGPIPE);
    served_stop(&k);
    served_stop(&s);
    assert_true(both);
}

/* ---- terminals that are closed --------------------------------------------------------------- */

static void hang_up(served *s)
{
    int status = 0;
    kill(s->pid, SIGHUP);
    assert_int_equal(waitpid(s->pid, &status, 0), s->pid);
    assert_int_equal(status, 0);
    served_stop(s);
}

/* A hangup ends servers as SIGTERM does, and what they have in the folder: sockets, and the token
 * of a coordinator without --master. */
TEST(a_hangup_leaves_nothing)
{
    char keeper_path[128];
    snprintf(keeper_path, sizeof keeper_path, "%s/k", folder);
    const char *const arguments[] = {"dray", "keeper", "--json", "--socket", keeper_path, NULL};
    served s = serve(0);
    setenv("DRAY_ADDRESS", served_says(&s, "tcp"), 1);
    setenv("DRAY_HOST", "another", 1);
    served k = served_start(arguments, 0);
    unsetenv("DRAY_HOST");
    unsetenv("DRAY_ADDRESS");
    hang_up(&k);
    assert_int_equal(access(keeper_path, F_OK), -1);
    hang_up(&s);
    assert_int_equal(access(unix_address + strlen("unix:"), F_OK), -1);
}

TEST(a_hangup_that_is_ignored_ends_nobody)
{
    signal(SIGHUP, SIG_IGN);
    served s = serve(0);
    signal(SIGHUP, SIG_DFL);
    kill(s.pid, SIGHUP);
    scrape(served_says(&s, "metrics"));
    served_stop(&s);
}

/* ---- floods ---------------------------------------------------------------------------------- */

/* What each listener is asked by those who want something of it. */
static void use_coordinator(const char *address)
{
    dray_context *context;
    dray_options options = DRAY_OPTIONS_INIT;
    dray_error error;
    options.address = address;
    options.timeout_ns = 20 * DRAY__SECOND;
    if (dray_open(&options, &context, &error) ||
        dray_barrier(context, "here", 1, DRAY_WAIT_DEFAULT, &error))
        fail_msg("%s: %s", address, error.message);
    dray_close(context);
}

static void use_keeper(const char *address)
{
    dray__channel *channel;
    dray__writer message = {0};
    dray__reply reply;
    dray_error error;
    if (dray__channel_connect(address, dray__deadline(20 * DRAY__SECOND), &channel, &error))
        fail_msg("%s: %s", address, error.message);
    dray__put_u64(&message, 7);
    int rc = dray__call(channel, DRAY__MSG_KEEPER_GET, &message, NULL, 0,
                        dray__deadline(20 * DRAY__SECOND), &reply, &error);
    if (rc != DRAY_EGONE) /* there is no such chunk, it says */
        fail_msg("%s: %s", address, rc ? error.message : "a chunk that nobody put");
    dray__writer_free(&message);
    dray__channel_close(channel);
}

static bool ask_data(int fd)
{
    uint8_t head[DRAY__ANSWER_HEADER];
    struct timeval patience = {.tv_sec = 20};
    dray__writer w = {0};
    dray__cells_request(&w, 7, &(dray__cell){1, 0, 1}, 1);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    bool answered = send(fd, w.data, w.size, MSG_NOSIGNAL) == (ssize_t)w.size &&
                    recv(fd, head, sizeof head, MSG_WAITALL) == (ssize_t)sizeof head;
    dray__writer_free(&w);
    return answered;
}

static void use_data(const char *address)
{
    int fd = served_connect(address);
    if (fd < 0 || !ask_data(fd))
        fail_msg("%s: no answer", address);
    close(fd);
}

enum { LISTENERS = 5, DESCRIPTORS = 256, CROWD = 300, CLOSED_MS = 40000 };

typedef struct target {
    void (*use)(const char *address);
    char address[160];
} target;

/* All of them, in two processes that may open few files. */
typedef struct scene {
    served server, keeper;
    target targets[LISTENERS];
} scene;

static void set_scene(scene *to, int number, void (*use)(const char *), const char *address)
{
    to->targets[number].use = use;
    snprintf(to->targets[number].address, sizeof to->targets[number].address, "%s", address);
}

static void open_scene(scene *out)
{
    char path[128], keeper[140];
    out->server = serve(DESCRIPTORS);
    snprintf(path, sizeof path, "%s.k", unix_address + strlen("unix:"));
    snprintf(keeper, sizeof keeper, "unix:%s", path);
    const char *const arguments[] = {"dray", "keeper", "--json", "--socket", path, NULL};
    setenv("DRAY_ADDRESS", served_says(&out->server, "tcp"), 1);
    setenv("DRAY_HOST", "another", 1);
    out->keeper = served_start(arguments, DESCRIPTORS);
    unsetenv("DRAY_HOST");
    unsetenv("DRAY_ADDRESS");
    set_scene(out, 0, use_coordinator, unix_address);
    set_scene(out, 1, use_coordinator, served_says(&out->server, "tcp"));
    set_scene(out, 2, use_keeper, keeper);
    set_scene(out, 3, use_data, served_says(&out->keeper, "endpoint"));
    set_scene(out, 4, scrape, served_says(&out->server, "metrics"));
}

static void close_scene(scene *s)
{
    served_stop(&s->keeper);
    served_stop(&s->server);
}

/* What those of a flood send when they have connected, and again and again. */
typedef struct flood {
    const char *begin, *more;
    size_t begin_size;
} flood;

static const flood idle = {NULL, NULL, 0};
/* The beginning of a ClientHello. */
static const flood half_open = {"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", NULL, 11};
static const flood slow_tls = {"\x16\x03\x01\x02\x00\x01", "\x00", 6};
static const flood slow_http = {"GET /", "x", 5};
/* Of frames the magic number, of requests to data servers none: they begin with a size. */
static const flood slow_frame = {"DRAY", "\x00", 1}, slow_request = {"\x10", "\x00", 1};

static bool is_gone(int fd)
{
    char waste[512];
    ssize_t n;
    do
        n = recv(fd, waste, sizeof waste, MSG_DONTWAIT);
    while (n > 0);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

/* Keeps CROWD connections to each listener, as well as it is let. */
static void keep_up(const scene *s, const flood *f, int fds[LISTENERS][CROWD])
{
    for (int l = 0; l < LISTENERS; l++)
        for (int i = 0; i < CROWD; i++) {
            int *fd = &fds[l][i];
            if (*fd >= 0 && is_gone(*fd)) {
                close(*fd);
                *fd = -1;
            }
            if (*fd >= 0 && f->more)
                send(*fd, f->more, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (*fd >= 0)
                continue;
            *fd = served_connect_now(s->targets[l].address);
            if (*fd >= 0 && f->begin)
                send(*fd, f->begin, f->begin_size, MSG_NOSIGNAL | MSG_DONTWAIT);
        }
}

static void hold(const flood *f)
{
    static int fds[LISTENERS][CROWD];
    scene s;
    open_scene(&s);
    memset(fds, -1, sizeof fds);
    for (int round = 0; round < 3; round++) {
        keep_up(&s, f, fds);
        for (int l = 0; l < LISTENERS; l++)
            s.targets[l].use(s.targets[l].address);
    }
    for (int l = 0; l < LISTENERS; l++)
        for (int i = 0; i < CROWD; i++)
            close(fds[l][i]);
    close_scene(&s);
}

TEST(the_idle_keep_nobody_out)
{
    hold(&idle);
}

TEST(half_open_handshakes_keep_nobody_out)
{
    hold(&half_open);
}

TEST(slow_bytes_keep_nobody_out)
{
    static const flood *const slow[] = {&slow_tls, &slow_http, &slow_frame, &slow_request};
    for (size_t i = 0; i < sizeof slow / sizeof *slow; i++)
        hold(slow[i]);
}

/* Those who asked once, and are silent then, make room for others, too. */
TEST(silent_readers_make_room)
{
    enum { READERS = 400 };
    static int fds[READERS];
    scene s;
    open_scene(&s);
    const char *endpoint = s.targets[3].address;
    for (int i = 0; i < READERS; i++) {
        fds[i] = served_connect(endpoint);
        if (fds[i] < 0 || !ask_data(fds[i]))
            fail_msg("reader %d of %s: no answer", i, endpoint);
    }
    assert_true(is_gone(fds[0]));
    assert_false(is_gone(fds[READERS - 1]));
    for (int i = 0; i < READERS; i++)
        close(fds[i]);
    close_scene(&s);
}

/* ---- deadlines ------------------------------------------------------------------------------- */

static struct {
    scene all;
    int silent[LISTENERS], slow[LISTENERS];
} waiting;

/* Begun first, and looked at when the other tests are through. */
TEST(silence_begins)
{
    open_scene(&waiting.all);
    for (int l = 0; l < LISTENERS; l++) {
        waiting.silent[l] = served_connect(waiting.all.targets[l].address);
        waiting.slow[l] = served_connect(waiting.all.targets[l].address);
        send(waiting.slow[l], l == 4 ? "G" : "\x16", 1, MSG_NOSIGNAL);
    }
}

/* Over the Unix socket of the coordinator, where its own user comes, 30 s: not waited for here. */
TEST(silence_ends)
{
    int64_t deadline = dray__deadline(CLOSED_MS * DRAY__MILLISECOND);
    for (int l = 1; l < LISTENERS; l++) {
        bool keeper = l == 2; /* a Unix socket, too */
        while (!keeper && !(is_gone(waiting.silent[l]) && is_gone(waiting.slow[l]))) {
            if (dray__now() > deadline)
                fail_msg("%s: a silent connection stays", waiting.all.targets[l].address);
            send(waiting.slow[l], "\x03", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
            poll(NULL, 0, 50);
        }
        waiting.all.targets[l].use(waiting.all.targets[l].address);
    }
    for (int l = 0; l < LISTENERS; l++) {
        close(waiting.silent[l]);
        close(waiting.slow[l]);
    }
    close_scene(&waiting.all);
}

/* ---- changes of keys ------------------------------------------------------------------------- */

static dray__tls_key flooding_with;

static int show_key(SSL *ssl, const EVP_MD *md, const unsigned char **id, size_t *size,
                    SSL_SESSION **out)
{
    static const unsigned char suite[] = {0x13, 0x01};
    (void)md;
    *id = (const unsigned char *)flooding_with.identity;
    *size = strlen(flooding_with.identity);
    *out = SSL_SESSION_new();
    return SSL_SESSION_set1_master_key(*out, flooding_with.bytes, sizeof flooding_with.bytes) &&
           SSL_SESSION_set_cipher(*out, SSL_CIPHER_find(ssl, suite)) &&
           SSL_SESSION_set_protocol_version(*out, TLS1_3_VERSION);
}

/* Asks for new keys again and again, and reads nothing. How often, until it was thrown out; -1: it
 * may do so for ever. */
static int flood_of_keys(const char *address, const dray__tls_key *key)
{
    enum { MOST = 200000 };
    int fd = served_connect(address), sent = 0;
    struct timeval patience = {.tv_sec = 10};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    flooding_with = *key;
    SSL_CTX *context = SSL_CTX_new(TLS_client_method());
    SSL_CTX_set_psk_use_session_callback(context, show_key);
    SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256");
    SSL *ssl = SSL_new(context);
    SSL_set_fd(ssl, fd);
    signal(SIGPIPE, SIG_IGN); /* OpenSSL writes as others do */
    assert_int_equal(SSL_connect(ssl), 1);
    while (sent < MOST && SSL_key_update(ssl, SSL_KEY_UPDATE_REQUESTED) == 1 &&
           SSL_do_handshake(ssl) == 1)
        sent++;
    signal(SIGPIPE, SIG_DFL);
    SSL_free(ssl);
    SSL_CTX_free(context);
    close(fd);
    return sent == MOST ? -1 : sent;
}

static int read_nothing(void *user, const dray__cell *cell, void *out)
{
    (void)user, (void)cell, (void)out;
    return DRAY_EGONE;
}

TEST(changes_of_keys_come_to_an_end)
{
    served s = serve(0);
    const char *address = served_says(&s, "tcp");
    dray__address parsed;
    dray__token key;
    assert_int_equal(dray__address_parse(address, &parsed, NULL), DRAY_OK);
    assert_int_equal(dray__token_find(&parsed, &key, NULL), DRAY_OK);
    assert_int_equal(dray__token_derive(&key, "task", &key, NULL), DRAY_OK);
    assert_true(flood_of_keys(address, &key) >= 0);
    use_coordinator(address);
    served_stop(&s);

    dray__server *server;
    const char *endpoint;
    dray__networks trusted = {.count = 0};
    const dray__stream_keys keys = {.key = &key, .trusted = &trusted};
    const dray__cells cells = {.read = read_nothing};
    assert_int_equal(dray__cells_serve("127.0.0.1", &keys, &cells, &server, &endpoint, NULL), 0);
    assert_true(flood_of_keys(endpoint, &key) >= 0);
    use_data(endpoint);
    dray__server_free(server);
}

/* ---- the library ----------------------------------------------------------------------------- */

/* The library sends without signals, and leaves those of its program as they are. */
TEST(the_library_changes_no_signals)
{
    struct sigaction before[32], after;
    dray_context *context;
    dray_options options = DRAY_OPTIONS_INIT;
    served s = serve(0);
    for (int i = 1; i < 32; i++)
        sigaction(i, NULL, &before[i]);
    assert_true(before[SIGPIPE].sa_handler == SIG_DFL);
    options.address = unix_address;
    options.timeout_ns = 20 * DRAY__SECOND;
    assert_int_equal(dray_open(&options, &context, NULL), DRAY_OK);
    assert_int_equal(dray_barrier(context, "here", 1, DRAY_WAIT_DEFAULT, NULL), DRAY_OK);
    served_stop(&s);
    for (int i = 0; i < 3; i++)
        assert_true(dray_report_post(context, "kind", "{}", NULL) < 0);
    dray_close(context);
    for (int i = 1; i < 32; i++) {
        sigaction(i, NULL, &after);
        assert_true(after.sa_handler == before[i].sa_handler);
    }
}

SUITE(make_folder, remove_folder)
