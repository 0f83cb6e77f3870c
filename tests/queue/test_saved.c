/* Tests where checkpoints are written. A client gives a name in the coordinator's folder, or a
 * descriptor of a file that it opened itself, and never a path. */
#include "queue/fixture.h"

#include "base/io.h"
#include "queue/client/client.h"
#include "queue/journal/records.h"

#include <dray/queue.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/stat.h>
#include <sys/syscall.h>

static queue_fixture f = {.durable = true};
static const char *const text[] = {"text"};
static const dray_queue_task tasks[] = {{.name = "train", .needs = text, .needs_count = 1}};

static int open_as(dray_context *context, const char *restore, int32_t durability, dray_queue **out,
                   dray_error *said)
{
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    o.tasks = tasks;
    o.task_count = 1;
    o.backend = DRAY_BACKEND_BUILTIN;
    o.durability = durability;
    o.restore = restore;
    return dray_queue_open(context, "samples", &o, out, said);
}

static int open_saved(dray_context *context, const char *restore, dray_queue **out,
                      dray_error *said)
{
    return open_as(context, restore, DRAY_DURABILITY_CHECKPOINT, out, said);
}

static void fill(dray_queue *queue, const char *partition)
{
    const int32_t values[4] = {1, 2, 3, 4};
    const dray_column_data column = {.name = "text", .dtype = DRAY_I32, .values = values};
    dray_insert_options in = DRAY_INSERT_OPTIONS_INIT;
    in.partition = partition;
    in.rows = 4;
    in.columns = &column;
    in.column_count = 1;
    uint32_t first;
    OK(dray_queue_insert(queue, &in, &first, &error));
}

static dray_queue *open_filled(dray_context *context)
{
    dray_queue *queue;
    OK(open_saved(context, NULL, &queue, &error));
    fill(queue, "0");
    return queue;
}

static void has_partition(dray_queue *queue, const char *partition)
{
    dray_batch *batch;
    dray_claim_options c = DRAY_CLAIM_OPTIONS_INIT;
    c.task = "train";
    c.partition = partition;
    c.count = 4;
    OK(dray_queue_claim(queue, &c, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), 4);
    dray_batch_free(batch);
}

static void has_rows(dray_queue *queue)
{
    has_partition(queue, "0");
}

/* QUEUE_CHECKPOINT as any session can send it. */
static int send_checkpoint(dray_queue *queue, const char *what, int fd, dray_error *said)
{
    dray__writer *w = dray__queue_begin(queue);
    dray__reply reply;
    dray__put_string(w, what);
    return dray__call(queue->channel, DRAY__MSG_QUEUE_CHECKPOINT, w, &fd, fd >= 0,
                      dray__deadline(20 * DRAY__SECOND), &reply, said);
}

/* QUEUE_OPEN of a queue that is not there, from a file. */
static int send_restore(dray_queue *queue, const char *what, dray_error *said)
{
    dray__writer w = {0};
    dray__reply reply;
    dray__put_string(&w, "another");
    dray__put_u32(&w, 1);
    dray__put_string(&w, "train");
    dray__put_u32(&w, 0);
    dray__put_u32(&w, 0);
    for (int i = 0; i < 60; i++)
        dray__put_u8(&w, 0);
    dray__put_string(&w, "");
    dray__put_u64(&w, 1);
    dray__put_string(&w, what);
    dray__put_i64(&w, 0);
    int rc = dray__call(queue->channel, DRAY__MSG_QUEUE_OPEN, &w, NULL, 0,
                        dray__deadline(20 * DRAY__SECOND), &reply, said);
    dray__writer_free(&w);
    return rc;
}

static void make_file(const char *path, const char *content)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, content, strlen(content)) != (ssize_t)strlen(content))
        die(path, NULL);
    close(fd);
}

