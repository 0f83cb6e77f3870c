/* Tests what remains of durable queues when the controller is killed, power is lost, or the disk is
 * full. The oracle knows only what was acknowledged. */
#include "queue/fixture.h"

#include "queue/journal/journal.h"
#include "seed.h"

#include <fcntl.h>
#include <jansson.h>
#include <sys/stat.h>

static queue_fixture f;

static const char *const prompts[] = {"prompts"}, *const responses[] = {"responses"};
static const dray_queue_task tasks[] = {
    {.name = "rollout", .needs = prompts, .needs_count = 1, .writes = responses, .writes_count = 1},
    {.name = "reward", .needs = responses, .needs_count = 1},
    {.name = "actor", .needs = responses, .needs_count = 1},
};
static const char *const provisional[] = {"actor"};

enum { GROUP = 4 };

static void up(void)
{
    f = (queue_fixture){.durable = true};
    fixture_up(&f);
}

static void down(void)
{
    fixture_down(&f);
}

static void restart(void)
{
    fixture_restart(&f);
}

static int count_records(void *user, const dray__journal_record *record, dray_error *said)
{
    (void)said;
    *(uint64_t *)user += record->seq != 0;
    return DRAY_OK;
}

/* Where its last record ends; the file may go on. */
static off_t journal_end(const char *path)
{
    uint64_t end, last, count = 0;
    OK(dray__journal_read(path, count_records, &count, &end, &last, &error));
    return (off_t)end;
}

static dray_queue *open_with(dray_context *context, int32_t durability, const char *restore)
{
    dray_queue *queue;
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    o.tasks = tasks;
    o.task_count = 3;
    o.provisional = provisional;
    o.provisional_count = 1;
    o.max_attempts = 1;
    o.durability = durability;
    o.restore = restore;
    OK(dray_queue_open(context, "samples", &o, &queue, &error));
    return queue;
}

static dray_queue *open_queue(dray_context *context)
{
    return open_with(context, DRAY_DURABILITY_JOURNAL, NULL);
}

/* Ragged prompts: value k of row i of the partition is a function of both. */
static int64_t value_of(int partition, uint32_t slot, uint32_t k)
{
    return partition * 1000000 + (int64_t)slot * 1000 + k;
}

static int insert(dray_queue *queue, int partition, uint32_t rows, uint32_t *first,
                  dray_error *said)
{
    char name[16];
    uint64_t offsets[65] = {0};
    int64_t values[64 * 8];
    uint32_t at = 0;
    for (uint32_t i = 0; i < rows; i++) {
        for (uint32_t k = 0; k < 1 + i % 5; k++)
            values[at++] = value_of(partition, i, k);
        offsets[i + 1] = at;
    }
    snprintf(name, sizeof name, "%d", partition);
    dray_column_data column = {
        .name = "prompts", .dtype = DRAY_I64, .ndim = 1, .offsets = offsets, .values = values};
    dray_tag tag = {"step", partition};
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = name;
    o.rows = rows;
    o.group_size = rows % GROUP ? 1 : GROUP;
    o.columns = &column;
    o.column_count = 1;
    o.tags = &tag;
    o.tag_count = 1;
    return dray_queue_insert(queue, &o, first, said);
}

static int claim(dray_queue *queue, const char *task, int partition, uint32_t count,
                 dray_batch **out, dray_error *said)
{
    char name[16];
    snprintf(name, sizeof name, "%d", partition);
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = task;
    o.count = count;
    o.up_to = 1;
    o.partition = name;
    o.timeout_ns = 0;
    return dray_queue_claim(queue, &o, out, said);
}

static void check_prompts(dray_batch *batch, int partition)
{
    dray_column column;
    double step;
    OK(dray_batch_column(batch, "prompts", &column, &error));
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++) {
        uint32_t slot = dray_batch_row(batch, i)->slot;
        assert_int_equal(column.lengths[i], 1 + slot % 5);
        for (uint32_t k = 0; k < column.lengths[i]; k++)
            assert_int_equal(((const int64_t *)column.cells[i])[k], value_of(partition, slot, k));
        OK(dray_batch_tag(batch, i, "step", &step, &error));
        assert_int_equal((int)step, partition);
    }
}

