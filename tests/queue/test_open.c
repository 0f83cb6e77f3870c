/* Tests opening a queue while its coordinator is killed and started again at every moment of it.
 * The client waits for the next coordinator, within its deadline. */
#include "queue/fixture.h"

#include "base/hook.h"
#include "seed.h"

#include <stdatomic.h>
#include <sys/mman.h>

static queue_fixture f;
static uint64_t seed, starts;
static atomic_int *killed, *ready; /* shared with the openers, who are ready when they have begun */

enum { OPENERS = 4, ROWS = 6, KILLS = 20 };

static const char *const prompts[] = {"prompts"};
static const dray_queue_task tasks[] = {{.name = "rollout", .needs = prompts, .needs_count = 1}};

static uint64_t draw(uint64_t *random, uint64_t below)
{
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    return (*random >> 33) % below;
}

/* One in eight steps of what the coordinator does with a request is its last. */
static void die_sometimes(void *user, const char *step)
{
    uint64_t *random = user;
    if ((strcmp(step, "handling") == 0 || strcmp(step, "handled") == 0 ||
         strcmp(step, "answering") == 0) &&
        draw(random, 8) == 0)
        raise(SIGKILL);
}

static void hook(bool keeper)
{
    static uint64_t random;
    random = seed + starts;
    if (!keeper)
        dray__hook_set(die_sometimes, &random);
}

static dray_queue *open_queue(dray_context *context, int32_t durability)
{
    dray_queue *queue;
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    o.tasks = tasks;
    o.task_count = 1;
    o.durability = durability;
    OK(dray_queue_open(context, durability == DRAY_DURABILITY_JOURNAL ? "kept" : "plain", &o,
                       &queue, &error));
    return queue;
}

static void insert(dray_queue *queue)
{
    static const int32_t values[ROWS] = {1, 2, 3, 4, 5, 6};
    dray_column_data column = {.name = "prompts", .dtype = DRAY_I32, .values = values};
    dray_insert_options o = DRAY_INSERT_OPTIONS_INIT;
    o.partition = "p";
    o.rows = ROWS;
    o.columns = &column;
    o.column_count = 1;
    OK(dray_queue_insert(queue, &o, NULL, &error));
}

/* One context for all openings: its session goes on with whatever coordinator there is. */
static void open_often(void *user)
{
    int number = *(int *)user, enough = test_times(KILLS);
    dray_context *context = fixture_context(&f, "opener");
    atomic_fetch_add(ready, 1);
    for (int i = number; atomic_load(killed) < enough; i++)
        dray_queue_close(
            open_queue(context, i % 2 ? DRAY_DURABILITY_JOURNAL : DRAY_DURABILITY_NONE));
    dray_close(context);
}

/* Kills it now and then itself, and starts another where it died, until the openers are done. */
static void keep_up(pid_t *openers)
{
    uint64_t random = seed;
    int left = OPENERS;
    while (left) {
        usleep((useconds_t)(200 + draw(&random, 4000)));
        if (draw(&random, 4) == 0)
            kill(f.coordinator_pid, SIGKILL);
        for (int i = 0; i < OPENERS; i++) {
            int status = 0;
            if (!openers[i] || waitpid(openers[i], &status, WNOHANG) != openers[i])
                continue;
            assert_int_equal(status, 0);
            openers[i] = 0;
            left--;
        }
        if (waitpid(f.coordinator_pid, NULL, WNOHANG) != f.coordinator_pid)
            continue;
        atomic_fetch_add(killed, 1);
        starts++;
        f.coordinator_pid = fixture_spawn(&f, false);
    }
}

static void open_through_deaths(bool keeps_sessions)
{
    dray_batch *batch;
    f = (queue_fixture){.durable = true, .keeps_sessions = keeps_sessions};
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "main");
    dray_queue *queue = open_queue(context, DRAY_DURABILITY_JOURNAL);
    insert(queue);
    leave(queue, context);
    f.prepare = hook;
    atomic_store(killed, 0);
    atomic_store(ready, 0);
    pid_t openers[OPENERS];
    int numbers[OPENERS];
    for (int i = 0; i < OPENERS; i++) {
        numbers[i] = i;
        openers[i] = child(open_often, &numbers[i]);
    }
    for (int i = 0; i < 10000 && atomic_load(ready) < OPENERS; i++)
        usleep(1000);
    keep_up(openers);
    f.prepare = NULL;
    fixture_restart(&f);
    context = fixture_context(&f, "main");
    queue = open_queue(context, DRAY_DURABILITY_JOURNAL);
    dray_claim_options o = DRAY_CLAIM_OPTIONS_INIT;
    o.task = "rollout";
    o.count = ROWS;
    OK(dray_queue_claim(queue, &o, &batch,
                        &error)); /* what was there from the beginning still is */
    dray_batch_free(batch);
    leave(queue, context);
    fixture_down(&f);
}

TEST(test_new_sessions)
{
    open_through_deaths(false);
}

TEST(test_same_sessions)
{
    open_through_deaths(true);
}

/* The coordinator that came after it, and keeps no sessions, gave the member's number to another.
 */
TEST(test_number_of_another)
{
    f = (queue_fixture){.durable = true};
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "main");
    fixture_restart(&f);
    dray_context *other = fixture_context(&f, "other");
    assert_int_equal(dray_context_member(other), dray_context_member(context));
    leave(open_queue(context, DRAY_DURABILITY_NONE), other);
    dray_close(context);
    fixture_down(&f);
}

/* Nobody comes after it: an error within the deadline, and at once where it said so. */
TEST(test_nobody_comes)
{
    dray_queue *queue;
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    o.tasks = tasks;
    o.task_count = 1;
    o.timeout_ns = DRAY__SECOND / 2;
    f = (queue_fixture){.durable = true, .keeps_sessions = true};
    fixture_up(&f);
    dray_context *context = fixture_context(&f, "main");
    fixture_end(f.coordinator_pid, SIGKILL);
    int64_t begin = dray__now();
    int rc = dray_queue_open(context, "q", &o, &queue, &error);
    assert_true(rc == DRAY_ECLOSED || rc == DRAY_ETIMEDOUT);
    assert_true(dray__now() - begin < 10 * DRAY__SECOND);
    f.coordinator_pid = fixture_spawn(&f, false);
    OK(dray_queue_open(context, "q", &o, &queue, &error));
    dray_queue_close(queue);
    fixture_end(f.coordinator_pid, SIGTERM);
    o.timeout_ns = 60 * DRAY__SECOND;
    begin = dray__now();
    FAILS(DRAY_ECLOSED, dray_queue_open(context, "q", &o, &queue, &error));
    assert_true(dray__now() - begin < 30 * DRAY__SECOND);
    f.coordinator_pid = fixture_spawn(&f, false);
    dray_close(context);
    fixture_down(&f);
}

int main(void)
{
    seed = test_seed();
    if (elsewhere())
        return 77;
    killed =
        mmap(NULL, 2 * sizeof *killed, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (killed == MAP_FAILED)
        die("mmap", NULL);
    ready = killed + 1;
    return suite_run(NULL, NULL);
}
