/* Tests faults that were seen in the sample queues of other systems. Each test has the name of the
 * fault, and passes when this queue does not have it. */
#include "base/random.h"
#include "queue/client/client.h"
#include "queue/three_tasks.h"
#include "seed.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>

static uint64_t seed;
static uint64_t drawn;

static uint32_t draw(uint32_t below)
{
    return (uint32_t)(dray__random_u64(seed, 0, drawn++) % below);
}

static void shuffle(uint32_t *order, uint32_t count)
{
    for (uint32_t i = count; i > 1; i--) {
        uint32_t other = draw(i), swap = order[i - 1];
        order[i - 1] = order[other];
        order[other] = swap;
    }
}

/* One number out of a file of /proc/PID: the one behind `key`. */
static int64_t proc_number(pid_t pid, const char *file, const char *key)
{
    char path[64], line[256];
    long long value = -1;
    snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, file);
    FILE *in = fopen(path, "r");
    while (in && value < 0 && fgets(line, sizeof line, in))
        if (strncmp(line, key, strlen(key)) == 0)
            sscanf(line + strlen(key), ": %lld", &value);
    if (in)
        fclose(in);
    return value;
}

static dray_batch *claim_one(dray_queue *queue, const char *task)
{
    dray_batch *batch;
    dray_claim_options o = want(task, 1);
    OK(dray_queue_claim(queue, &o, &batch, &error));
    return batch;
}

/* ---- a bad request kills the controller ------------------------------------------------------ */

static void wait_for_a_row(void *argument)
{
    (void)argument;
    dray_context *context = fixture_context(&f, "waits");
    dray_queue *queue = open_queue(context, "bad", 0, 0);
    dray_batch_free(claim_one(queue, "actor")); /* it comes at the very end */
    leave(queue, context);
}

static void ask_for_too_much(dray_queue *queue)
{
    dray_batch *none;
    dray_claim_options o = want("rollout", 9); /* a shortfall */
    o.timeout_ns = 0;
    FAILS(DRAY_ETIMEDOUT, dray_queue_claim(queue, &o, &none, &error));
    o = want("rollout", 4); /* what the balancer must refuse */
    o.policy = DRAY_POLICY_TOKEN_BALANCED;
    o.token_cap = 1;
    o.cost = "weight";
    FAILS(DRAY_EFULL, dray_queue_claim(queue, &o, &none, &error));
    o.dp_rank = 3;
    FAILS(DRAY_EINVALID, dray_queue_claim(queue, &o, &none, &error));
    o = want("nobody", 1);
    FAILS(DRAY_ENOENT, dray_queue_claim(queue, &o, &none, &error));
}

/* Whatever a client sends, it alone hears of it: who waits is served when its row comes. */
TEST_WITHIN(test_a_bad_request_kills_the_controller, up, down)
{
    dray_context *context = fixture_context(&f, "bad"), *noisy;
    dray_queue *queue = open_queue(context, "bad", 0, 0), *other;
    insert_ints(queue, "0", 4, 1);
    dray_batch *batch;
    dray_claim_options o = want("rollout", 4);
    OK(dray_queue_claim(queue, &o, &batch, &error));
    pid_t waits = child(wait_for_a_row, NULL);
    noisy = fixture_context(&f, "noisy");
    other = open_queue(noisy, "bad", 0, 0);
    dray_tag heavy = {"weight", 5};
    dray_insert_options in = DRAY_INSERT_OPTIONS_INIT;
    int32_t values[4] = {0};
    dray_column_data column = int_column("prompts", values);
    in.partition = "1";
    in.rows = 4;
    in.columns = &column;
    in.column_count = 1;
    in.tags = &heavy;
    in.tag_count = 1;
    OK(dray_queue_insert(other, &in, NULL, &error));
    for (int round = 0; round < 20; round++) {
        ask_for_too_much(other);
        for (uint16_t type = 0x0301; type < 0x0320;
             type++) { /* heads without a body, and unknown */
            if (type == DRAY__MSG_QUEUE_END || type == DRAY__MSG_QUEUE_CLOSE)
                continue;
            dray__writer w = {0};
            dray__reply reply;
            dray__put_u32(&w, draw(2) ? other->id : draw(100000));
            for (uint32_t n = draw(40); n; n--)
                dray__put_u8(&w, (uint8_t)draw(256));
            int rc = dray__call(other->channel, type, &w, NULL, 0,
                                dray__deadline(20 * DRAY__SECOND), &reply, &error);
            assert_true(rc != DRAY_ECLOSED && rc != DRAY_ETIMEDOUT);
            dray__writer_free(&w);
        }
    }
    set_ints(batch, "responses", 0);
    COMMIT(batch);
    all_rows(queue, "reward", "rewards", 0, 4);
    join(waits);
    assert_int_equal(kill(f.coordinator_pid, 0), 0);
    leave(other, noisy);
    leave(queue, context);
}

