/* Tests the queue through its public API: all ways in which rows go from insert to end. Other
 * programs test refusals and processes that are killed. */
#include "queue/three_tasks.h"

#include <jansson.h>
#include <poll.h>
#include <pthread.h>

TEST(test_rows_flow)
{
    dray_context *context = fixture_context(&f, "flow");
    dray_queue *queue = open_queue(context, "flow", 0, 0);
    insert_ints(queue, "0", 10, 1);
    OK(dray_queue_seal(queue, "0", 10, &error));
    static const uint32_t expected[] = {4, 4, 2};
    for (int i = 0; i < 3; i++) {
        dray_claim_options o = want("rollout", 4);
        o.partition = "0";
        dray_batch *batch;
        dray_column column;
        OK(dray_queue_claim(queue, &o, &batch, &error));
        assert_int_equal(dray_batch_rows(batch), expected[i]);
        OK(dray_batch_column(batch, "prompts", &column, &error));
        for (uint32_t r = 0; r < expected[i]; r++) {
            assert_int_equal(dray_batch_row(batch, r)->slot, 4 * i + (int)r);
            assert_int_equal(*(const int32_t *)column.cells[r], (4 * i + (int)r) * 10);
            assert_int_equal(column.lengths[r], 1);
        }
        set_ints(batch, "responses", 100);
        OK(dray_batch_set_tag(batch, 0, "length", 7.5, &error));
        OK(dray_batch_commit(batch, &error));
        OK(dray_batch_commit(batch, &error)); /* again */
        dray_batch_free(batch);
    }
    dray_claim_options o = want("rollout", 4);
    dray_batch *batch = NULL;
    o.partition = "0";
    FAILS(DRAY_EEND, dray_queue_claim(queue, &o, &batch, &error));
    OK(dray_queue_wait(queue, "0", "rollout", 0, &error));
    FAILS(DRAY_ETIMEDOUT, dray_queue_wait(queue, "0", NULL, 1000, &error));
    o = want("reward", 10);
    OK(dray_queue_claim(queue, &o, &batch, &error));
    double tag;
    OK(dray_batch_tag(batch, 4, "length", &tag, &error));
    assert_true(tag == 7.5);
    FAILS(DRAY_ENOENT, dray_batch_tag(batch, 1, "length", &tag, &error));
    FAILS(DRAY_EINVALID, dray_batch_commit(batch, &error)); /* rewards not set */
    set_ints(batch, "rewards", 1000);
    COMMIT(batch);
    o = want("actor", 10);
    o.policy = DRAY_POLICY_ORDERED;
    OK(dray_queue_claim(queue, &o, &batch, &error));
    int32_t gathered[10];
    size_t bytes;
    OK(dray_batch_gather(batch, "rewards", gathered, sizeof gathered, &bytes, &error));
    assert_int_equal(bytes, 40);
    for (int i = 0; i < 10; i++)
        assert_int_equal(gathered[i], 1000 + i);
    FAILS(DRAY_EFULL, dray_batch_gather(batch, "rewards", gathered, 39, &bytes, &error));
    FAILS(DRAY_ENOENT, dray_batch_gather(batch, "prompts", gathered, 40, &bytes, &error));
    COMMIT(batch);
    OK(dray_queue_wait(queue, "0", NULL, 0, &error));
    OK(dray_queue_end(queue, &error));
    o = want("actor", 1);
    FAILS(DRAY_EEND, dray_queue_claim(queue, &o, &batch, &error));
    OK(dray_queue_clear(queue, "0", &error));
    OK(dray_queue_clear(queue, "0", &error));
    leave(queue, context);
}

/* The text of one line of /proc/self/maps that holds the address. */
static bool mapped_as(const void *address, const char *mode, const char *name)
{
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "r");
    bool found = false;
    while (!found && fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        char perms[8];
        if (sscanf(line, "%lx-%lx %7s", &from, &to, perms) == 3 && (uintptr_t)address >= from &&
            (uintptr_t)address < to)
            found = strcmp(perms, mode) == 0 && strstr(line, name) != NULL;
    }
    fclose(maps);
    return found;
}

