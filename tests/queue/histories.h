/* Random histories: processes insert, claim, commit in whole and in part, fail rows and give rows
 * back, and are stopped, continued and killed. All of them share a ledger.
 *
 * Every inserted sample has a number of its own, which is its prompt. Every token of a row is the
 * sample's number and the token's index, and every mark is the attempt that wrote it. Therefore a
 * reader of a row can tell whether it is complete and of one sample, and whether each piece is of
 * one attempt. The ledger shows whether a task committed a sample twice. */
#pragma once

#include "base/random.h"
#include "queue/one_fixture.h"
#include "seed.h"

#include <stdatomic.h>
#include <sys/mman.h>
#include <time.h>

enum { ROLLOUT, REWARD, ACTOR, TASKS, WORKERS = 4, OPEN = 4, BATCH = 24, NUMBERS = 8 << 20 };

typedef struct ledger {
    atomic_ullong operations, attempts;
    atomic_uchar committed[NUMBERS][TASKS];
} ledger;

typedef struct random {
    uint64_t seed, stream, draws;
} random_state;

static ledger *book;
static uint64_t base_seed;

static const char *const c_prompt[] = {"prompt"};
static const char *const c_rows[] = {"tokens", "marks"};
static const char *const c_reward_in[] = {"prompt", "tokens", "marks"};
static const char *const c_score[] = {"score"};
static const char *const c_actor[] = {"prompt", "tokens", "marks", "score"};

static const dray_queue_task history_tasks[TASKS] = {
    {"rollout", c_prompt, 1, c_rows, 2},
    {"reward", c_reward_in, 3, c_score, 1},
    {"actor", c_actor, 4, NULL, 0},
};

static inline uint32_t draw(random_state *r, uint32_t below)
{
    return (uint32_t)(dray__random_u64(r->seed, r->stream, r->draws++) % below);
}

static inline void require(bool condition, const char *what, int64_t number)
{
    if (condition)
        return;
    fprintf(stderr, "sample %lld: %s (seed %llu)\n", (long long)number, what,
            (unsigned long long)base_seed);
    abort();
}

static inline dray_queue *open_history(dray_context *context)
{
    dray_queue *queue;
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = history_tasks;
    options.task_count = TASKS;
    OK(dray_queue_open(context, "history", &options, &queue, &error));
    return queue;
}

/* ---- what a row must be ---------------------------------------------------------------------- */

static inline void check_pieces(dray_batch *batch, uint32_t row, const int64_t *marks,
                                int64_t number)
{
    dray_piece tokens[64], attempts[64];
    uint32_t count, other;
    OK(dray_batch_pieces(batch, "tokens", row, tokens, 64, &count, &error));
    OK(dray_batch_pieces(batch, "marks", row, attempts, 64, &other, &error));
    require(count == other, "tokens and marks in other pieces", number);
    uint64_t at = 0;
    for (uint32_t i = 0; i < count && i < 64; i++) {
        require(tokens[i].elements == attempts[i].elements, "pieces of two attempts", number);
        for (uint64_t k = at; k < at + attempts[i].elements; k++)
            require(marks[k] == marks[at], "a piece of two attempts", number);
        at += attempts[i].elements;
    }
}

/* Checks the rows. Sets their numbers, and the number of tokens of each, which may be 0. */
static inline void check_rows(dray_batch *batch, int task, int64_t *numbers, uint64_t *lengths)
{
    dray_column prompt, tokens, marks, score = {0};
    OK(dray_batch_column(batch, "prompt", &prompt, &error));
    int rc = dray_batch_column(batch, "tokens", &tokens, &error);
    bool begun = rc == DRAY_OK;
    if (task != ROLLOUT || rc != DRAY_ENOENT)
        OK(rc);
    if (begun)
        OK(dray_batch_column(batch, "marks", &marks, &error));
    if (task == ACTOR)
        OK(dray_batch_column(batch, "score", &score, &error));
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++) {
        int64_t number = numbers[i] = *(const int64_t *)prompt.cells[i];
        lengths[i] = begun ? tokens.lengths[i] : 0;
        require(!begun || tokens.lengths[i] == marks.lengths[i], "columns of two attempts", number);
        for (uint64_t k = 0; k < lengths[i]; k++)
            require(((const int64_t *)tokens.cells[i])[k] == (number << 20 | (int64_t)k),
                    "a token of another sample, or twice", number);
        if (begun && lengths[i])
            check_pieces(batch, i, marks.cells[i], number);
        require(task == ROLLOUT || lengths[i] > 0, "ready without tokens", number);
        require(task != ACTOR || *(const int64_t *)score.cells[i] == number, "another's score",
                number);
    }
}

/* ---- workers --------------------------------------------------------------------------------- */

