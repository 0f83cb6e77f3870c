/* Compares plans with an oracle that goes element by element, and with the rules that plan.h
 * states. */
#include "plan/world.h"

/* ---- the oracle ------------------------------------------------------------------------------ */

/* What lies at each byte of a region where an element begins: 1 + tensor * 65536 + element; 0:
 * nothing. */
typedef struct memory_map {
    uint32_t *at[REGIONS];
} memory_map;

static memory_map map_memory(const world *w, uint32_t member)
{
    memory_map m;
    const holdings *h = &w->held[member];
    for (uint32_t r = 0; r < REGIONS; r++)
        m.at[r] = calloc(h->bytes[r] + 1, sizeof *m.at[r]);
    for (uint32_t i = 0; i < h->count; i++) {
        const dray_block *b = &h->items[i].block;
        const world_tensor *x = &w->tensors[b->tensor];
        int64_t index[DRAY_MAX_DIMS] = {0};
        do
            m.at[b->region][address_of(b->offset, b->stride, x->ndim, index)] =
                1 + b->tensor * 65536 + (uint32_t)element_of(x, b->start, index);
        while (next_index(x->ndim, b->extent, index));
    }
    return m;
}

static void free_map(memory_map *m)
{
    for (uint32_t r = 0; r < REGIONS; r++)
        free(m->at[r]);
}

static dray_link expected_link(const dray_plan_member *a, const dray_plan_member *b)
{
    if (a->host != b->host)
        return DRAY_LINK_NETWORK;
    if (a->process == b->process)
        return DRAY_LINK_PROCESS;
    return a->device && a->device == b->device ? DRAY_LINK_DEVICE : DRAY_LINK_HOST;
}

/* The nearest link over which each element can come; DRAY_LINK_COUNT: nobody holds it. */
static void nearest_links(const world *w, uint8_t *nearest)
{
    memset(nearest, DRAY_LINK_COUNT, TENSORS * 65536);
    for (uint32_t s = 0; s < w->source_count; s++) {
        uint8_t link = (uint8_t)expected_link(&w->sources[s], &w->destination);
        for (uint32_t i = 0; i < w->held[s].count; i++) {
            const dray_block *b = &w->held[s].items[i].block;
            const world_tensor *x = &w->tensors[b->tensor];
            int64_t index[DRAY_MAX_DIMS] = {0};
            do {
                uint8_t *at = &nearest[b->tensor * 65536 + element_of(x, b->start, index)];
                *at = link < *at ? link : *at;
            } while (next_index(x->ndim, b->extent, index));
        }
    }
}

/* Which of the world's tensors a copy is of. */
static uint32_t tensor_of(const world *w, const dray_copy *c)
{
    const char *name = dray_layout_tensor(w->layouts[SOURCES], c->tensor)->name;
    for (uint32_t t = 0; t < w->tensor_count; t++)
        if (strcmp(name, w->tensors[t].name) == 0 || strcmp(name, w->tensors[t].other) == 0)
            return t;
    fail_msg("a copy of an unknown tensor %s", name);
    return 0;
}

static uint64_t check_copy(const world *w, const dray_copy *c, const memory_map *sources,
                           memory_map *destination, const uint8_t *nearest)
{
    uint32_t t = tensor_of(w, c);
    const world_tensor *x = &w->tensors[t];
    assert_true(c->source < w->source_count);
    assert_int_equal(c->ndim, x->ndim ? x->ndim : 1);
    assert_int_equal(c->source_dtype, x->from);
    assert_int_equal(c->destination_dtype, x->to);
    uint8_t link = (uint8_t)expected_link(&w->sources[c->source], &w->destination);
    int64_t index[DRAY_MAX_DIMS] = {0};
    uint64_t n = 0;
    do {
        uint32_t id = 1 + t * 65536 + (uint32_t)element_of(x, c->start, index);
        uint64_t from = address_of(c->source_offset, c->source_stride, c->ndim, index);
        uint64_t to = address_of(c->destination_offset, c->destination_stride, c->ndim, index);
        assert_true(from < w->held[c->source].bytes[c->source_region]);
        assert_true(to < w->held[SOURCES].bytes[c->destination_region]);
        if (sources[c->source].at[c->source_region][from] != id)
            fail_msg("source %u has %u where %u is read", c->source,
                     sources[c->source].at[c->source_region][from], id);
        if (destination->at[c->destination_region][to] != id)
            fail_msg("the destination has %u (0: filled already) where %u is written",
                     destination->at[c->destination_region][to], id);
        destination->at[c->destination_region][to] = 0; /* once */
        assert_int_equal(link, nearest[id - 1]);
        n++;
    } while (next_index(c->ndim, c->extent, index));
    return n;
}