TEST(test_reads_in_place)
{
    if (elsewhere()) /* this is of chunks */
        skip();
    (void)state;
    dray_context *context = fixture_context(&f, "place"), *other = fixture_context(&f, "other");
    dray_queue *queue = open_queue(context, "place", 0, 0);
    dray_queue *reader = open_queue(other, "place", 0, 0);
    insert_ints(queue, "0", 8, 1);
    OK(dray_queue_seal(queue, "0", 8, &error));
    all_rows(queue, "rollout", "responses", 500, 8);
    dray_claim_options o = want("reward", 8);
    dray_batch *batch;
    dray_column column;
    OK(dray_queue_claim(reader, &o, &batch, &error));
    OK(dray_batch_column(batch, "responses", &column, &error));
    for (int i = 0; i < 8; i++)
        assert_true(mapped_as(column.cells[i], "r--s", "dray-samples"));
    set_ints(batch, "rewards", 0);
    OK(dray_batch_commit(batch, &error));
    all_rows(queue, "actor", NULL, 0, 8);
    OK(dray_queue_wait(queue, "0", NULL, 0, &error));
    OK(dray_queue_clear(queue, "0", &error));
    /* The producer writes on, over many chunks' worth of values: what is pinned stays. */
    static int32_t wide[1 << 18];
    memset(wide, 0xFF, sizeof wide);
    for (int i = 0; i < 24; i++) {
        char name[16];
        snprintf(name, sizeof name, "w%d", i);
        dray_column_data big = int_column("wide", wide);
        big.ndim = 1;
        big.shape[0] = 1 << 18;
        dray_insert_options in = DRAY_INSERT_OPTIONS_INIT;
        in.partition = name;
        in.rows = 1;
        in.columns = &big;
        in.column_count = 1;
        OK(dray_queue_insert(queue, &in, NULL, &error));
        OK(dray_queue_clear(queue, name, &error));
    }
    for (int i = 0; i < 8; i++)
        assert_int_equal(*(const int32_t *)column.cells[i], 500 + i);
    dray_batch_free(batch);
    dray_queue_close(reader);
    leave(queue, other);
    dray_close(context);
}

/* ---- every dtype, ragged and fixed, through three processes --------------------------------- */

enum { KINDS = 17 };
static const char *const kind_names[] = {"F64", "F32", "BF16", "F16",  "F8E4M3", "F8E5M2",
                                         "I64", "I32", "I16",  "I8",   "U64",    "U32",
                                         "U16", "U8",  "BOOL", "text", "blob"};
static const char *const hop_names[3][KINDS] = {
    {"a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "a8", "a9", "a10", "a11", "a12", "a13", "a14",
     "a15", "a16"},
    {"b0", "b1", "b2", "b3", "b4", "b5", "b6", "b7", "b8", "b9", "b10", "b11", "b12", "b13", "b14",
     "b15", "b16"},
    {"c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8", "c9", "c10", "c11", "c12", "c13", "c14",
     "c15", "c16"}};
enum { HOP_ROWS = 24, HOP_MICRO = 5 };

static const dray_queue_task hops[] = {
    {.name = "one",
     .needs = hop_names[0],
     .needs_count = KINDS,
     .writes = hop_names[1],
     .writes_count = KINDS},
    {.name = "two",
     .needs = hop_names[1],
     .needs_count = KINDS,
     .writes = hop_names[2],
     .writes_count = KINDS},
    {.name = "three", .needs = hop_names[2], .needs_count = KINDS},
};

static int32_t kind_dtype(int kind)
{
    return kind < 15 ? kind + 1 : DRAY_U8;
}

/* Odd kinds have slices of three elements; a row's value is `length` slices of pattern bytes. */
static uint64_t kind_unit(int kind)
{
    return dray_dtype_size((dray_dtype)kind_dtype(kind)) * (kind < 15 && kind % 2 ? 3 : 1);
}

static uint64_t hop_length(uint32_t slot, int kind)
{
    return (slot * 7 + (uint32_t)kind * 3) % 11; /* also 0 */
}

