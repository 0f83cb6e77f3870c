/* Tests to which stores the coordinator connects with its password: to the addresses of its own
 * list, a bounded number of times, and never while a client waits for it. No redis-server is
 * needed, because the listeners only note what they receive. */
#include "queue/fixture.h"

#include "base/error.h"
#include "net/address.h"
#include "queue/storage/stores.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

static const char *const text[] = {"text"};
static const dray_queue_task tasks[] = {{.name = "train", .needs = text, .needs_count = 1}};

/* A socket that somebody connects to, or not. */
typedef struct listener {
    char path[100], address[110], store[120];
    int fd;
} listener;

static void listen_at(listener *l, const char *folder, const char *name)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    snprintf(l->path, sizeof l->path, "%.60s/%.30s", folder, name);
    snprintf(l->address, sizeof l->address, "unix:%s", l->path);
    snprintf(l->store, sizeof l->store, "redis:%s", l->address);
    snprintf(at.sun_path, sizeof at.sun_path, "%s", l->path);
    l->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (bind(l->fd, (struct sockaddr *)&at, sizeof at) || listen(l->fd, 128))
        die(l->path, NULL);
}

/* How many have connected since the last time; *said: whether one of them sent the word. */
static int connected(const listener *l, const char *word, bool *said)
{
    int count = 0, fd;
    for (*said = false; (fd = accept4(l->fd, NULL, NULL, SOCK_CLOEXEC)) >= 0; count++) {
        char data[1024];
        struct pollfd p = {.fd = fd, .events = POLLIN};
        ssize_t n = poll(&p, 1, 1000) == 1 ? recv(fd, data, sizeof data - 1, MSG_DONTWAIT) : 0;
        data[n > 0 ? n : 0] = 0;
        *said |= strstr(data, word) != NULL;
        close(fd);
    }
    return count;
}

static void close_listener(listener *l)
{
    close(l->fd);
    unlink(l->path);
}

/* ---- an empty store, which takes any password ------------------------------------------------ */

typedef struct store { /* a process of its own */
    listener at;
    pid_t process;
    atomic_bool *heard; /* the password; shared */
} store;

static void answer_one(store *self, int fd)
{
    char data[4096];
    ssize_t n = recv(fd, data, sizeof data - 1, 0);
    data[n > 0 ? n : 0] = 0;
    bool scan = strstr(data, "SCAN") != NULL;
    const char *answer = scan ? "*2\r\n$1\r\n0\r\n*0\r\n" : "+OK\r\n";
    if (strstr(data, "open-sesame"))
        atomic_store(self->heard, true);
    if (n > 0)
        send(fd, answer, strlen(answer), MSG_NOSIGNAL);
}

static _Noreturn void serve_store(store *self)
{
    enum { MOST = 64 };
    struct pollfd fds[MOST] = {{.fd = self->at.fd, .events = POLLIN}};
    nfds_t count = 1;
    for (;;) {
        poll(fds, count, 10);
        for (nfds_t i = 1; i < count; i++)
            if (fds[i].revents & POLLIN)
                answer_one(self, fds[i].fd);
        int fd = count < MOST ? accept4(self->at.fd, NULL, NULL, SOCK_CLOEXEC) : -1;
        if (fd >= 0)
            fds[count++] = (struct pollfd){.fd = fd, .events = POLLIN};
    }
}

