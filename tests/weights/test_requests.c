/* Tests requests to a data server for its blocks and its chunks, exactly at each limit and one
 * beyond it. */
#include "mover/mover.h"
#include "net/cells.h"
#include "suite.h"
#include "weights/internal.h"
#include "weights/server/nccl.h"
#include "weights/server/pull.h"
#include "weights/server/shares.h"
#include "weights/sources/remote.h"

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { RUN = 9, RECT_BYTES = 4 + 1 + 1 + 4 * 8, FLAGS_AT = 5 };

static dray_layout *layout;
static dray_region *region, *staging;
static dray__packer *packer;

/* Rows 2 to 5 of an f32 matrix of 8 x 10. */
FIXTURE(up)
{
    const int64_t shape[2] = {8, 10};
    const dray_region_info info = {.kind = DRAY_REGION_HOST, .bytes = 4096, .name = "r"};
    const dray_block block = {.offset = 400, .start = {2, 0}, .extent = {4, 10}, .stride = {40, 4}};
    assert_int_equal(dray_layout_new(&layout, NULL), 0);
    assert_int_equal(dray_layout_add_region(layout, &info, NULL, NULL), 0);
    assert_int_equal(dray_layout_add_tensor(layout, "w", DRAY_F32, 2, shape, NULL, NULL), 0);
    assert_int_equal(dray_layout_add_block(layout, &block, NULL), 0);
    assert_int_equal(dray_region_alloc(DRAY_REGION_HOST, info.bytes, "r", &region, NULL), 0);
    assert_int_equal(
        dray_region_alloc(DRAY_REGION_HOST, DRAY__DATA_MAX + 4096, "s", &staging, NULL), 0);
    packer = dray__packer_new();
    return packer ? 0 : -1;
}

FIXTURE(down)
{
    dray__packer_free(packer);
    dray_region_free(region);
    dray_region_free(staging);
    dray_layout_free(layout);
    return 0;
}

static void put_rect(dray__writer *w, int64_t row, int64_t rows, int64_t column, int64_t columns)
{
    dray__put_u32(w, 0);
    dray__put_u8(w, DRAY_F32);
    dray__put_u8(w, 0);
    dray__put_i64(w, row);
    dray__put_i64(w, rows);
    dray__put_i64(w, column);
    dray__put_i64(w, columns);
}

static int read_rects(dray__writer *w, uint64_t room)
{
    const dray_copy *copies;
    uint32_t count;
    uint64_t bytes;
    dray__reader in = dray__reader_of(w->data, w->size);
    int rc = dray__pull_get_rects(packer, &in, room, DRAY__PULL_QUANT_MAX, layout, &copies, &count,
                                  &bytes, NULL);
    dray__writer_free(w);
    return rc;
}

TEST_WITHIN(test_rectangles_lie_in_their_block, up, down)
{
    static const struct {
        int64_t rect[4];
        int code;
    } cases[] = {
        {{2, 4, 0, 10}, 0},
        {{5, 1, 9, 1}, 0},
        {{2, 5, 0, 10}, DRAY_EINVALID},
        {{3, 4, 0, 10}, DRAY_EINVALID},
        {{1, 2, 0, 10}, DRAY_EINVALID},
        {{2, 4, 1, 10}, DRAY_EINVALID},
        {{2, 4, -1, 10}, DRAY_EINVALID},
        {{6, 1, 0, 10}, DRAY_EINVALID},
        {{2, 0, 0, 10}, DRAY_EINVALID},
        {{INT64_MIN, 4, 0, 10}, DRAY_EINVALID},
        {{2, INT64_MAX, 0, 10}, DRAY_EINVALID},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        dray__writer w = {0};
        const int64_t *r = cases[i].rect;
        dray__put_u32(&w, 1);
        put_rect(&w, r[0], r[1], r[2], r[3]);
        if (read_rects(&w, DRAY__DATA_MAX) != cases[i].code)
            fail_msg("rectangle %zu: %d expected", i, cases[i].code);
    }
}

