/* What one steady operation of a client executes: soak_steady_files.py compiles this and the
 * library with
 * --coverage and counts the files. Everything before the operation is forgotten.
 *
 *     DRAY_ADDRESS=... steady queue     insert, claim, read, commit of four rows
 *     DRAY_ADDRESS=... steady update MODEL    an engine rank's update, co-located with its trainer
 */
#include <dray/queue.h>
#include <dray/weights.h>

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

void __gcov_reset(void);
void __gcov_dump(void);

enum { WARM_UP = 3, ROWS = 4 };

static dray_error error;

static void must(const char *what, int status)
{
    if (!status)
        return;
    fprintf(stderr, "%s: %s: %s\n", what, dray_error_name(status), error.message);
    _exit(1);
}

static dray_context *join(const char *role)
{
    dray_options options = DRAY_OPTIONS_INIT;
    dray_context *context;
    options.role = role;
    must("coordinator", dray_open(&options, &context, &error));
    return context;
}

static void round_of_rows(dray_queue *queue)
{
    int32_t values[ROWS] = {1, 2, 3, 4};
    dray_column_data prompts = {.name = "prompts", .dtype = DRAY_I32, .values = values};
    dray_column_data answers = {.name = "answers", .dtype = DRAY_I32, .values = values};
    dray_insert_options insert = DRAY_INSERT_OPTIONS_INIT;
    insert.partition = "0";
    insert.rows = ROWS;
    insert.columns = &prompts;
    insert.column_count = 1;
    must("insert", dray_queue_insert(queue, &insert, NULL, &error));
    dray_claim_options claim = DRAY_CLAIM_OPTIONS_INIT;
    claim.task = "answer";
    claim.count = ROWS;
    dray_batch *batch;
    must("claim", dray_queue_claim(queue, &claim, &batch, &error));
    dray_column column;
    must("read", dray_batch_column(batch, "prompts", &column, &error));
    must("set", dray_batch_set(batch, &answers, &error));
    must("commit", dray_batch_commit(batch, &error));
    dray_batch_free(batch);
}

static void queue_steadily(void)
{
    static const char *const needs[] = {"prompts"}, *const writes[] = {"answers"};
    const dray_queue_task task = {
        .name = "answer", .needs = needs, .needs_count = 1, .writes = writes, .writes_count = 1};
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = &task;
    options.task_count = 1;
    dray_queue *queue;
    must("queue", dray_queue_open(join("worker"), "steady", &options, &queue, &error));
    for (int i = 0; i < WARM_UP; i++)
        round_of_rows(queue);
    __gcov_reset();
    round_of_rows(queue);
    __gcov_dump();
}

static dray_layout *layout_of(const dray_model_config *config, int engine)
{
    dray_layout *layout;
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    must("layout", engine ? dray_layout_engine(config, &spec, &layout, &error)
                          : dray_layout_fsdp(config, DRAY_DTYPE_NONE, 0, 1, DRAY_REGION_SHARED,
                                             &layout, &error));
    return layout;
}

static void train(const dray_model_config *config)
{
    dray_layout *layout = layout_of(config, 0);
    dray_region *regions[1];
    must("memory", dray_regions_for_layout(layout, 1, regions, &error));
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    options.regions = regions;
    options.world = 1;
    dray_publisher *publisher;
    must("publisher",
         dray_publisher_open(join("trainer"), "policy", layout, &options, &publisher, &error));
    static const char *const group = "engine-0";
    for (uint64_t version = 1; version <= WARM_UP + 1; version++) {
        must("publish", dray_publisher_publish(publisher, version, NULL, &error));
        must("deliver",
             dray_publisher_deliver(publisher, version, &group, 1, DRAY_WAIT_DEFAULT, &error));
    }
    pause(); /* until the engine, which has the last version then, ends it */
}

static void update_steadily(const char *model)
{
    dray_model_config config;
    must("model", dray_model_config_load(model, &config, &error));
    pid_t trainer = fork();
    if (trainer == 0)
        train(&config);
    dray_layout *layout = layout_of(&config, 1);
    dray_region *regions[1];
    must("memory", dray_regions_for_layout(layout, 1, regions, &error));
    dray_subscriber_options options = DRAY_SUBSCRIBER_OPTIONS_INIT;
    options.regions = regions;
    options.group = "engine-0";
    options.world = 1;
    dray_subscriber *subscriber;
    must("subscriber",
         dray_subscriber_open(join("engine"), "policy", layout, &options, &subscriber, &error));
    for (uint64_t version = 1; version <= WARM_UP + 1; version++) {
        dray_update_options update = DRAY_UPDATE_OPTIONS_INIT;
        update.min_version = version;
        if (version == WARM_UP + 1)
            __gcov_reset();
        must("update", dray_update_weights(subscriber, &update, NULL, &error));
    }
    __gcov_dump();
    kill(trainer, SIGKILL);
    waitpid(trainer, NULL, 0);
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "queue") == 0)
        queue_steadily();
    else if (argc == 3 && strcmp(argv[1], "update") == 0)
        update_steadily(argv[2]);
    else
        return 2;
    _exit(0); /* what follows would be counted, too */
}