/* ---- groups mix prompts ---------------------------------------------------------------------- */

enum { GROUP = 4, GROUPS = 4 };

static void one_group(dray_queue *queue, const uint32_t *done)
{
    dray_batch *batch;
    dray_claim_options o = want("reward", GROUP);
    o.policy = DRAY_POLICY_GROUP;
    o.timeout_ns = 0;
    uint32_t whole = 0;
    for (uint32_t g = 0; g < GROUPS; g++)
        whole += done[g] == GROUP;
    if (!whole) {
        FAILS(DRAY_ETIMEDOUT, dray_queue_claim(queue, &o, &batch, &error));
        return;
    }
    OK(dray_queue_claim(queue, &o, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), GROUP);
    uint32_t group = dray_batch_row(batch, 0)->group;
    assert_int_equal(done[group], GROUP);
    for (uint32_t i = 0; i < GROUP; i++) {
        assert_int_equal(dray_batch_row(batch, i)->group, group);
        assert_int_equal(dray_batch_row(batch, i)->slot / GROUP, group);
    }
    dray_batch_free(batch); /* given back */
}

/* Samples of groups {0-3}, {4-7}, ... get ready in any order (first all but slot 0): a group is
 * given when it is whole, and with nobody else's samples. */
TEST_WITHIN(test_groups_mix_prompts, up, down)
{
    dray_context *context = fixture_context(&f, "groups");
    dray_queue *queue = open_queue(context, "groups", 0, 0);
    for (int round = 0; round < test_times(20); round++) {
        dray_batch *batches[GROUP * GROUPS];
        uint32_t order[GROUP * GROUPS], done[GROUPS] = {0};
        char name[16];
        snprintf(name, sizeof name, "%d", round);
        insert_ints(queue, name, GROUP * GROUPS, GROUP);
        for (uint32_t i = 0; i < GROUP * GROUPS; i++) {
            batches[i] = claim_one(queue, "rollout");
            order[i] = (i + 1) % (GROUP * GROUPS);
        }
        if (round)
            shuffle(order, GROUP * GROUPS);
        for (uint32_t i = 0; i < GROUP * GROUPS; i++) {
            dray_batch *batch = batches[order[i]];
            set_ints(batch, "responses", 0);
            OK(dray_batch_commit(batch, &error));
            done[dray_batch_row(batch, 0)->slot / GROUP]++;
            dray_batch_free(batch);
            one_group(queue, done);
        }
        OK(dray_queue_clear(queue, name, &error));
    }
    leave(queue, context);
}

/* ---- tags are visible after the data --------------------------------------------------------- */

enum { TAGGED = 40 };

/* Takes rows the moment they are there. */
static void compare_tags(void *argument)
{
    const char *policy = argument;
    dray_context *context = fixture_context(&f, "compares");
    dray_queue *queue = open_queue(context, "tags", 0, 0);
    dray_claim_options o = want("reward", TAGGED);
    dray_batch *batch;
    o.up_to = 1;
    o.policy = policy[0] == 'f' ? DRAY_POLICY_FIFO : DRAY_POLICY_TOKEN_BALANCED;
    int rc;
    while ((rc = dray_queue_claim(queue, &o, &batch, &error)) == DRAY_OK) {
        int32_t values[TAGGED];
        OK(dray_batch_gather(batch, "responses", values, sizeof values, NULL, &error));
        for (uint32_t i = 0; i < dray_batch_rows(batch); i++) {
            double tokens;
            OK(dray_batch_tag(batch, i, DRAY_TAG_TOKENS, &tokens, &error));
            assert_int_equal((int32_t)tokens, values[i]);
        }
        set_ints(batch, "rewards", 0);
        COMMIT(batch);
    }
    assert_int_equal(rc, DRAY_EEND);
    leave(queue, context);
}

