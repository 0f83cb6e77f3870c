/* Tests quantised tensors through load_weights. Tensors that publishers hold quantised arrive
 * unchanged, weights and scales, through buckets that cut the cells. Tensors that would have to be
 * quantised or dequantised on the way are refused before the first call, and the next update that
 * has none of them works. */
#include "suite.h"
#include "weights/cluster.h"

#include <stdint.h>

enum { ROWS = 900, COLUMNS = 700, CELL = 128, ACROSS = (COLUMNS + CELL - 1) / CELL };
enum { DOWN = (ROWS + CELL - 1) / CELL, WEIGHT_BYTES = ROWS * COLUMNS };

#define LONG (20 * DRAY__SECOND)

/* Of a weight and its scales; floats: the weight alone, in bf16. blocks: where it lies. */
static dray_layout *layout_of(bool floats, bool blocks)
{
    static const int64_t shape[2] = {ROWS, COLUMNS}, cells[2] = {DOWN, ACROSS}, zero[2] = {0};
    dray_layout *l;
    dray_region_info info = {.kind = (int32_t)cluster_kind, .bytes = 2 << 20, .name = "weights"};
    dray_quant quant = {.kind = DRAY_QUANT_BLOCK, .block = {CELL, CELL}};
    uint32_t weight;
    MUST(dray_layout_new(&l, error));
    MUST(dray_layout_add_region(l, &info, NULL, error));
    MUST(dray_layout_add_tensor(l, "w.weight", floats ? DRAY_BF16 : DRAY_F8E4M3, 2, shape, &weight,
                                error));
    if (blocks)
        MUST(dray_layout_add_dense(l, weight, 0, zero, shape, 0, error));
    if (floats)
        return l;
    MUST(dray_layout_add_tensor(l, "w.weight_scale_inv", DRAY_F32, 2, cells, &quant.scales, error));
    if (blocks)
        MUST(dray_layout_add_dense(l, quant.scales, 0, zero, cells, WEIGHT_BYTES, error));
    MUST(dray_layout_set_quant(l, weight, &quant, error));
    return l;
}

typedef struct taker {
    const uint8_t *held; /* by the publisher */
    uint64_t bytes, calls, wrong;
} taker;

static int take(void *user, const dray_load_bucket *b, dray_error *error)
{
    (void)error;
    taker *k = user;
    k->calls++;
    for (uint32_t i = 0; i < b->count; i++) {
        const dray_load_tensor *t = &b->tensors[i];
        bool scales = strcmp(t->name, "w.weight_scale_inv") == 0;
        uint64_t row = (uint64_t)t->shape[1] * (scales ? 4 : 1);
        uint64_t at = (scales ? WEIGHT_BYTES : 0) + (uint64_t)t->first_row * row;
        CHECK(t->dtype == (scales ? DRAY_F32 : DRAY_F8E4M3));
        k->wrong +=
            memcmp((const uint8_t *)b->data + t->start, k->held + at, t->end - t->start) != 0;
        k->bytes += t->end - t->start;
    }
    return DRAY_OK;
}

typedef struct side {
    dray_layout *layout;
    dray_region *region;
    dray_publisher *publisher;
} side;

static void publish(side *s, dray_context *context, const char *as, bool floats)
{
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    s->layout = layout_of(floats, true);
    MUST(dray_regions_for_layout(s->layout, 1, &s->region, error));
    uint8_t *bytes = memory_open(s->region);
    for (uint64_t i = 0; i < dray_region_bytes(s->region); i++)
        bytes[i] = (uint8_t)(mix(i) & 0x3B); /* neither NaN nor large, in any of the dtypes */
    memory_close(s->region, bytes, true);
    options.regions = &s->region;
    MUST(dray_publisher_open(context, as, s->layout, &options, &s->publisher, error));
    MUST(dray_publisher_publish(s->publisher, 1, NULL, error));
}

static void end(side *s)
{
    dray_publisher_close(s->publisher);
    dray_region_free(s->region);
    dray_layout_free(s->layout);
}

/* An engine that takes w as floats, or quantised, from publishers that hold it either way. */
static int load(dray_context *context, const char *of, bool floats, taker *k, dray_error *said)
{
    dray_load_options load = DRAY_LOAD_OPTIONS_INIT;
    dray_subscriber_options options = DRAY_SUBSCRIBER_OPTIONS_INIT;
    dray_update_options update = DRAY_UPDATE_OPTIONS_INIT;
    dray_subscriber *s;
    dray_layout *l = layout_of(floats, false);
    load.load = take;
    load.user = k;
    load.bucket_bytes = 512 << 10; /* less than the weight */
    load.slices = 1;
    options.load = &load;
    options.group = floats ? "floats" : "quantised";
    update.timeout_ns = LONG;
    MUST(dray_subscriber_open(context, of, l, &options, &s, error));
    int rc = dray_update_weights(s, &update, NULL, said);
    dray_subscriber_close(s);
    dray_layout_free(l);
    return rc;
}

CLUSTER_TEST(test_quantised_tensors_through_load_weights)
{
    dray_error said = {0};
    side quantised, floats;
    dray_context *context = fixture_open(&f, "trainer", "trainer", 0);
    dray_context *other = fixture_open(&f, "engine", "engine", 0);
    publish(&quantised, context, "quantised", false);
    publish(&floats, context, "floats", true);
    uint8_t *held = memory_open(quantised.region);
    taker k = {.held = held};
    int rc = load(other, "quantised", false, &k, &said);
    if (rc)
        fprintf(stderr, "%s\n", said.message);
    assert_int_equal(rc, DRAY_OK);
    assert_int_equal(k.wrong, 0);
    assert_int_equal(k.bytes, WEIGHT_BYTES + 4 * DOWN * ACROSS);
    assert_true(k.calls > 1);
    for (int to_floats = 0; to_floats < 2; to_floats++) {
        k = (taker){0};
        rc = load(other, to_floats ? "quantised" : "floats", to_floats, &k, &said);
        assert_int_equal(rc, to_floats ? DRAY_EUNSUPPORTED : DRAY_EDTYPE);
        assert_non_null(strstr(said.message, "w.weight"));
        assert_int_equal(k.calls, 0);
    }
    memory_close(quantised.region, held, false);
    end(&quantised);
    end(&floats);
    dray_close(other);
    dray_close(context);
}

CLUSTER_SUITE