TEST(test_no_paths)
{
    dray_error other;
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "task");
    dray_queue *queue = open_filled(context);
    char keys[128], missing[128], longest[300];
    snprintf(keys, sizeof keys, "%s/authorized_keys", f.folder);
    snprintf(missing, sizeof missing, "%s/no_such_keys___", f.folder);
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    const char *const bad[] = {keys, "../x", "a/b", "..", ".", ".hidden", "", longest, "/"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        FAILS(DRAY_EINVALID, send_checkpoint(queue, bad[i], -1, &error));
        if (bad[i][0])
            FAILS(DRAY_EINVALID, send_restore(queue, bad[i], &error));
    }
    assert_int_equal(access(keys, F_OK), -1);
    /* What is there, and what is not, cannot be told apart. */
    make_file(keys, "ssh-rsa AAAA\n");
    FAILS(DRAY_EINVALID, send_restore(queue, keys, &error));
    FAILS(DRAY_EINVALID, send_restore(queue, missing, &other));
    char *at = strstr(error.message, "authorized_keys");
    if (at)
        memcpy(at, "no_such_keys___", strlen("no_such_keys___"));
    assert_string_equal(error.message, other.message);
    unlink(keys);
    leave(queue, context);
    fixture_down(&f);
}

TEST(test_names)
{
    struct stat st;
    char path[160], outside[128], left[160];
    dray_context *context;
    dray_queue *queue;
    fixture_up(&f);
    context = fixture_context(&f, "task");
    queue = open_filled(context);
    snprintf(path, sizeof path, "%s/checkpoint-first", f.journals);
    snprintf(outside, sizeof outside, "%s/outside", f.folder);
    snprintf(left, sizeof left, "%s/.checkpoint-0123456789abcdef", f.journals);
    OK(dray_queue_checkpoint(queue, "first", &error));
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    OK(dray_queue_checkpoint(queue, "first", &error)); /* replaced */
    /* A link in the folder leads nowhere: it is not read through, and replaced as a whole. */
    make_file(outside, "as it was");
    snprintf(path, sizeof path, "%s/checkpoint-link", f.journals);
    assert_int_equal(symlink(outside, path), 0);
    assert_true(send_restore(queue, "link", &error) == DRAY_ESYS);
    OK(dray_queue_checkpoint(queue, "link", &error));
    assert_true(lstat(path, &st) == 0 && S_ISREG(st.st_mode));
    assert_true(stat(outside, &st) == 0 && st.st_size == 9);
    unlink(outside);
    FAILS(DRAY_ENOENT, send_restore(queue, "second", &error));
    leave(queue, context);
    make_file(left, "of one that was killed");
    fixture_restart(&f);
    assert_int_equal(access(left, F_OK), -1);
    context = fixture_context(&f, "task");
    OK(open_saved(context, "first", &queue, &error));
    has_rows(queue);
    leave(queue, context);
    fixture_down(&f);
}

/* A file that the client may write to, and nothing else. */
TEST(test_descriptors)
{
    char path[128], folder[128];
    int pipes[2];
    dray_queue *queue;
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "task");
    queue = open_filled(context);
    snprintf(path, sizeof path, "%s/mine", f.folder);
    OK(dray_queue_checkpoint(queue, path, &error)); /* opened here */
    static const int flags[] = {O_RDONLY, O_WRONLY | O_APPEND, O_RDWR | O_APPEND};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        int fd = open(path, flags[i] | O_CLOEXEC);
        FAILS(DRAY_EINVALID, send_checkpoint(queue, "/", fd, &error));
        close(fd);
    }
    assert_int_equal(pipe2(pipes, O_CLOEXEC), 0);
    FAILS(DRAY_EINVALID, send_checkpoint(queue, "/", pipes[1], &error));
    FAILS(DRAY_EINVALID, send_checkpoint(queue, "name", pipes[1], &error)); /* both */
    close(pipes[0]);
    close(pipes[1]);
    snprintf(folder, sizeof folder, "%s/nowhere/at-all", f.folder);
    FAILS(DRAY_ESYS, dray_queue_checkpoint(queue, folder, &error));
    leave(queue, context);
    fixture_restart(&f);
    context = fixture_context(&f, "task");
    FAILS(DRAY_ESYS, open_saved(context, folder, &queue, &error));
    OK(open_saved(context, path, &queue, &error));
    has_rows(queue);
    int before = count_fds(f.coordinator_pid, path);
    assert_int_equal(before, 0);
    leave(queue, context);
    unlink(path);
    fixture_down(&f);
}

/* ---- checkpoints that are not whole ------------------------------------------------------------
 */

