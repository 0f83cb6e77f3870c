/* Tests TLS with tokens. OpenSSL's own s_client and s_server are the other side. Recorded messages
 * are replayed, wrong tokens and wrong roles are refused, and silent or slow strangers delay no
 * other client. */
#include "control/fixture.h"
#include "suite.h"

#include "net/stream.h"

#include "base/network.h"
#include "control/channel.h"
#include "control/frame.h"
#include "control/token.h"
#include "net/address.h"
#include "weights/registry/registry.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

static coordinator_fixture f;
static dray__token master;

FIXTURE(start)
{
    f.tcp = true;
    fixture_fork(&f, dray__registry_add);
    master = fixture_master(&f);
    return 0;
}

FIXTURE(stop)
{
    fixture_stop(&f);
    return 0;
}

static void use_token(const char *role)
{
    dray__token token;
    char text[DRAY__TOKEN_TEXT];
    assert_int_equal(dray__token_derive(&master, role, &token, NULL), DRAY_OK);
    setenv("DRAY_TOKEN", dray__token_print(&token, text), 1);
}

static int open_as(const char *role, dray_context **out, dray_error *error)
{
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = f.tcp_address;
    options.name = "tls";
    options.role = role;
    options.timeout_ns = 20 * DRAY__SECOND;
    *out = NULL;
    return dray_open(&options, out, error);
}

static int connect_tcp(void)
{
    dray__address address;
    int fd;
    assert_int_equal(dray__address_parse(f.tcp_address, &address, NULL), DRAY_OK);
    assert_int_equal(dray__address_connect(&address, f.tcp_address,
                                           dray__deadline(10 * DRAY__SECOND), &fd, NULL),
                     DRAY_OK);
    return fd;
}

static void still_serves(void)
{
    dray_context *context;
    use_token("task");
    assert_int_equal(open_as(NULL, &context, NULL), DRAY_OK);
    assert_int_equal(dray_barrier(context, "here", 1, 20 * DRAY__SECOND, NULL), DRAY_OK);
    dray_close(context);
    unsetenv("DRAY_TOKEN");
}