static void check_order(const dray_copy *c, uint64_t count)
{
    for (uint64_t i = 1; i < count; i++) {
        const dray_copy *a = &c[i - 1], *b = &c[i];
        assert_true(a->source <= b->source);
        if (a->source != b->source)
            continue;
        assert_true(a->source_region <= b->source_region);
        if (a->source_region == b->source_region)
            assert_true(a->source_offset <= b->source_offset);
    }
}

static void check_plan(const world *w, const dray_plan *plan, const uint8_t *nearest)
{
    memory_map sources[SOURCES], destination = map_memory(w, SOURCES);
    for (uint32_t s = 0; s < w->source_count; s++)
        sources[s] = map_memory(w, s);
    const dray_copy *copies = dray_plan_copies(plan);
    uint64_t count = dray_plan_count(plan), total = 0, largest = 0;
    uint64_t links[DRAY_LINK_COUNT] = {0}, from[SOURCES] = {0};
    check_order(copies, count);
    for (uint64_t i = 0; i < count; i++) {
        const dray_copy *c = &copies[i];
        uint64_t n = check_copy(w, c, sources, &destination, nearest);
        uint64_t bytes = n * dray_dtype_size((dray_dtype)c->destination_dtype);
        total += bytes;
        largest = bytes > largest ? bytes : largest;
        links[expected_link(&w->sources[c->source], &w->destination)] += bytes;
        from[c->source] += n * dray_dtype_size((dray_dtype)c->source_dtype);
    }
    for (uint32_t r = 0; r < REGIONS; r++)
        for (uint64_t i = 0; i < w->held[SOURCES].bytes[r]; i++)
            if (destination.at[r][i])
                fail_msg("element %u at byte %llu stays unfilled", destination.at[r][i],
                         (unsigned long long)i);
    assert_int_equal(total, dray_layout_bytes(w->layouts[SOURCES]));
    assert_int_equal(total, dray_plan_total_bytes(plan));
    assert_int_equal(largest, dray_plan_largest_copy(plan));
    for (int l = 0; l < DRAY_LINK_COUNT; l++)
        assert_int_equal(links[l], dray_plan_bytes(plan, (dray_link)l));
    for (uint32_t s = 0; s < w->source_count; s++) {
        assert_int_equal(from[s], dray_plan_source_bytes(plan, s));
        assert_int_equal(dray_plan_source_link(plan, s),
                         expected_link(&w->sources[s], &w->destination));
        free_map(&sources[s]);
    }
    free_map(&destination);
}

static void same_plan(const dray_plan *a, const dray_plan *b)
{
    assert_int_equal(dray_plan_count(a), dray_plan_count(b));
    if (dray_plan_count(a))
        assert_memory_equal(dray_plan_copies(a), dray_plan_copies(b),
                            dray_plan_count(a) * sizeof(dray_copy));
}