typedef struct places {     /* of records */
    uint64_t insert, state; /* the last ones */
} places;

static int note_place(void *user, const dray__journal_record *record, dray_error *said)
{
    places *p = user;
    (void)said;
    if (record->kind == DRAY__RECORD_INSERT)
        p->insert = record->at;
    if (record->kind == DRAY__RECORD_STATE)
        p->state = record->at;
    return DRAY_OK;
}

/* A checkpoint of the partitions "0" and "1", as the file `path`. */
static places save_two(const char *path)
{
    places at = {0};
    uint64_t end, last;
    dray_context *context = fixture_context(&f, "task");
    dray_queue *queue = open_filled(context);
    fill(queue, "1");
    OK(dray_queue_checkpoint(queue, path, &error));
    leave(queue, context);
    fixture_restart(&f);
    OK(dray__journal_read(path, note_place, &at, &end, &last, &error));
    assert_true(at.insert && at.state > at.insert);
    return at;
}

static void restore_alone(void *path)
{
    dray_queue *queue;
    dray_context *context = fixture_context(&f, "alone");
    open_as(context, path, DRAY_DURABILITY_JOURNAL, &queue, &error);
}

/* A coordinator that is killed while it copies a checkpoint leaves no journal of a part of it. */
TEST(test_killed_while_copying)
{
    int status;
    char path[128];
    dray_queue *queue;
    fixture_up(&f);
    snprintf(path, sizeof path, "%s/mine", f.folder);
    places at = save_two(path);
    const struct rlimit none = {0};
    prlimit(f.coordinator_pid, RLIMIT_CORE, &none, NULL);
    fixture_limit_files(&f, at.insert + 20); /* the write after this one kills */
    pid_t client = child(restore_alone, path);
    assert_int_equal(waitpid(f.coordinator_pid, &status, 0), f.coordinator_pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGXFSZ);
    fixture_end(client, SIGKILL);
    f.coordinator_pid = fixture_spawn(&f, false);
    dray_context *context = fixture_context(&f, "task");
    OK(open_as(context, path, DRAY_DURABILITY_JOURNAL, &queue, &error));
    has_partition(queue, "0");
    has_partition(queue, "1");
    leave(queue, context);
    unlink(path);
    fixture_down(&f);
}

static void restore_as_another(void *path)
{
    dray_queue *queue;
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    dray_context *context = fixture_context(&f, "alone");
    o.tasks = tasks;
    o.task_count = 1;
    o.durability = DRAY_DURABILITY_JOURNAL;
    o.restore = path;
    dray_queue_open(context, "another", &o, &queue, &error);
}

static int count_files(const char *end)
{
    int count = 0;
    DIR *dir = opendir(f.journals);
    assert_non_null(dir);
    for (struct dirent *entry; (entry = readdir(dir));) {
        size_t size = strlen(entry->d_name), length = strlen(end);
        count += strncmp(entry->d_name, "queue-", 6) == 0 && size > length &&
                 strcmp(entry->d_name + size - length, end) == 0;
    }
    closedir(dir);
    return count;
}

/* A coordinator that is killed while it reads a checkpoint that it would refuse leaves no journal
 * of it. The keeper, which is to take the bytes, stands still meanwhile. */
TEST(test_killed_while_reading)
{
    char path[128];
    dray_queue *queue;
    fixture_up(&f);
    snprintf(path, sizeof path, "%s/mine", f.folder);
    save_two(path);
    kill(f.keeper_pid, SIGSTOP);
    pid_t client = child(restore_as_another, path);
    for (int i = 0; i < 4000 && !count_files(".new") && !count_files(".journal"); i++)
        usleep(1000);
    usleep(300000); /* the copy is whole, and is read */
    fixture_end(f.coordinator_pid, SIGKILL);
    fixture_end(client, SIGKILL);
    kill(f.keeper_pid, SIGCONT);
    f.coordinator_pid = fixture_spawn(&f, false);
    assert_int_equal(count_files(".journal"), 0);
    assert_int_equal(count_files(".new"), 0);
    dray_context *context = fixture_context(&f, "task");
    OK(open_as(context, path, DRAY_DURABILITY_JOURNAL, &queue, &error));
    has_partition(queue, "1");
    leave(queue, context);
    unlink(path);
    fixture_down(&f);
}