static void set_responses(dray_batch *batch, int partition)
{
    int64_t values[64];
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
        values[i] = -value_of(partition, dray_batch_row(batch, i)->slot, 0);
    dray_column_data column = {.name = "responses", .dtype = DRAY_I64, .values = values};
    OK(dray_batch_set(batch, &column, &error));
}

static void check_responses(dray_batch *batch, int partition)
{
    int64_t values[64];
    OK(dray_batch_gather(batch, "responses", values, sizeof values, NULL, &error));
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
        assert_int_equal(values[i], -value_of(partition, dray_batch_row(batch, i)->slot, 0));
}

/* Rolls out `rows` rows and commits them. */
static void roll_out(dray_queue *queue, int partition, uint32_t rows)
{
    dray_batch *batch;
    OK(claim(queue, "rollout", partition, rows, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), rows);
    check_prompts(batch, partition);
    set_responses(batch, partition);
    COMMIT(batch);
}

TEST(test_goes_on)
{
    up();
    dray_context *context = fixture_context(&f, "main");
    dray_queue *queue = open_queue(context);
    uint32_t first = 9;
    OK(insert(queue, 1, 8, &first, &error));
    assert_int_equal(first, 0);
    OK(dray_queue_seal(queue, "1", 8, &error));
    roll_out(queue, 1, 3);
    dray_batch *before, *batch;
    OK(claim(queue, "rollout", 1, 2, &before, &error));
    set_responses(before, 1);
    restart();
    FAILS(DRAY_ESTALE, dray_batch_commit(before, &error));
    dray_batch_free(before);
    OK(claim(queue, "reward", 1, 8, &batch, &error)); /* what was committed is there */
    assert_int_equal(dray_batch_rows(batch), 3);
    check_responses(batch, 1);
    COMMIT(batch);
    roll_out(queue, 1, 5); /* with the rows whose claim is void */
    OK(insert(queue, 2, 5, NULL, &error));
    restart();
    OK(claim(queue, "reward", 1, 8, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), 5);
    check_responses(batch, 1);
    COMMIT(batch);
    OK(dray_queue_wait(queue, "1", "reward", 0, &error));
    OK(dray_queue_clear(queue, "1", &error));
    restart();
    OK(dray_queue_wait(queue, "1", "reward", 0, &error)); /* it had finished */
    roll_out(queue, 2, 5);
    OK(dray_queue_clear(queue, "2", &error));
    leave(queue, context);
    wait_for_chunks(&f, 0);
    down();
}

TEST(test_private)
{
    up();
    dray_context *context = fixture_context(&f, "main");
    dray_queue *queue = open_queue(context);
    char path[200];
    struct stat st;
    fixture_journal(&f, path, sizeof path);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    leave(queue, context);
    down();
}

/* ---- losing power ----------------------------------------------------------------------------
 * Random changes, each acknowledged; after each, how long the journal is and what the queue says of
 * itself. Cut off anywhere, the journal makes the queue of the last change that was whole. */

enum { CHANGES = 70, PARTITIONS = 5 };

typedef struct moment {
    off_t size; /* of the journal, when the change was acknowledged */
    char *state;
} moment;

static char *state_of(dray_queue *queue)
{
    static const char *const passing[] = {
        "chunks",     "chunk_bytes", "claims", "clients", "waiters", "totals",
        "columns_in", "tasks_out",   "waited", "holders", "held_by", "free_chunk_bytes"};
    char *text;
    OK(dray_queue_status(queue, &text, &error));
    json_t *json = json_loads(text, 0, NULL);
    free(text);
    for (size_t i = 0; i < sizeof passing / sizeof *passing; i++)
        json_object_del(json, passing[i]);
    text = json_dumps(json, JSON_SORT_KEYS | JSON_COMPACT);
    json_decref(json);
    return text;
}