static void store_up(store *self, const char *folder)
{
    listen_at(&self->at, folder, "store");
    self->heard =
        mmap(NULL, sizeof *self->heard, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(self->heard != MAP_FAILED);
    self->process = fork();
    assert_true(self->process >= 0);
    if (self->process == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        serve_store(self);
    }
}

static void store_down(store *self)
{
    kill(self->process, SIGKILL);
    waitpid(self->process, NULL, 0);
    munmap(self->heard, sizeof *self->heard);
    close_listener(&self->at);
}

static void make_folder(char folder[96])
{
    const char *tmp = getenv("TMPDIR");
    snprintf(folder, 96, "%.40s/dray-stores-XXXXXX", tmp ? tmp : "/tmp");
    assert_non_null(mkdtemp(folder));
}

static int open_in(dray_context *context, const char *name, int32_t durability, const char *address,
                   dray_queue **out, dray_error *said)
{
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    o.tasks = tasks;
    o.task_count = 1;
    o.durability = durability;
    o.backend = DRAY_BACKEND_REDIS;
    o.backend_address = address;
    return dray_queue_open(context, name, &o, out, said);
}

static void know_password(bool keeper)
{
    (void)keeper;
    setenv("DRAY_REDIS_PASSWORD", "open-sesame", 1);
}

static void write_stores(const queue_fixture *f, const char *lines)
{
    char path[128];
    snprintf(path, sizeof path, "%s/stores", f->journals);
    FILE *file = fopen(path, "w");
    fputs(lines, file);
    fclose(file);
}

static char *read_stores(const char *folder)
{
    static char lines[4096];
    char path[128];
    snprintf(path, sizeof path, "%s/stores", folder);
    FILE *file = fopen(path, "r");
    size_t n = file ? fread(lines, 1, sizeof lines - 1, file) : 0;
    lines[n] = 0;
    if (file)
        fclose(file);
    return lines;
}

/* ---- a coordinator --------------------------------------------------------------------------- */

/* Whatever a client, a folder or a checkpoint names: the password goes to the list's addresses. */
TEST(the_password_goes_nowhere_else)
{
    queue_fixture f = {.without_keeper = true, .durable = true, .prepare = know_password};
    store mine;
    listener theirs;
    dray_queue *queue;
    bool said;
    char lines[300], at[96];
    make_folder(at);
    store_up(&mine, at);
    listen_at(&theirs, at, "theirs");
    f.stores[0] = mine.at.store;
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "worker");
    int rc = open_in(context, "q", DRAY_DURABILITY_NONE, theirs.address, &queue, &error);
    if (!rc)
        dray_queue_close(queue);
    OK(open_in(context, "own", DRAY_DURABILITY_NONE, mine.at.address, &queue, &error));
    dray_queue_close(queue);
    OK(open_in(context, "own", DRAY_DURABILITY_NONE, NULL, &queue, &error)); /* there is one */
    leave(queue, context);
    fixture_end(f.coordinator_pid, SIGTERM); /* drops what its queues have */
    assert_int_equal(connected(&theirs, "open-sesame", &said), 0);
    assert_false(said);
    assert_int_equal(rc, DRAY_EPERM);
    assert_true(atomic_load(mine.heard));
    snprintf(lines, sizeof lines, "\nredis 0123456789abcdef %s\n", theirs.address);
    write_stores(&f, lines); /* of a coordinator with another list */
    f.coordinator_pid = fixture_spawn(&f, false);
    for (int i = 0; i < 400 && !strstr(read_stores(f.journals), "+1"); i++)
        usleep(25000);
    assert_non_null(strstr(read_stores(f.journals), "redis 0123456789abcdef+1 unix:"));
    assert_int_equal(connected(&theirs, "open-sesame", &said), 0);
    store_down(&mine);
    close_listener(&theirs);
    rmdir(at);
    fixture_down(&f);
}

/* Begins a coordinator of the folder in this process. */
static int begin_at(const queue_fixture *f, const char *const *stores, dray_error *said)
{
    char socket[128];
    struct event_base *base = event_base_new();
    dray__coordinator *coordinator;
    snprintf(socket, sizeof socket, "%s/other", f->folder);
    const dray__coordinator_options options = {.unix_path = socket};
    int rc = dray__coordinator_new(base, &options, &coordinator, said);
    if (!rc) {
        rc = dray__queue_add(coordinator, base, NULL, f->journals, stores, said);
        dray__coordinator_free(coordinator);
    }
    event_base_free(base);
    return rc;
}

/* What a journal says is no reason, either: the administrator has to say it again. */
TEST(journals_name_no_other_store)
{
    queue_fixture f = {.without_keeper = true, .durable = true};
    dray_queue *queue;
    store s;
    const char *stores[2] = {NULL, NULL}, *const wrong[] = {"redis:nowhere", NULL};
    char folder[96];
    make_folder(folder);
    store_up(&s, folder);
    f.stores[0] = s.at.store;
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "worker");
    OK(open_in(context, "kept", DRAY_DURABILITY_JOURNAL, s.at.address, &queue, &error));
    fixture_end(f.coordinator_pid, SIGKILL);
    FAILS(DRAY_EPERM, begin_at(&f, stores, &error));
    assert_non_null(strstr(error.message, s.at.address));
    assert_non_null(strstr(error.message, "--store"));
    FAILS(DRAY_EINVALID, begin_at(&f, wrong, &error));
    stores[0] = s.at.store;
    OK(begin_at(&f, stores, &error));
    f.coordinator_pid = fixture_spawn(&f, false);
    leave(queue, context);
    store_down(&s);
    rmdir(folder);
    fixture_down(&f);
}

