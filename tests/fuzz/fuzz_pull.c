/* What a data server is asked, and what a reader is answered (weights/server/pull.h). The first
 * byte says which:
 *
 *  0 to 3  requests: a header, a body that is cut to what the header says. 1: the ticket is put
 *          right first, 2: the attempt, too, 3: as 2, of what an update brings
 *  4       the header of an answer
 *  5, 6    a delta of a rectangle, bf16 or f32
 *  7       the answer to a request for regions
 *
 * All blocks hold zeros, and what lies between them does not: an answer that is no zero has read
 * what nobody registered. What a delta writes stays in its rectangle, and is all of it or nothing.
 */
#include "fuzz/fuzz.h"

#include "weights/delta/delta.h"
#include "weights/server/pull.h"
#include "weights/server/shares.h"
#include "weights/sources/remote.h"

#include <string.h>
#include <unistd.h>

enum { ROWS = 24, COLUMNS = 40, GAP = 16, RUN = 9 };

static struct world {
    dray_layout *layout;
    dray_region *region, *staging;
    uint64_t token;
    dray__packer *packer;
    dray__delta *delta;
    dray__delta_view *view;
    dray__writer out;
} w;

/* Two blocks of a bf16 matrix, one of an f32 vector, with 0xEE around them. */
static void make_layout(void)
{
    dray_region_info info = {.kind = DRAY_REGION_HOST, .bytes = 8192, .name = "r"};
    const int64_t shape[2] = {ROWS, COLUMNS};
    uint8_t *memory = malloc(info.bytes);
    MUST(memory && dray_layout_new(&w.layout, NULL) == 0);
    MUST(dray_region_wrap(memory, info.bytes, "r", &w.region, NULL) == 0);
    memset(memory, 0xEE, info.bytes);
    MUST(dray_layout_add_region(w.layout, &info, NULL, NULL) == 0);
    MUST(dray_layout_add_tensor(w.layout, "matrix", DRAY_BF16, 2, shape, NULL, NULL) == 0);
    MUST(dray_layout_add_tensor(w.layout, "vector", DRAY_F32, 1, shape, NULL, NULL) == 0);
    for (int half = 0; half < 2; half++) {
        dray_block block = {.offset = 64 + (uint64_t)half * 2560,
                            .start = {half * ROWS / 2, 0},
                            .extent = {ROWS / 2, COLUMNS},
                            .stride = {COLUMNS * 2 + GAP, 2}};
        MUST(dray_layout_add_block(w.layout, &block, NULL) == 0);
        for (int row = 0; row < ROWS / 2; row++)
            memset(memory + block.offset + row * block.stride[0], 0, COLUMNS * 2);
    }
    dray_block vector = {.tensor = 1, .offset = 6400, .extent = {ROWS}, .stride = {4}};
    MUST(dray_layout_add_block(w.layout, &vector, NULL) == 0);
    memset(memory + vector.offset, 0, ROWS * 4);
    const int64_t square[2] = {16, 16}, scales[2] = {2, 2};
    const dray_quant quant = {.kind = DRAY_QUANT_BLOCK, .scales = 3, .block = {8, 8}};
    dray_block held = {.tensor = 2, .offset = 7000, .extent = {16, 16}, .stride = {24, 1}};
    dray_block scale = {.tensor = 3, .offset = 7600, .extent = {2, 2}, .stride = {8, 4}};
    MUST(dray_layout_add_tensor(w.layout, "fp8", DRAY_F8E4M3, 2, square, NULL, NULL) == 0);
    MUST(dray_layout_add_tensor(w.layout, "scales", DRAY_F32, 2, scales, NULL, NULL) == 0);
    MUST(dray_layout_add_block(w.layout, &held, NULL) == 0);
    MUST(dray_layout_add_block(w.layout, &scale, NULL) == 0);
    MUST(dray_layout_set_quant(w.layout, 2, &quant, NULL) == 0);
    for (int row = 0; row < 16; row++)
        memset(memory + held.offset + row * held.stride[0], 0, 16);
    memset(memory + scale.offset, 0, 16);
}