static uint64_t draw(uint64_t *random, uint64_t below)
{
    *random = *random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (*random >> 33) % below;
}

typedef struct history {
    dray_queue *queue;
    uint64_t random;
    uint32_t rows[PARTITIONS * 100]; /* of each partition that there was */
    int first, last;
    void *cursor;
    size_t cursor_size;
} history;

static int some_partition(history *h)
{
    return h->first + (int)draw(&h->random, (uint64_t)(h->last - h->first));
}

static void change_rows(history *h)
{
    int p = draw(&h->random, 3) || h->last == h->first ? h->last : some_partition(h);
    uint32_t rows = GROUP * (1 + (uint32_t)draw(&h->random, 3));
    if (p == h->last && h->last - h->first >= PARTITIONS)
        return;
    int rc = insert(h->queue, p, rows, NULL, &error);
    if (rc == DRAY_EINVALID) /* sealed */
        return;
    OK(rc);
    h->rows[p] += rows;
    h->last += p == h->last;
}

static void change_claim(history *h, const char *task)
{
    dray_batch *batch;
    int p = some_partition(h);
    int rc = claim(h->queue, task, p, 1 + (uint32_t)draw(&h->random, 6), &batch, &error);
    if (rc)
        return;
    if (draw(&h->random, 6) == 0)
        OK(dray_batch_fail(batch, NULL, 0, "bad luck", &error));
    else if (strcmp(task, "rollout") == 0) {
        double version = (double)draw(&h->random, 5);
        for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
            OK(dray_batch_set_tag(batch, i, "version", version, &error));
        set_responses(batch, p);
        OK(dray_batch_commit(batch, &error));
    } else {
        if (draw(&h->random, 2))
            OK(dray_batch_set_tag(batch, 0, "loss", 0.5, &error));
        OK(dray_batch_commit(batch, &error));
    }
    dray_batch_free(batch);
}

static void change_refill(history *h)
{
    dray_refill refill = {.size = sizeof refill};
    if (dray_queue_refill_wait(h->queue, 0, &refill, &error))
        return;
    if (draw(&h->random, 3) == 0) {
        OK(dray_queue_refill_decline(h->queue, refill.id, &error));
        return;
    }
    int64_t values[64] = {0};
    uint64_t offsets[65];
    for (uint64_t i = 0; i < 65; i++)
        offsets[i] = i;
    dray_column_data column = {
        .name = "prompts", .dtype = DRAY_I64, .ndim = 1, .offsets = offsets, .values = values};
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = refill.partition;
    o.rows = refill.rows;
    o.columns = &column;
    o.column_count = 1;
    o.refill = refill.id;
    OK(dray_queue_insert(h->queue, &o, NULL, &error));
}

static void change_cursor(history *h)
{
    if (h->cursor && draw(&h->random, 4) == 0)
        OK(dray_queue_resume(h->queue, h->cursor, h->cursor_size, NULL, &error));
    else if (h->cursor && draw(&h->random, 2))
        OK(dray_queue_covered(h->queue, h->cursor, h->cursor_size, &error));
    else {
        free(h->cursor);
        h->cursor = NULL;
        OK(dray_queue_cursor(h->queue, draw(&h->random, 4), &h->cursor, &h->cursor_size, &error));
    }
}

/* Bounds nothing, but counts. */
static void change_admission(history *h)
{
    dray_admission a = DRAY_ADMISSION_INIT;
    a.task = "rollout";
    a.batch_rows = GROUP;
    a.staleness = 1000;
    a.version = draw(&h->random, 5);
    a.resume = draw(&h->random, 3) == 0;
    int rc = dray_queue_admit(h->queue, &a, &error);
    assert_true(rc == DRAY_OK || rc == DRAY_EINVALID); /* it goes back */
}