/* Whether the other side closes within half a minute. */
static bool closes(int fd)
{
    char data[4096];
    struct pollfd p = {.fd = fd, .events = POLLIN};
    while (poll(&p, 1, 30000) == 1) {
        ssize_t n = recv(fd, data, sizeof data, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
            return true;
    }
    return false;
}

/* ---- OpenSSL's own programs ------------------------------------------------------------------ */

static pid_t run_openssl(char *const arguments[], int *in, int *out)
{
    int to[2], from[2];
    assert_true(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int null = open("/dev/null", O_WRONLY);
        dup2(to[0], STDIN_FILENO);
        dup2(from[1], STDOUT_FILENO);
        dup2(null, STDERR_FILENO);
        execvp("openssl", arguments);
        _exit(127);
    }
    close(to[0]);
    close(from[1]);
    *in = to[1];
    *out = from[0];
    return pid;
}

static bool have_openssl(void)
{
    return system("openssl version >/dev/null 2>&1") == 0;
}

static char *hex_of(const dray__token *token, char out[2 * DRAY__TLS_KEY + 1])
{
    for (size_t i = 0; i < DRAY__TLS_KEY; i++)
        snprintf(out + 2 * i, 3, "%02x", token->bytes[i]);
    return out;
}

static void put_hello(dray__writer *out, const char *role)
{
    dray__writer payload = {0};
    dray__put_u32(&payload, DRAY__PROTOCOL_VERSION);
    dray__put_u32(&payload, DRAY__PROTOCOL_VERSION);
    dray__put_string(&payload, "s_client");
    dray__put_string(&payload, role);
    dray__put_u32(&payload, 0);
    dray__put_u64(&payload, 1);
    dray__put_i64(&payload, getpid());
    dray__frame frame = {
        .type = DRAY__MSG_HELLO, .id = 1, .payload = payload.data, .size = (uint32_t)payload.size};
    assert_int_equal(dray__frame_put(out, &frame, NULL), DRAY_OK);
    dray__writer_free(&payload);
}

/* What openssl s_client gets for a HELLO; 1: nothing, the connection ended. */
static int hello_through_openssl(const dray__token *token, const char *version, const char *role)
{
    char key[2 * DRAY__TLS_KEY + 1], identity[DRAY__TLS_IDENTITY], v[16], at[64];
    snprintf(identity, sizeof identity, "%s", token->identity);
    snprintf(v, sizeof v, "%s", version);
    snprintf(at, sizeof at, "%.60s", f.tcp_address + strlen("tcp:"));
    char *arguments[] = {"openssl",          "s_client",      "-connect", at, "-quiet", "-psk",
                         hex_of(token, key), "-psk_identity", identity,   v,  NULL};
    int in, out, status = 1;
    pid_t pid = run_openssl(arguments, &in, &out);
    dray__writer hello = {0};
    put_hello(&hello, role);
    signal(SIGPIPE, SIG_IGN);
    ssize_t sent = write(in, hello.data, hello.size);
    uint8_t data[4096];
    size_t got = 0;
    struct pollfd p = {.fd = out, .events = POLLIN};
    while (sent > 0 && status == 1 && poll(&p, 1, 20000) == 1) {
        ssize_t n = read(out, data + got, sizeof data - got);
        if (n <= 0)
            break;
        got += (size_t)n;
        uint32_t size, flags;
        if (got < DRAY__FRAME_HEADER)
            continue;
        memcpy(&size, data + 16, sizeof size);
        memcpy(&flags, data + 20, sizeof flags);
        dray_error told;
        if (got < DRAY__FRAME_HEADER + size)
            continue;
        dray__frame_get_error(dray__reader_of(data + DRAY__FRAME_HEADER, size), &told);
        status = flags & DRAY__FRAME_ERROR ? told.code : DRAY_OK;
    }
    close(in);
    close(out);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    dray__writer_free(&hello);
    return status;
}

TEST(s_client_gets_in_with_a_token_alone)
{
    if (!have_openssl())
        skip();
    dray__token engine, wrong;
    assert_int_equal(dray__token_derive(&master, "engine", &engine, NULL), DRAY_OK);
    assert_int_equal(hello_through_openssl(&master, "-tls1_3", "trainer"), DRAY_OK);
    assert_int_equal(hello_through_openssl(&engine, "-tls1_3", "engine"), DRAY_OK);
    assert_int_equal(hello_through_openssl(&engine, "-tls1_3", "trainer"), DRAY_EPERM);
    assert_int_equal(hello_through_openssl(&engine, "-tls1_2", "engine"), 1);
    wrong = engine;
    wrong.bytes[31] ^= 1;
    assert_int_equal(hello_through_openssl(&wrong, "-tls1_3", "engine"), 1);
    wrong = engine; /* an engine's key under a trainer's name */
    snprintf(wrong.identity, sizeof wrong.identity, "%.*strainer", 23, engine.identity);
    assert_int_equal(hello_through_openssl(&wrong, "-tls1_3", "trainer"), 1);
    wrong = engine; /* of another session */
    wrong.identity[6] = wrong.identity[6] == '0' ? '1' : '0';
    assert_int_equal(hello_through_openssl(&wrong, "-tls1_3", "engine"), 1);
    still_serves();
}

static int free_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&at, sizeof at), 0);
    getsockname(fd, (struct sockaddr *)&at, &size);
    close(fd);
    return ntohs(at.sin_port);
}

