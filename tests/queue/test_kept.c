/* Tests bytes that are lost although the queue exists: those of a keeper that is killed, and of
 * a redis-server that comes back empty. With a journal they are restored from it, and no row is
 * lost. */
#include "queue/redis.h"
#include "queue/three_tasks.h"

#include "base/hook.h"
#include "queue/journal/record.h"
#include "queue/journal/records.h"
#include "queue/keepers.h"
#include "seed.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <sys/mman.h>

static keeper_of kept = {.host = "b"};
static redis_server redis;
enum { PARTITIONS = 60 };

static const queue_fixture durable = {.durable = true};

static dray_queue *open_kept(dray_context *context, int32_t durability, bool in_redis)
{
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    o.durability = durability;
    o.backend = in_redis ? DRAY_BACKEND_REDIS : DRAY_BACKEND_BUILTIN;
    o.backend_address = in_redis ? redis.address : NULL;
    return open_three(context, "kept", o);
}

/* A queue with a journal, whose bytes a server of its own holds. */
static dray_queue *begin(dray_context **context)
{
    f = durable;
    *context = redis_begin(&redis, NULL, &f);
    return open_kept(*context, DRAY_DURABILITY_JOURNAL, true);
}

/* Claims and reads until the rows are there: what was lost is put back meanwhile. */
static dray_batch *read_again(dray_queue *queue, const char *task, const char *column_name,
                              uint32_t rows, dray_column *column)
{
    for (int tries = 0; tries < 5; tries++) {
        dray_claim_options o = want(task, rows);
        dray_batch *batch;
        OK(dray_queue_claim(queue, &o, &batch, &error));
        assert_int_equal(dray_batch_rows(batch), rows);
        int rc = dray_batch_column(batch, column_name, column, &error);
        if (!rc)
            return batch;
        if (rc != DRAY_EGONE)
            die("read", &error);
        dray_batch_free(batch);
    }
    fail_msg("%s", error.message);
    return NULL;
}

static void check_ints(const dray_batch *batch, const dray_column *column, int32_t base, int32_t by)
{
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
        assert_int_equal(*(const int32_t *)column->cells[i],
                         base + by * (int32_t)dray_batch_row(batch, i)->slot);
}

static void nothing_lost(dray_queue *queue)
{
    assert_true(status_has(queue, "\"lost\":{\"failed\":0,\"stale\":0,\"rolled_back\":0,"
                                  "\"bytes_lost\":0}"));
}

/* A keeper is killed while rows are claimed, committed, and waiting: all are read afterwards. */
static void test_keeper_dies(void **state)
{
    (void)state;
    dray_column column;
    f = durable;
    fixture_up(&f);
    keeper_up(&kept);
    dray_context *at_b = context_of("b", "producer"), *here = fixture_context(&f, "consumer");
    dray_queue *b = open_kept(at_b, DRAY_DURABILITY_JOURNAL, false);
    dray_queue *a = open_kept(here, DRAY_DURABILITY_JOURNAL, false);
    insert_ints(b, "0", 40, 1);
    OK(dray_queue_seal(b, "0", 40, &error));
    all_rows(b, "rollout", "responses", 500, 20);
    dray_claim_options o = want("reward", 10);
    dray_batch *claimed, *batch;
    OK(dray_queue_claim(a, &o, &claimed, &error));
    assert_true(chunks_of(&kept) > 0);
    keeper_down(&kept, SIGKILL);
    /* It was claimed before: its extents are of the keeper that is gone. */
    FAILS(DRAY_EGONE, dray_batch_column(claimed, "responses", &column, &error));
    dray_batch_free(claimed);
    batch = read_again(a, "reward", "responses", 20, &column);
    check_ints(batch, &column, 500, 1);
    set_ints(batch, "rewards", 1000);
    COMMIT(batch);
    batch = read_again(a, "rollout", "prompts", 20, &column);
    check_ints(batch, &column, 0, 10);
    set_ints(batch, "responses", 500);
    COMMIT(batch);
    nothing_lost(a);
    keeper_up(&kept); /* and the producer goes on with the next one */
    insert_ints(b, "1", 8, 1);
    assert_true(chunks_of(&kept) > 0);
    /* The coordinator, too: what the second keeper holds is in the journal. */
    fixture_restart(&f);
    batch = read_again(a, "rollout", "prompts", 8, &column);
    assert_string_equal(dray_batch_partition(batch), "1");
    check_ints(batch, &column, 0, 10);
    dray_batch_free(batch);
    dray_queue_close(a);
    leave(b, here);
    dray_close(at_b);
    keeper_down(&kept, SIGTERM);
    fixture_down(&f);
}