static uint8_t hop_byte(uint32_t slot, int kind, uint64_t i)
{
    uint64_t value = slot * 31 + (uint64_t)kind * 17 + i * 5;
    return (uint8_t)(kind == 14 ? value & 1 : kind == 15 ? 'a' + value % 26 : value);
}

static dray_column_data hop_column(int hop, int kind, const uint64_t *offsets, const void *values)
{
    dray_column_data column = {.name = hop_names[hop][kind],
                               .dtype = kind_dtype(kind),
                               .content = kind == 15   ? DRAY_CONTENT_STRING
                                          : kind == 16 ? DRAY_CONTENT_BYTES
                                                       : DRAY_CONTENT_TENSOR,
                               .ndim = kind < 15 && kind % 2 ? 2 : 1,
                               .offsets = offsets,
                               .values = values};
    column.shape[1] = 3;
    return column;
}

static void check_hop(dray_batch *batch, int hop)
{
    for (int kind = 0; kind < KINDS; kind++) {
        dray_column column;
        OK(dray_batch_column(batch, hop_names[hop][kind], &column, &error));
        assert_int_equal(column.dtype, kind_dtype(kind));
        assert_int_equal(column.shape[0], -1);
        for (uint32_t r = 0; r < dray_batch_rows(batch); r++) {
            uint32_t slot = dray_batch_row(batch, r)->slot;
            uint64_t bytes = hop_length(slot, kind) * kind_unit(kind);
            uint64_t size = dray_dtype_size((dray_dtype)kind_dtype(kind));
            assert_int_equal(column.lengths[r] * size, bytes);
            for (uint64_t i = 0; i < bytes; i++)
                if (((const uint8_t *)column.cells[r])[i] != hop_byte(slot, kind, i))
                    die(kind_names[kind], NULL);
        }
    }
}

static void hop_values(int kind, uint32_t rows, const uint32_t *slots, uint64_t *offsets,
                       uint8_t *values)
{
    uint64_t at = 0;
    offsets[0] = 3; /* the first offset need not be 0 */
    for (uint32_t r = 0; r < rows; r++) {
        uint64_t bytes = hop_length(slots[r], kind) * kind_unit(kind);
        for (uint64_t i = 0; i < bytes; i++)
            values[3 * kind_unit(kind) + at++] = hop_byte(slots[r], kind, i);
        offsets[r + 1] = offsets[r] + hop_length(slots[r], kind);
    }
}

static dray_queue *open_hops(dray_context *context)
{
    dray_queue *queue;
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = hops;
    options.task_count = 3;
    options.on_loss = DRAY_ON_LOSS_SHRINK_GROUP;
    OK(dray_queue_open(context, "hops", &options, &queue, &error));
    return queue;
}

static void hop(void *argument)
{
    int from = *(int *)argument;
    dray_context *context = fixture_context(&f, hops[from].name);
    dray_queue *queue = open_hops(context);
    dray_claim_options o = want(hops[from].name, HOP_MICRO);
    o.partition = "p";
    dray_batch *batch;
    int rc;
    while ((rc = dray_queue_claim(queue, &o, &batch, &error)) == DRAY_OK) {
        uint32_t rows = dray_batch_rows(batch), slots[HOP_MICRO];
        uint64_t offsets[HOP_MICRO + 1];
        static uint8_t values[HOP_MICRO * 16 * 24];
        check_hop(batch, from);
        for (uint32_t r = 0; r < rows; r++)
            slots[r] = dray_batch_row(batch, r)->slot;
        for (int kind = 0; kind < KINDS && from < 2; kind++) {
            hop_values(kind, rows, slots, offsets, values);
            dray_column_data column = hop_column(from + 1, kind, offsets, values);
            OK(dray_batch_set(batch, &column, &error));
            OK(dray_batch_set(batch, &column, &error)); /* the last one counts */
        }
        COMMIT(batch);
    }
    FAILS(DRAY_EEND, rc);
    leave(queue, context);
}