/* The client's side of a handshake with openssl s_server, started with these arguments. */
static int handshake_with_server(char *const arguments[], int port, const dray__token *token)
{
    int in, out;
    pid_t pid = run_openssl(arguments, &in, &out);
    char text[64];
    snprintf(text, sizeof text, "tcp:127.0.0.1:%d", port);
    dray__address address;
    assert_int_equal(dray__address_parse(text, &address, NULL), DRAY_OK);
    int fd = -1;
    for (int i = 0; i < 1000 && fd < 0; i++)
        if (dray__address_connect(&address, text, dray__deadline(DRAY__SECOND), &fd, NULL))
            poll(NULL, 0, 10);
    assert_true(fd >= 0);
    dray__tls *tls;
    int status;
    assert_int_equal(dray__tls_connect(fd, token, &tls, NULL), DRAY_OK);
    while ((status = dray__tls_handshake(tls, NULL)) == DRAY_EAGAIN) {
        struct pollfd p = {.fd = fd, .events = dray__tls_events(tls)};
        assert_int_equal(poll(&p, 1, 20000), 1);
    }
    if (status == DRAY_OK) {
        assert_int_equal(dray__tls_send(tls, "hello\n", 6), 6);
        char got[64] = "";
        struct pollfd p = {.fd = out, .events = POLLIN};
        size_t n = 0;
        while (!strstr(got, "hello") && n + 1 < sizeof got && poll(&p, 1, 20000) == 1) {
            ssize_t more = read(out, got + n, sizeof got - 1 - n);
            assert_true(more > 0);
            n += (size_t)more;
        }
        assert_non_null(strstr(got, "hello"));
    }
    dray__tls_free(tls);
    close(fd);
    close(in);
    close(out);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    return status;
}

TEST(s_server_is_believed_with_the_key_alone)
{
    if (!have_openssl())
        skip();
    char key[2 * DRAY__TLS_KEY + 1], port[16], identity[DRAY__TLS_IDENTITY];
    snprintf(identity, sizeof identity, "%s", master.identity);
    for (int wrong = 0; wrong < 2; wrong++) {
        dray__token shown = master;
        int number = free_port();
        snprintf(port, sizeof port, "%d", number);
        shown.bytes[0] ^= (uint8_t)wrong;
        char *arguments[] = {"openssl",       "s_server", "-accept", port,
                             "-quiet",        "-nocert",  "-psk",    hex_of(&shown, key),
                             "-psk_identity", identity,   "-tls1_3", NULL};
        assert_int_equal(handshake_with_server(arguments, number, &master),
                         wrong ? DRAY_EPERM : DRAY_OK);
    }
    /* A server that has a certificate instead of the key. */
    char file[160], certificate[160], command[512];
    snprintf(file, sizeof file, "%s/key.pem", f.folder);
    snprintf(certificate, sizeof certificate, "%s/cert.pem", f.folder);
    snprintf(command, sizeof command,
             "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=x "
             "-keyout %s -out %s >/dev/null 2>&1",
             file, certificate);
    assert_int_equal(system(command), 0);
    int number = free_port();
    snprintf(port, sizeof port, "%d", number);
    char *arguments[] = {"openssl", "s_server", "-accept",   port,      "-quiet", "-key",
                         file,      "-cert",    certificate, "-tls1_3", NULL};
    assert_int_not_equal(handshake_with_server(arguments, number, &master), DRAY_OK);
    unlink(file);
    unlink(certificate);
}

/* ---- replay ---------------------------------------------------------------------------------- */

/* Passes on what lies at one end; what goes to the coordinator is recorded. */
static bool pass_on(int from, int to, dray__writer *record)
{
    uint8_t data[4096];
    ssize_t n = recv(from, data, sizeof data, MSG_DONTWAIT);
    if (n <= 0)
        return false;
    if (record)
        dray__put_bytes(record, data, (size_t)n);
    assert_int_equal(send(to, data, (size_t)n, MSG_NOSIGNAL), n);
    return true;
}

static size_t count_sessions(void)
{
    dray_context *context = fixture_open(&f, "counter", "tool", 0);
    char *text;
    size_t count = 0;
    assert_int_equal(dray_context_status(context, &text, NULL), DRAY_OK);
    for (const char *at = text; (at = strstr(at, "\"connections\"")); at++)
        count++;
    dray_free(text);
    dray_close(context);
    return count;
}