TEST_WITHIN(test_tags_are_visible_after_the_data, up, down)
{
    dray_context *context = fixture_context(&f, "tags");
    dray_queue *queue = open_queue(context, "tags", 0, 0);
    pid_t readers[] = {child(compare_tags, "fifo"), child(compare_tags, "token_balanced")};
    for (int round = 0; round < test_times(20); round++) {
        char name[16];
        snprintf(name, sizeof name, "%d", round);
        insert_ints(queue, name, TAGGED, 1);
        OK(dray_queue_seal(queue, name, TAGGED, &error));
        for (uint32_t left = TAGGED; left;) {
            dray_batch *batch;
            dray_claim_options o = want("rollout", 1 + draw(left < 5 ? left : 5));
            OK(dray_queue_claim(queue, &o, &batch, &error));
            set_ints(batch, "responses", 1000 * round);
            left -= dray_batch_rows(batch);
            for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
                OK(dray_batch_set_tag(batch, i, DRAY_TAG_TOKENS,
                                      1000 * round + (int32_t)dray_batch_row(batch, i)->slot,
                                      &error));
            COMMIT(batch);
        }
        OK(dray_queue_wait(queue, name, "reward", 20 * DRAY__SECOND, &error));
        OK(dray_queue_clear(queue, name, &error));
    }
    OK(dray_queue_end(queue, &error));
    join(readers[0]);
    join(readers[1]);
    leave(queue, context);
}

/* ---- a lost acknowledgement is reported as success ------------------------------------------- */

static void commit_to_nobody(dray_queue *queue)
{
    dray_batch *batch;
    dray_claim_options o = want("rollout", 4);
    insert_ints(queue, "2", 4, 1);
    OK(dray_queue_claim(queue, &o, &batch, &error));
    set_ints(batch, "responses", 10);
    fixture_end(f.coordinator_pid, SIGKILL);
    FAILS(DRAY_ECLOSED, dray_batch_commit(batch, &error));
    FAILS(DRAY_ECLOSED, dray_batch_commit(batch, &error));
    FAILS(DRAY_ECLOSED, dray_queue_seal(queue, "2", 4, &error));
    dray_batch_free(batch);
    unlink(f.socket);
    f.coordinator_pid = fixture_spawn(&f, false);
}

TEST_WITHIN(test_a_lost_acknowledgement_is_success, up, down)
{
    static dray_context *context; /* seen by the leak checker of what is forked below */
    static dray_queue *queue, *hasty;
    context = fixture_context(&f, "acknowledged");
    queue = open_queue(context, "acks", 0, 0);
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.timeout_ns = 20 * DRAY__MILLISECOND;
    OK(dray_queue_open(context, "acks", &options, &hasty, &error));
    insert_ints(queue, "0", 4, 1);
    dray_batch *batch;
    dray_claim_options o = want("rollout", 4);
    OK(dray_queue_claim(hasty, &o, &batch, &error));
    set_ints(batch, "responses", 7);
    kill(f.coordinator_pid, SIGSTOP);
    FAILS(DRAY_ETIMEDOUT, dray_batch_commit(batch, &error)); /* nobody knows: no success */
    kill(f.coordinator_pid, SIGCONT);
    options.timeout_ns = 0;
    int rc;
    while ((rc = dray_batch_commit(batch, &error)) == DRAY_ETIMEDOUT)
        ;
    OK(rc); /* and repeating it says what became of it */
    dray_batch_free(batch);
    all_rows(queue, "reward", "rewards", 0, 4);
    /* An acknowledgement that comes too late for the claim. */
    insert_ints(queue, "1", 4, 1);
    o.max_hold_ns = DRAY__MILLISECOND;
    OK(dray_queue_claim(queue, &o, &batch, &error));
    set_ints(batch, "responses", 8);
    all_rows(queue, "rollout", "responses", 9, 4);
    FAILS(DRAY_ESTALE, dray_batch_commit(batch, &error));
    dray_batch_free(batch);
    dray_queue_close(hasty);
    if (!elsewhere()) /* keys outlive a controller that is killed */
        commit_to_nobody(queue);
    leave(queue, context);
}

/* ---- a stale address reads another sample ---------------------------------------------------- */

/* The name, the slots and the memory of a partition are used again and again, while addresses of
 * its first life are kept: they lead to what they led to, or to an error. */