TEST(test_every_dtype)
{
    int froms[] = {0, 1, 2, 1};
    pid_t pids[4];
    for (int i = 0; i < 4; i++)
        pids[i] = child(hop, &froms[i]);
    dray_context *context = fixture_context(&f, "driver");
    dray_queue *queue = open_hops(context);
    for (uint32_t first = 0; first < HOP_ROWS; first += 6) {
        uint32_t slots[6];
        static uint64_t offsets[KINDS][7];
        static uint8_t values[KINDS][6 * 16 * 24];
        dray_column_data columns[KINDS];
        for (uint32_t r = 0; r < 6; r++)
            slots[r] = first + r;
        for (int kind = 0; kind < KINDS; kind++) {
            hop_values(kind, 6, slots, offsets[kind], values[kind]);
            columns[kind] = hop_column(0, kind, offsets[kind], values[kind]);
        }
        dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
        o.partition = "p";
        o.rows = 6;
        o.columns = columns;
        o.column_count = KINDS;
        o.at_slot = first + 1;
        uint32_t slot;
        OK(dray_queue_insert(queue, &o, &slot, &error));
        assert_int_equal(slot, first);
        FAILS(DRAY_EEXIST, dray_queue_insert(queue, &o, &slot, &error));
    }
    OK(dray_queue_seal(queue, "p", HOP_ROWS, &error));
    OK(dray_queue_wait(queue, "p", NULL, 20 * DRAY__SECOND, &error));
    OK(dray_queue_clear(queue, "p", &error)); /* late claims see the end all the same */
    for (int i = 0; i < 4; i++)
        join(pids[i]);
    leave(queue, context);
    wait_for_chunks(&f, 0);
}

/* ---- groups, attempts, capacity -------------------------------------------------------------- */

TEST(test_whole_groups)
{
    dray_context *context = fixture_context(&f, "groups");
    dray_queue *queue = open_queue(context, "groups", 0, 0);
    int32_t prompts_of[3] = {70, 71, 72};
    dray_column_data column = int_column("prompts", prompts_of);
    dray_tag tag = {"epoch", 4};
    dray_insert_options in = DRAY_INSERT_OPTIONS_INIT;
    in.partition = "g";
    in.rows = 12;
    in.group_size = 4;
    in.once_per_group = 1;
    in.columns = &column;
    in.column_count = 1;
    in.tags = &tag;
    in.tag_count = 1;
    OK(dray_queue_insert(queue, &in, NULL, &error));
    OK(dray_queue_seal(queue, "g", 12, &error));
    dray_batch *members[12], *batch;
    for (int i = 0; i < 12; i++) {
        dray_claim_options o = want("rollout", 1);
        OK(dray_queue_claim(queue, &o, &members[i], &error));
        dray_column prompt;
        double epoch;
        OK(dray_batch_column(members[i], "prompts", &prompt, &error));
        OK(dray_batch_tag(members[i], 0, "epoch", &epoch, &error));
        assert_int_equal(*(const int32_t *)prompt.cells[0], 70 + i / 4);
        assert_true(epoch == 4);
        set_ints(members[i], "responses", 0);
    }
    static const int order[] = {0, 4, 8, 9, 5, 10, 1, 11, 6, 2, 7, 3};
    static const int complete[] = {-1, -1, -1, -1, -1, -1, -1, 2, -1, -1, 1, 0};
    dray_claim_options o = want("reward", 4);
    o.policy = DRAY_POLICY_GROUP;
    o.timeout_ns = 0;
    for (int i = 0; i < 12; i++) {
        OK(dray_batch_commit(members[order[i]], &error));
        dray_batch_free(members[order[i]]);
        if (complete[i] < 0) {
            FAILS(DRAY_ETIMEDOUT, dray_queue_claim(queue, &o, &batch, &error));
            continue;
        }
        OK(dray_queue_claim(queue, &o, &batch, &error));
        assert_int_equal(dray_batch_rows(batch), 4);
        for (uint32_t r = 0; r < 4; r++) {
            assert_int_equal(dray_batch_row(batch, r)->group, complete[i]);
            assert_int_equal(dray_batch_row(batch, r)->slot, complete[i] * 4 + (int)r);
        }
        set_ints(batch, "rewards", 0);
        COMMIT(batch);
    }
    o.count = 6;
    FAILS(DRAY_ETIMEDOUT, dray_queue_claim(queue, &o, &batch, &error));
    o = want("actor", 6);
    o.policy = DRAY_POLICY_GROUP;
    FAILS(DRAY_EINVALID, dray_queue_claim(queue, &o, &batch, &error));
    leave(queue, context);
}