static inline void set_outputs(dray_batch *batch, int task, random_state *r, const int64_t *numbers,
                               const uint64_t *lengths)
{
    uint32_t rows = dray_batch_rows(batch);
    int64_t tokens[BATCH * 3], marks[BATCH * 3];
    uint64_t offsets[BATCH + 1] = {0};
    int64_t attempt = (int64_t)atomic_fetch_add(&book->attempts, 1);
    dray_column_data column = {.name = "score", .dtype = DRAY_I64, .values = numbers};
    if (task == REWARD)
        OK(dray_batch_set(batch, &column, &error));
    if (task != ROLLOUT)
        return;
    for (uint32_t i = 0; i < rows; i++) {
        offsets[i + 1] = offsets[i] + 1 + draw(r, 3);
        for (uint64_t k = offsets[i]; k < offsets[i + 1]; k++) {
            tokens[k] = numbers[i] << 20 | (int64_t)(lengths[i] + k - offsets[i]);
            marks[k] = attempt;
        }
    }
    column = (dray_column_data){
        .name = "tokens", .dtype = DRAY_I64, .ndim = 1, .offsets = offsets, .values = tokens};
    OK(dray_batch_set(batch, &column, &error));
    column.name = "marks";
    column.values = marks;
    OK(dray_batch_set(batch, &column, &error));
}

static inline void commit_some(dray_batch *batch, int task, random_state *r, const int64_t *numbers,
                               const uint64_t *lengths, const bool *failed)
{
    uint32_t open[BATCH], open_count = 0;
    bool stays[BATCH] = {false};
    set_outputs(batch, task, r, numbers, lengths);
    for (uint32_t i = 0; task == ROLLOUT && i < dray_batch_rows(batch); i++)
        if ((stays[i] = lengths[i] < 40 && draw(r, 4) == 0))
            open[open_count++] = i;
    if (open_count)
        OK(dray_batch_leave_open(batch, open, open_count, &error));
    int rc = dray_batch_commit(batch, &error);
    if (rc == DRAY_ESTALE || rc == DRAY_EGONE)
        return;
    OK(rc);
    if (draw(r, 8) == 0)
        OK(dray_batch_commit(batch, &error));
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
        if (!stays[i] && !failed[i])
            require(atomic_fetch_add(&book->committed[numbers[i]][task], 1) == 0,
                    "committed twice for a task", numbers[i]);
}

static inline void work_on(dray_batch *batch, int task, random_state *r)
{
    int64_t numbers[BATCH];
    uint64_t lengths[BATCH];
    bool failed[BATCH] = {false};
    check_rows(batch, task, numbers, lengths);
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++) /* rows of weight 0 are padding */
        failed[i] = dray_batch_weight(batch, i) == 0;
    uint32_t what = draw(r, 100), rows[BATCH], count = 0;
    if (what < 8)
        return; /* the rows are given back */
    if (what < 9)
        raise(SIGKILL);
    if (what < 16) {
        for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
            if (draw(r, 3) == 0 && !failed[i])
                failed[i] = true, rows[count++] = i;
        int rc = count ? dray_batch_fail(batch, rows, count, "failed", &error) : DRAY_OK;
        if (rc == DRAY_ESTALE || rc == DRAY_EGONE)
            return;
        OK(rc);
    }
    atomic_fetch_add(&book->operations, 1);
    commit_some(batch, task, r, numbers, lengths, failed);
}

static inline void work(void *argument)
{
    static const int32_t policies[] = {DRAY_POLICY_FIFO, DRAY_POLICY_GROUP,
                                       DRAY_POLICY_OLDEST_VERSION, DRAY_POLICY_TOKEN_BALANCED};
    random_state r = *(const random_state *)argument;
    dray_context *context = fixture_context(&f, "worker");
    dray_queue *queue = open_history(context);
    for (int rc = 0; rc != DRAY_EEND;) {
        int task = (int)draw(&r, TASKS);
        dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
        dray_batch *batch;
        o.task = history_tasks[task].name;
        o.count = 4 * (1 + draw(&r, 4));
        o.up_to = 1;
        o.policy = policies[draw(&r, 4)];
        o.dp_size = 2;
        o.dp_rank = draw(&r, 2);
        o.max_hold_ns = draw(&r, 4) ? 0 : 2 * DRAY__MILLISECOND;
        o.timeout_ns = (int64_t)draw(&r, 2) * DRAY__MILLISECOND;
        rc = dray_queue_claim(queue, &o, &batch, &error);
        atomic_fetch_add(&book->operations, 1);
        if (rc == DRAY_ETIMEDOUT || rc == DRAY_EEND)
            continue;
        OK(rc);
        work_on(batch, task, &r);
        dray_batch_free(batch);
    }
    leave(queue, context);
}

/* ---- the driver ------------------------------------------------------------------------------ */

typedef struct driver {
    dray_queue *queue;
    random_state r;
    int64_t number; /* of the next sample */
    uint32_t made, cleared;
    struct {
        uint32_t rows;
        int64_t numbers[1 << 14]; /* of all samples that the partition ever had */
        uint32_t count;
    } open[OPEN];
    random_state worker_random[WORKERS];
    pid_t pids[WORKERS];
} driver;

static inline void start_worker(driver *d, int i)
{
    d->worker_random[i] =
        (random_state){base_seed, ++d->worker_random[i].stream * WORKERS + (uint64_t)i, 0};
    d->pids[i] = child(work, &d->worker_random[i]);
}