TEST_WITHIN(test_a_stale_address_reads_another_sample, up, down)
{
    dray_context *context = fixture_context(&f, "stale");
    dray_queue *queue = open_queue(context, "stale", 0, 0);
    insert_ints(queue, "p", 8, 1);
    dray_batch *held, *batch;
    dray_claim_options o = want("rollout", 8);
    OK(dray_queue_claim(queue, &o, &held, &error));
    uint32_t generation = dray_batch_row(held, 0)->generation;
    void *address;
    size_t size;
    OK(dray_batch_export(held, &address, &size, &error));
    OK(dray_queue_clear(queue, "p", &error));
    for (int round = 0; round < test_times(50); round++) {
        int32_t others[8];
        for (int i = 0; i < 8; i++)
            others[i] = 1000000 + 8 * round + i;
        dray_column_data column = int_column("prompts", others);
        dray_insert_options in = DRAY_INSERT_OPTIONS_INIT;
        in.partition = "p";
        in.rows = 8;
        in.columns = &column;
        in.column_count = 1;
        OK(dray_queue_insert(queue, &in, NULL, &error));
        int32_t values[8];
        dray_batch *read;
        OK(dray_batch_import(queue, address, size, &read, &error));
        assert_int_equal(dray_batch_row(read, 0)->generation, generation);
        OK(dray_batch_gather(read, "prompts", values, sizeof values, NULL, &error));
        for (int i = 0; i < 8; i++)
            assert_int_equal(values[i], 10 * i);
        dray_batch_free(read);
        OK(dray_queue_claim(queue, &o, &batch, &error));
        assert_true(dray_batch_row(batch, 0)->generation != generation);
        OK(dray_batch_gather(batch, "prompts", values, sizeof values, NULL, &error));
        assert_memory_equal(values, others, sizeof values);
        dray_batch_free(batch);
        OK(dray_queue_clear(queue, "p", &error));
    }
    set_ints(held, "responses", 0);
    FAILS(DRAY_EGONE, dray_batch_commit(held, &error));
    dray_batch_free(held);
    free(address);
    leave(queue, context);
}

/* ---- waiting is sleeping and looking again --------------------------------------------------- */

static void claim_when_it_comes(void *argument)
{
    int said = *(int *)argument;
    dray_context *context = fixture_context(&f, "sleeps");
    dray_queue *queue = open_queue(context, "sleep", 0, 0);
    if (write(said, "w", 1) != 1)
        abort();
    dray_batch *batch = claim_one(queue, "rollout");
    int64_t now = dray__now();
    if (write(said, &now, sizeof now) != sizeof now)
        abort();
    dray_batch_free(batch);
    leave(queue, context);
}

static int64_t switches(pid_t pid)
{
    return proc_number(pid, "status", "voluntary_ctxt_switches");
}

/* A second of waiting for a row wakes neither the one who waits nor the controller; the row does,
 * at once. */
TEST_WITHIN(test_waiting_is_polling, up, down)
{
    dray_context *context = fixture_context(&f, "writer");
    dray_queue *queue = open_queue(context, "sleep", 0, 0);
    int pipes[2];
    char byte;
    assert_int_equal(pipe(pipes), 0);
    pid_t waits = child(claim_when_it_comes, &pipes[1]);
    assert_int_equal(read(pipes[0], &byte, 1), 1);
    usleep(300000); /* the claim is on its way, and then waits */
    int64_t client = switches(waits), controller = switches(f.coordinator_pid);
    usleep(1000000);
    client = switches(waits) - client;
    controller = switches(f.coordinator_pid) - controller;
    fprintf(stderr, "woken in a second: client %lld times, controller %lld\n", (long long)client,
            (long long)controller);
    assert_true(client <= 2 &&
                controller <= 5); /* a poller's 1 s is 1; others' milliseconds 1,000 */
    int64_t begun = dray__now(), woken;
    insert_ints(queue, "0", 1, 1);
    assert_int_equal(read(pipes[0], &woken, sizeof woken), sizeof woken);
    fprintf(stderr, "woken after %.3f ms\n", (double)(woken - begun) / 1e6);
    assert_true(woken - begun < DRAY__SECOND / 2);
    join(waits);
    close(pipes[0]);
    close(pipes[1]);
    leave(queue, context);
}

/* ---- the balancer makes empty or overfull micro-batches -------------------------------------- */

enum { MOST = 60 };