/* Takes one piece of the sources away everywhere. Returns whether anybody misses it. */
static bool dig_hole(world *w, uint8_t *nearest)
{
    uint32_t t = (uint32_t)draw(w->tensor_count);
    const cell *c = &w->cells[t][draw(w->cell_count[t])];
    for (uint32_t s = 0; s < w->source_count; s++) {
        holdings *h = &w->held[s];
        for (uint32_t i = 0; i < h->count;) {
            const dray_block *b = &h->items[i].block;
            if (b->tensor == t && memcmp(b->start, c->start, sizeof c->start) == 0)
                h->items[i] = h->items[--h->count];
            else
                i++;
        }
    }
    nearest_links(w, nearest);
    for (uint32_t i = 0; i < w->held[SOURCES].count; i++) {
        const dray_block *b = &w->held[SOURCES].items[i].block;
        const world_tensor *x = &w->tensors[b->tensor];
        int64_t index[DRAY_MAX_DIMS] = {0};
        do
            if (nearest[b->tensor * 65536 + element_of(x, b->start, index)] == DRAY_LINK_COUNT)
                return true;
        while (next_index(x->ndim, b->extent, index));
    }
    return false;
}

/* Moves one block of the destination onto another one's memory. Returns whether they share a byte.
 */
static bool overlap_memory(world *w)
{
    holdings *h = &w->held[SOURCES];
    if (h->count < 2)
        return false;
    uint32_t i = (uint32_t)draw(h->count), j = (uint32_t)draw(h->count);
    dray_block *a = &h->items[i].block, *b = &h->items[j].block;
    if (i == j)
        return false;
    a->region = b->region;
    a->offset = b->offset + draw(64);
    uint64_t end = a->offset + 64;
    for (uint32_t d = 0; d < DRAY_MAX_DIMS; d++)
        end += (uint64_t)(a->extent[d] - 1) * (uint64_t)a->stride[d];
    if (end > h->bytes[a->region])
        h->bytes[a->region] = end;
    uint8_t *owner = calloc(h->bytes[a->region], 1);
    bool shared = false;
    for (uint32_t k = 0; k < h->count; k++) {
        const dray_block *x = &h->items[k].block;
        uint64_t size = dray_dtype_size((dray_dtype)w->tensors[x->tensor].to);
        int64_t index[DRAY_MAX_DIMS] = {0};
        if (x->region == a->region)
            do
                for (uint64_t byte = 0; byte < size; byte++) {
                    uint8_t *at = &owner[address_of(x->offset, x->stride, DRAY_MAX_DIMS, index)];
                    shared = shared || at[byte];
                    at[byte] = 1;
                }
            while (next_index(DRAY_MAX_DIMS, x->extent, index));
    }
    free(owner);
    return shared;
}

enum injected { NOTHING, HOLE, OVERLAP };

static void one_world(enum injected injected)
{
    static uint8_t nearest[TENSORS * 65536];
    static world w;
    uint64_t begin = drawn;
    world_place(&w);
    bool hole = injected == HOLE && dig_hole(&w, nearest);
    bool overlap = injected == OVERLAP && overlap_memory(&w);
    world_layouts(&w, NULL, NULL);
    nearest_links(&w, nearest);
    dray_plan_options options = DRAY_PLAN_OPTIONS_INIT;
    options.stripe_bytes = draw(2) ? 1 + draw(300) : 0;
    dray_plan *plan = NULL, *again = NULL;
    dray_plan_index *index;
    dray_error e = {0};
    int rc = dray_plan_new(w.sources, w.source_count, &w.destination, &options, &plan, &e);
    int expected = overlap ? DRAY_EOVERLAP : hole ? DRAY_EHOLE : DRAY_OK;
    if (rc != expected)
        fail_msg("drawn %llu: %s: '%s', expected %s", (unsigned long long)begin,
                 dray_error_name(rc), e.message, dray_error_name(expected));
    assert_int_equal(dray_plan_index_new(w.sources, w.source_count, &index, NULL), DRAY_OK);
    assert_int_equal(dray_plan_from_index(index, &w.destination, &options, &again, NULL), rc);
    dray_plan_index_free(index);
    if (rc) {
        assert_null(plan);
        assert_true(strstr(e.message, ".weight") && strstr(e.message, "member"));
    } else {
        same_plan(plan, again);
        if (!overlap)
            check_plan(&w, plan, nearest);
    }
    dray_plan_free(plan);
    dray_plan_free(again);
    world_free(&w);
}