TEST(a_recorded_session_cannot_be_replayed)
{
    int pair[2], fd = connect_tcp();
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    dray__tls *tls;
    dray__writer record = {0}, hello = {0};
    dray__inbox inbox = {0};
    dray__frame frame;
    int fds[DRAY__FRAME_FDS], status;
    put_hello(&hello, "trainer");
    assert_int_equal(dray__tls_connect(pair[0], &master, &tls, NULL), DRAY_OK);
    inbox.tls = tls;
    bool said = false;
    int64_t deadline = dray__deadline(20 * DRAY__SECOND);
    while ((status = dray__inbox_take(&inbox, &frame, fds, NULL)) == DRAY_EAGAIN) {
        assert_true(dray__now() < deadline);
        if (dray__tls_handshake(tls, NULL) == DRAY_OK && !said)
            said = dray__tls_send(tls, hello.data, hello.size) == (ssize_t)hello.size;
        bool moved = pass_on(pair[1], fd, &record);
        moved |= pass_on(fd, pair[1], NULL);
        if (dray__inbox_fill(&inbox, pair[0], NULL) == DRAY_EAGAIN && !moved)
            poll(NULL, 0, 1);
    }
    assert_true(status == DRAY_OK && frame.flags == DRAY__FRAME_REPLY);
    size_t before = count_sessions();
    for (int cut = 0; cut < 4; cut++) {
        int again = connect_tcp();
        assert_true(send(again, record.data, record.size * (4u - (unsigned)cut) / 4, MSG_NOSIGNAL) >
                    0);
        if (cut == 0)
            assert_true(closes(again));
        close(again);
    }
    assert_int_equal(count_sessions(), before);
    dray__inbox_free(&inbox);
    dray__tls_free(tls);
    dray__writer_free(&record);
    dray__writer_free(&hello);
    close(pair[0]);
    close(pair[1]);
    close(fd);
}

/* ---- roles ----------------------------------------------------------------------------------- */

static int send_type(dray_context *context, uint16_t type)
{
    dray__channel *channel;
    assert_int_equal(dray__channel_open(context, &channel, NULL), DRAY_OK);
    int status =
        dray__call(channel, type, NULL, NULL, 0, dray__deadline(20 * DRAY__SECOND), NULL, NULL);
    dray__channel_close(channel);
    return status;
}

static const dray__tls_key *data_key(const dray_context *context)
{
    return dray__context_keys(context)->key;
}

TEST(roles_do_what_is_theirs)
{
    static const struct {
        const char *role;
        bool publishes, subscribes, works, moves;
    } cases[] = {{"trainer", true, false, true, true},
                 {"engine", false, true, true, true},
                 {"task", false, false, true, false},
                 {"tool", false, false, false, false}};
    dray_context *context, *wrong;
    dray_error error;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        use_token(cases[i].role);
        assert_int_equal(open_as(NULL, &context, &error), DRAY_OK); /* its role is the token's */
        /* An empty message of a right role is malformed, of a wrong one not even looked at. */
        assert_int_equal(send_type(context, DRAY__MSG_PUBLISHER_OPEN) != DRAY_EPERM,
                         cases[i].publishes);
        assert_int_equal(send_type(context, DRAY__MSG_PUBLISH) != DRAY_EPERM, cases[i].publishes);
        assert_int_equal(send_type(context, DRAY__MSG_SUBSCRIBER_OPEN) != DRAY_EPERM,
                         cases[i].subscribes);
        assert_int_equal(dray_barrier(context, "r", 1, DRAY__SECOND, NULL) == DRAY_OK,
                         cases[i].works);
        assert_int_equal(data_key(context)->identity[0] != 0, cases[i].moves);
        assert_int_equal(send_type(context, DRAY__MSG_STATUS), DRAY_OK);
        for (size_t other = 0; other < 3; other++)
            if (other != i) {
                assert_int_equal(open_as(cases[other].role, &wrong, &error), DRAY_EPERM);
                assert_null(wrong);
            }
        dray_close(context);
        assert_int_equal(open_as("tool", &context, &error), DRAY_OK); /* everybody may look */
        assert_int_equal(send_type(context, DRAY__MSG_PUBLISHER_OPEN), DRAY_EPERM);
        assert_int_equal(data_key(context)->identity[0], 0);
        dray_close(context);
    }
    unsetenv("DRAY_TOKEN");
}

