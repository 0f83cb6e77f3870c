/* Tests the bound on rollout over random runs. Samples are cut, given back, failed, dropped and
 * replaced, trainers go back to a checkpoint, and coordinators are killed. A claim begins no sample
 * while the allowed number of samples is begun, and a begun sample can always be continued. */
#include "queue/fixture.h"

#include "base/random.h"
#include "seed.h"

#include <dray/queue.h>

enum { B = 4, ROWS = 160, HELD = 6, STEPS = 300, TRIES = 1000 };

static queue_fixture f = {.durable = true};
static const char *const prompts[] = {"prompts"}, *const responses[] = {"responses"};
static const char *const trainers[] = {"actor"};
static const dray_queue_task tasks[] = {
    {.name = "rollout", .needs = prompts, .needs_count = 1, .writes = responses, .writes_count = 1},
    {.name = "actor", .needs = responses, .needs_count = 1}};

/* What became of each sample, as the calls say it. */
typedef struct run {
    uint64_t seed, draws;
    dray_context *context;
    dray_queue *queue;
    uint64_t staleness, version, saved;
    bool cut[ROWS], made[ROWS], trained[ROWS], saved_trained[ROWS];
    uint64_t newest[ROWS]; /* version of a sample's newest token */
    uint32_t trained_count, begun_again;
    dray_batch *held[HELD];
    void *cursor;
    size_t cursor_size;
} run;

#define HOLDS(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s (seed %llu)\n", __FILE__, __LINE__, #condition,             \
                    (unsigned long long)r->seed);                                                  \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static uint32_t draw(run *r, uint32_t below)
{
    return (uint32_t)(dray__random_u64(r->seed, 7, r->draws++) % below);
}

static dray_claim_options want_of(const char *task, uint32_t count)
{
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = task;
    o.count = count;
    o.up_to = 1;
    o.timeout_ns = 0;
    return o;
}

static void open_run(run *r)
{
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    o.tasks = tasks;
    o.task_count = 2;
    o.provisional = trainers;
    o.provisional_count = 1;
    o.durability = DRAY_DURABILITY_JOURNAL;
    o.max_attempts = 3;
    char name[32];
    snprintf(name, sizeof name, "run-%llu", (unsigned long long)r->seed);
    OK(dray_queue_open(r->context, name, &o, &r->queue, &error));
}

static void insert_all(run *r, uint32_t rows, uint32_t group_size)
{
    int32_t values[ROWS] = {0};
    const dray_column_data column = {.name = "prompts", .dtype = DRAY_I32, .values = values};
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = "0";
    o.rows = rows;
    o.group_size = group_size;
    o.columns = &column;
    o.column_count = 1;
    OK(dray_queue_insert(r->queue, &o, NULL, &error));
    OK(dray_queue_seal(r->queue, "0", rows, &error));
}

static void admit(run *r, uint32_t staleness)
{
    dray_admission admission = DRAY_ADMISSION_INIT;
    r->staleness = admission.staleness = staleness;
    admission.task = "rollout";
    admission.batch_rows = B;
    OK(dray_queue_admit(r->queue, &admission, &error));
}

static bool in_hands(const run *r, uint32_t slot)
{
    for (int i = 0; i < HELD; i++)
        for (uint32_t k = 0; r->held[i] && k < dray_batch_rows(r->held[i]); k++)
            if (dray_batch_row(r->held[i], k)->slot == slot)
                return true;
    return false;
}

static int64_t begun(const run *r)
{
    int64_t count = 0;
    for (uint32_t i = 0; i < ROWS; i++)
        count += r->cut[i] || r->made[i] || in_hands(r, i);
    return count;
}

static int64_t bound(const run *r)
{
    return (int64_t)((r->staleness + r->version + 1) * B);
}

/* ---- what an engine does --------------------------------------------------------------------- */

static void claim(run *r)
{
    static const int32_t policies[] = {DRAY_POLICY_FIFO, DRAY_POLICY_ORDERED,
                                       DRAY_POLICY_OLDEST_VERSION, DRAY_POLICY_GROUP};
    int at = 0;
    while (at < HELD && r->held[at])
        at++;
    if (at == HELD)
        return;
    dray_claim_options o = want_of("rollout", 1 + draw(r, 6));
    o.policy = policies[draw(r, 4)];
    int64_t before = begun(r), waiting = 0;
    for (uint32_t i = 0; i < ROWS; i++)
        waiting += r->cut[i] && !in_hands(r, i);
    int rc = dray_queue_claim(r->queue, &o, &r->held[at], &error);
    /* In the order of slots one that may not be begun is in the way of those behind it. */
    HOLDS(rc == DRAY_OK || (rc == DRAY_ETIMEDOUT && (!waiting || o.policy == DRAY_POLICY_ORDERED ||
                                                     o.policy == DRAY_POLICY_OLDEST_VERSION)));
    if (rc) {
        r->held[at] = NULL;
        return;
    }
    uint32_t cut = 0, rows = dray_batch_rows(r->held[at]);
    for (uint32_t i = 0; i < rows; i++)
        cut += r->cut[dray_batch_row(r->held[at], i)->slot];
    r->begun_again += cut;
    HOLDS(begun(r) == before + rows - cut);
    HOLDS(rows == cut || begun(r) <= bound(r));
}