TEST(every_element_once_from_who_holds_it)
{
    for (int i = 0; i < test_times(8000); i++)
        one_world(NOTHING);
}

TEST(holes_are_found)
{
    for (int i = 0; i < test_times(4000); i++)
        one_world(HOLE);
}

TEST(double_fills_are_found)
{
    for (int i = 0; i < test_times(8000); i++)
        one_world(OVERLAP);
}

/* ---- by hand --------------------------------------------------------------------------------- */

static dray_layout *layout_with(const char *name, dray_dtype dtype, uint32_t ndim,
                                const int64_t *shape, const int64_t *start, const int64_t *extent)
{
    dray_layout *l;
    uint32_t region, tensor;
    uint64_t bytes = dray_dtype_size(dtype);
    for (uint32_t d = 0; d < ndim; d++)
        bytes *= (uint64_t)extent[d];
    dray_region_info info = {.kind = DRAY_REGION_SHARED, .bytes = bytes, .name = "r"};
    assert_int_equal(dray_layout_new(&l, NULL), DRAY_OK);
    assert_int_equal(dray_layout_add_region(l, &info, &region, NULL), DRAY_OK);
    assert_int_equal(dray_layout_add_tensor(l, name, dtype, ndim, shape, &tensor, NULL), DRAY_OK);
    if (bytes)
        assert_int_equal(dray_layout_add_dense(l, tensor, region, start, extent, 0, NULL), DRAY_OK);
    return l;
}

typedef struct moved {
    uint64_t copies, bytes;
} moved;

/* The article's example: FSDP 4 -> TP 2, each rank holding a half along `dim`. */
static moved article(dray_dtype dtype, int dim)
{
    const int64_t shape[2] = {1024, 1024};
    dray_plan_member sources[4];
    dray_layout *layouts[4];
    moved m = {0, 0};
    for (int i = 0; i < 4; i++) {
        const int64_t start[2] = {256 * i, 0}, extent[2] = {256, 1024};
        layouts[i] = layout_with("w", dtype, 2, shape, start, extent);
        sources[i] = (dray_plan_member){
            .layout = layouts[i], .member = (uint64_t)i, .host = 1, .process = 10 + (uint64_t)i};
    }
    for (int r = 0; r < 2; r++) {
        int64_t start[2] = {0, 0}, extent[2] = {1024, 1024};
        start[dim] = 512 * r, extent[dim] = 512;
        dray_layout *l = layout_with("w", dtype, 2, shape, start, extent);
        dray_plan_member d = {.layout = l, .member = 9, .host = 1, .process = 20};
        dray_plan *plan;
        assert_int_equal(dray_plan_new(sources, 4, &d, NULL, &plan, NULL), DRAY_OK);
        const dray_copy *c = dray_plan_copies(plan);
        for (uint64_t i = 0; i < dray_plan_count(plan); i++) {
            assert_int_equal(c[i].extent[0], 256);
            assert_int_equal(c[i].extent[1], dim == 0 ? 1024 : 512);
        }
        m.copies += dray_plan_count(plan);
        m.bytes += dray_plan_total_bytes(plan);
        dray_plan_free(plan);
        dray_layout_free(l);
    }
    for (int i = 0; i < 4; i++)
        dray_layout_free(layouts[i]);
    return m;
}

TEST(the_articles_example)
{
    moved m = article(DRAY_F16, 0);
    assert_int_equal(m.copies, 4);
    assert_int_equal(m.bytes, 2 << 20);
    m = article(DRAY_F32, 0);
    assert_int_equal(m.copies, 4);
    assert_int_equal(m.bytes, 4 << 20);
    m = article(DRAY_F16, 1);
    assert_int_equal(m.copies, 8);
    assert_int_equal(m.bytes, 2 << 20);
    m = article(DRAY_F32, 1);
    assert_int_equal(m.copies, 8);
    assert_int_equal(m.bytes, 4 << 20);
}