static void make_shares(void)
{
    dray__shares *shares;
    MUST(dray__shares_new(RUN, w.layout, &w.region, &shares, NULL) == 0);
    for (uint32_t b = 0; b < 4; b++) {
        dray__rect whole = dray__rect_of(w.layout, b), half = whole;
        half.extent[0] /= 2;
        MUST(dray__shares_expect(shares, b, &whole));
        MUST(dray__shares_enter(shares, b, b == 1 ? &half : &whole, 0, 0));
    }
    dray__local_share(w.token, shares);
}

static void make(void)
{
    make_layout();
    MUST(dray_region_alloc(DRAY_REGION_HOST, DRAY__DATA_MAX, "staging", &w.staging, NULL) == 0);
    MUST(dray__delta_new(w.layout, &w.region, 0, &w.delta, NULL) == 0);
    uint8_t *first = (uint8_t *)dray_region_base(w.region) + 64;
    first[6] = 1;
    MUST(dray__delta_publish(w.delta, 1, 1, INT64_MAX, NULL) == 0);
    first[6] = 0;
    MUST(dray__delta_publish(w.delta, 1, 2, INT64_MAX, NULL) == 0);
    MUST(dray__delta_open(w.layout, dray__delta_region(w.delta), &w.view, NULL) == 0);
    w.token = dray__local_token();
    w.packer = dray__packer_new();
    MUST(w.packer);
    MUST(dray__local_add(w.token, w.layout, &w.region, 1, w.view, NULL, NULL) == 0);
    make_shares();
    dray__local_began(w.token, RUN);
    dray__local_revoke(w.token, 2);
}

/* ---- requests -------------------------------------------------------------------------------- */

/* Asks it for anything to be quantised? Zeros have scales that are none. */
static bool quantises(const uint8_t *body, size_t size, uint16_t options)
{
    dray__reader in = dray__reader_of(body, size);
    dray__get_bytes(&in, options & DRAY__PULL_BASE ? 42 : 18);
    for (uint32_t count = dray__get_u32(&in); count-- > 0 && !in.failed;) {
        uint32_t block = dray__get_u32(&in);
        dray__get_u8(&in);
        if (dray__get_u8(&in) & DRAY__PULL_QUANTISED)
            return true;
        dray__get_bytes(&in, block == 2 ? 16 : 32);
    }
    return false;
}

static void check_answer(const dray__data_request *asked, const uint8_t *body, uint64_t data_bytes)
{
    dray__answer answer;
    MUST(dray__answer_get(w.out.data, &answer, NULL) == 0);
    MUST(answer.id == asked->id);
    MUST(w.out.size == DRAY__ANSWER_HEADER + answer.head_bytes);
    MUST(answer.status == 0 || data_bytes == 0);
    uint16_t options = dray__pull_options(asked, body);
    MUST(answer.data_bytes == data_bytes || options & DRAY__PULL_ARENA);
    const uint8_t *data = dray_region_base(w.staging);
    if (quantises(body, asked->body_bytes, options) || options & DRAY__PULL_BASE)
        return;
    for (uint64_t i = 0; i < data_bytes; i++)
        MUST(data[i] == 0);
}

