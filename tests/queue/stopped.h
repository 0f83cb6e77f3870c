/* Processes that are stopped between putting and committing, and continue later. */
#pragma once

#include "queue/three_tasks.h"

#include <sys/mman.h>

static const char *const two_outputs[] = {"responses", "log_probs"};

static const dray_queue_task two_tasks[] = {
    {.name = "rollout",
     .needs = prompts,
     .needs_count = 1,
     .writes = two_outputs,
     .writes_count = 2},
    {.name = "reward", .needs = two_outputs, .needs_count = 2},
};

static inline dray_queue *open_two(dray_context *context, const char *name)
{
    dray_queue *queue;
    dray_queue_options options = DRAY_QUEUE_OPTIONS_INIT;
    options.tasks = two_tasks;
    options.task_count = 2;
    options.max_attempts = 1000000; /* a row may be superseded often */
    OK(dray_queue_open(context, name, &options, &queue, &error));
    return queue;
}

/* Puts outputs, stops itself, and commits when it is continued, until the queue ends. */
static inline void put_and_stop(void *argument)
{
    (void)argument;
    dray_context *context = fixture_context(&f, "stopped");
    dray_queue *queue = open_two(context, "stopped");
    dray_claim_options o = want("rollout", 2);
    dray_batch *batch;
    o.max_hold_ns = DRAY__MILLISECOND / 2;
    int rc;
    while ((rc = dray_queue_claim(queue, &o, &batch, &error)) != DRAY_EEND) {
        OK(rc);
        set_ints(batch, "responses", 1000);
        set_ints(batch, "log_probs", 1000);
        raise(SIGSTOP);
        rc = dray_batch_commit(batch, &error);
        if (rc != DRAY_ESTALE && rc != DRAY_EGONE)
            OK(rc);
        dray_batch_free(batch);
    }
    leave(queue, context);
}

/* Checks `rounds` times that all columns of a row are of one attempt, whichever process was
 * first. */
static inline void supersede(int rounds)
{
    dray_context *context = fixture_context(&f, "successor");
    dray_queue *queue = open_two(context, "stopped");
    dray_claim_options o = want("rollout", 2), check = want("reward", 2);
    uint32_t superseded = 0;
    pid_t pid = child(put_and_stop, NULL);
    for (int i = 0; i < rounds; i++) {
        char name[16];
        int status;
        snprintf(name, sizeof name, "%d", i);
        insert_ints(queue, name, 2, 1);
        OK(dray_queue_seal(queue, name, 2, &error));
        assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
        assert_true(WIFSTOPPED(status));
        dray_batch *batch;
        o.partition = check.partition = name;
        /* This claim succeeds when the other process has held the rows too long. */
        OK(dray_queue_claim(queue, &o, &batch, &error));
        set_ints(batch, "responses", 5000);
        if (i % 2)
            kill(pid, SIGCONT); /* between the two columns */
        set_ints(batch, "log_probs", 5000);
        int rc = dray_batch_commit(batch, &error);
        OK(rc);
        dray_batch_free(batch);
        if (i % 2 == 0)
            kill(pid, SIGCONT);
        int32_t a[2], b[2];
        OK(dray_queue_claim(queue, &check, &batch, &error));
        OK(dray_batch_gather(batch, "responses", a, sizeof a, NULL, &error));
        OK(dray_batch_gather(batch, "log_probs", b, sizeof b, NULL, &error));
        for (uint32_t k = 0; k < 2; k++) {
            assert_int_equal(a[k], b[k]);
            assert_int_equal(a[k], 5000 + (int32_t)dray_batch_row(batch, k)->slot);
            superseded++;
        }
        COMMIT(batch);
        OK(dray_queue_clear(queue, name, &error));
    }
    assert_int_equal(superseded, 2 * rounds);
    OK(dray_queue_end(queue, &error));
    join(pid);
    leave(queue, context);
}
