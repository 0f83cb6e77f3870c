/* Tests the article's example. A tensor of 1024 x 1024, sharded over four trainers by FSDP, becomes
 * the shards of two tensor-parallel engine ranks, by rows and by columns, on as many GPUs as there
 * are (up to four). The engines' shards are compared with gather-and-slice: here, and by numpy in
 * test_article_python.py, which runs
 *
 *     gpu_test_article IN OUT0 OUT1
 *
 * The files are of bf16. Each OUT has the row shard, and then the column shard. */
#include "gpu/weights.h"
#include "seed.h"
#include "suite.h"

#include <stdint.h>

enum { N = 1024, TRAINERS = 4, ENGINES = 2, UPDATES = 3 };

static coordinator_fixture f;
static uint32_t gpus;

/* What all processes see: the matrix, and what engines found. */
typedef struct sheet {
    uint16_t whole[N * N];
    uint16_t found[ENGINES][2 * N * N / ENGINES]; /* rows, then columns */
} sheet;

static sheet *shared;

typedef struct rank {
    uint32_t number;
} rank;

/* Tensors "rows" and "columns" hold the same values. */
static dray_layout *layout_of(bool trains, uint32_t number)
{
    dray_layout *layout;
    const int64_t shape[2] = {N, N};
    int64_t part = trains ? N / TRAINERS : N / ENGINES;
    dray_region_info info = {
        .kind = DRAY_REGION_CUDA, .bytes = 2 * 2 * (uint64_t)(N * part), .name = "weights"};
    MUST(dray_layout_new(&layout, error));
    MUST(dray_layout_add_region(layout, &info, NULL, error));
    for (uint32_t t = 0; t < 2; t++) {
        bool columns = t == 1 && !trains;
        int64_t start[2] = {0, 0}, extent[2] = {N, N};
        start[columns] = part * number;
        extent[columns] = part;
        MUST(dray_layout_add_tensor(layout, t ? "columns" : "rows", DRAY_BF16, 2, shape, NULL,
                                    error));
        MUST(dray_layout_add_dense(layout, t, 0, start, extent, (uint64_t)(2 * N * part) * t,
                                   error));
    }
    return layout;
}

static void run_trainer(void *user)
{
    const rank *r = user;
    dray_layout *layout = layout_of(true, r->number);
    dray_region *region, *host;
    dray_publisher *publisher;
    see_one(r->number % gpus);
    dray_context *context = fixture_open_at(f.unix_address, "trainer", "trainer", r->number);
    MUST(dray_regions_for_layout(layout, 1, &region, error));
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    options.regions = &region;
    options.rank = r->number;
    options.world = TRAINERS;
    MUST(dray_publisher_open(context, MODEL, layout, &options, &publisher, error));
    host = mirror_of(region);
    for (uint64_t version = 1; version <= UPDATES; version++) {
        size_t shard = N * N / TRAINERS;
        for (size_t i = 0; i < 2 * shard; i++) /* another matrix each time, the given one last */
            ((uint16_t *)dray_region_base(host))[i] =
                (uint16_t)(shared->whole[r->number * shard + i % shard] + (UPDATES - version));
        copy_region(region, host, true);
        MUST(dray_publisher_publish(publisher, version, NULL, error));
        MUST(dray_barrier(context, "updated", TRAINERS + ENGINES, DRAY_WAIT_DEFAULT, error));
        MUST(dray_publisher_wait(publisher, version, DRAY_WAIT_DEFAULT, NULL, error));
    }
    MUST(dray_barrier(context, "over", TRAINERS + ENGINES, DRAY_WAIT_DEFAULT, error));
    dray_publisher_close(publisher);
    dray_region_free(host);
    dray_region_free(region);
    dray_layout_free(layout);
    dray_close(context);
}

