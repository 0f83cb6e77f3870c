/* Tests a column that is described and copied in one call: the values and places of rows from
 * anywhere in it. Nothing is written beyond the given room. */
#include "queue/three_tasks.h"

static const char *const needs[] = {"pairs", "score"};
static const dray_queue_task tasks[] = {{.name = "read", .needs = needs, .needs_count = 2}};

enum { ROWS = 6, FIRST = 4, UNTOUCHED = -77 };

static const uint64_t ends[ROWS + 1] = {0, 2, 2, 5, 6, 6, 9}; /* in pairs; 4 rows, then 2 */
static int32_t pairs[18];
static float score[ROWS];

static void insert_rows(dray_queue *queue, uint32_t first, uint32_t rows)
{
    uint64_t offsets[ROWS + 1];
    for (uint32_t i = 0; i <= rows; i++)
        offsets[i] = ends[first + i] - ends[first];
    dray_column_data columns[] = {{.name = "pairs",
                                   .dtype = DRAY_I32,
                                   .ndim = 2,
                                   .shape = {-1, 2},
                                   .offsets = offsets,
                                   .values = pairs + ends[first] * 2},
                                  {.name = "score", .dtype = DRAY_F32, .values = score + first}};
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = "0";
    o.rows = rows;
    o.columns = columns;
    o.column_count = 2;
    OK(dray_queue_insert(queue, &o, NULL, &error));
}

static dray_batch *claim_all(dray_context *context, dray_queue **queue)
{
    dray_batch *batch;
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = tasks;
    options.task_count = 1;
    for (int i = 0; i < 18; i++)
        pairs[i] = 100 + i;
    for (int i = 0; i < ROWS; i++)
        score[i] = (float)i / 2;
    OK(dray_queue_open(context, "read", &options, queue, &error));
    insert_rows(*queue, 0, FIRST);
    insert_rows(*queue, FIRST, ROWS - FIRST);
    dray_claim_options o = want("read", ROWS);
    o.policy = DRAY_POLICY_ORDERED;
    OK(dray_queue_claim(*queue, &o, &batch, &error));
    return batch;
}

static void check_part(dray_batch *batch, uint32_t first, uint32_t rows, size_t capacity)
{
    dray_column_part part;
    int64_t offsets[ROWS + 2];
    int32_t room[20];
    for (int i = 0; i < 20; i++)
        room[i] = UNTOUCHED;
    offsets[rows + 1] = UNTOUCHED;
    OK(dray_batch_read(batch, "pairs", first, rows, &part, offsets, room, capacity, &error));
    uint64_t count = ends[first + rows] - ends[first];
    assert_true(part.dtype == DRAY_I32 && part.content == DRAY_CONTENT_TENSOR && part.ndim == 2);
    assert_true(part.shape[0] == -1 && part.shape[1] == 2 && part.bytes == count * 8);
    for (uint32_t i = 0; i <= rows; i++)
        assert_int_equal(offsets[i], ends[first + i] - ends[first]);
    assert_int_equal(offsets[rows + 1], UNTOUCHED);
    assert_int_equal(part.copied, part.bytes <= capacity);
    for (uint64_t i = 0; i < 20; i++)
        assert_int_equal(room[i],
                         part.copied && i < count * 2 ? pairs[ends[first] * 2 + i] : UNTOUCHED);
    bool one_insert = first + rows <= FIRST || first >= FIRST || ends[first] == ends[FIRST] ||
                      ends[first + rows] == ends[FIRST];
    if (!elsewhere()) /* there each row has its own place */
        assert_int_equal(part.values != NULL, count && one_insert);
    if (part.values)
        assert_memory_equal(part.values, pairs + ends[first] * 2, part.bytes);
}

TEST_WITHIN(test_parts, up, down)
{
    dray_context *context = fixture_context(&f, "read");
    dray_queue *queue;
    dray_batch *batch = claim_all(context, &queue);
    for (uint32_t first = 0; first <= ROWS; first++)
        for (uint32_t rows = 0; rows <= ROWS - first; rows++) {
            size_t bytes = (ends[first + rows] - ends[first]) * 8;
            check_part(batch, first, rows, bytes);
            check_part(batch, first, rows, sizeof(int32_t[20]));
            if (bytes)
                check_part(batch, first, rows, bytes - 1);
        }
    dray_batch_free(batch);
    leave(queue, context);
}

TEST_WITHIN(test_fixed_and_refused, up, down)
{
    dray_column_part part;
    float room[ROWS];
    int64_t offsets[ROWS + 1] = {UNTOUCHED};
    dray_context *context = fixture_context(&f, "fixed");
    dray_queue *queue;
    dray_batch *batch = claim_all(context, &queue);
    OK(dray_batch_read(batch, "score", 1, 4, &part, offsets, room, sizeof room, &error));
    assert_true(part.dtype == DRAY_F32 && part.ndim == 0 && part.bytes == 16 && part.copied == 1);
    assert_memory_equal(room, score + 1, 16);
    assert_int_equal(offsets[0], UNTOUCHED); /* it is not ragged */
    FAILS(DRAY_EINVALID,
          dray_batch_read(batch, "score", 3, 4, &part, offsets, room, sizeof room, &error));
    FAILS(DRAY_EINVALID,
          dray_batch_read(batch, "score", UINT32_MAX, 2, &part, offsets, room, 0, &error));
    FAILS(DRAY_ENOENT, dray_batch_read(batch, "none", 0, 1, &part, offsets, room, 0, &error));
    dray_batch_free(batch);
    leave(queue, context);
}

SUITE(NULL, NULL)