/* Nobody waits for stores that do not answer, however many there are. */
TEST(a_start_does_not_wait_for_stores)
{
    enum { SILENT = 8 };
    queue_fixture f = {.without_keeper = true, .durable = true};
    listener l[SILENT];
    char lines[SILENT * 160], *at = lines, folder[96];
    make_folder(folder);
    for (int i = 0; i < SILENT; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        listen_at(&l[i], folder, name);
        at += sprintf(at, "\nredis %016x %s\n", i + 1, l[i].address);
    }
    for (int i = 0; i < 4; i++)
        f.stores[i] = l[i].store;
    fixture_up(&f);
    fixture_end(f.coordinator_pid, SIGTERM);
    write_stores(&f, lines);
    int64_t begin = dray__now();
    f.coordinator_pid = fixture_spawn(&f, false);
    int64_t took = dray__now() - begin; /* with 3 s for each it was 24 s */
    for (int i = 0; i < SILENT; i++)
        close_listener(&l[i]);
    rmdir(folder);
    write_stores(&f, "");
    fixture_restart(&f); /* it would wait for the try that is under way */
    fixture_down(&f);
    assert_true(took < 8 * DRAY__SECOND);
}

/* ---- the list of spaces ---------------------------------------------------------------------- */

typedef struct asked {
    bool listed;
    uint64_t used; /* and all above */
} asked;

static bool is_used(void *user, uint64_t space)
{
    return space >= ((const asked *)user)->used;
}

static bool is_listed(void *user, const char *kind, const char *address)
{
    return ((const asked *)user)->listed && strcmp(kind, "redis") == 0 &&
           strncmp(address, "unix:", 5) == 0;
}

static void clean(const dray__stores_options *options, const asked *a)
{
    dray__stores *stores;
    OK(dray__stores_new(options, &stores, &error));
    OK(dray__stores_clean(stores, is_used, is_listed, (void *)(uintptr_t)a, &error));
    OK(dray__stores_note(stores, "redis", "unix:/noted/meanwhile", 7, &error));
    for (int i = 0; i < 4000 && !dray__stores_done(stores); i++)
        usleep(5000);
    assert_true(dray__stores_done(stores));
    dray__stores_free(stores);
}

TEST(a_list_that_cannot_be_read)
{
    queue_fixture f = {.without_keeper = true};
    make_folder(f.journals);
    char path[128];
    snprintf(path, sizeof path, "%s/stores", f.journals);
    const dray__stores_options options = {.folder = f.journals};
    dray__stores *stores;
    OK(dray__stores_new(&options, &stores, &error));
    assert_int_equal(mkdir(path, 0700), 0);
    asked a = {.listed = true, .used = 3};
    assert_int_equal(dray__stores_clean(stores, is_used, is_listed, &a, &error), DRAY_ESYS);
    assert_non_null(strstr(error.message, "reading the stores in "));
    assert_int_equal(rmdir(path), 0);
    OK(dray__stores_clean(stores, is_used, is_listed, &a, &error)); /* there is none */
    dray__stores_free(stores);
    assert_int_equal(rmdir(f.journals), 0);
}

TEST(they_are_given_up)
{
    queue_fixture f = {.without_keeper = true};
    listener l;
    bool said;
    make_folder(f.journals);
    listen_at(&l, f.journals, "silent");
    const dray__stores_options options = {.folder = f.journals,
                                          .patience_ns = 20 * DRAY__MILLISECOND,
                                          .pause_ns = DRAY__MILLISECOND,
                                          .tries = 3,
                                          .starts = 4};
    dray__stores *stores;
    OK(dray__stores_new(&options, &stores, &error));
    OK(dray__stores_note(stores, "redis", l.address, 1, &error));
    OK(dray__stores_note(stores, "redis", l.address, 2, &error));
    OK(dray__stores_note(stores, "redis", "unix:/used", 3, &error));
    dray__stores_free(stores);
    asked a = {.listed = true, .used = 3};
    char counted[40];
    for (unsigned start = 1; start <= 4; start++) {
        clean(&options, &a);
        int tried = connected(&l, "SCAN", &said);
        if (tried < 1 || tried > 60) /* each time again where the store closes the connection */
            fail_msg("tried %d times", tried);
        snprintf(counted, sizeof counted, "redis %016x+%u unix:", 1, start);
        assert_int_equal(strstr(read_stores(f.journals), counted) != NULL, start < 4);
        assert_non_null(strstr(read_stores(f.journals), "redis 0000000000000003 unix:/used"));
        assert_non_null(strstr(read_stores(f.journals), "redis 0000000000000007 unix:/noted"));
        fflush(NULL);
    }
    assert_null(strstr(read_stores(f.journals), l.address)); /* it is asked no more */
    clean(&options, &a);
    assert_int_equal(connected(&l, "SCAN", &said), 0);
    close_listener(&l);
    fixture_empty(f.journals);
    rmdir(f.journals);
}

int main(void)
{
    if (!dray_queue_backend_built(DRAY_BACKEND_REDIS)) {
        puts("skipped: hiredis was missing");
        return 77;
    }
    unsetenv("DRAY_QUEUE_BACKEND");
    return suite_run(NULL, NULL);
}