TEST_WITHIN(test_rectangles_are_so_many_and_so_large, up, down)
{
    for (uint32_t more = 0; more < 2; more++) {
        dray__writer w = {0};
        dray__put_u32(&w, DRAY__PULL_RECTS_MAX + more);
        for (uint32_t i = 0; i < DRAY__PULL_RECTS_MAX + more; i++)
            put_rect(&w, 2, 1, 0, 1);
        assert_int_equal(read_rects(&w, DRAY__DATA_MAX), more ? DRAY_EFORMAT : 0);
        dray__put_u32(&w, 2);
        put_rect(&w, 2, 4, 0, 10); /* 160 bytes */
        put_rect(&w, 2, 1, 0, 10); /* 40 */
        assert_int_equal(read_rects(&w, 200 - more), more ? DRAY_EINVALID : 0);
    }
}

/* The status of the answer to a request for the whole block; twice: to read it two times. */
static int ask_for(uint64_t token, uint16_t options, uint64_t attempt, bool twice)
{
    dray__writer body = {0}, out = {0};
    uint64_t bytes = 0;
    dray__put_u64(&body, token);
    dray__put_u64(&body, attempt);
    dray__put_u16(&body, options);
    dray__put_u32(&body, 1);
    put_rect(&body, 2, 4, 0, 10);
    body.data[body.size - RECT_BYTES + FLAGS_AT] = twice ? DRAY__PULL_TWICE : 0;
    const dray__data_request header = {
        .type = DRAY__DATA_RECTS, .id = 7, .body_bytes = (uint32_t)body.size};
    dray__answer answer;
    assert_true(dray__pull_answer(packer, &header, body.data, staging, 0, &out, &bytes));
    assert_int_equal(dray__answer_get(out.data, &answer, NULL), 0);
    assert_int_equal(bytes, answer.status ? 0 : 160);
    dray__writer_free(&body);
    dray__writer_free(&out);
    return answer.status;
}

static int ask(uint64_t token, uint16_t options, uint64_t attempt)
{
    return ask_for(token, options, attempt, false);
}

/* Who lost its lease reads nothing any more; of what an update brings, that update's ranks alone.
 */
TEST_WITHIN(test_requests_are_of_an_update, up, down)
{
    uint64_t token = dray__local_token();
    dray__shares *shares;
    assert_int_equal(dray__local_add(token, layout, &region, 1, NULL, NULL, NULL), 0);
    assert_int_equal(dray__shares_new(RUN, layout, &region, &shares, NULL), 0);
    dray__rect whole = dray__rect_of(layout, 0);
    assert_true(dray__shares_expect(shares, 0, &whole));
    assert_true(dray__shares_enter(shares, 0, &whole, 0, 0));
    dray__local_share(token, shares);
    dray__local_began(token, RUN);
    assert_int_equal(ask(token, 0, 1), 0);
    dray__local_revoke(token, 2);
    assert_int_equal(ask(token, 0, 1), DRAY_ESTALE);
    assert_int_equal(ask(token, 0, 2), 0);
    assert_int_equal(ask(token, DRAY__PULL_COHORT, RUN), 0);
    assert_int_equal(ask(token, DRAY__PULL_COHORT, RUN - 1), DRAY_ESTALE);
    assert_int_equal(ask(token, DRAY__PULL_COHORT, RUN + 1), DRAY_EAGAIN);
    assert_int_equal(ask(token, DRAY__PULL_MAPPED, RUN),
                     DRAY_EVERSION); /* alone it means nothing */
    assert_int_equal(ask(token, DRAY__PULL_OPTIONS + 1, 2), DRAY_EVERSION);
    dray__local_remove(token);
}

static dray__fault misread(void *user, const char *tensor)
{
    (void)user, (void)tensor;
    return DRAY__FAULT_MISREAD;
}

/* What nobody else compares is read twice at its source, where two ways must find the same. */
TEST_WITHIN(test_two_readings_are_the_same, up, down)
{
    uint64_t token = dray__local_token();
    uint8_t *bytes = dray_region_base(region);
    for (int i = 0; i < 4096; i++)
        bytes[i] = (uint8_t)(i * 7);
    assert_int_equal(dray__local_add(token, layout, &region, 1, NULL, NULL, NULL), 0);
    assert_int_equal(ask_for(token, DRAY__PULL_SUMS, 1, true), 0);
    dray__mover_faults(misread, NULL);
    int once = ask_for(token, DRAY__PULL_SUMS, 1, false);
    int twice = ask_for(token, DRAY__PULL_SUMS, 1, true);
    dray__mover_faults(NULL, NULL);
    assert_int_equal(once, 0);
    assert_int_equal(twice, DRAY_ECHECKSUM);
    dray__local_remove(token);
}

