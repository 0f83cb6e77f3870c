/* Tests layouts, plan, regions, movers and checksums together: random placements with real bytes,
 * for every pair of region kinds. Each element holds a number made from its tensor and position. */
#include "plan/world.h"

#include "gpu/memory.h"
#include "mover/kernels/checksum.h"
#include "mover/mover.h"
#include "pairs.h"

#include <fcntl.h>
#include <limits.h>
#include <unistd.h>

static char folder[PATH_MAX / 2];
static dray_region_kind kinds[2]; /* of the sources, of the destination */

FIXTURE(set_up)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/dray-end-to-end-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    return mkdtemp(folder) ? 0 : -1;
}

FIXTURE(tear_down)
{
    return rmdir(folder);
}

static dray_region_kind kind_of(uint32_t member)
{
    return kinds[member == SOURCES];
}

/* Exact in every dtype, so that conversions keep it. */
static int number_of(uint32_t tensor, uint64_t element)
{
    return (int)((element * 37 + tensor * 11) % 120);
}

static void encode(int32_t dtype, int number, uint8_t *out)
{
    double d = number;
    float f = (float)number;
    uint64_t whole = (uint64_t)number;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint16_t bf16 = (uint16_t)(bits >> 16);
    uint16_t f16 = (uint16_t)(number ? ((bits >> 13) - ((127 - 15) << 10)) & 0x7FFF : 0);
    if (dtype == DRAY_F64)
        memcpy(out, &d, 8);
    else if (dtype == DRAY_F32)
        memcpy(out, &f, 4);
    else if (dtype == DRAY_BF16)
        memcpy(out, &bf16, 2);
    else if (dtype == DRAY_F16)
        memcpy(out, &f16, 2);
    else
        memcpy(out, &whole, dray_dtype_size((dray_dtype)dtype)); /* little-endian */
}

/* What a member's memory holds once every element is there; the rest is `background`. */
static uint8_t *image_of(const world *w, uint32_t member, uint32_t region, uint8_t background)
{
    const holdings *h = &w->held[member];
    uint8_t *image = malloc(h->bytes[region] + 1);
    memset(image, background, h->bytes[region] + 1);
    for (uint32_t i = 0; i < h->count; i++) {
        const dray_block *b = &h->items[i].block;
        const world_tensor *x = &w->tensors[b->tensor];
        int64_t index[DRAY_MAX_DIMS] = {0};
        if (b->region == region)
            do
                encode(member == SOURCES ? x->to : x->from,
                       number_of(b->tensor, element_of(x, b->start, index)),
                       image + address_of(b->offset, b->stride, x->ndim, index));
            while (next_index(x->ndim, b->extent, index));
    }
    return image;
}

typedef struct stage {
    char path[(SOURCES + 1) * REGIONS][PATH_MAX];
    const char *paths[(SOURCES + 1) * REGIONS];
    dray_region *live[SOURCES + 1][REGIONS];
} stage;

static void write_file(const char *path, const uint8_t *data, uint64_t bytes)
{
    int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, data, bytes), (ssize_t)bytes);
    close(fd);
}

/* Regions of a member, made from its layout, with its bytes (sources) or the background. */
static void bring_up(const world *w, uint32_t member, stage *s)
{
    bool filled = member != SOURCES;
    uint8_t *images[REGIONS];
    for (uint32_t r = 0; r < REGIONS; r++) {
        uint64_t bytes = w->held[member].bytes[r];
        images[r] = image_of(w, member, r, 0xC3);
        if (!filled)
            memset(images[r], 0xC3, bytes);
        if (kind_of(member) == DRAY_REGION_FILE)
            write_file(s->paths[member * REGIONS + r], images[r], bytes);
    }
    dray_error e;
    if (dray_regions_for_layout(w->layouts[member], !filled, s->live[member], &e))
        fail_msg("regions: %s", e.message);
    for (uint32_t r = 0; r < REGIONS; r++) {
        if (dray_region_get_kind(s->live[member][r]) != DRAY_REGION_FILE)
            memory_put(s->live[member][r], 0, images[r], w->held[member].bytes[r]);
        free(images[r]);
    }
}

static void bring_down(const world *w, uint32_t member, stage *s)
{
    for (uint32_t r = 0; r < REGIONS; r++) {
        dray_region_free(s->live[member][r]);
        if (kind_of(member) == DRAY_REGION_FILE)
            unlink(s->paths[member * REGIONS + r]);
    }
    (void)w;
}

