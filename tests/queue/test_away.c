/* Tests reads while the coordinator's own keeper is away, alone or together with the
 * coordinator. */
#include "queue/three_tasks.h"

static dray_queue *open_with(dray_context *context, int32_t durability)
{
    dray_queue_options o = DRAY_QUEUE_OPTIONS_INIT;
    o.durability = durability;
    return open_three(context, "away", o);
}

typedef struct outage {
    int32_t durability;
    bool coordinator, back; /* it goes, too; both come back */
    int code;               /* what who reads meanwhile gets */
    int ready[2], go[2];
} outage;

static void read_in_outage(void *argument)
{
    const outage *o = argument;
    dray_column column;
    dray_batch *batch;
    char byte;
    dray_context *context = fixture_context(&f, "reader");
    dray_queue *queue = open_with(context, o->durability);
    dray_claim_options claim = want("rollout", 4);
    OK(dray_queue_claim(queue, &claim, &batch, &error));
    if (write(o->ready[1], "x", 1) != 1 || read(o->go[0], &byte, 1) != 1)
        abort();
    int64_t begun = dray__now();
    FAILS(o->code, dray_batch_column(batch, "prompts", &column, &error));
    if (dray__now() - begun > 15 * DRAY__SECOND) /* nobody is waited for who cannot come back */
        abort();
    dray_batch_free(batch);
    if (o->coordinator && o->back) { /* they are in the journal */
        OK(dray_queue_claim(queue, &claim, &batch, &error));
        OK(dray_batch_column(batch, "prompts", &column, &error));
        assert_int_equal(*(const int32_t *)column.cells[3], 30);
        dray_batch_free(batch);
    }
    leave(queue, context);
}

/* Longer than a keeper takes to answer: whoever reads waits, where it may come back, and hears what
 * became of the bytes. */
TEST(test_keeper_is_away)
{
    outage outages[] = {{DRAY_DURABILITY_NONE, false, true, DRAY_EGONE, {0}, {0}},
                        {DRAY_DURABILITY_JOURNAL, true, true, DRAY_EGONE, {0}, {0}},
                        {DRAY_DURABILITY_NONE, true, false, DRAY_ECLOSED, {0}, {0}}};
    for (size_t i = 0; i < sizeof outages / sizeof *outages; i++) {
        outage *o = &outages[i];
        char byte;
        f = (queue_fixture){.durable = true};
        fixture_up(&f);
        assert_true(pipe(o->ready) == 0 && pipe(o->go) == 0);
        dray_context *context = fixture_context(&f, "producer");
        dray_queue *queue = open_with(context, o->durability);
        insert_ints(queue, "0", 4, 1);
        pid_t reader = child(read_in_outage, o);
        close(o->ready[1]); /* a reader that dies is heard of */
        assert_int_equal(read(o->ready[0], &byte, 1), 1);
        if (o->coordinator)
            fixture_end(f.coordinator_pid, SIGKILL);
        fixture_end(f.keeper_pid, SIGKILL);
        unlink(f.keeper);
        assert_int_equal(write(o->go[1], "x", 1), 1);
        usleep(650000);
        if (!o->back)
            join(reader); /* servers for the end of the test */
        f.keeper_pid = fixture_spawn(&f, true);
        if (o->coordinator)
            f.coordinator_pid = fixture_spawn(&f, false);
        if (o->back)
            join(reader);
        leave(queue, context);
        fixture_down(&f);
        close(o->ready[0]);
        close(o->go[0]);
        close(o->go[1]);
    }
}

SUITE(NULL, NULL)
