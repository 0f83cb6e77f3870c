/* What a keeper's data server is asked: ranges of bytes of chunks (net/cells.h). An
 * input is the body of a request. Every number that is known is a chunk of its bytes, of as many as
 * its number; what is answered is those, and nothing else. */
#include "fuzz/fuzz.h"

#include "base/hash.h"
#include "net/cells.h"

#include <string.h>

enum { CHUNKS = 8, UNIT = 1000 }; /* chunk n has n units of the byte n */

static dray_region *staging;
static dray__writer out;
static uint64_t told;

static int read_cell(void *user, const dray__cell *cell, void *to)
{
    (void)user;
    if (!cell->number || cell->number >= CHUNKS || cell->offset > cell->number * UNIT ||
        cell->bytes > cell->number * UNIT - cell->offset)
        return DRAY_EGONE;
    memset(to, (int)cell->number, cell->bytes);
    told += cell->bytes;
    return DRAY_OK;
}

static void check(const uint8_t *body, const dray__answer *answer)
{
    const uint8_t *data = dray_region_base(staging);
    dray__reader asked = dray__reader_of(body, 1 << 20);
    dray__reader head = dray__reader_of(out.data + DRAY__ANSWER_HEADER, answer->head_bytes);
    uint32_t count = dray__get_u32(&asked);
    MUST(answer->head_bytes == 8 + count && answer->data_bytes == told);
    MUST(dray__get_u64(&head) == dray__hash(data, told));
    for (uint64_t i = 0, at = 0; i < count; i++) {
        uint64_t number = dray__get_u64(&asked);
        dray__get_u64(&asked);
        uint64_t bytes = dray__get_u64(&asked);
        if (dray__get_u8(&head))
            continue;
        MUST(bytes <= told - at);
        for (uint64_t k = 0; k < bytes; k++)
            MUST(data[at + k] == number);
        at += bytes;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const dray__cells cells = {read_cell, NULL};
    const dray__data_request header = {
        .type = DRAY__DATA_CELLS, .id = 7, .body_bytes = (uint32_t)size};
    uint64_t bytes = 0;
    dray__answer answer;
    if (size > DRAY__REQUEST_MAX)
        return 0;
    if (!staging)
        MUST(dray_region_alloc(DRAY_REGION_HOST, DRAY__DATA_MAX, "fuzz", &staging, NULL) == 0);
    told = 0;
    dray__cells_answer(&cells, &header, data, staging, &out, &bytes);
    MUST(dray__answer_get(out.data, &answer, NULL) == 0 && answer.id == 7);
    MUST(out.size == DRAY__ANSWER_HEADER + answer.head_bytes && answer.data_bytes == bytes);
    MUST(answer.status == 0 || bytes == 0);
    if (!answer.status)
        check(data, &answer);
    return 0;
}

void fuzz_seeds(fuzz_put put, void *user)
{
    static const dray__cell some[] = {
        {1, 0, 1000}, {7, 6999, 1}, {3, 100, 2900}, {99, 0, 5}, {2, 2000, 0}};
    dray__writer w = {0};
    for (uint32_t count = 1; count <= 5; count++) {
        dray__writer_reset(&w);
        dray__cells_request(&w, 7, some, count);
        put(user, w.data + DRAY__REQUEST_HEADER, w.size - DRAY__REQUEST_HEADER);
    }
    dray__writer_free(&w);
}