/* A token a row. */
static void set_responses(dray_batch *batch)
{
    uint64_t offsets[17] = {0};
    int32_t values[16] = {0};
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
        offsets[i + 1] = i + 1;
    const dray_column_data column = {
        .name = "responses", .dtype = DRAY_I32, .ndim = 1, .offsets = offsets, .values = values};
    OK(dray_batch_set(batch, &column, &error));
}

/* Some rows are finished, others cut. */
static void commit(run *r, dray_batch *batch)
{
    uint32_t rows = dray_batch_rows(batch), open[16], open_count = 0;
    for (uint32_t i = 0; i < rows; i++) {
        uint32_t slot = dray_batch_row(batch, i)->slot;
        OK(dray_batch_set_tag(batch, i, DRAY_TAG_VERSION, (double)r->version, &error));
        r->newest[slot] = r->version;
        r->cut[slot] = draw(r, 3) == 0;
        r->made[slot] = !r->cut[slot];
        if (r->cut[slot])
            open[open_count++] = i;
    }
    set_responses(batch);
    if (open_count)
        OK(dray_batch_leave_open(batch, open, open_count, &error));
    OK(dray_batch_commit(batch, &error));
}

static void let_go(run *r)
{
    uint32_t at = draw(r, HELD), how = draw(r, 5);
    dray_batch *batch = r->held[at];
    if (!batch)
        return;
    if (how < 3)
        commit(r, batch);
    else if (how == 3)
        OK(dray_batch_fail(batch, NULL, 0, "broken", &error));
    dray_batch_free(batch);
    r->held[at] = NULL;
}

/* ---- what others do -------------------------------------------------------------------------- */

/* Samples that were lost are replaced: others, that nobody has begun. */
static void refill(run *r)
{
    const int32_t value = 0;
    const dray_column_data column = {.name = "prompts", .dtype = DRAY_I32, .values = &value};
    dray_refill lost = DRAY_REFILL_INIT;
    while (dray_queue_refill_wait(r->queue, 0, &lost, &error) == DRAY_OK) {
        HOLDS(lost.rows == 1);
        r->cut[lost.slot] = r->made[lost.slot] = false;
        dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
        o.partition = lost.partition;
        o.rows = 1;
        o.refill = lost.id;
        o.columns = &column;
        o.column_count = 1;
        OK(dray_queue_insert(r->queue, &o, NULL, &error));
    }
}

static void train(run *r)
{
    dray_batch *batch;
    dray_claim_options o = want_of("actor", 1 + draw(r, 3));
    o.fresh = DRAY_FRESH_DROP;
    o.version = r->version;
    o.staleness = (uint32_t)r->staleness;
    if (dray_queue_claim(r->queue, &o, &batch, &error) == DRAY_OK) {
        OK(dray_batch_commit(batch, &error));
        for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
            r->trained[dray_batch_row(batch, i)->slot] = true;
        r->trained_count += dray_batch_rows(batch);
        dray_batch_free(batch);
    }
    refill(r);
    while (r->trained_count >= (r->version + 1) * B)
        OK(dray_queue_version(r->queue, ++r->version, &error));
}

static void save(run *r)
{
    free(r->cursor);
    OK(dray_queue_cursor(r->queue, r->version, &r->cursor, &r->cursor_size, &error));
    OK(dray_queue_covered(r->queue, r->cursor, r->cursor_size, &error));
    memcpy(r->saved_trained, r->trained, sizeof r->trained);
    r->saved = r->version;
}

/* Those in hands are freed: what they hold may be void. */
static void resume(run *r)
{
    if (!r->cursor)
        return;
    OK(dray_queue_resume(r->queue, r->cursor, r->cursor_size, NULL, &error));
    r->version = r->saved;
    memcpy(r->trained, r->saved_trained, sizeof r->trained);
    r->trained_count = 0;
    for (uint32_t i = 0; i < ROWS; i++)
        r->trained_count += r->trained[i];
    for (int i = 0; i < HELD; i++)
        dray_batch_free(r->held[i]);
    memset(r->held, 0, sizeof r->held);
    refill(r);
    save(r); /* the cursor is of an epoch that is over */
}