/* A session's further connections have its role: neither less nor more. */
TEST(sessions_are_joined_in_their_role)
{
    static const char *const roles[] = {"trainer", "engine", "task", "master"};
    char text[DRAY__TOKEN_TEXT];
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        for (size_t k = 0; k < sizeof roles / sizeof *roles; k++) {
            dray_context *context;
            dray__channel *channel = NULL;
            for (size_t which = 0; which < 2; which++) {
                const char *role = roles[which ? k : i];
                if (strcmp(role, "master") == 0)
                    setenv("DRAY_TOKEN", dray__token_print(&master, text), 1);
                else
                    use_token(role);
                if (!which)
                    assert_int_equal(open_as(i == 3 ? "trainer" : NULL, &context, NULL), DRAY_OK);
            }
            assert_int_equal(dray__channel_open(context, &channel, NULL),
                             i == k ? DRAY_OK : DRAY_EPERM);
            dray__channel_close(channel);
            dray_close(context);
        }
    unsetenv("DRAY_TOKEN");
}

TEST(members_share_a_data_key)
{
    dray_context *a, *b = fixture_open(&f, "b", "engine", 0);
    use_token("trainer");
    assert_int_equal(open_as(NULL, &a, NULL), DRAY_OK);
    unsetenv("DRAY_TOKEN");
    const dray__tls_key *mine = data_key(a), *theirs = data_key(b);
    assert_true(mine->identity[0] && memcmp(mine, theirs, sizeof *mine) == 0);
    assert_memory_not_equal(mine->bytes, master.bytes, sizeof mine->bytes);
    int fd = connect_tcp(); /* it is no way into the coordinator */
    dray__tls *tls;
    int status;
    assert_int_equal(dray__tls_connect(fd, mine, &tls, NULL), DRAY_OK);
    while ((status = dray__tls_handshake(tls, NULL)) == DRAY_EAGAIN) {
        struct pollfd p = {.fd = fd, .events = dray__tls_events(tls)};
        assert_int_equal(poll(&p, 1, 20000), 1);
    }
    assert_int_equal(status, DRAY_EPERM);
    dray__tls_free(tls);
    close(fd);
    dray_close(a);
    dray_close(b);
}

TEST(tokens_are_checked)
{
    char good[DRAY__TOKEN_TEXT], bad[DRAY__TOKEN_TEXT + 8];
    dray__token token;
    dray__token_print(&master, good);
    assert_int_equal(dray__token_parse(good, "x", &token, NULL), DRAY_OK);
    assert_memory_equal(&token, &master, sizeof token);
    size_t length = strlen(good);
    for (size_t i = 0; i < length; i++) { /* cut, and each character replaced */
        memcpy(bad, good, length + 1);
        bad[i] = 0;
        assert_int_equal(dray__token_parse(bad, "x", &token, NULL), DRAY_EFORMAT);
        memcpy(bad, good, length + 1);
        bad[i] = 'G';
        assert_int_equal(dray__token_parse(bad, "x", &token, NULL), DRAY_EFORMAT);
    }
    snprintf(bad, sizeof bad, "%s\n", good);
    assert_int_equal(dray__token_parse(bad, "x", &token, NULL), DRAY_OK);
    snprintf(bad, sizeof bad, "%s0", good);
    assert_int_equal(dray__token_parse(bad, "x", &token, NULL), DRAY_EFORMAT);
    dray__token engine;
    assert_int_equal(dray__token_derive(&master, "engine", &engine, NULL), DRAY_OK);
    assert_int_equal(dray__token_derive(&engine, "trainer", &token, NULL), DRAY_EINVALID);
    assert_int_equal(dray__token_derive(&master, "master", &token, NULL), DRAY_EINVALID);
    assert_int_equal(dray__token_derive(&master, "boss", &token, NULL), DRAY_EINVALID);
    char path[160];
    snprintf(path, sizeof path, "%s/made", f.folder);
    assert_int_equal(dray__token_master(path, &token, NULL), DRAY_OK); /* made */
    dray__token again;
    assert_int_equal(dray__token_master(path, &again, NULL), DRAY_OK); /* found */
    assert_memory_equal(&token, &again, sizeof token);
    assert_int_equal(dray__token_write(path, &engine, NULL), DRAY_EEXIST);
    unlink(path);
    assert_int_equal(dray__token_write(path, &engine, NULL), DRAY_OK);
    assert_int_equal(dray__token_master(path, &again, NULL), DRAY_EINVALID);
    unlink(path);
}