static void change(history *h)
{
    char name[16];
    uint64_t what = h->last == h->first ? 0 : draw(&h->random, 17);
    if (what < 3) {
        change_rows(h);
    } else if (what < 7) {
        change_claim(h, "rollout");
    } else if (what < 10) {
        change_claim(h, draw(&h->random, 2) ? "reward" : "actor");
    } else if (what < 12) {
        change_refill(h);
    } else if (what < 13) {
        change_cursor(h);
    } else if (what < 15) {
        int p = some_partition(h);
        snprintf(name, sizeof name, "%d", p);
        int rc = dray_queue_seal(h->queue, name, h->rows[p], &error);
        assert_true(rc == DRAY_OK || rc == DRAY_ENOENT);
    } else if (what < 16) {
        snprintf(name, sizeof name, "%d", h->first);
        OK(dray_queue_clear(h->queue, name, &error));
        h->first += h->first < h->last;
    } else {
        change_admission(h);
    }
}

static void copy_to(const char *from, const char *to, off_t size, off_t flip)
{
    uint8_t *data = malloc((size_t)size + 1);
    int in = open(from, O_RDONLY), out = open(to, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(in >= 0 && out >= 0 && pread(in, data, (size_t)size, 0) == size);
    if (flip >= 0)
        data[flip] ^= 0x10;
    assert_true(write(out, data, (size_t)size) == size);
    close(in);
    close(out);
    free(data);
}

/* What a coordinator says that is started on these bytes. */
static char *state_after(const char *saved, const char *path, off_t size, off_t flip)
{
    fixture_end(f.coordinator_pid, SIGKILL);
    copy_to(saved, path, size, flip);
    f.coordinator_pid = fixture_spawn(&f, false);
    dray_context *context = fixture_context(&f, "after");
    dray_queue *queue = open_queue(context);
    char *state = state_of(queue);
    leave(queue, context);
    return state;
}

static void expect_state(const char *saved, const char *path, off_t size, off_t flip,
                         const char *expected)
{
    char *state = state_after(saved, path, size, flip);
    if (strcmp(state, expected) != 0)
        fprintf(stderr, "cut at %lld:\n%s\nexpected\n%s\n", (long long)size, state, expected);
    assert_string_equal(state, expected);
    free(state);
}

TEST(test_power_cut)
{
    uint64_t seed = test_seed();
    int scale = test_times(1);
    for (int round = 0; round < scale; round++) {
        up();
        moment moments[CHANGES + 1];
        char path[200], saved[300];
        dray_context *context = fixture_context(&f, "main");
        history h = {.queue = open_queue(context), .random = seed + (uint64_t)round};
        fixture_journal(&f, path, sizeof path);
        for (int i = 0; i <= CHANGES; i++) {
            if (i)
                change(&h);
            /* The controller answers what comes after a loss that nobody waits for. */
            FAILS(DRAY_ENOENT, dray_queue_seal(h.queue, "nowhere", 1, &error));
            moments[i].state = state_of(h.queue);
            moments[i].size = journal_end(path);
        }
        snprintf(saved, sizeof saved, "%s/saved", f.folder);
        copy_to(path, saved, moments[CHANGES].size, -1);
        leave(h.queue, context);
        for (int i = 1; i <= CHANGES; i++) {
            off_t from = moments[i - 1].size, to = moments[i].size;
            if (to == from)
                continue;
            off_t inside = 1 + (off_t)draw(&h.random, (uint64_t)(to - from));
            expect_state(saved, path, to, -1, moments[i].state);
            if (draw(&h.random, 2)) /* of several records, the first may be whole */
                free(state_after(saved, path, to - inside, -1));
            expect_state(saved, path, from + 40, -1, moments[i - 1].state);
        }
        /* A bit of the last record is as good as none of it; of one that was safe, an error. */
        off_t last = moments[CHANGES].size;
        uint64_t end, number, count = 0;
        fixture_end(f.coordinator_pid, SIGKILL);
        copy_to(saved, path, last, last - 20);
        OK(dray__journal_read(path, count_records, &count, &end, &number, &error));
        assert_true((off_t)end < last);
        copy_to(saved, path, last, moments[1].size / 2);
        FAILS(DRAY_ECHECKSUM,
              dray__journal_read(path, count_records, &count, &end, &number, &error));
        copy_to(saved, path, last, -1);
        f.coordinator_pid = fixture_spawn(&f, false);
        unlink(saved);
        free(h.cursor);
        for (int i = 0; i <= CHANGES; i++)
            free(moments[i].state);
        down();
    }
}

/* ---- a full disk ----------------------------------------------------------------------------- */

TEST(test_disk_full)
{
    up();
    char path[200];
    dray_batch *batch;
    dray_context *context = fixture_context(&f, "main");
    dray_queue *queue = open_queue(context);
    OK(insert(queue, 1, 8, NULL, &error));
    OK(claim(queue, "rollout", 1, 8, &batch, &error));
    set_responses(batch, 1);
    fixture_journal(&f, path, sizeof path);
    fixture_limit_files(&f, (rlim_t)journal_end(path) + 60);
    FAILS(DRAY_EFULL, dray_batch_commit(batch, &error));
    assert_non_null(strstr(error.message, path));
    FAILS(DRAY_EFULL, insert(queue, 2, 8, NULL, &error)); /* refused: nothing of it is there */
    FAILS(DRAY_EFULL, dray_queue_seal(queue, "1", 8, &error));
    char *text = state_of(queue); /* looking is no change */
    free(text);
    fixture_limit_files(&f, RLIM_INFINITY);
    int64_t deadline = dray__deadline(10 * DRAY__SECOND);
    int rc;
    while ((rc = dray_batch_commit(batch, &error)) == DRAY_EFULL && dray__now() < deadline)
        usleep(20000);
    OK(rc);
    dray_batch_free(batch);
    OK(dray_queue_seal(queue, "1", 8, &error));
    restart();
    OK(claim(queue, "reward", 1, 8, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), 8);
    check_responses(batch, 1);
    dray_batch_free(batch);
    FAILS(DRAY_ETIMEDOUT, claim(queue, "rollout", 2, 8, &batch, &error));
    leave(queue, context);
    down();
}

/* ---- an end while rows are inserted ---------------------------------------------------------- */

enum { MANY = 1 << 20 };

static dray_queue *open_wide(dray_context *context)
{
    dray_queue *queue;
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    o.tasks = tasks;
    o.task_count = 3;
    o.capacity_rows = MANY;
    o.durability = DRAY_DURABILITY_JOURNAL;
    OK(dray_queue_open(context, "wide", &o, &queue, &error));
    return queue;
}

static void insert_many(void *told)
{
    dray_context *context = fixture_context(&f, "many");
    dray_queue *queue = open_wide(context);
    uint8_t *values = calloc(MANY, 1);
    const dray_column_data column = {.name = "prompts", .dtype = DRAY_U8, .values = values};
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = "p";
    o.rows = MANY;
    o.columns = &column;
    o.column_count = 1;
    int rc = dray_queue_insert(queue, &o, NULL, &error);
    if (write(*(const int *)told, &rc, sizeof rc) != sizeof rc)
        abort();
    free(values);
    leave(queue, context);
}

static bool status_has(dray_queue *queue, const char *words)
{
    char *text;
    OK(dray_queue_status(queue, &text, &error));
    bool found = strstr(text, words) != NULL;
    free(text);
    return found;
}

/* Many rows are inserted in steps, between which the queue may be ended: then they are refused, and
 * the journal has no rows after its end. */
TEST(test_end_between_steps)
{
    up();
    int told[2], inserted = DRAY_OK;
    dray_context *context = fixture_context(&f, "main");
    dray_queue *queue = open_wide(context);
    assert_int_equal(pipe(told), 0);
    pid_t pid = child(insert_many, &told[1]);
    while (!status_has(queue, "\"inserts\":1,") && !status_has(queue, "\"name\":\"p\""))
        ;
    OK(dray_queue_end(queue, &error));
    assert_int_equal(read(told[0], &inserted, sizeof inserted), sizeof inserted);
    join(pid);
    close(told[0]);
    close(told[1]);
    assert_true(inserted == DRAY_OK || inserted == DRAY_EEND);
    bool there = status_has(queue, "\"name\":\"p\"");
    assert_int_equal(there, inserted == DRAY_OK);
    restart();
    assert_int_equal(status_has(queue, "\"name\":\"p\""), there);
    leave(queue, context);
    down();
}

/* ---- eight clients --------------------------------------------------------------------------- */

enum { CLIENTS = 8, STEPS = 30 };

typedef struct client_pipe {
    int number, pipe;
} client_pipe;

/* Rolls out a partition of its own, row by row, and says of each what was acknowledged. */
static void be_client(void *argument)
{
    client_pipe *c = argument;
    dray_context *context = fixture_context(&f, "client");
    dray_queue *queue = open_queue(context);
    OK(insert(queue, c->number, STEPS, NULL, &error));
    for (int done = 0; done < STEPS;) {
        dray_batch *batch;
        int64_t begun = dray__now();
        OK(claim(queue, "rollout", c->number, 1, &batch, &error));
        check_prompts(batch, c->number);
        set_responses(batch, c->number);
        int rc = dray_batch_commit(batch, &error);
        int64_t took = dray__now() - begun;
        dray_batch_free(batch);
        if (rc == DRAY_ESTALE) /* of a claim from before */
            continue;
        OK(rc);
        done++;
        if (write(c->pipe, &took, sizeof took) != sizeof took)
            abort();
        usleep(2000);
    }
    leave(queue, context);
}

TEST(test_eight_clients)
{
    up();
    int pipes[2];
    assert_int_equal(pipe(pipes), 0);
    pid_t pids[CLIENTS];
    client_pipe clients[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) {
        clients[i] = (client_pipe){i, pipes[1]};
        pids[i] = child(be_client, &clients[i]);
    }
    close(pipes[1]);
    int64_t took, longest = 0;
    int acknowledged = 0;
    while (read(pipes[0], &took, sizeof took) == sizeof took) {
        longest = took > longest ? took : longest;
        if (++acknowledged % 60 == 0)
            restart();
    }
    close(pipes[0]);
    for (int i = 0; i < CLIENTS; i++)
        join(pids[i]);
    assert_int_equal(acknowledged, CLIENTS * STEPS);
    printf("longest commit %.3f s\n", (double)longest / 1e9);
    assert_true(longest < 5 * DRAY__SECOND);
    dray_context *context = fixture_context(&f, "main");
    dray_queue *queue = open_queue(context);
    for (int i = 0; i < CLIENTS; i++) {
        dray_batch *batch;
        char name[16];
        OK(claim(queue, "reward", i, STEPS, &batch, &error));
        assert_int_equal(dray_batch_rows(batch), STEPS);
        check_responses(batch, i);
        dray_batch_free(batch);
        snprintf(name, sizeof name, "%d", i);
        OK(dray_queue_clear(queue, name, &error));
    }
    wait_for_chunks(&f, 0); /* no memory file is left over */
    leave(queue, context);
    down();
}

/* ---- checkpoints, compaction ----------------------------------------------------------------- */

TEST(test_checkpoint)
{
    static dray_context *context; /* seen by the leak checker of a coordinator forked meanwhile */
    static dray_queue *queue;
    for (int32_t to = DRAY_DURABILITY_NONE; to <= DRAY_DURABILITY_JOURNAL; to++) {
        up();
        char path[200];
        dray_batch *batch;
        snprintf(path, sizeof path, "%s/checkpoint", f.folder);
        context = fixture_context(&f, "main");
        queue = open_with(context, DRAY_DURABILITY_CHECKPOINT, NULL);
        OK(insert(queue, 1, 8, NULL, &error));
        roll_out(queue, 1, 3);
        OK(insert(queue, 2, 4, NULL, &error));
        OK(dray_queue_clear(queue, "2", &error));
        OK(dray_queue_checkpoint(queue, path, &error));
        char *before = state_of(queue); /* what was cleared is written, and not held any more */
        FAILS(DRAY_EINVALID, dray_queue_checkpoint(queue, ".here", &error));
        FAILS(DRAY_ESYS, dray_queue_checkpoint(queue, "/nowhere/at/all", &error));
        roll_out(queue, 1, 5); /* later than it */
        fixture_end(f.coordinator_pid, SIGKILL);
        f.coordinator_pid = fixture_spawn(&f, false);
        FAILS(DRAY_ECLOSED, dray_queue_seal(queue, "1", 8, &error));
        leave(queue, context);
        context = fixture_context(&f, "main");
        queue = open_with(context, to, path);
        char *after = state_of(queue);
        assert_string_equal(before, after);
        free(before);
        free(after);
        roll_out(queue, 1, 5);
        if (to == DRAY_DURABILITY_JOURNAL)
            restart();
        OK(claim(queue, "reward", 1, 8, &batch, &error));
        assert_int_equal(dray_batch_rows(batch), 8);
        check_responses(batch, 1);
        dray_batch_free(batch);
        dray_queue *other = open_with(context, to, NULL); /* it is what it was opened as */
        dray_queue_close(other);
        leave(queue, context);
        unlink(path);
        down();
    }
}

TEST(test_compaction)
{
    up();
    enum { BYTES = 4 << 20 };
    uint8_t *values = malloc(BYTES);
    memset(values, 7, BYTES);
    char path[200], name[16];
    dray_context *context = fixture_context(&f, "main");
    dray_queue *queue = open_queue(context);
    OK(insert(queue, 0, 8, NULL, &error));
    roll_out(queue, 0, 8);
    dray_column_data column = {
        .name = "large", .dtype = DRAY_U8, .ndim = 1, .shape = {BYTES}, .values = values};
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = name;
    o.rows = 1;
    o.columns = &column;
    o.column_count = 1;
    fixture_journal(&f, path, sizeof path);
    for (int i = 1; i <= 12; i++) {
        snprintf(name, sizeof name, "%d", i);
        OK(dray_queue_insert(queue, &o, NULL, &error));
        OK(dray_queue_clear(queue, name, &error));
    }
    for (int i = 0; i < 2000 && journal_end(path) > 24 << 20; i++) /* beside what else it does */
        usleep(5000);
    assert_true(journal_end(path) <= 24 << 20);
    char *before = state_of(queue);
    restart();
    char *after = state_of(queue);
    assert_string_equal(before, after);
    free(before);
    free(after);
    FAILS(DRAY_EDTYPE, (column.dtype = DRAY_I8, dray_queue_insert(queue, &o, NULL, &error)));
    dray_batch *batch;
    OK(claim(queue, "reward", 0, 8, &batch, &error));
    check_responses(batch, 0);
    dray_batch_free(batch);
    free(values);
    leave(queue, context);
    down();
}

/* Columns of one insert are put back into chunks of which none has room for all. */
TEST(test_columns_of_several_chunks)
{
    up();
    enum { BYTES = 200 << 10, COLUMNS = 3 };
    static uint8_t values[BYTES];
    static const char *const names[COLUMNS] = {"a", "b", "c"};
    dray_column_data columns[COLUMNS];
    for (int i = 0; i < COLUMNS; i++)
        columns[i] = (dray_column_data){
            .name = names[i], .dtype = DRAY_U8, .ndim = 1, .shape = {BYTES}, .values = values};
    dray_context *context = fixture_context(&f, "main");
    dray_queue *queue = open_queue(context);
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = "0";
    o.rows = 1;
    o.columns = columns;
    o.column_count = COLUMNS;
    OK(dray_queue_insert(queue, &o, NULL, &error));
    restart();
    OK(dray_queue_seal(queue, "0", 1, &error));
    leave(queue, context);
    down();
}

SUITE(NULL, NULL)