static int plan_one(dray_layout *from, dray_layout *to, const dray_plan_options *options,
                    dray_plan **plan, dray_error *e)
{
    dray_plan_member a = {.layout = from, .member = 1, .name = "trainer-0", .host = 1};
    dray_plan_member b = {.layout = to, .member = 2, .name = "engine-0", .host = 2};
    int rc = dray_plan_new(&a, 1, &b, options, plan, e);
    dray_layout_free(from);
    dray_layout_free(to);
    return rc;
}

TEST(errors_say_what_and_who)
{
    const int64_t zero[2] = {0, 0}, a[2] = {8, 4}, b[2] = {4, 8}, half[2] = {4, 4};
    const int64_t half_columns[2] = {8, 2};
    dray_plan *plan = NULL;
    dray_error e;
    assert_int_equal(plan_one(layout_with("model.norm", DRAY_F32, 2, a, zero, a),
                              layout_with("model.norm", DRAY_F32, 2, b, zero, b), NULL, &plan, &e),
                     DRAY_ESHAPE);
    assert_string_equal(e.message, "tensor model.norm: engine-0 expects [4, 8], trainer-0 holds "
                                   "[8, 4]");
    assert_int_equal(
        plan_one(layout_with("model.norm", DRAY_F32, 2, a, zero, a),
                 layout_with("model.norm", DRAY_F32, 2, half_columns, zero, half_columns), NULL,
                 &plan, &e),
        DRAY_ESHAPE); /* of as many rows */
    assert_int_equal(plan_one(layout_with("model.norm", DRAY_BF16, 2, a, zero, a),
                              layout_with("model.norm", DRAY_I32, 2, a, zero, a), NULL, &plan, &e),
                     DRAY_EDTYPE);
    assert_int_equal(plan_one(layout_with("model.norm", DRAY_I32, 2, a, zero, a),
                              layout_with("model.norm", DRAY_BF16, 2, a, zero, a), NULL, &plan, &e),
                     DRAY_EDTYPE);
    assert_true(strstr(e.message, "model.norm") && strstr(e.message, "BF16") &&
                strstr(e.message, "I32") && strstr(e.message, "trainer-0"));
    assert_int_equal(plan_one(layout_with("model.norm", DRAY_F32, 2, a, zero, half),
                              layout_with("model.norm", DRAY_F32, 2, a, zero, a), NULL, &plan, &e),
                     DRAY_EHOLE);
    assert_string_equal(e.message, "tensor model.norm: elements [4:8, 0:4], which engine-0 needs, "
                                   "are held by none of 1 members (nearest: trainer-0 holds "
                                   "[0:4, 0:4])");
    assert_int_equal(plan_one(layout_with("model.norn", DRAY_F32, 2, a, zero, half),
                              layout_with("model.norm", DRAY_F32, 2, a, zero, a), NULL, &plan, &e),
                     DRAY_EHOLE);
    assert_non_null(strstr(e.message, "model.norn"));
    assert_null(plan);
}

TEST(casts_can_be_forbidden)
{
    const int64_t zero[2] = {0, 0}, a[2] = {8, 4};
    dray_plan_options options = DRAY_PLAN_OPTIONS_INIT;
    dray_plan *plan = NULL;
    dray_error e;
    options.allow_cast = DRAY_CAST_NONE;
    assert_int_equal(plan_one(layout_with("w", DRAY_F32, 2, a, zero, a),
                              layout_with("w", DRAY_BF16, 2, a, zero, a), &options, &plan, &e),
                     DRAY_EDTYPE);
    options.allow_cast = 64;
    assert_int_equal(plan_one(layout_with("w", DRAY_F32, 2, a, zero, a),
                              layout_with("w", DRAY_F32, 2, a, zero, a), &options, &plan, &e),
                     DRAY_EINVALID);
    options.allow_cast = 0;
    assert_int_equal(plan_one(layout_with("w", DRAY_F32, 2, a, zero, a),
                              layout_with("w", DRAY_BF16, 2, a, zero, a), &options, &plan, &e),
                     DRAY_OK);
    assert_int_equal(dray_plan_total_bytes(plan), 64);
    assert_int_equal(dray_plan_source_bytes(plan, 0), 128);
    dray_plan_free(plan);
}