/* The coordinator's own keeper is killed, and started again without what it held: whoever reads it
 * says so. Without a journal all rows concerned are refilled; with one nothing is lost. */
static void test_own_keeper_restarts(void **state)
{
    (void)state;
    const int32_t durabilities[] = {DRAY_DURABILITY_NONE, DRAY_DURABILITY_JOURNAL};
    for (size_t i = 0; i < 2; i++) {
        dray_column column;
        dray_batch *batch, *working;
        f = durable;
        fixture_up(&f);
        dray_context *context = fixture_context(&f, "all");
        dray_queue *queue = open_kept(context, durabilities[i], false),
                   *worker = open_kept(context, durabilities[i], false);
        insert_ints(queue, "0", 12, 1);
        OK(dray_queue_seal(queue, "0", 12, &error));
        all_rows(worker, "rollout", "responses", 300, 4);
        dray_claim_options o = want("rollout", 4);
        OK(dray_queue_claim(worker, &o, &working, &error));
        set_ints(working, "responses", 300);
        fixture_restart_keeper(&f);
        o = want("reward", 4);
        OK(dray_queue_claim(queue, &o, &batch, &error));
        FAILS(DRAY_EGONE, dray_batch_column(batch, "responses", &column, &error));
        dray_batch_free(batch);
        FAILS(DRAY_EGONE, dray_batch_commit(working, &error)); /* where the lost ones were */
        set_ints(working, "responses", 300);
        COMMIT(working);
        uint32_t refills = durabilities[i] == DRAY_DURABILITY_NONE ? 8 : 0, rows = 0;
        if (refills) { /* four whose responses were read, four whose prompts will be */
            o = want("rollout", 4);
            OK(dray_queue_claim(queue, &o, &batch, &error));
            FAILS(DRAY_EGONE, dray_batch_column(batch, "prompts", &column, &error));
            dray_batch_free(batch);
        }
        while (rows < refills) {
            dray_refill refill = DRAY_REFILL_INIT;
            OK(dray_queue_refill_wait(queue, 10 * DRAY__SECOND, &refill, &error));
            assert_int_equal(refill.cause, DRAY_LOSS_BYTES);
            refill_ints(queue, &refill, 7);
            rows += refill.rows;
        }
        if (!refills)
            nothing_lost(queue);
        batch = read_again(worker, "rollout", "prompts", refills ? 8 : 4, &column);
        for (uint32_t r = 0; r < dray_batch_rows(batch); r++)
            assert_int_equal(*(const int32_t *)column.cells[r],
                             refills ? 7 : 10 * (int32_t)dray_batch_row(batch, r)->slot);
        set_ints(batch, "responses", 300);
        COMMIT(batch);
        batch = read_again(queue, "reward", "responses", 12, &column);
        check_ints(batch, &column, 300, 1);
        dray_batch_free(batch);
        OK(dray_queue_clear(queue, "0", &error));
        dray_queue_close(worker);
        leave(queue, context);
        wait_for_chunks(&f, 0);
        fixture_down(&f);
    }
}

static int note_first_insert(void *user, const dray__journal_record *record, dray_error *said)
{
    off_t *last = user;
    (void)said;
    if (!*last && record->kind == DRAY__RECORD_INSERT) /* the last byte of its values */
        *last = (off_t)(record->at + DRAY__RECORD_HEAD + record->size) - 1;
    return DRAY_OK;
}