TEST(test_attempts)
{
    dray_context *context = fixture_context(&f, "attempts");
    dray_queue *queue = open_queue(context, "attempts", 0, 0);
    insert_ints(queue, "0", 4, 1);
    OK(dray_queue_seal(queue, "0", 4, &error));
    dray_batch *batch;
    dray_claim_options o = want("rollout", 4);
    OK(dray_queue_claim(queue, &o, &batch, &error));
    dray_batch_free(batch); /* not counted */
    for (uint32_t attempt = 2; attempt <= 4; attempt++) {
        OK(dray_queue_claim(queue, &o, &batch, &error));
        assert_int_equal(dray_batch_rows(batch), 4);
        uint32_t bad = UINT32_MAX, out_of_range = 4;
        for (uint32_t i = 0; i < 4; i++) {
            assert_int_equal(dray_batch_row(batch, i)->attempt, attempt);
            if (dray_batch_row(batch, i)->slot == 2)
                bad = i;
        }
        FAILS(DRAY_EINVALID, dray_batch_fail(batch, &out_of_range, 1, "no", &error));
        OK(dray_batch_fail(batch, &bad, 1, "the answer was no JSON", &error));
        if (attempt == 4) {
            set_ints(batch, "responses", 0);
            OK(dray_batch_commit(batch, &error)); /* without the failed one */
        }
        dray_batch_free(batch);
    }
    o.partition = "0";
    FAILS(DRAY_EEND, dray_queue_claim(queue, &o, &batch, &error));
    OK(dray_queue_wait(queue, "0", "rollout", 0, &error));
    all_rows(queue, "reward", "rewards", 0, 3);
    char *text;
    OK(dray_queue_status(queue, &text, &error));
    json_t *status = json_loads(text, 0, NULL);
    json_t *partition = json_array_get(json_object_get(status, "partitions"), 0);
    json_t *death = json_array_get(json_object_get(partition, "deaths"), 0);
    assert_string_equal(json_string_value(json_object_get(death, "reason")),
                        "the answer was no JSON");
    assert_int_equal(json_integer_value(json_object_get(death, "slot")), 2);
    assert_int_equal(json_integer_value(json_object_get(death, "attempts")), 3);
    assert_int_equal(json_integer_value(json_object_get(partition, "rows")), 4);
    json_decref(status);
    free(text);
    leave(queue, context);
}

static void clear_later(void *argument)
{
    (void)argument;
    dray_context *context = fixture_context(&f, "clearer");
    dray_queue *queue = open_queue(context, "capacity", 0, 0);
    for (;;) { /* until the other's insert waits */
        char *text;
        OK(dray_queue_status(queue, &text, &error));
        bool waits = strstr(text, "\"inserts\":1") != NULL;
        free(text);
        if (waits)
            break;
        usleep(1000);
    }
    OK(dray_queue_clear(queue, "0", &error));
    leave(queue, context);
}

TEST(test_capacity)
{
    dray_context *context = fixture_context(&f, "capacity");
    dray_queue *queue = open_queue(context, "capacity", 10, 4096);
    insert_ints(queue, "0", 8, 1);
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = "1";
    o.rows = 3;
    o.timeout_ns = 0;
    FAILS(DRAY_EFULL, dray_queue_insert(queue, &o, NULL, &error));
    assert_non_null(strstr(error.message, "8 rows + 3 > 10"));
    o.timeout_ns = 1000000;
    FAILS(DRAY_ETIMEDOUT, dray_queue_insert(queue, &o, NULL, &error));
    o.rows = 11; /* never */
    o.timeout_ns = DRAY_WAIT_DEFAULT;
    FAILS(DRAY_EFULL, dray_queue_insert(queue, &o, NULL, &error));
    o.rows = 1;
    o.row_bytes = 5000;
    FAILS(DRAY_EFULL, dray_queue_insert(queue, &o, NULL, &error));
    o.row_bytes = 4090; /* beside the 32 bytes that partition 0 holds */
    o.timeout_ns = 0;
    FAILS(DRAY_EFULL, dray_queue_insert(queue, &o, NULL, &error));
    o.timeout_ns = DRAY_WAIT_DEFAULT;
    pid_t pid = child(clear_later, NULL);
    OK(dray_queue_insert(queue, &o, NULL, &error));
    join(pid);
    leave(queue, context);
}