TEST(equal_replicas_share_large_blocks)
{
    const int64_t zero[1] = {0}, shape[1] = {64 << 20};
    dray_layout *l = layout_with("w", DRAY_U8, 1, shape, zero, shape);
    dray_plan_member sources[5], d = {.layout = l, .member = 77, .host = 1, .process = 50};
    for (uint64_t i = 0; i < 5; i++) /* the fifth is far away */
        sources[i] =
            (dray_plan_member){.layout = l, .member = i, .host = i < 4 ? 1 : 2, .process = i};
    dray_plan *plan;
    assert_int_equal(dray_plan_new(sources, 5, &d, NULL, &plan, NULL), DRAY_OK);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(dray_plan_source_bytes(plan, i), 16 << 20);
    assert_int_equal(dray_plan_source_bytes(plan, 4), 0);
    assert_int_equal(dray_plan_count(plan), 4);
    dray_plan_free(plan);
    dray_layout_free(l);
}

TEST(small_tensors_are_spread)
{
    enum { N = 101 };
    dray_layout *l;
    uint32_t region, tensor;
    const int64_t zero[1] = {0}, shape[1] = {1000};
    dray_region_info info = {.kind = DRAY_REGION_SHARED, .bytes = N * 1000, .name = "r"};
    assert_int_equal(dray_layout_new(&l, NULL), DRAY_OK);
    assert_int_equal(dray_layout_add_region(l, &info, &region, NULL), DRAY_OK);
    for (int i = 0; i < N; i++) {
        char name[16];
        snprintf(name, sizeof name, "t%d", i);
        assert_int_equal(dray_layout_add_tensor(l, name, DRAY_U8, 1, shape, &tensor, NULL),
                         DRAY_OK);
        assert_int_equal(
            dray_layout_add_dense(l, tensor, region, zero, shape, (uint64_t)i * 1000, NULL),
            DRAY_OK);
    }
    dray_plan_member sources[4], d = {.layout = l, .host = 9};
    for (uint64_t i = 0; i < 4; i++)
        sources[i] = (dray_plan_member){.layout = l, .member = i, .host = i};
    uint32_t first[4] = {0};
    for (d.member = 0; d.member < 40; d.member++) {
        dray_plan *plan;
        assert_int_equal(dray_plan_new(sources, 4, &d, NULL, &plan, NULL), DRAY_OK);
        for (uint32_t i = 0; i < 4; i++) {
            uint64_t bytes = dray_plan_source_bytes(plan, i);
            assert_true(bytes == 25000 || bytes == 26000);
            first[i] += bytes == 26000;
        }
        dray_plan_free(plan);
    }
    for (uint32_t i = 0; i < 4; i++) /* not all destinations begin with the same source */
        assert_true(first[i] > 0);
    dray_layout_free(l);
}

TEST(neighbours_become_one_copy)
{
    /* One member holds a matrix in 16 blocks that lie in memory as one matrix: one copy. */
    const int64_t zero[2] = {0, 0}, shape[2] = {8, 8};
    dray_layout *l;
    uint32_t region, tensor;
    dray_region_info info = {.kind = DRAY_REGION_SHARED, .bytes = 256, .name = "r"};
    assert_int_equal(dray_layout_new(&l, NULL), DRAY_OK);
    assert_int_equal(dray_layout_add_region(l, &info, &region, NULL), DRAY_OK);
    assert_int_equal(dray_layout_add_tensor(l, "w", DRAY_F32, 2, shape, &tensor, NULL), DRAY_OK);
    for (int64_t i = 0; i < 16; i++) {
        dray_block b = {
            .tensor = tensor, .start = {i / 4 * 2, i % 4 * 2}, .extent = {2, 2}, .stride = {32, 4}};
        b.offset = (uint64_t)(b.start[0] * 32 + b.start[1] * 4);
        assert_int_equal(dray_layout_add_block(l, &b, NULL), DRAY_OK);
    }
    dray_plan *plan;
    dray_error e;
    assert_int_equal(
        plan_one(l, layout_with("w", DRAY_F32, 2, shape, zero, shape), NULL, &plan, &e), DRAY_OK);
    assert_int_equal(dray_plan_count(plan), 1);
    assert_int_equal(dray_plan_largest_copy(plan), 256);
    dray_plan_free(plan);
}

