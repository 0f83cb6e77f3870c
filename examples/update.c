/* A trainer's shards become an engine's: what a framework does with dray's weights, in one file.
 *
 *     dray serve --listen unix:/tmp/dray.socket &
 *     export DRAY_ADDRESS=unix:/tmp/dray.socket
 *     cc update.c -o update $(pkg-config --cflags --libs dray)
 *     ./update trainer 0 & ./update trainer 1 & ./update engine 0 & ./update engine 1
 *
 * Two trainer ranks hold the model as FSDP cuts it, two engine ranks as tensor parallelism with
 * fused parameters does. Three versions are published, read and verified. A third argument names
 * another model or a config.json. */
#include <dray/weights.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 2, VERSIONS = 3 };

static const char *const group = "engine-0";
static dray_error error;

static void must(const char *what, int status)
{
    if (status) {
        fprintf(stderr, "%s: %s: %s\n", what, dray_error_name(status), error.message);
        exit(1);
    }
}

static void train(dray_context *context, const dray_layout *layout, dray_region **regions,
                  uint32_t rank)
{
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    options.regions = regions;
    options.rank = rank;
    options.world = RANKS;
    dray_publisher *publisher;
    must("publisher", dray_publisher_open(context, "policy", layout, &options, &publisher, &error));
    for (uint64_t version = 1; version <= VERSIONS; version++) {
        memset(dray_region_base(regions[0]), (int)version, dray_region_bytes(regions[0]));
        must("publish", dray_publisher_publish(publisher, version, NULL, &error));
        /* However late the engine comes, nothing is withdrawn before it has the version. */
        must("deliver",
             dray_publisher_deliver(publisher, version, &group, 1, DRAY_WAIT_DEFAULT, &error));
        must("wait", dray_publisher_wait(publisher, version, DRAY_WAIT_DEFAULT, NULL, &error));
    }
    dray_publisher_close(publisher);
}

static void serve(dray_context *context, const dray_layout *layout, dray_region **regions,
                  uint32_t rank)
{
    dray_subscriber_options options = DRAY_SUBSCRIBER_OPTIONS_INIT;
    options.regions = regions;
    options.group = group;
    options.rank = rank;
    options.world = RANKS;
    dray_subscriber *subscriber;
    must("subscriber",
         dray_subscriber_open(context, "policy", layout, &options, &subscriber, &error));
    for (uint64_t version = 1; version <= VERSIONS; version++) {
        dray_update_options update = DRAY_UPDATE_OPTIONS_INIT;
        dray_update_report report = DRAY_UPDATE_REPORT_INIT;
        char line[2048];
        update.min_version = version;
        must("update", dray_update_weights(subscriber, &update, &report, &error));
        must("verify", dray_subscriber_verify(subscriber, &error));
        must("report", dray_update_report_json(&report, line, sizeof line, &error));
        printf("engine %u: %s\n", rank, line);
    }
    dray_subscriber_close(subscriber);
}

int main(int argc, char **argv)
{
    if (argc < 3 || (strcmp(argv[1], "trainer") != 0 && strcmp(argv[1], "engine") != 0)) {
        fprintf(stderr, "usage: %s trainer|engine RANK [MODEL]\n", argv[0]);
        return 2;
    }
    int engine = strcmp(argv[1], "engine") == 0;
    uint32_t rank = (uint32_t)strtoul(argv[2], NULL, 10);
    dray_model_config config;
    must("model", dray_model_config_load(argc > 3 ? argv[3] : "qwen2.5-0.5b", &config, &error));

    /* Which rectangle of which tensor lies where in this rank's memory, and that memory. */
    dray_layout *layout;
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    spec.tp = RANKS;
    spec.tp_rank = rank;
    must("layout", engine ? dray_layout_engine(&config, &spec, &layout, &error)
                          : dray_layout_fsdp(&config, DRAY_DTYPE_NONE, rank, RANKS,
                                             DRAY_REGION_SHARED, &layout, &error));
    dray_region *regions[1]; /* both builders make one */
    must("memory", dray_regions_for_layout(layout, 1, regions, &error));

    dray_options options = DRAY_OPTIONS_INIT;
    options.role = argv[1];
    options.rank = rank;
    dray_context *context;
    must("coordinator", dray_open(&options, &context, &error));
    (engine ? serve : train)(context, layout, regions, rank);
    dray_close(context);
    dray_region_free(regions[0]);
    dray_layout_free(layout);
    return 0;
}