/* Runs of copies between one pair of regions go to one move. */
static void carry_out(const world *w, const dray_plan *plan, stage *s, uint64_t *sums)
{
    const dray_copy *c = dray_plan_copies(plan);
    uint64_t count = dray_plan_count(plan);
    for (uint64_t i = 0, n; i < count; i += n) {
        for (n = 1; i + n < count && c[i + n].source == c[i].source &&
                    c[i + n].source_region == c[i].source_region &&
                    c[i + n].destination_region == c[i].destination_region;)
            n++;
        dray__move_options options = {.sums = sums + i, .layout = w->layouts[SOURCES]};
        dray_error e;
        if (dray__move_all(s->live[c[i].source][c[i].source_region],
                           s->live[SOURCES][c[i].destination_region], &c[i], n, &options, &e))
            fail_msg("move: %s", e.message);
    }
}

static uint64_t sum_of_block(const world *w, const dray_block *b, uint8_t *const *images)
{
    const world_tensor *x = &w->tensors[b->tensor];
    dray__sum_of of = {
        x->to, x->ndim, x->shape, b->start, b->extent, b->stride, images[b->region] + b->offset};
    return dray__sum(&of);
}

static void check_destination(const world *w, stage *s, const uint64_t *sums, uint64_t count)
{
    uint8_t *wanted[REGIONS];
    for (uint32_t r = 0; r < REGIONS; r++) {
        uint64_t bytes = w->held[SOURCES].bytes[r];
        uint8_t *found = malloc(bytes + 1);
        wanted[r] = image_of(w, SOURCES, r, 0xC3);
        memory_get(s->live[SOURCES][r], 0, found, bytes);
        for (uint64_t i = 0; i < bytes; i++)
            if (found[i] != wanted[r][i])
                fail_msg("region %u, byte %llu is %02x, expected %02x", r, (unsigned long long)i,
                         found[i], wanted[r][i]);
        free(found);
    }
    /* However the plan cut them, the copies' checksums add up to those of the blocks. */
    uint64_t moved = 0, held = 0;
    for (uint64_t i = 0; i < count; i++)
        moved += sums[i];
    for (uint32_t i = 0; i < w->held[SOURCES].count; i++)
        held += sum_of_block(w, &w->held[SOURCES].items[i].block, wanted);
    assert_int_equal(moved, held);
    for (uint32_t r = 0; r < REGIONS; r++)
        free(wanted[r]);
}

static void one_update(void)
{
    static world w;
    static stage s;
    for (uint32_t i = 0; i < (SOURCES + 1) * REGIONS; i++) {
        snprintf(s.path[i], sizeof s.path[i], "%s/%u", folder, i);
        s.paths[i] = s.path[i];
    }
    world_place(&w);
    world_layouts(&w, kind_of, s.paths);
    for (uint32_t i = 0; i < w.source_count; i++)
        bring_up(&w, i, &s);
    bring_up(&w, SOURCES, &s);
    dray_plan_options options = DRAY_PLAN_OPTIONS_INIT;
    options.stripe_bytes = draw(2) ? 1 + draw(300) : 0;
    dray_plan *plan;
    dray_error e;
    if (dray_plan_new(w.sources, w.source_count, &w.destination, &options, &plan, &e))
        fail_msg("plan: %s", e.message);
    uint64_t *sums = calloc(dray_plan_count(plan) + 1, sizeof *sums);
    carry_out(&w, plan, &s, sums);
    check_destination(&w, &s, sums, dray_plan_count(plan));
    if (kinds[0] == DRAY_REGION_FILE || kinds[1] == DRAY_REGION_FILE)
        assert_int_equal(dray_plan_bytes(plan, DRAY_LINK_FILE), dray_plan_total_bytes(plan));
    free(sums);
    dray_plan_free(plan);
    for (uint32_t i = 0; i < w.source_count; i++)
        bring_down(&w, i, &s);
    bring_down(&w, SOURCES, &s);
    world_free(&w);
}

static void updates_between(dray_region_kind from, dray_region_kind to)
{
    /* Each copy to and from a GPU is a call of its driver. */
    int updates = from == DRAY_REGION_CUDA || to == DRAY_REGION_CUDA ? 6 : 60;
    kinds[0] = from;
    kinds[1] = to;
    for (int i = 0; i < test_times(updates); i++)
        one_update();
}

#define XX(from, to)                                                                               \
    TEST(from##_to_##to)                                                                           \
    {                                                                                              \
        updates_between(DRAY_REGION_##from, DRAY_REGION_##to);                                     \
    }
PAIRS(XX)
#undef XX

int main(void)
{
    seed = test_seed();
    gpu_begin(1);
    return suite_run(set_up, tear_down);
}