/* ---- waiting --------------------------------------------------------------------------------- */

static void insert_later(void *argument)
{
    const char *queue_name = argument;
    dray_context *context = fixture_context(&f, "inserter");
    dray_queue *queue = open_queue(context, queue_name, 0, 0);
    usleep(20000);
    insert_ints(queue, "0", 5, 1);
    OK(dray_queue_seal(queue, "0", 5, &error));
    OK(dray_queue_end(queue, &error));
    leave(queue, context);
}

TEST(test_waiters_are_woken)
{
    dray_context *context = fixture_context(&f, "waiter");
    dray_queue *queue = open_queue(context, "wake", 0, 0);
    pid_t pid = child(insert_later, "wake");
    dray_claim_options o = want("rollout", 4);
    dray_batch *batch;
    OK(dray_queue_claim(queue, &o, &batch, &error)); /* the default timeout would be 20 s */
    set_ints(batch, "responses", 0);
    COMMIT(batch);
    join(pid);
    all_rows(queue, "rollout", "responses", 0, 1);
    FAILS(DRAY_EEND, dray_queue_claim(queue, &o, &batch, &error));
    leave(queue, context);
}

TEST(test_choices_and_polling)
{
    dray_context *context = fixture_context(&f, "choices");
    dray_queue *queue = open_queue(context, "choices", 0, 0);
    dray_queue *other = open_queue(context, "choices", 0, 0);
    dray_claim_options choices[] = {want("reward", 2), want("rollout", 2)};
    dray_batch *batch = NULL;
    uint32_t which = 9;
    OK(dray_queue_claim_start(queue, choices, 2, &error));
    FAILS(DRAY_EBUSY, dray_queue_claim_start(queue, choices, 2, &error));
    FAILS(DRAY_EAGAIN, dray_queue_claim_poll(queue, &which, &batch, &error));
    insert_ints(other, "0", 4, 1);
    insert_ints(queue, "1", 4, 1); /* other calls go on beside it */
    struct pollfd p = {.fd = dray_queue_fd(queue), .events = POLLIN};
    assert_int_equal(poll(&p, 1, 20000), 1);
    OK(dray_queue_claim_poll(queue, &which, &batch, &error));
    assert_int_equal(which, 1);
    assert_string_equal(dray_batch_partition(batch), "0");
    set_ints(batch, "responses", 0);
    COMMIT(batch);
    OK(dray_queue_claim_any(queue, choices, 2, &which, &batch, &error));
    assert_int_equal(which, 0);
    dray_batch_free(batch);
    OK(dray_queue_claim_any(queue, choices, 2, &which, &batch, &error));
    assert_int_equal(which, 0);
    dray_batch_free(batch);
    FAILS(DRAY_EINVALID, dray_queue_claim_poll(queue, &which, &batch, &error));
    choices[0].count = 3;
    choices[0].partition = "nothing";
    OK(dray_queue_claim_start(queue, choices, 1, &error));
    dray_queue_close(queue); /* gives up the started one */
    leave(other, context);
}