/* A record of the journal is broken when the bytes are put back: only its own rows are lost. */
static void test_broken_record(void **state)
{
    (void)state;
    static const char *const names[] = {"0", "1", "2"};
    dray_column column;
    char path[200];
    uint64_t end, number;
    off_t last = 0;
    uint8_t byte;
    f = durable;
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "all");
    dray_queue *queue = open_kept(context, DRAY_DURABILITY_JOURNAL, false);
    for (int i = 0; i < 3; i++)
        insert_ints(queue, names[i], 8, 1);
    fixture_journal(&f, path, sizeof path);
    OK(dray__journal_read(path, note_first_insert, &last, &end, &number, &error));
    int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(last && fd >= 0 && pread(fd, &byte, 1, last) == 1);
    byte ^= 1;
    assert_true(pwrite(fd, &byte, 1, last) == 1);
    close(fd);
    fixture_restart_keeper(&f);
    for (int i = 2; i > 0; i--) {
        dray_batch *batch = claim_of(queue, "rollout", names[i], 8);
        for (int tries = 0; dray_batch_column(batch, "prompts", &column, &error); tries++) {
            if (tries == 5)
                die("read", &error);
            dray_batch_free(batch);
            batch = claim_of(queue, "rollout", names[i], 8);
        }
        check_ints(batch, &column, 0, 10);
        dray_batch_free(batch);
    }
    assert_true(status_has(queue, "\"rolled_back\":0,\"bytes_lost\":8"));
    leave(queue, context);
    fixture_down(&f);
}

/* The coordinator's reading of the journal is held up, record by record, until the test lets it. */
typedef struct hold {
    atomic_int held, read;
} hold;

static hold *reading;

static void at_step(void *user, const char *step)
{
    (void)user;
    if (strcmp(step, "reading") != 0)
        return;
    reading->read++;
    for (int i = 0; i < 20000 && reading->held; i++)
        usleep(1000);
}

static void prepare_server(bool keeper)
{
    if (!keeper)
        dray__hook_set(at_step, NULL);
}