TEST(nothing_wanted_is_an_empty_plan)
{
    dray_layout *a, *b;
    assert_int_equal(dray_layout_new(&a, NULL), DRAY_OK);
    assert_int_equal(dray_layout_new(&b, NULL), DRAY_OK);
    dray_plan *plan;
    assert_int_equal(plan_one(a, b, NULL, &plan, NULL), DRAY_OK);
    assert_int_equal(dray_plan_count(plan), 0);
    dray_plan_free(plan);
}

/* Columns of one matrix, cut into random pieces, lie between each other in memory; one of them may
 * be moved onto others. Oracle: a map of bytes. */
TEST(columns_between_each_other)
{
    enum { ROWS = 24, COLUMNS = 600, SLACK = 2 * COLUMNS };
    const int64_t shape[] = {ROWS, COLUMNS}, zero[] = {0, 0};
    dray_region_info info = {.kind = DRAY_REGION_SHARED, .bytes = ROWS * COLUMNS + SLACK};
    int shares = 0;
    for (int round = 0; round < test_times(400); round++) {
        static dray_block blocks[ROWS * COLUMNS];
        static uint8_t owner[ROWS * COLUMNS + SLACK];
        uint32_t count = 0;
        for (int64_t c = 0, w; c < COLUMNS; c += w) {
            w = 1 + (int64_t)draw(4);
            w = c + w > COLUMNS ? COLUMNS - c : w;
            int64_t cut = draw(4) ? ROWS : 1 + (int64_t)draw(ROWS - 1);
            for (int64_t r = 0; r < ROWS; r += cut, cut = ROWS - cut)
                blocks[count++] = (dray_block){.start = {r, c},
                                               .extent = {cut, w},
                                               .offset = (uint64_t)(r * COLUMNS + c),
                                               .stride = {COLUMNS, 1}};
        }
        if (draw(2))
            blocks[draw(count)].offset += draw(2) ? draw(4) : draw(SLACK);
        bool shared = false;
        memset(owner, 0, sizeof owner);
        dray_layout *from = layout_with("m", DRAY_U8, 2, shape, zero, shape), *to;
        assert_int_equal(dray_layout_new(&to, NULL), DRAY_OK);
        assert_int_equal(dray_layout_add_region(to, &info, NULL, NULL), DRAY_OK);
        assert_int_equal(dray_layout_add_tensor(to, "m", DRAY_U8, 2, shape, NULL, NULL), DRAY_OK);
        for (uint32_t i = 0; i < count; i++) {
            const dray_block *b = &blocks[i];
            assert_int_equal(dray_layout_add_block(to, b, NULL), DRAY_OK);
            for (int64_t k = 0; k < b->extent[0] * b->extent[1]; k++) {
                uint8_t *at =
                    &owner[(int64_t)b->offset + k / b->extent[1] * COLUMNS + k % b->extent[1]];
                shared |= *at;
                *at = 1;
            }
        }
        dray_plan *plan = NULL;
        assert_int_equal(plan_one(from, to, NULL, &plan, NULL), shared ? DRAY_EOVERLAP : DRAY_OK);
        shares += shared;
        dray_plan_free(plan);
    }
    assert_true(shares > 0);
}

TEST(links_have_names)
{
    assert_string_equal(dray_link_name(DRAY_LINK_PROCESS), "process");
    assert_string_equal(dray_link_name(DRAY_LINK_FILE), "file");
    assert_string_equal(dray_link_name(DRAY_LINK_COUNT), "?");
}

int main(void)
{
    seed = test_seed();
    return suite_run(NULL, NULL);
}