static inline void insert_samples(driver *d, uint32_t partition, uint32_t rows, uint32_t group,
                                  uint64_t refill)
{
    int64_t numbers[BATCH];
    char name[16];
    for (uint32_t i = 0; i < rows; i++) {
        require(d->number < NUMBERS && d->open[partition % OPEN].count < 1 << 14, "no room",
                d->number);
        d->open[partition % OPEN].numbers[d->open[partition % OPEN].count++] = d->number;
        numbers[i] = d->number++;
    }
    dray_column_data column = {.name = "prompt", .dtype = DRAY_I64, .values = numbers};
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    snprintf(name, sizeof name, "%u", partition);
    o.partition = name;
    o.rows = rows;
    o.group_size = group;
    o.columns = &column;
    o.column_count = 1;
    o.refill = refill;
    OK(dray_queue_insert(d->queue, &o, NULL, &error));
    if (!refill)
        OK(dray_queue_seal(d->queue, name, rows, &error));
    atomic_fetch_add(&book->operations, 1);
}

static inline void answer_refills(driver *d)
{
    dray_refill refill = DRAY_REFILL_INIT;
    int rc;
    while ((rc = dray_queue_refill_wait(d->queue, 0, &refill, &error)) == DRAY_OK)
        insert_samples(d, (uint32_t)atoi(refill.partition), refill.rows, 1, refill.id);
    if (rc != DRAY_ETIMEDOUT)
        OK(rc);
}

/* Clears the oldest partition when all tasks have finished it. At least as many samples as it has
 * rows must have been trained. Rarely, it is cleared earlier. Returns false when it was not
 * cleared. */
static inline bool finish_one(driver *d)
{
    char name[16];
    uint32_t at = d->cleared % OPEN;
    snprintf(name, sizeof name, "%u", d->cleared);
    int rc = dray_queue_wait(d->queue, name, NULL, 2 * DRAY__MILLISECOND, &error);
    bool early = rc == DRAY_ETIMEDOUT && draw(&d->r, 2000) == 0;
    if (rc == DRAY_ETIMEDOUT && !early)
        return false;
    if (!early)
        OK(rc);
    uint32_t trained = 0;
    for (int tries = 0; tries < 1000 && !early && trained < d->open[at].rows; tries++) {
        trained = 0; /* a worker may not have noted its commit yet, or was stopped before it did */
        for (uint32_t i = 0; i < d->open[at].count; i++)
            trained += atomic_load(&book->committed[d->open[at].numbers[i]][ACTOR]);
        if (trained < d->open[at].rows)
            usleep(2000);
    }
    require(early || trained >= d->open[at].rows, "a row that nobody trained", d->cleared);
    OK(dray_queue_clear(d->queue, name, &error));
    atomic_fetch_add(&book->operations, 1);
    d->open[at].count = 0;
    d->cleared++;
    return true;
}

static inline void torment(driver *d)
{
    int victim = (int)draw(&d->r, WORKERS), status;
    if (draw(&d->r, 20) == 0) {
        kill(d->pids[victim], SIGSTOP);
        usleep(draw(&d->r, 4000));
        kill(d->pids[victim], SIGCONT);
    }
    for (int i = 0; i < WORKERS; i++) {
        if (waitpid(d->pids[i], &status, WNOHANG) != d->pids[i])
            continue;
        if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL)
            die("a worker failed", NULL);
        start_worker(d, i);
    }
}

static inline void run_histories(uint64_t operations)
{
    base_seed = test_seed();
    book = mmap(NULL, sizeof *book, PROT_READ | PROT_WRITE,
                MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    driver *d = calloc(1, sizeof *d);
    d->r = (random_state){base_seed, 0, 0};
    d->number = 1;
    dray_context *context = fixture_context(&f, "driver");
    d->queue = open_history(context);
    for (int i = 0; i < WORKERS; i++)
        start_worker(d, i);
    static const uint32_t groups[] = {1, 2, 4};
    while (atomic_load(&book->operations) < operations || d->cleared < d->made) {
        bool more = atomic_load(&book->operations) < operations;
        while (more && d->made - d->cleared < OPEN) {
            uint32_t group = groups[draw(&d->r, 3)];
            uint32_t rows = group * (1 + draw(&d->r, BATCH / group));
            d->open[d->made % OPEN].rows = rows;
            insert_samples(d, d->made++, rows, group, 0);
        }
        answer_refills(d);
        finish_one(d);
        torment(d);
    }
    OK(dray_queue_end(d->queue, &error));
    for (int i = 0; i < WORKERS; i++) {
        int status;
        waitpid(d->pids[i], &status, 0); /* some are killed in their last step */
        require(status == 0 || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL),
                "a worker failed", i);
    }
    fprintf(stderr, "%llu operations, %u partitions, %lld samples\n",
            (unsigned long long)atomic_load(&book->operations), d->made, (long long)d->number);
    leave(d->queue, context);
    munmap(book, sizeof *book);
    free(d);
    wait_for_chunks(&f, 0);
}