TEST(test_ordered)
{
    dray_context *context = fixture_context(&f, "ordered");
    dray_queue *queue = open_queue(context, "ordered", 0, 0);
    insert_ints(queue, "0", 6, 1);
    insert_ints(queue, "1", 2, 1);
    dray_batch *first, *second, *batch;
    dray_claim_options o = want("rollout", 3);
    OK(dray_queue_claim(queue, &o, &first, &error));
    OK(dray_queue_claim(queue, &o, &second, &error));
    set_ints(first, "responses", 0);
    set_ints(second, "responses", 0);
    OK(dray_batch_commit(second, &error));
    dray_claim_options r = want("reward", 6);
    r.policy = DRAY_POLICY_ORDERED;
    r.up_to = 1;
    r.timeout_ns = 0;
    FAILS(DRAY_ETIMEDOUT, dray_queue_claim(queue, &r, &batch, &error)); /* slot 0 comes first */
    OK(dray_batch_commit(first, &error));
    OK(dray_queue_claim(queue, &r, &batch, &error));
    for (uint32_t i = 0; i < 6; i++)
        assert_int_equal(dray_batch_row(batch, i)->slot, (int)i);
    all_rows(queue, "rollout", "responses", 0, 2);
    dray_batch *later = NULL;
    FAILS(DRAY_ETIMEDOUT, dray_queue_claim(queue, &r, &later, &error)); /* 0 may still grow */
    OK(dray_queue_seal(queue, "0", 6, &error));
    OK(dray_queue_claim(queue, &r, &later, &error));
    assert_string_equal(dray_batch_partition(later), "1");
    dray_batch_free(later);
    dray_batch_free(batch);
    dray_batch_free(first);
    dray_batch_free(second);
    leave(queue, context);
}

/* ---- other ranks, other processes ------------------------------------------------------------ */

typedef struct exported {
    void *data;
    size_t size;
} exported;

static void import_there(void *argument)
{
    exported *e = argument;
    dray_context *context = fixture_context(&f, "rank1");
    dray_queue *queue = open_queue(context, "export", 0, 0);
    dray_batch *batch;
    int32_t values[4];
    double tag;
    OK(dray_batch_import(queue, e->data, e->size, &batch, &error));
    OK(dray_batch_gather(batch, "responses", values, sizeof values, NULL, &error));
    OK(dray_batch_tag(batch, 3, "length", &tag, &error));
    for (int i = 0; i < 4; i++)
        assert_int_equal(values[i], 40 + i);
    assert_true(tag == 3);
    FAILS(DRAY_EPERM, dray_batch_commit(batch, &error));
    FAILS(DRAY_EPERM, dray_batch_fail(batch, NULL, 0, "x", &error));
    dray_batch_free(batch);
    uint8_t *bytes = e->data;
    for (size_t i = 0; i < e->size; i++) {
        bytes[i] ^= 1;
        assert_int_not_equal(dray_batch_import(queue, bytes, e->size, &batch, &error), DRAY_OK);
        bytes[i] ^= 1;
        assert_int_not_equal(dray_batch_import(queue, bytes, i, &batch, &error), DRAY_OK);
    }
    leave(queue, context);
}

TEST(test_export)
{
    dray_context *context = fixture_context(&f, "rank0");
    dray_queue *queue = open_queue(context, "export", 0, 0);
    insert_ints(queue, "0", 4, 1);
    dray_batch *batch;
    dray_claim_options o = want("rollout", 4);
    OK(dray_queue_claim(queue, &o, &batch, &error));
    set_ints(batch, "responses", 40);
    for (uint32_t i = 0; i < 4; i++)
        OK(dray_batch_set_tag(batch, i, "length", i, &error));
    COMMIT(batch);
    o = want("reward", 4);
    OK(dray_queue_claim(queue, &o, &batch, &error));
    exported e;
    OK(dray_batch_export(batch, &e.data, &e.size, &error));
    join(child(import_there, &e));
    free(e.data);
    dray_batch_free(batch);
    leave(queue, context);
}

/* Threads of one process, each with a queue of its own, share the context and the mappings. */
static void *thread_of(void *argument)
{
    static const char *const outputs[] = {"responses", "rewards", NULL};
    dray_context *context = ((void **)argument)[0];
    int t = *(int *)((void **)argument)[1];
    dray_queue *queue = open_queue(context, "threads", 0, 0);
    dray_claim_options o = want(three_tasks[t].name, 3);
    dray_batch *batch;
    int32_t values[6];
    int rc;
    o.up_to = 1;
    while ((rc = dray_queue_claim(queue, &o, &batch, &error)) == DRAY_OK) {
        for (uint32_t n = 0; n < three_tasks[t].needs_count; n++)
            OK(dray_batch_gather(batch, three_tasks[t].needs[n], values, sizeof values, NULL,
                                 &error));
        if (outputs[t])
            set_ints(batch, outputs[t], 0);
        COMMIT(batch);
    }
    FAILS(DRAY_EEND, rc);
    dray_queue_close(queue);
    return NULL;
}