static void run_engine(void *user)
{
    const rank *r = user;
    dray_layout *layout = layout_of(false, r->number);
    dray_region *region, *host;
    dray_subscriber *subscriber;
    see_one((TRAINERS - 1 - r->number) % gpus);
    dray_context *context = fixture_open_at(f.unix_address, "engine", "engine", r->number);
    MUST(dray_regions_for_layout(layout, 1, &region, error));
    gpu_poison(region);
    dray_subscriber_options options = DRAY_SUBSCRIBER_OPTIONS_INIT;
    options.regions = &region;
    options.group = "engine";
    options.rank = r->number;
    options.world = ENGINES;
    MUST(dray_subscriber_open(context, MODEL, layout, &options, &subscriber, error));
    host = mirror_of(region);
    for (uint64_t version = 1; version <= UPDATES; version++) {
        dray_update_options update = DRAY_UPDATE_OPTIONS_INIT;
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        update.min_version = version;
        MUST(dray_update_weights(subscriber, &update, &report, error));
        CHECK(report.verified_tensors == 2);
        copy_region(region, host, false);
        uint16_t first = *(uint16_t *)dray_region_base(host);
        CHECK(first ==
              (uint16_t)(shared->whole[r->number * (N * N / ENGINES)] + (UPDATES - version)));
        MUST(dray_barrier(context, "updated", TRAINERS + ENGINES, DRAY_WAIT_DEFAULT, error));
    }
    memcpy(shared->found[r->number], dray_region_base(host), sizeof shared->found[0]);
    MUST(dray_barrier(context, "over", TRAINERS + ENGINES, DRAY_WAIT_DEFAULT, error));
    dray_subscriber_close(subscriber);
    dray_region_free(host);
    dray_region_free(region);
    dray_layout_free(layout);
    dray_close(context);
}

static void run_all(void)
{
    static rank ranks[TRAINERS + ENGINES];
    pid_t pids[TRAINERS + ENGINES];
    fixture_fork(&f, dray__registry_add);
    for (uint32_t i = 0; i < TRAINERS + ENGINES; i++) {
        ranks[i].number = i < TRAINERS ? i : i - TRAINERS;
        pids[i] = spawn(i < TRAINERS ? run_trainer : run_engine, &ranks[i]);
    }
    all_end_well(pids, TRAINERS + ENGINES);
    fixture_stop(&f);
}

TEST(test_article)
{
    uint64_t seed = test_seed();
    for (uint32_t i = 0; i < N * N; i++)
        shared->whole[i] = (uint16_t)mix(seed + i);
    run_all();
    for (uint32_t e = 0; e < ENGINES; e++)
        for (uint32_t i = 0; i < N / ENGINES; i++)
            for (uint32_t k = 0; k < N; k++) {
                const uint16_t *columns = shared->found[e] + N * N / ENGINES;
                assert_int_equal(shared->found[e][i * N + k],
                                 shared->whole[(e * (N / ENGINES) + i) * N + k]);
                assert_int_equal(columns[k * (N / ENGINES) + i],
                                 shared->whole[k * N + e * (N / ENGINES) + i]);
            }
}

static int with_files(char **names)
{
    FILE *in = fopen(names[0], "rb");
    CHECK(in && fread(shared->whole, sizeof shared->whole, 1, in) == 1);
    fclose(in);
    run_all();
    for (uint32_t e = 0; e < ENGINES; e++) {
        FILE *out = fopen(names[1 + e], "wb");
        CHECK(out && fwrite(shared->found[e], sizeof shared->found[e], 1, out) == 1);
        fclose(out);
    }
    return 0;
}

int main(int argc, char **argv)
{
    gpu_begin(1);
    gpus = gpu_is_real() ? (uint32_t)gpu_real_count() : 4;
    if (!gpu_is_real())
        setenv("FAKE_CUDA_DEVICES", "4", 1);
    gpus = gpus > 4 ? 4 : gpus;
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    return argc == 2 + ENGINES ? with_files(argv + 1) : suite_run(NULL, NULL);
}