/* While lost bytes are put back everybody else is answered, and nobody gets the rows that wait. */
static void test_others_go_on(void **state)
{
    (void)state;
    dray_column column;
    dray_batch *batch, *claimed;
    reading =
        mmap(NULL, sizeof *reading, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (reading == MAP_FAILED)
        die("mmap", NULL);
    f = durable;
    f.prepare = prepare_server;
    fixture_up(&f);
    keeper_up(&kept);
    dray_context *at_b = context_of("b", "producer"), *here = fixture_context(&f, "consumer");
    dray_queue *b = open_kept(at_b, DRAY_DURABILITY_JOURNAL, false);
    dray_queue *a = open_kept(here, DRAY_DURABILITY_JOURNAL, false);
    insert_ints(b, "0", 16, 4);
    OK(dray_queue_seal(b, "0", 16, &error));
    insert_ints(b, "1", 8, 1);
    insert_ints(a, "2", 8, 1);
    dray_claim_options o = want("rollout", 4);
    o.partition = "0";
    OK(dray_queue_claim(a, &o, &claimed, &error));
    reading->held = 1;
    keeper_down(&kept, SIGKILL);
    for (int i = 0; i < 20000 && !reading->read; i++)
        usleep(1000);
    assert_int_equal(reading->read, 1);
    FAILS(DRAY_EGONE, dray_batch_column(claimed, "prompts", &column, &error));
    dray_batch_free(claimed);
    all_rows(a, "rollout", "responses", 70, 8); /* those whose bytes are here */
    insert_ints(a, "3", 8, 1);
    all_rows(a, "rollout", "responses", 80, 8);
    all_rows(a, "reward", "rewards", 90, 8);
    all_rows(a, "reward", "rewards", 90, 8);
    OK(dray_queue_clear(a, "1", &error)); /* what would be put back is not wanted any more */
    FAILS(DRAY_ENOENT, dray_queue_seal(a, "1", 8, &error));
    o.timeout_ns = 0;
    FAILS(DRAY_ETIMEDOUT, dray_queue_claim(a, &o, &batch, &error));
    assert_int_equal(reading->read, 1); /* all that while the first record was read */
    reading->held = 0;
    o.timeout_ns = 20 * DRAY__SECOND;
    o.count = 16;
    OK(dray_queue_claim(a, &o, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), 16);
    OK(dray_batch_column(batch, "prompts", &column, &error));
    check_ints(batch, &column, 0, 10);
    dray_batch_free(batch);
    nothing_lost(a);
    for (int i = 0; i < 4; i++) {
        char name[8];
        snprintf(name, sizeof name, "%d", i);
        if (i != 1)
            OK(dray_queue_clear(a, name, &error));
    }
    dray_queue_close(a);
    leave(b, here);
    dray_close(at_b);
    wait_for_chunks(&f, 0); /* nor is a chunk left of what was cleared meanwhile */
    fixture_down(&f);
    munmap(reading, sizeof *reading);
}

/* What was not in the journal yet when its keeper ended: the producer hears of it, the rows are
 * refilled. The keeper is stopped, so that the journal cannot have read it. */
static void test_gone_before_kept(void **state)
{
    (void)state;
    f = durable;
    fixture_up(&f);
    keeper_up(&kept);
    dray_context *at_b = context_of("b", "producer");
    dray_queue *b = open_kept(at_b, DRAY_DURABILITY_JOURNAL, false);
    insert_ints(b, "0", 4, 1); /* the chunk is there */
    kill(kept.pid, SIGSTOP);
    waitpid(kept.pid, NULL, WUNTRACED);
    pid_t killer = fork();
    if (killer == 0) {
        usleep(300000);
        kill(kept.pid, SIGKILL);
        _exit(0);
    }
    FAILS(DRAY_EDEAD, try_insert_ints(b, "0", 4, 1));
    join(killer);
    waitpid(kept.pid, NULL, 0);
    unlink(kept.path);
    keeper_up(&kept);
    uint32_t rows = 0;
    while (rows < 4) {
        dray_refill refill = DRAY_REFILL_INIT;
        OK(dray_queue_refill_wait(b, 10 * DRAY__SECOND, &refill, &error));
        assert_int_equal(refill.cause, DRAY_LOSS_BYTES);
        assert_true(refill.slot >= 4);
        refill_ints(b, &refill, 9);
        rows += refill.rows;
    }
    dray_column column;
    dray_context *here = fixture_context(&f, "consumer");
    dray_queue *a = open_kept(here, DRAY_DURABILITY_JOURNAL, false);
    dray_batch *batch = read_again(a, "rollout", "prompts", 8, &column);
    for (int i = 0; i < 8; i++)
        assert_int_equal(*(const int32_t *)column.cells[i], i < 4 ? i * 10 : 9);
    dray_batch_free(batch);
    dray_queue_close(a);
    leave(b, here);
    dray_close(at_b);
    keeper_down(&kept, SIGTERM);
    fixture_down(&f);
}

typedef struct doomed {
    const char *partition;
    int ready, go;
} doomed;

static void insert_doomed(void *argument)
{
    const doomed *d = argument;
    char byte = 0;
    dray_context *context = context_of("b", d->partition);
    dray_queue *queue = open_kept(context, DRAY_DURABILITY_JOURNAL, false);
    insert_ints(queue, d->partition, 4, 1); /* the chunk is there */
    if (write(d->ready, &byte, 1) != 1 || read(d->go, &byte, 1) != 1)
        die("pipe", NULL);
    FAILS(DRAY_EDEAD, try_insert_ints(queue, d->partition, 4, 1));
    leave(queue, context);
}

/* With the commit goes a claim, which waits. */
static void commit_doomed(void *argument)
{
    const doomed *d = argument;
    char byte = 0;
    dray_context *context = context_of("b", d->partition);
    dray_queue *queue = open_kept(context, DRAY_DURABILITY_JOURNAL, false);
    dray_batch *batch, *next;
    insert_ints(queue, d->partition, 4, 1);
    dray_claim_options o = want("rollout", 4);
    o.partition = d->partition;
    OK(dray_queue_claim(queue, &o, &batch, &error));
    set_ints(batch, "responses", 1);
    if (write(d->ready, &byte, 1) != 1 || read(d->go, &byte, 1) != 1)
        die("pipe", NULL);
    FAILS(DRAY_EDEAD, dray_batch_commit_claim(batch, &o, 1, NULL, &next, &error));
    dray_batch_free(batch);
    leave(queue, context);
}

static bool all_waiting(dray_queue *queue)
{
    char *text;
    OK(dray_queue_status(queue, &text, &error));
    bool there = strstr(text, "\"inserted\":28") && strstr(text, "\"claims\":{\"rollout\":1");
    free(text);
    return there;
}

/* Several producers' bytes are gone before they are in the journal: none of them is told that its
 * rows are safe. */
static void test_all_gone_before_kept(void **state)
{
    (void)state;
    enum { WORKERS = 4 };
    static const char *const names[WORKERS] = {"0", "1", "2", "3"};
    doomed all[WORKERS];
    pid_t pids[WORKERS];
    int ready[2], go[2];
    char bytes[WORKERS] = {0};
    f = durable;
    fixture_up(&f);
    keeper_up(&kept);
    if (pipe(ready) < 0 || pipe(go) < 0)
        die("pipe", NULL);
    for (int i = 0; i < WORKERS; i++) {
        all[i] = (doomed){names[i], ready[1], go[0]};
        pids[i] = child(i < 3 ? insert_doomed : commit_doomed, &all[i]);
    }
    for (int i = 0; i < WORKERS; i++)
        assert_int_equal(read(ready[0], bytes, 1), 1);
    dray_context *here = fixture_context(&f, "watcher");
    dray_queue *queue = open_kept(here, DRAY_DURABILITY_JOURNAL, false);
    kill(kept.pid, SIGSTOP);
    waitpid(kept.pid, NULL, WUNTRACED);
    assert_int_equal(write(go[1], bytes, WORKERS), WORKERS);
    for (int i = 0; i < 4000 && !all_waiting(queue); i++)
        usleep(2000);
    assert_true(all_waiting(queue));
    kill(kept.pid, SIGKILL);
    waitpid(kept.pid, NULL, 0);
    unlink(kept.path);
    for (int i = 0; i < WORKERS; i++)
        join(pids[i]);
    for (uint32_t rows = 0; rows < 4 * WORKERS;) { /* the others are in the journal */
        dray_refill refill = DRAY_REFILL_INIT;
        OK(dray_queue_refill_wait(queue, 10 * DRAY__SECOND, &refill, &error));
        assert_int_equal(refill.cause, DRAY_LOSS_BYTES);
        assert_true(refill.slot >= 4 || strcmp(refill.partition, "3") == 0);
        OK(dray_queue_refill_decline(queue, refill.id, &error));
        rows += refill.rows;
    }
    for (int i = 0; i < 2; i++) {
        close(ready[i]);
        close(go[i]);
    }
    leave(queue, here);
    fixture_down(&f);
}

/* The controller is killed: its successor puts the bytes into Redis again, and drops the old ones.
 */
static void test_redis_outlives_controller(void **state)
{
    (void)state;
    dray_column column;
    dray_context *context;
    dray_queue *queue = begin(&context);
    insert_ints(queue, "0", 40, 4);
    all_rows(queue, "rollout", "responses", 500, 20);
    long keys = redis_keys(&redis);
    assert_true(keys > 0);
    for (int round = 0; round < 3; round++) {
        fixture_end(f.coordinator_pid, SIGKILL);
        if (round == 1) { /* and the server, with all that it held */
            redis_restart(&redis, NULL);
        }
        f.coordinator_pid = fixture_spawn(&f, false);
        dray_batch *batch = read_again(queue, "reward", "responses", 20, &column);
        check_ints(batch, &column, 500, 1);
        dray_batch_free(batch);
        batch = read_again(queue, "rollout", "prompts", 20, &column);
        check_ints(batch, &column, 0, 10);
        dray_batch_free(batch);
        redis_wait_keys(&redis, keys);
    }
    nothing_lost(queue);
    all_rows(queue, "reward", "rewards", 0, 20);
    all_rows(queue, "rollout", "responses", 0, 20);
    all_rows(queue, "reward", "rewards", 0, 20);
    all_rows(queue, "actor", NULL, 0, 40);
    OK(dray_queue_clear(queue, "0", &error));
    redis_wait_keys(&redis, 0);
    redis_end(&redis, &f, context, queue);
}

/* A coordinator that is killed at some moment of its recovery, before it serves anybody. */
static void begin_and_die(uint64_t after_us)
{
    int ready[2];
    assert_int_equal(pipe(ready), 0);
    fflush(NULL);
    f.coordinator_pid = fork();
    if (f.coordinator_pid == 0)
        fixture_serve(&f, false, ready[1]);
    close(ready[1]);
    usleep((useconds_t)after_us);
    fixture_end(f.coordinator_pid, SIGKILL);
    close(ready[0]);
}

/* How many keys the server holds that are not of the space of the first one. */
static long other_spaces(void)
{
    char first[64], line[256], command[160];
    snprintf(command, sizeof command, "redis-cli -s %s --scan --pattern 'dray:*'", redis.socket);
    FILE *keys = popen(command, "r");
    long others = 0, count = 0;
    for (; keys && fgets(line, sizeof line, keys); count++) {
        if (!count)
            snprintf(first, sizeof first, "%.21s", line); /* dray:SPACE */
        others += strncmp(line, first, 21) != 0;
    }
    if (keys)
        pclose(keys);
    return others;
}

/* Coordinators are killed while they put back what the journal holds, and again and again: the next
 * one that gets through drops what all of them had put there. */
static void test_killed_while_recovering(void **state)
{
    (void)state;
    dray_column column;
    uint64_t random = test_seed();
    dray_context *context;
    dray_queue *queue = begin(&context);
    for (int p = 0; p < PARTITIONS; p++) {
        char name[16];
        snprintf(name, sizeof name, "%d", p);
        insert_ints(queue, name, 16, 1);
    }
    all_rows(queue, "rollout", "responses", 500, 16);
    long keys = PARTITIONS, most = 0; /* of one partition the responses, of others the prompts */
    uint64_t took = 12000;            /* us, to begin */
    redis_wait_keys(&redis, keys);
    /* On a machine with other work, none may be killed when it matters for a while. */
    for (int round = 0; round < test_times(4) || (most <= keys && round < 40); round++) {
        fixture_end(f.coordinator_pid, SIGKILL);
        for (int i = 0; i < 5; i++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            begin_and_die((random >> 33) % (took + took / 4));
            long now = redis_keys(&redis);
            most = now > most ? now : most;
        }
        int64_t begun = dray__now();
        f.coordinator_pid = fixture_spawn(&f, false);
        took = (uint64_t)(dray__now() - begun) / 1000;
        dray_batch *batch = read_again(queue, "reward", "responses", 16, &column);
        check_ints(batch, &column, 500, 1);
        dray_batch_free(batch);
        redis_wait_keys(&redis, keys);
        assert_int_equal(other_spaces(), 0);
    }
    assert_true(most > keys);
    nothing_lost(queue);
    for (int p = 0; p < PARTITIONS; p++) {
        char name[16];
        snprintf(name, sizeof name, "%d", p);
        OK(dray_queue_clear(queue, name, &error));
    }
    redis_wait_keys(&redis, 0);
    redis_end(&redis, &f, context, queue);
}

/* A queue without a journal ends with its coordinator; what it had in Redis, the next one drops
 * that is started with the same folder. */
static void test_ends_with_its_coordinator(void **state)
{
    (void)state;
    f = durable;
    dray_context *context = redis_begin(&redis, NULL, &f);
    dray_queue *queue = open_kept(context, DRAY_DURABILITY_NONE, true);
    insert_ints(queue, "0", 40, 1);
    assert_true(redis_keys(&redis) > 0);
    fixture_restart(&f);
    redis_wait_keys(&redis, 0);
    redis_end(&redis, &f, context, queue);
}

/* The server is killed, and comes back without its data, while rows are claimed and committed. */
static void test_redis_restarts(void **state)
{
    (void)state;
    dray_column column;
    dray_context *context;
    dray_queue *queue = begin(&context);
    for (int step = 0; step < 4; step++) {
        char name[16];
        snprintf(name, sizeof name, "%d", step);
        insert_ints(queue, name, 16, 1);
        OK(dray_queue_seal(queue, name, 16, &error));
        redis_restart(&redis, NULL);
        dray_batch *batch = read_again(queue, "rollout", "prompts", 16, &column);
        check_ints(batch, &column, 0, 10);
        set_ints(batch, "responses", 100 * step);
        COMMIT(batch);
        redis_restart(&redis, NULL);
        batch = read_again(queue, "reward", "responses", 16, &column);
        check_ints(batch, &column, 100 * step, 1);
        set_ints(batch, "rewards", 7);
        COMMIT(batch);
        redis_restart(&redis, NULL);
        batch = read_again(queue, "actor", "rewards", 16, &column);
        check_ints(batch, &column, 7, 1);
        COMMIT(batch);
        OK(dray_queue_wait(queue, name, NULL, 0, &error));
        OK(dray_queue_clear(queue, name, &error));
    }
    nothing_lost(queue);
    redis_end(&redis, &f, context, queue);
}

/* Checkpoints of what Redis holds, and of what shared memory holds, are restored: each to where its
 * values were, when the options name no place. */
static void test_checkpoint(void **state)
{
    (void)state;
    dray_column column;
    char path[160];
    f = durable;
    redis_up(&redis, NULL);
    f.stores[0] = redis.store;
    fixture_up(&f);
    for (int way = 0; way < 2; way++) {
        dray_context *context = fixture_context(&f, "all");
        dray_queue *queue = open_kept(context, DRAY_DURABILITY_CHECKPOINT, way == 0);
        snprintf(path, sizeof path, "%s/saved-%d", f.journals, way);
        insert_ints(queue, "0", 20, 1);
        all_rows(queue, "rollout", "responses", 50, 20);
        OK(dray_queue_checkpoint(queue, path, &error));
        leave(queue, context);
        fixture_restart(&f);
        context = fixture_context(&f, "all");
        dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
        o.durability = DRAY_DURABILITY_CHECKPOINT;
        o.restore = path;
        queue = open_three(context, "kept", o);
        dray_batch *batch = read_again(queue, "reward", "responses", 20, &column);
        check_ints(batch, &column, 50, 1);
        dray_batch_free(batch);
        leave(queue, context);
        fixture_restart(&f);
    }
    redis_down(&redis);
    fixture_down(&f);
}

/* The disk is full: refused, by name, and nothing is acknowledged; then it goes on. */
static void test_disk_full(void **state)
{
    (void)state;
    dray_column column;
    dray_context *context;
    dray_queue *queue = begin(&context);
    insert_ints(queue, "0", 4, 1);
    fixture_limit_files(&f, 4096);
    int rc = DRAY_OK;
    for (int i = 0; i < 100 && !rc; i++)
        rc = try_insert_ints(queue, "full", 64, 1);
    assert_int_equal(rc, DRAY_EFULL);
    assert_non_null(strstr(error.message, "journal"));
    fixture_limit_files(&f, RLIM_INFINITY);
    for (int i = 0; i < 100 && (rc = dray_queue_seal(queue, "0", 4, &error)); i++)
        usleep(50000);
    OK(rc);
    fixture_restart(&f);
    dray_batch *batch = claim_of(queue, "rollout", "0", 4);
    OK(dray_batch_column(batch, "prompts", &column, &error));
    check_ints(batch, &column, 0, 10);
    dray_batch_free(batch);
    redis_end(&redis, &f, context, queue);
}

int main(void)
{
    bool redis_here = have_program("redis-server") && have_program("redis-cli") &&
                      dray_queue_backend_built(DRAY_BACKEND_REDIS);
    if (elsewhere()) /* it says itself what holds the bytes */
        return 77;
    const struct CMUnitTest own[] = {
        cmocka_unit_test(test_keeper_dies),          cmocka_unit_test(test_own_keeper_restarts),
        cmocka_unit_test(test_others_go_on),         cmocka_unit_test(test_gone_before_kept),
        cmocka_unit_test(test_all_gone_before_kept), cmocka_unit_test(test_broken_record),
    };
    const struct CMUnitTest with_redis[] = {
        cmocka_unit_test(test_redis_outlives_controller),
        cmocka_unit_test(test_killed_while_recovering),
        cmocka_unit_test(test_ends_with_its_coordinator),
        cmocka_unit_test(test_redis_restarts),
        cmocka_unit_test(test_checkpoint),
        cmocka_unit_test(test_disk_full),
    };
    int failed = cmocka_run_group_tests(own, NULL, NULL);
    if (redis_here)
        failed += cmocka_run_group_tests(with_redis, NULL, NULL);
    return failed ? 1 : redis_here ? 0 : 77;
}