static void request(const uint8_t *data, size_t size, int kind)
{
    dray__data_request header;
    uint8_t body[DRAY__REQUEST_MAX];
    if (size < DRAY__REQUEST_HEADER || dray__request_get(data, &header, NULL))
        return;
    size -= DRAY__REQUEST_HEADER;
    header.body_bytes = (uint32_t)(header.body_bytes < size ? header.body_bytes : size);
    memcpy(body, data + DRAY__REQUEST_HEADER, header.body_bytes);
    if (kind > 0 && header.body_bytes >= 8)
        memcpy(body, &w.token, 8);
    const uint64_t attempt = kind == 3 ? RUN : 2;
    if (kind > 1 && header.body_bytes >= 16)
        memcpy(body + 8, &attempt, 8);
    if (kind == 3 && header.body_bytes >= 18)
        body[16] |= DRAY__PULL_COHORT;
    uint8_t *exact = malloc((size_t)header.body_bytes + 1); /* where a sanitizer sees its end */
    uint64_t data_bytes = 0;
    memcpy(exact, body, header.body_bytes);
    if (header.type == DRAY__DATA_REGIONS) {
        dray__writer_reset(&w.out);
        dray__pull_regions(header.id, DRAY__DATA_MAX, &w.out, NULL);
        dray__pull_regions(w.token, DRAY__DATA_MAX, &w.out, NULL);
    } else if (header.type == DRAY__DATA_RECTS) {
        MUST(dray__pull_answer(w.packer, &header, exact, w.staging, 0, &w.out, &data_bytes));
        check_answer(&header, exact, data_bytes);
    }
    free(exact);
}

/* ---- answers --------------------------------------------------------------------------------- */

static void decode(const uint8_t *data, size_t size, dray_dtype dtype)
{
    size_t element = dray_dtype_size(dtype);
    int64_t stride = (int64_t)element * (COLUMNS + 3);
    dray_copy copy = {.ndim = 2,
                      .extent = {ROWS, COLUMNS, 1, 1},
                      .source_dtype = (int32_t)dtype,
                      .destination_dtype = (int32_t)dtype,
                      .destination_stride = {stride, (int64_t)element}};
    uint8_t *to = malloc((size_t)stride * ROWS);
    dray__delta_coder *coder = dray__delta_coder_new();
    MUST(to && coder);
    memset(to, 0xEE, (size_t)stride * ROWS);
    int rc = dray__delta_decode(coder, data, size, &copy, to, NULL);
    MUST(rc == 0 || rc == DRAY_EFORMAT || rc == DRAY_ENOMEM);
    for (int row = 0; row < ROWS; row++)
        for (size_t i = rc ? 0 : COLUMNS * element; i < (size_t)stride; i++)
            MUST(to[row * stride + (int64_t)i] == 0xEE);
    dray__delta_coder_free(coder);
    free(to);
}

static void answer_header(const uint8_t *data, size_t size)
{
    dray__answer answer;
    if (size < DRAY__ANSWER_HEADER || dray__answer_get(data, &answer, NULL))
        return;
    MUST(answer.status <= 0 && answer.head_bytes <= DRAY__HEAD_MAX);
    MUST(answer.data_bytes <= DRAY__DATA_MAX);
}

static void maps(const uint8_t *data, size_t size)
{
    dray__source of = {.layout = w.layout, .name = (char *)"peer", .pid = getpid()};
    struct source s = {.of = &of, .cohort = true};
    if (dray__remote_take_maps(&s, data, size, NULL) == 0 && s.maps[0])
        MUST(dray_region_bytes(s.maps[0]) >= 8192);
    dray__remote_unmap(&s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!w.layout)
        make();
    if (size == 0)
        return 0;
    int kind = data[0] % 8;
    data++;
    size--;
    if (kind < 4)
        request(data, size, kind);
    else if (kind == 4)
        answer_header(data, size);
    else if (kind == 7)
        maps(data, size);
    else
        decode(data, size, kind == 5 ? DRAY_BF16 : DRAY_F32);
    return 0;
}

/* ---- what it begins with --------------------------------------------------------------------- */