enum { WRITERS = 4, WRITES = 200 };

typedef struct writer {
    pthread_barrier_t *barrier;
    char path[160];
    dray__token master;
    int state_failed;
} writer;

static void *make_tokens(void *user)
{
    writer *w = user;
    dray__token state;
    uint64_t number;
    for (int i = 0; i < WRITES; i++) {
        char path[200];
        snprintf(path, sizeof path, "%s-%d", w->path, i);
        pthread_barrier_wait(w->barrier);
        if (dray__token_master(path, &w->master, NULL))
            w->master = (dray__token){{0}, {0}};
        strcat(path, ".state");
        w->state_failed += dray__token_state(path, &state, &number, NULL) != DRAY_OK;
        pthread_barrier_wait(w->barrier);
        pthread_barrier_wait(w->barrier); /* the test has compared them */
    }
    return NULL;
}

/* Those who begin at once with one file, as in containers where all have the same number, have the
 * token that is in it. */
TEST(writers_at_once_have_one_token)
{
    pthread_barrier_t barrier;
    pthread_t threads[WRITERS];
    static writer writers[WRITERS];
    int wrong = 0;
    pthread_barrier_init(&barrier, NULL, WRITERS + 1);
    for (int k = 0; k < WRITERS; k++) {
        writers[k] = (writer){.barrier = &barrier};
        snprintf(writers[k].path, sizeof writers[k].path, "%s/at-once", f.folder);
        assert_int_equal(pthread_create(&threads[k], NULL, make_tokens, &writers[k]), 0);
    }
    for (int i = 0; i < WRITES; i++) {
        char path[200];
        dray__token found;
        snprintf(path, sizeof path, "%s-%d", writers[0].path, i);
        pthread_barrier_wait(&barrier);
        pthread_barrier_wait(&barrier);
        wrong += dray__token_read(path, &found, NULL) != DRAY_OK;
        for (int k = 0; k < WRITERS; k++)
            wrong += memcmp(&writers[k].master, &found, sizeof found) != 0;
        unlink(path);
        strcat(path, ".state");
        unlink(path);
        pthread_barrier_wait(&barrier);
    }
    for (int k = 0; k < WRITERS; k++) {
        pthread_join(threads[k], NULL);
        wrong += writers[k].state_failed;
    }
    pthread_barrier_destroy(&barrier);
    assert_int_equal(wrong, 0);
}

/* Root may read every file, but a token that another user wrote is that user's word. */
TEST(token_files_are_of_their_user)
{
    char path[160];
    dray__token token;
    dray_error error;
    if (geteuid() != 0)
        skip(); /* only root can give files away */
    snprintf(path, sizeof path, "%s/given", f.folder);
    assert_int_equal(dray__token_write(path, &master, NULL), DRAY_OK);
    assert_int_equal(dray__token_read(path, &token, NULL), DRAY_OK);
    assert_int_equal(chown(path, 12345, (gid_t)-1), 0);
    assert_int_equal(dray__token_read(path, &token, &error), DRAY_EPERM);
    assert_non_null(strstr(error.message, "user 12345"));
    unlink(path);
}