static int read_cell(void *user, const dray__cell *cell, void *out)
{
    (void)user;
    memset(out, 1, cell->bytes);
    return DRAY_OK;
}

static int ask_cells(uint32_t count, uint64_t first_bytes, uint64_t bytes)
{
    const dray__cells cells = {read_cell, NULL};
    dray__cell *ranges = calloc(count, sizeof *ranges);
    dray__writer w = {0}, out = {0};
    dray__answer answer;
    uint64_t sent = 0;
    for (uint32_t i = 0; i < count; i++)
        ranges[i] = (dray__cell){1, 0, i ? bytes : first_bytes};
    dray__cells_request(&w, 7, ranges, count);
    const dray__data_request header = {
        .type = DRAY__DATA_CELLS, .id = 7, .body_bytes = (uint32_t)w.size - DRAY__REQUEST_HEADER};
    dray__cells_answer(&cells, &header, w.data + DRAY__REQUEST_HEADER, staging, &out, &sent);
    assert_int_equal(dray__answer_get(out.data, &answer, NULL), 0);
    dray__writer_free(&w);
    dray__writer_free(&out);
    free(ranges);
    return answer.status;
}

TEST_WITHIN(test_ranges_are_so_many_and_so_large, up, down)
{
    assert_int_equal(ask_cells(DRAY__CELLS_MAX, 1, 1), 0);
    assert_int_equal(ask_cells(DRAY__CELLS_MAX + 1, 1, 1), DRAY_EFORMAT);
    assert_int_equal(ask_cells(2, DRAY__VALUES_MAX - 8, 8), 0);
    assert_int_equal(ask_cells(2, DRAY__VALUES_MAX - 8, 9), DRAY_EFORMAT);
}

/* Memory that is smaller than its layout says is not looked at. */
TEST_WITHIN(test_regions_are_as_large_as_said, up, down)
{
    dray_region *less;
    dray_checksums *sums;
    assert_int_equal(dray_checksums_compute(layout, &region, &sums, NULL), 0);
    dray_checksums_free(sums);
    assert_int_equal(dray_region_alloc(DRAY_REGION_HOST, 4095, "less", &less, NULL), 0);
    assert_int_equal(dray_checksums_compute(layout, &less, &sums, NULL), DRAY_EINVALID);
    dray_region_free(less);
}

/* ---- answers --------------------------------------------------------------------------------- */

/* An answer to a request for two rows, of 40 bytes each, that says so many of each. */
static bool fits(uint32_t first, uint32_t second)
{
    dray__op op = {0};
    dray__sources sources = {.ops = &op, .op_count = 1};
    dray__transfer transfer = {.sources = &sources};
    struct remote_route route = {.transfer = &transfer};
    struct part part = {0};
    struct source source = {.parts = &part, .count = 1};
    struct request *request = calloc(1, sizeof *request + 2 * sizeof *request->slices);
    dray__writer head = {0};
    assert_non_null(request);
    op.copy = (dray_copy){.ndim = 2, .source_dtype = DRAY_F32, .destination_dtype = DRAY_F32};
    request->count = 2;
    for (uint32_t i = 0; i < 2; i++)
        request->slices[i].rect = dray__rect_of(layout, 0);
    for (uint32_t i = 0; i < 2; i++)
        request->slices[i].rect.extent[0] = 1;
    dray__put_u32(&head, first);
    dray__put_u32(&head, second);
    dray__arrival arrival = {
        .header = {.head_bytes = (uint32_t)head.size, .data_bytes = (uint64_t)first + second},
        .head = head.data};
    bool found = dray__remote_fits(&route, &source, request, &arrival);
    dray__writer_free(&head);
    free(request);
    return found;
}