static void put_requests(fuzz_put put, void *user)
{
    static const uint16_t flags[] = {0, DRAY__PULL_SUMS,
                                     DRAY__PULL_SUMS | DRAY__PULL_COHORT | DRAY__PULL_MAPPED};
    const dray__pull_base base = {1, 1, 2};
    for (int i = 0; i < 24; i++) {
        dray__pull_rect rects[3] = {
            {.block = 0, .ndim = 2, .dtype = DRAY_BF16, .rect.extent = {12, 40, 1, 1}},
            {.block = 1, .ndim = 2, .dtype = DRAY_F32, .rect = {{14, 3}, {2, 5, 1, 1}}},
            {.block = 2,
             .ndim = 1,
             .dtype = DRAY_BF16,
             .twice = true,
             .rect.extent = {24, 1, 1, 1}}};
        if (i % 5 == 4) {
            rects[0].quantised = true;
            rects[0].quant = (dray__pull_quant){DRAY_F8E4M3, 0, {4, 8, 1, 1}};
            rects[0].dtype = DRAY_F8E4M3;
        }
        dray__writer body = {0};
        dray__pull_put_request(&body, 7, flags[i % 3], 1, 2, i % 4 == 2 ? &base : NULL, rects,
                               1 + (uint32_t)i % 3);
        fuzz_put_kind(put, user, (uint8_t)(i % 4), &body);
        dray__writer_free(&body);
    }
    dray__pull_rect held = {.block = 3,
                            .ndim = 2,
                            .dtype = DRAY_F8E4M3,
                            .quantised = true,
                            .quant = {DRAY_F8E4M3, DRAY_SCALE_F32, {8, 8, 1, 1}},
                            .rect = {{8, 0}, {8, 16, 1, 1}}};
    dray__writer body = {0};
    for (uint16_t sums = 0; sums < 2; sums++) {
        dray__writer_reset(&body);
        dray__pull_put_request(&body, 7, sums ? DRAY__PULL_SUMS : 0, 1, 2, NULL, &held, 1);
        fuzz_put_kind(put, user, 3, &body);
    }
    dray__writer_reset(&body);
    dray__request_end(&body, dray__pull_begin(&body, DRAY__DATA_REGIONS, 1, 5, 0));
    fuzz_put_kind(put, user, 1, &body);
    dray__writer_free(&body);
}

static void put_answers(fuzz_put put, void *user)
{
    dray__writer body = {0};
    dray__answer_put(&body, 0, 3, 32, 4096);
    fuzz_put_kind(put, user, 4, &body);
    dray__writer_reset(&body);
    dray__put_u64(&body, (uint64_t)getpid());
    dray__put_u32(&body, 1);
    dray__put_u32(&body, 3);
    uint8_t handle[400] = {0};
    dray__put_blob(&body, handle, sizeof handle);
    fuzz_put_kind(put, user, 7, &body);
    for (int i = 0; i < 4; i++) {
        static const uint8_t gaps[] = {0, 3, 255, 10, 70}, codes[] = {0x3d, 0x02, 0, 0, 0, 0, 0, 0};
        uint8_t kind = (uint8_t)(5 + i % 2);
        dray__writer_reset(&body);
        dray__put_u32(&body, i < 2 ? 4 : UINT32_C(1) << 30 | 4);
        dray__put_u32(&body, sizeof gaps);
        dray__put_bytes(&body, gaps, sizeof gaps);
        dray__put_bytes(&body, i < 2 ? handle : codes,
                        i < 2       ? (kind == 5 ? 8 : 16)
                        : kind == 5 ? 4
                                    : 6);
        fuzz_put_kind(put, user, kind, &body);
    }
    dray__writer_free(&body);
    uint8_t wire[4096];
    dray__rect rect = dray__rect_of(w.layout, 0);
    dray__delta_coder *coder = dray__delta_coder_new();
    size_t size = dray__delta_encode(coder, w.view, 0, &rect, DRAY_BF16, wire, sizeof wire);
    MUST(size);
    dray__put_bytes(&body, wire, size);
    fuzz_put_kind(put, user, 5, &body);
    dray__writer_free(&body);
    dray__delta_coder_free(coder);
}

void fuzz_seeds(fuzz_put put, void *user)
{
    if (!w.layout)
        make();
    put_requests(put, user);
    put_answers(put, user);
}