TEST(test_threads)
{
    dray_context *context = fixture_context(&f, "threads");
    dray_queue *queue = open_queue(context, "threads", 0, 0);
    pthread_t threads[6];
    int numbers[6];
    void *arguments[6][2];
    for (int i = 0; i < 6; i++) {
        numbers[i] = i % 3;
        arguments[i][0] = context;
        arguments[i][1] = &numbers[i];
        assert_int_equal(pthread_create(&threads[i], NULL, thread_of, arguments[i]), 0);
    }
    for (int i = 0; i < 20; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        insert_ints(queue, name, 12, 1);
        OK(dray_queue_seal(queue, name, 12, &error));
        if (i >= 4) {
            snprintf(name, sizeof name, "%d", i - 4);
            OK(dray_queue_wait(queue, name, NULL, DRAY_WAIT_DEFAULT, &error));
            OK(dray_queue_clear(queue, name, &error));
        }
    }
    OK(dray_queue_end(queue, &error));
    for (int i = 0; i < 6; i++)
        pthread_join(threads[i], NULL);
    leave(queue, context);
}

/* Tags of single rows beside those of the whole insert, of rows and of groups. */
TEST(test_row_tags)
{
    dray_context *context = fixture_context(&f, "tags");
    dray_queue *queue = open_queue(context, "tags", 0, 0);
    static const int32_t values[8] = {0};
    dray_column_data column = int_column("prompts", values);
    dray_tag common[] = {{"step", 3}, {"tokens", 1}};
    dray_row_tag tags[] = {{.row = 1, .key = "tokens", .number = 10},
                           {.row = 3, .key = "tokens", .number = 30},
                           {.row = 3, .key = "level", .number = 5}};
    dray_insert_options in = DRAY_INSERT_OPTIONS_INIT;
    in.partition = "rows";
    in.rows = 4;
    in.columns = &column;
    in.column_count = 1;
    in.tags = common;
    in.tag_count = 2;
    in.row_tags = tags;
    in.row_tag_count = 3;
    OK(dray_queue_insert(queue, &in, NULL, &error));
    in.partition = "groups";
    in.rows = 8;
    in.group_size = 2;
    in.once_per_group = 1;
    OK(dray_queue_insert(queue, &in, NULL, &error));
    for (uint32_t size = 1; size <= 2; size++) {
        dray_batch *batch;
        dray_claim_options o = want("rollout", 4 * size);
        o.partition = size == 1 ? "rows" : "groups";
        OK(dray_queue_claim(queue, &o, &batch, &error));
        for (uint32_t i = 0; i < 4 * size; i++) {
            double tag;
            OK(dray_batch_tag(batch, i, "step", &tag, &error));
            assert_true(tag == 3);
            OK(dray_batch_tag(batch, i, "tokens", &tag, &error));
            assert_true(tag == (i / size == 1 ? 10 : i / size == 3 ? 30 : 1));
            int rc = dray_batch_tag(batch, i, "level", &tag, &error);
            assert_int_equal(rc, i / size == 3 ? DRAY_OK : DRAY_ENOENT);
        }
        dray_batch_free(batch);
    }
    tags[0].row = 8;
    FAILS(DRAY_EINVALID, dray_queue_insert(queue, &in, NULL, &error));
    tags[0].row = 4; /* of 4 groups */
    FAILS(DRAY_EINVALID, dray_queue_insert(queue, &in, NULL, &error));
    OK(dray_queue_clear(queue, "rows", &error));
    OK(dray_queue_clear(queue, "groups", &error));
    leave(queue, context);
}

SUITE(up, down)