/* Everybody may write into /tmp: what lies there says nothing of who the server is. */
TEST(tokens_are_not_looked_for_in_tmp)
{
    char path[160], text[64], *kept = strdup(getenv("XDG_RUNTIME_DIR"));
    unsigned port = 1024 + (unsigned)getpid() % 60000;
    dray__address address;
    dray__token token;
    dray_error error;
    snprintf(text, sizeof text, "tcp:127.0.0.1:%u", port);
    assert_int_equal(dray__address_parse(text, &address, NULL), DRAY_OK);
    snprintf(path, sizeof path, "/tmp/dray-%u-tcp-%u.token", (unsigned)geteuid(), port);
    unlink(path);
    assert_int_equal(dray__token_write(path, &master, NULL), DRAY_OK);
    for (int empty = 0; empty < 2; empty++) {
        if (empty)
            setenv("XDG_RUNTIME_DIR", "", 1);
        else
            unsetenv("XDG_RUNTIME_DIR");
        assert_int_equal(dray__token_find(&address, &token, &error), DRAY_ENOENT);
        assert_non_null(strstr(error.message, "XDG_RUNTIME_DIR"));
    }
    struct event_base *base = event_base_new();
    dray__coordinator *coordinator = NULL;
    dray__coordinator_options options = {.tcp_address = "127.0.0.1:0"};
    assert_int_equal(dray__coordinator_new(base, &options, &coordinator, &error), DRAY_ENOENT);
    assert_non_null(strstr(error.message, "--master"));
    event_base_free(base);
    setenv("XDG_RUNTIME_DIR", kept, 1);
    free(kept);
    unlink(path);
}

/* ---- strangers ------------------------------------------------------------------------------- */

TEST(silent_strangers_make_room)
{
    enum { CROWD = 400 };
    int fds[CROWD];
    for (int i = 0; i < CROWD; i++) {
        fds[i] = connect_tcp();
        if (i % 3 == 1) /* the beginning of a ClientHello, and nothing more */
            assert_int_equal(send(fds[i], "\x16\x03\x01\x02\x00\x01", 6, MSG_NOSIGNAL), 6);
        if (i % 100 == 0)
            still_serves();
    }
    still_serves();
    assert_true(closes(fds[0]));
    for (int i = 0; i < CROWD; i++)
        close(fds[i]);
}

TEST(handshakes_have_a_deadline)
{
    coordinator_fixture quick = {.tcp = true, .options = {.hello_ns = 100 * DRAY__MILLISECOND}};
    fixture_start(&quick, NULL);
    char address[64];
    snprintf(address, sizeof address, "%s", f.tcp_address);
    snprintf(f.tcp_address, sizeof f.tcp_address, "%s", quick.tcp_address);
    int silent = connect_tcp(), slow = connect_tcp();
    bool closed = false;
    for (int i = 0; i < 3000 && !closed; i++) { /* a byte now and then does not help */
        closed = send(slow, "\x16", 1, MSG_NOSIGNAL) < 0;
        poll(NULL, 0, 10);
    }
    assert_true(closed);
    assert_true(closes(silent));
    snprintf(f.tcp_address, sizeof f.tcp_address, "%s", address);
    close(silent);
    close(slow);
    fixture_stop(&quick);
}

/* ---- networks -------------------------------------------------------------------------------- */

static bool trusts(const char *list, const char *text)
{
    dray__networks networks;
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6};
    struct sockaddr_in v4 = {.sin_family = AF_INET};
    assert_int_equal(dray__networks_parse(list, &networks, NULL), DRAY_OK);
    if (inet_pton(AF_INET, text, &v4.sin_addr) == 1)
        return dray__networks_have(&networks, (struct sockaddr *)&v4);
    assert_int_equal(inet_pton(AF_INET6, text, &v6.sin6_addr), 1);
    return dray__networks_have(&networks, (struct sockaddr *)&v6);
}