/* A file that lost its end, as when a copy of it was broken off, is not restored in part. */
TEST(test_cut_off)
{
    char path[128];
    dray_queue *queue;
    fixture_up(&f);
    snprintf(path, sizeof path, "%s/mine", f.folder);
    places at = save_two(path);
    dray_context *context = fixture_context(&f, "task");
    static const int32_t ways[] = {DRAY_DURABILITY_JOURNAL, DRAY_DURABILITY_CHECKPOINT,
                                   DRAY_DURABILITY_NONE};
    const uint64_t cuts[] = {at.state + 60, at.state, at.insert + 60, at.insert, 60};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        assert_int_equal(truncate(path, (off_t)cuts[i]), 0);
        for (size_t k = 0; k < sizeof ways / sizeof *ways; k++) {
            FAILS(DRAY_EFORMAT, open_as(context, path, ways[k], &queue, &error));
            assert_non_null(strstr(error.message, "mine"));
        }
    }
    OK(open_saved(context, NULL, &queue, &error)); /* nothing is there of what was refused */
    FAILS(DRAY_ENOENT, dray_queue_seal(queue, "0", 4, &error));
    leave(queue, context);
    unlink(path);
    fixture_down(&f);
}

/* A coordinator does not touch the files of one that uses the same folder. */
TEST(test_two_coordinators)
{
    char path[200], socket[128];
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "task");
    dray_queue *queue = open_filled(context);
    fixture_journal(&f, path, sizeof path);
    snprintf(socket, sizeof socket, "%s/second", f.folder);
    struct event_base *base = event_base_new();
    dray__coordinator *second = NULL;
    const dray__coordinator_options options = {.unix_path = socket};
    OK(dray__coordinator_new(base, &options, &second, &error));
    FAILS(DRAY_EBUSY, dray__queue_add(second, base, NULL, f.journals, f.stores, &error));
    assert_non_null(strstr(error.message, f.journals));
    assert_int_equal(access(path, F_OK), 0);
    leave(queue, context);
    fixture_end(f.coordinator_pid, SIGKILL);
    OK(dray__queue_add(second, base, NULL, f.journals, f.stores, &error)); /* the folder is free */
    dray__coordinator_free(second);
    event_base_free(base);
    f.coordinator_pid = fixture_spawn(&f, false);
    fixture_down(&f);
}

/* ---- names in a folder ----------------------------------------------------------------------- */

static void opens_nothing_else(const char *folder_path)
{
    int folder = open(folder_path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    static const char *const bad[] = {"..", "../secret", "/etc/passwd", "link",
                                      "inner/../../secret"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int fd = dray__open_beneath(folder, bad[i], O_RDONLY, 0);
        if (fd >= 0)
            die(bad[i], NULL);
    }
    int fd = dray__open_beneath(folder, "good", O_WRONLY | O_CREAT, 0600);
    if (fd < 0 || fcntl(fd, F_GETFD) != FD_CLOEXEC)
        die("good", NULL);
    close(fd);
    close(folder);
}

/* As on a kernel before 5.6. */
static void forget_openat2(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat2, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {sizeof code / sizeof *code, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        _exit(77); /* no such filters here */
}

TEST(test_beneath)
{
    const char *tmp = getenv("TMPDIR");
    char folder[64], path[128], command[128];
    snprintf(folder, sizeof folder, "%.40s/dray-test-XXXXXX", tmp ? tmp : "/tmp");
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/secret", folder);
    make_file(path, "secret");
    snprintf(path, sizeof path, "%s/own", folder);
    assert_int_equal(mkdir(path, 0700), 0);
    snprintf(command, sizeof command, "%s/own/inner", folder);
    assert_int_equal(mkdir(command, 0700), 0);
    snprintf(command, sizeof command, "%s/own/link", folder);
    assert_int_equal(symlink("../secret", command), 0);
    opens_nothing_else(path);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        forget_openat2();
        opens_nothing_else(path);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    assert_true(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 77));
    snprintf(command, sizeof command, "rm -rf %.63s", folder);
    assert_int_equal(system(command), 0);
}

SUITE(NULL, NULL)