static void check_shares(dray_queue *queue, dray_claim_options *o, const double *tokens,
                         uint32_t rows, const char *name)
{
    uint32_t seen[MOST] = {0}, micros = 0;
    dray_batch *batches[8];
    for (uint32_t rank = 0; rank < o->dp_size; rank++) {
        o->dp_rank = rank;
        OK(dray_queue_claim(queue, o, &batches[rank], &error));
        dray_batch *b = batches[rank];
        assert_true(dray_batch_micros(b) > 0);
        if (o->policy == DRAY_POLICY_LOCKSTEP && rank)
            assert_int_equal(dray_batch_micros(b), micros);
        micros = dray_batch_micros(b);
        for (uint32_t m = 0; m < micros; m++) {
            uint32_t first, count;
            double sum = 0;
            OK(dray_batch_micro(b, m, &first, &count, &error));
            assert_true(count > 0);
            for (uint32_t i = first; i < first + count; i++) {
                uint32_t slot = dray_batch_row(b, i)->slot;
                sum += tokens[slot];
                seen[slot] += dray_batch_weight(b, i) > 0;
            }
            assert_true(sum <= (double)o->token_cap);
        }
    }
    for (uint32_t i = 0; i < rows; i++)
        assert_int_equal(seen[i], 1);
    for (uint32_t rank = 0; rank < o->dp_size; rank++) {
        set_ints(batches[rank], "rewards", 0);
        OK(dray_batch_commit(batches[rank], &error));
        dray_batch_free(batches[rank]);
    }
    OK(dray_queue_wait(queue, name, "reward", 0, &error));
}

/* Any lengths, ranks and caps, also fewer samples than ranks and one sample as long as the cap. */
TEST_WITHIN(test_the_balancer_makes_bad_micro_batches, up, down)
{
    dray_context *context = fixture_context(&f, "balance");
    for (int round = 0; round < test_times(60); round++) {
        char name[16];
        double tokens[MOST];
        snprintf(name, sizeof name, "q%d", round);
        dray_queue *queue = open_queue(context, name, 0, 0);
        uint32_t rows = 1 + draw(MOST), longest = 1 + draw(500);
        for (uint32_t i = 0; i < rows; i++)
            tokens[i] = 1 + draw(longest);
        tokens[draw(rows)] = longest;
        insert_ints(queue, "0", rows, 1);
        OK(dray_queue_seal(queue, "0", rows, &error));
        dray_batch *batch;
        dray_claim_options o = want("rollout", rows);
        OK(dray_queue_claim(queue, &o, &batch, &error));
        set_ints(batch, "responses", 0);
        for (uint32_t i = 0; i < rows; i++)
            OK(dray_batch_set_tag(batch, i, DRAY_TAG_TOKENS, tokens[i], &error));
        COMMIT(batch);
        o = want("reward", rows);
        o.policy = round % 2 ? DRAY_POLICY_LOCKSTEP : DRAY_POLICY_TOKEN_BALANCED;
        o.dp_size = 1 + draw(8);
        o.token_cap = draw(2) ? longest : longest + draw(2000);
        o.micro_rows = draw(2) ? 0 : 1 + draw(8);
        check_shares(queue, &o, tokens, rows, "0");
        dray_queue_close(queue);
    }
    dray_close(context);
}

/* ---- starting up deadlocks ------------------------------------------------------------------- */

enum { PROCESSES = 12 };

typedef struct starter {
    const char *task, *output;
    uint32_t rows;
} starter;

static void on_one_processor(void)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(0, &one);
    sched_setaffinity(0, sizeof one, &one);
}

static void start_and_work(void *argument)
{
    const starter *s = argument;
    on_one_processor();
    dray_context *context = fixture_context(&f, s->task);
    dray_queue *queue;
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT; /* made by whoever comes last */
    OK(dray_queue_open(context, "start", &options, &queue, &error));
    for (uint32_t i = 0; i < s->rows; i++) {
        dray_batch *batch = claim_one(queue, s->task);
        if (s->output)
            set_ints(batch, s->output, 0);
        COMMIT(batch);
    }
    leave(queue, context);
}

/* Four times three tasks, consumers first, all on one processor, before there is a queue: they
 * wait for each other, and get through. Who waits for a queue that nobody makes is told so. */