static void restart(run *r)
{
    for (int i = 0; i < HELD; i++)
        dray_batch_free(r->held[i]);
    memset(r->held, 0, sizeof r->held);
    leave(r->queue, r->context);
    fixture_restart(&f);
    r->context = fixture_context(&f, "run");
    open_run(r);
}

/* Nothing is held: what is cut can be claimed although nothing may be begun. */
static void finish(run *r)
{
    dray_claim_options o = want_of("rollout", ROWS);
    uint32_t cut = 0, again = 0;
    for (int i = 0; i < HELD; i++)
        dray_batch_free(r->held[i]);
    memset(r->held, 0, sizeof r->held);
    for (uint32_t i = 0; i < ROWS; i++)
        cut += r->cut[i];
    dray_batch *batch;
    if (dray_queue_claim(r->queue, &o, &batch, &error) == DRAY_OK) {
        for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
            again += r->cut[dray_batch_row(batch, i)->slot];
        dray_batch_free(batch);
    }
    HOLDS(again == cut);
}

/* Whether what was cut was begun again, and the last version is a trained one. */
static bool try_run(uint64_t seed)
{
    run state = {.seed = seed}, *r = &state;
    r->context = fixture_context(&f, "run");
    open_run(r);
    admit(r, draw(r, 3));
    insert_all(r, ROWS, 0);
    for (int i = 0; i < STEPS; i++) {
        uint32_t what = draw(r, TRIES);
        if (what < 450)
            claim(r);
        else if (what < 750)
            let_go(r);
        else if (what < 960)
            train(r);
        else if (what < 975)
            save(r);
        else if (what < 990)
            resume(r);
        else
            restart(r);
        refill(r);
    }
    finish(r);
    free(r->cursor);
    leave(r->queue, r->context);
    return r->begun_again > 0 && r->version > 0;
}

TEST(test_bound)
{
    uint64_t first = test_seed(), runs = test_cases((uint64_t)test_times(10));
    uint64_t full = 0;
    fixture_up(&f);
    /* A short run goes on until one is full; $DRAY_TEST_CASES may ask for one that is not. */
    for (uint64_t i = 0; i < runs || (!full && i < 10 && !getenv("DRAY_TEST_CASES")); i++)
        full += try_run(first + i);
    fixture_down(&f);
    assert_true(full > 0 || getenv("DRAY_TEST_CASES"));
}

/* Where no other sample may be begun, the members of a group that are cut go on, though the others
 * are finished: they are not a whole group. */
TEST(test_rest_of_a_group)
{
    run scene = {.seed = 0}, *r = &scene;
    fixture_up(&f);
    r->context = fixture_context(&f, "run");
    open_run(r);
    admit(r, 0);
    insert_all(r, 2 * B, B);
    dray_claim_options o = want_of("rollout", B);
    o.policy = DRAY_POLICY_GROUP;
    dray_batch *batch;
    for (uint32_t cut = B - 1; cut > 0; cut--) { /* all but one of the rows */
        OK(dray_queue_claim(r->queue, &o, &batch, &error));
        assert_int_equal(dray_batch_rows(batch), cut == B - 1 ? B : cut + 1);
        const uint32_t open[] = {0, 1, 2};
        set_responses(batch);
        OK(dray_batch_leave_open(batch, open, cut, &error));
        COMMIT(batch);
    }
    OK(dray_queue_claim(r->queue, &o, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), 1);
    assert_int_equal(dray_batch_row(batch, 0)->slot, 0);
    set_responses(batch);
    COMMIT(batch);
    FAILS(DRAY_ETIMEDOUT, dray_queue_claim(r->queue, &o, &batch, &error));
    leave(r->queue, r->context);
    fixture_down(&f);
}

static int admit_at(dray_queue *queue, uint64_t version)
{
    dray_admission admission = DRAY_ADMISSION_INIT;
    admission.batch_rows = 1 << 22;
    admission.staleness = 1;
    admission.version = version;
    return dray_queue_admit(queue, &admission, &error);
}

/* Accepted rows are counted on from those of the version. From a count that is the last one, the
 * journal would get one with which it cannot be read. */
TEST(test_counts_near_their_end)
{
    run scene = {.seed = 0}, *r = &scene;
    fixture_up(&f);
    r->context = fixture_context(&f, "run");
    open_run(r);
    FAILS(DRAY_EINVALID, admit_at(r->queue, UINT64_C(1) << 40));
    OK(admit_at(r->queue, UINT64_C(1) << 39));
    insert_all(r, B, 1);
    OK(dray_queue_version(r->queue, (UINT64_C(1) << 39) + 1, &error));
    fixture_restart(&f);
    OK(dray_queue_version(r->queue, (UINT64_C(1) << 39) + 2, &error));
    leave(r->queue, r->context);
    fixture_down(&f);
}

SUITE(NULL, NULL)