TEST(networks_are_read)
{
    static const char *const bad[] = {"10.0.0.0/33", "10.0.0.1/8",  "fd00::/129", "fd00::1/8", "x",
                                      "10.0.0/8",    "10.0.0.0/",   "1.2.3.4/-1", "::/0/0",    "/8",
                                      "10.0.0.0/8x", "10.0.0.0/ 8", "1.2.3.4.5"};
    dray__networks networks = {.count = 7};
    dray_error error;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (dray__networks_parse(bad[i], &networks, &error) != DRAY_EINVALID)
            fail_msg("'%s' was taken", bad[i]);
    assert_int_equal(networks.count, 7); /* left alone */
    assert_true(trusts("10.1.0.0/16, fd00::/8 192.168.1.7", "10.1.255.3"));
    assert_true(trusts("10.1.0.0/16, fd00::/8 192.168.1.7", "192.168.1.7"));
    assert_true(trusts("10.1.0.0/16, fd00::/8 192.168.1.7", "fd12::1"));
    assert_true(trusts("10.1.0.0/16", "::ffff:10.1.2.3")); /* the same host, seen over IPv6 */
    assert_false(trusts("10.1.0.0/16, fd00::/8 192.168.1.7", "10.2.0.1"));
    assert_false(trusts("10.1.0.0/16, fd00::/8 192.168.1.7", "192.168.1.6"));
    assert_false(trusts("10.1.0.0/16, fd00::/8 192.168.1.7", "fe80::1"));
    assert_true(trusts("10.128.0.0/9", "10.129.0.0") && !trusts("10.128.0.0/9", "10.127.0.0"));
    assert_true(trusts("0.0.0.0/0", "8.8.8.8") && !trusts("0.0.0.0/0", "2001:db8::1"));
    assert_true(trusts("::/0", "2001:db8::1"));
    assert_false(trusts("", "127.0.0.1") || trusts(NULL, "127.0.0.1"));
    dray_options options = DRAY_OPTIONS_INIT;
    dray_context *context;
    options.address = f.unix_address;
    options.trusted_networks = "10.0.0.0/40";
    assert_int_equal(dray_open(&options, &context, NULL), DRAY_EINVALID);
}

TEST(ipv6_works)
{
    dray__address address;
    assert_int_equal(dray__address_parse("tcp:[::1]:0", &address, NULL), DRAY_OK);
    int probe;
    if (dray__address_listen(&address, "tcp:[::1]:0", NULL, NULL, &probe, NULL) != DRAY_OK)
        skip(); /* no IPv6 here */
    close(probe);
    struct event_base *base = event_base_new();
    dray__coordinator *coordinator;
    char path[160];
    snprintf(path, sizeof path, "%s/v6", f.folder);
    dray__coordinator_options options = {.tcp_address = "[::1]:0", .token_path = path};
    assert_int_equal(dray__coordinator_new(base, &options, &coordinator, NULL), DRAY_OK);
    assert_memory_equal(dray__coordinator_tcp(coordinator), "tcp:[::1]:", 10);
    char text[64];
    snprintf(text, sizeof text, "%s", dray__coordinator_tcp(coordinator));
    pid_t child = fork();
    if (child == 0) {
        setenv("DRAY_TOKEN_FILE", path, 1);
        dray_options own = DRAY_OPTIONS_INIT;
        dray_context *context;
        own.address = text;
        int status = dray_open(&own, &context, NULL);
        if (!status)
            dray_close(context);
        _exit(status == DRAY_OK ? 0 : 1);
    }
    int status;
    while (waitpid(child, &status, WNOHANG) == 0) {
        event_base_loop(base, EVLOOP_NONBLOCK);
        poll(NULL, 0, 1);
    }
    assert_int_equal(status, 0);
    dray__coordinator_free(coordinator);
    event_base_free(base);
    assert_int_equal(unlink(path), 0); /* a master's file stays */
}

SUITE(start, stop)
