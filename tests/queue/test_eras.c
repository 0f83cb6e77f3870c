/* Tests a controller that is killed after a producer announced a chunk and before the keeper
 * received it. The next controller does not know the chunk, so that nothing would ever drop it. */
#include "queue/three_tasks.h"

#include "base/hook.h"

#include <poll.h>

enum { ROWS = 4 };

static int told[2], go[2]; /* pipes: the producer has told; it may go on */

static dray_queue *open_durable(dray_context *context)
{
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    o.durability = DRAY_DURABILITY_JOURNAL;
    return open_three(context, "eras", o);
}

/* Once. */
static void at_step(void *user, const char *step)
{
    static bool done;
    char byte = 0;
    bool *dies = user;
    if (strcmp(step, "told") == 0 && !done) {
        done = true;
        if (write(told[1], &byte, 1) != 1 || read(go[0], &byte, 1) != 1)
            abort();
    } else if (strcmp(step, "kept") == 0 && *dies) {
        kill(getpid(), SIGKILL);
    }
}

static void produce(void *argument)
{
    dray_context *context = fixture_context(&f, "producer");
    dray_queue *queue = open_durable(context);
    dray__hook_set(at_step, argument);
    insert_ints(queue, "0", ROWS, 1);
    leave(queue, context);
}

static void pass_a_controller(bool dies)
{
    char byte = 0;
    f = (queue_fixture){.durable = true};
    fixture_up(&f);
    if (pipe(told) < 0 || pipe(go) < 0)
        die("pipe", NULL);
    pid_t pid = child(produce, &dies);
    struct pollfd p = {.fd = told[0], .events = POLLIN};
    if (poll(&p, 1, 20000) != 1 || read(told[0], &byte, 1) != 1)
        die("the producer has told nobody", NULL);
    fixture_end(f.coordinator_pid, SIGKILL);
    f.coordinator_pid = fixture_spawn(&f, false);
    if (write(go[1], &byte, 1) != 1)
        die("pipe", NULL);
    if (dies) {
        int status;
        waitpid(pid, &status, 0);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    } else {
        join(pid);
    }
    for (int i = 0; i < 2; i++) {
        close(told[i]);
        close(go[i]);
    }
}

TEST(test_producer_dies)
{
    pass_a_controller(true);
    wait_for_chunks(&f, 0);
    fixture_down(&f);
}

/* It goes on with the controller that is there, and its rows are in the queue once. */
TEST(test_producer_lives)
{
    pass_a_controller(false);
    wait_for_chunks(&f, 1);
    dray_context *context = fixture_context(&f, "consumer");
    dray_queue *queue = open_durable(context);
    dray_claim_options o = want("rollout", ROWS + 1);
    dray_batch *batch;
    dray_column column;
    o.up_to = 1;
    OK(dray_queue_claim(queue, &o, &batch, &error));
    assert_int_equal(dray_batch_rows(batch), ROWS);
    OK(dray_batch_column(batch, "prompts", &column, &error));
    for (uint32_t i = 0; i < ROWS; i++)
        assert_int_equal(*(const int32_t *)column.cells[i], i * 10);
    dray_batch_free(batch);
    OK(dray_queue_clear(queue, "0", &error));
    wait_for_chunks(&f, 0);
    leave(queue, context);
    fixture_down(&f);
}

int main(void)
{
    if (elsewhere()) /* this is of chunks */
        return 77;
    return suite_run(NULL, NULL);
}