/* Deltas of rectangles may be smaller than these; nothing is larger, whatever the others are. */
TEST_WITHIN(test_answers_are_no_larger_than_asked, up, down)
{
    assert_true(fits(40, 40));
    assert_true(fits(40, 12));
    assert_false(fits(40, 41));
    assert_false(fits(41, 39));
    assert_false(fits(80, 0));
    assert_false(fits(UINT32_MAX, 0));
}

static uint64_t read_back(const dray__transfer *transfer, const dray_region *from,
                          const dray_copy *copy)
{
    uint64_t sum = 0;
    dray__transfer_read_back(transfer, from, copy, 1, &sum);
    return sum;
}

/* Memory that cannot be read back holds nothing that was expected, be it in two places. */
TEST_WITHIN(test_what_cannot_be_read_back, up, down)
{
    char path[] = "/tmp/dray-requests-XXXXXX";
    int fd = mkstemp(path);
    dray_region *file;
    dray__destination destination = {.layout = layout, .regions = &file};
    const dray__transfer transfer = {.destination = &destination};
    assert_true(fd >= 0 && ftruncate(fd, 4096) == 0);
    assert_int_equal(dray_region_open(path, 0, &file, NULL), 0);
    dray_copy copy = dray__block_copy(layout, 0);
    uint64_t first = read_back(&transfer, file, &copy);
    assert_int_equal(first, read_back(&transfer, file, &copy));
    assert_int_not_equal(first, 0);
    assert_int_not_equal(first, read_back(&transfer, region, &copy));
    copy.destination_offset += 4;
    assert_int_not_equal(first, read_back(&transfer, file, &copy));
    dray_region_free(file);
    close(fd);
    unlink(path);
}

/* Requests that a session for NCCL takes, one for each slot and no more, are answered in their
 * order; who did not join, who asks for another slot and whose ticket never was one is refused. */
TEST(test_nccl_answers_in_order)
{
    static const struct {
        uint8_t what, slot;
        int32_t status;
    } cases[] = {{DRAY__NCCL_FETCH, 0, DRAY_EINVALID},
                 {DRAY__NCCL_JOIN, 0, DRAY_EDEAD},
                 {DRAY__NCCL_FETCH, DRAY__NCCL_SLOTS, DRAY_EINVALID},
                 {9, 0, DRAY_EINVALID}};
    enum { CASES = sizeof cases / sizeof *cases };
    int wake = eventfd(0, EFD_NONBLOCK);
    dray__nccl_session *s = dray__nccl_session_new(wake);
    assert_non_null(s);
    for (uint32_t round = 0, id = 1; round < 3; round++) {
        for (uint32_t i = 0; i <= DRAY__NCCL_SLOTS; i++) {
            dray__writer body = {0};
            dray__put_u64(&body, 77);
            dray__put_u64(&body, 1);
            dray__put_u8(&body, cases[(id + i) % CASES].what);
            dray__put_u8(&body, cases[(id + i) % CASES].slot);
            const dray__data_request header = {
                .type = DRAY__DATA_NCCL, .id = id + i, .body_bytes = (uint32_t)body.size};
            assert_int_equal(dray__nccl_session_ask(s, &header, body.data),
                             i == DRAY__NCCL_SLOTS ? -EPROTO : 0);
            dray__writer_free(&body);
        }
        for (uint32_t i = 0; i < DRAY__NCCL_SLOTS; i++, id++) {
            dray__writer out = {0};
            dray__answer answer;
            struct pollfd p = {.fd = wake, .events = POLLIN};
            while (!dray__nccl_session_answer(s, &out)) {
                uint64_t count;
                assert_int_equal(poll(&p, 1, 20000), 1);
                assert_int_equal(read(wake, &count, sizeof count), sizeof count);
            }
            assert_int_equal(dray__answer_get(out.data, &answer, NULL), 0);
            assert_int_equal(answer.id, id);
            assert_int_equal(answer.status, cases[id % CASES].status);
            dray__writer_free(&out);
        }
    }
    assert_false(dray__nccl_session_answered(s));
    dray__nccl_session *ending = NULL;
    dray__nccl_session_leave(s, &ending);
    dray__nccl_sessions_free(&ending, true);
    assert_null(ending);
    close(wake);
}

SUITE(NULL, NULL)