TEST_WITHIN(test_starting_up_deadlocks, up, down)
{
    pid_t pids[PROCESSES];
    starter starters[3] = {
        {"actor", NULL, 4}, {"reward", "rewards", 4}, {"rollout", "responses", 4}};
    for (int i = 0; i < PROCESSES; i++)
        pids[i] = child(start_and_work, &starters[i * 3 / PROCESSES]);
    dray_context *context = fixture_context(&f, "late");
    dray_queue *queue;
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.timeout_ns = 200 * DRAY__MILLISECOND;
    FAILS(DRAY_ETIMEDOUT, dray_queue_open(context, "nobody's", &options, &queue, &error));
    assert_non_null(strstr(error.message, "nobody's"));
    queue = open_queue(context, "start", 0, 0);
    insert_ints(queue, "0", 16, 1);
    OK(dray_queue_seal(queue, "0", 16, &error));
    OK(dray_queue_wait(queue, "0", NULL, 20 * DRAY__SECOND, &error));
    for (int i = 0; i < PROCESSES; i++)
        join(pids[i]);
    leave(queue, context);
}

/* ---- a put doubles the memory ---------------------------------------------------------------- */

enum { PUT_ROWS = 64 };
#define PUT_CELL ((size_t)1 << 20)

static int64_t private_bytes(pid_t pid)
{
#ifdef __SANITIZE_THREAD__ /* what it remembers of every byte is private, too */
    (void)pid;
    return 0;
#else
    return proc_number(pid, "status", "RssAnon") * 1024;
#endif
}

/* Of all chunks that the keeper holds: pages that are there, as the kernel counts them. */
static uint64_t chunk_memory(void)
{
    char path[300], target[64];
    uint64_t bytes = 0;
    struct stat st;
    snprintf(path, sizeof path, "/proc/%d/fd", (int)f.keeper_pid);
    DIR *dir = opendir(path);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        ssize_t n = readlinkat(dirfd(dir), entry->d_name, target, sizeof target - 1);
        target[n > 0 ? n : 0] = 0;
        if (strncmp(target, "/memfd:dray-samples", 19) == 0 &&
            fstatat(dirfd(dir), entry->d_name, &st, 0) == 0)
            bytes += (uint64_t)st.st_blocks * 512;
    }
    closedir(dir);
    return bytes;
}

/* 64 MiB lie in the chunks once, and nowhere else: not in the producer beside its own array, not in
 * the controller, the keeper, or the consumer. */
TEST_WITHIN(test_a_put_doubles_the_memory, up, down)
{
    if (elsewhere()) /* this is of chunks */
        skip();
    dray_context *context = fixture_context(&f, "puts");
    dray_queue *queue = open_queue(context, "memory", 0, 0);
    uint8_t *values = mmap(NULL, PUT_ROWS * PUT_CELL, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    memset(values, 0x5A, PUT_ROWS * PUT_CELL);
    pid_t pids[] = {getpid(), f.coordinator_pid, f.keeper_pid};
    int64_t before[3];
    insert_ints(queue, "warm", 1, 1);
    for (int i = 0; i < 3; i++)
        before[i] = private_bytes(pids[i]);
    dray_column_data column = {.name = "frames", .dtype = DRAY_U8, .ndim = 1, .values = values};
    column.shape[0] = PUT_CELL;
    dray_column_data columns[] = {column, int_column("prompts", (int32_t *)(void *)values)};
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = "0";
    o.rows = PUT_ROWS;
    o.columns = columns;
    o.column_count = 2;
    OK(dray_queue_insert(queue, &o, NULL, &error));
    OK(dray_queue_seal(queue, "0", PUT_ROWS, &error));
    dray_batch *batch;
    dray_claim_options c = want("rollout", PUT_ROWS);
    c.partition = "0";
    OK(dray_queue_claim(queue, &c, &batch, &error));
    dray_column read;
    OK(dray_batch_column(batch, "prompts", &read, &error));
    for (int i = 0; i < 3; i++) {
        int64_t more = private_bytes(pids[i]) - before[i];
        fprintf(stderr, "process %d: %lld KiB more\n", i, (long long)more / 1024);
        assert_true(more < (int64_t)(PUT_ROWS * PUT_CELL / 8));
    }
    uint64_t chunks = chunk_memory();
    fprintf(stderr, "%llu bytes of chunks for %zu of samples\n", (unsigned long long)chunks,
            PUT_ROWS * PUT_CELL);
    /* Chunks have few sizes, to be used again: a quarter more at most, and small ones beside it. */
    assert_true(chunks <= PUT_ROWS * PUT_CELL * 5 / 4 + (8 << 20));
    dray_batch_free(batch);
    munmap(values, PUT_ROWS * PUT_CELL);
    leave(queue, context);
}

int main(void)
{
    seed = test_seed();
    return suite_run(NULL, NULL);
}
