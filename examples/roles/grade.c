/* A role that grades, in C: the task `reward` of a job.
 *
 *     cc grade.c -o grade $(pkg-config --cflags --libs dray)
 *     dray run job.yaml --set 'roles=[..., {name: grader, tasks: [reward], command: ./grade}]'
 *
 * Where it is, and what it is to do, is in its environment (docs/roles.md). It claims rows until
 * the queue ends, which is the only stop that a role must understand. */
#include <dray/task.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 16, END = 258 /* the token behind a response; the others are its bytes */ };

static dray_error error;

/* The last line that begins with "error:" is what `dray run` says of a role that failed. */
static void must(const char *what, int status)
{
    if (!status)
        return;
    fprintf(stderr, "error: %s: %s: %s\n", what, dray_error_name(status), error.message);
    exit(1);
}

/* 1 when the response, up to its end token, is the answer. */
static float grade(const int32_t *response, uint64_t tokens, const unsigned char *answer,
                   uint64_t bytes)
{
    uint64_t length = 0;
    while (length < tokens && response[length] != END)
        length++;
    if (length != bytes)
        return 0;
    for (uint64_t i = 0; i < bytes; i++)
        if (response[i] != answer[i])
            return 0;
    return 1;
}

static void grade_batch(dray_batch *batch)
{
    dray_column answers, responses;
    float rewards[ROWS];
    must("answer", dray_batch_column(batch, "answer", &answers, &error));
    must("response", dray_batch_column(batch, "response", &responses, &error));
    for (uint32_t i = 0; i < dray_batch_rows(batch); i++)
        rewards[i] =
            grade(responses.cells[i], responses.lengths[i], answers.cells[i], answers.lengths[i]);
    const dray_column_data reward = {.name = "reward", .dtype = DRAY_F32, .values = rewards};
    must("set", dray_batch_set(batch, &reward, &error));
    must("commit", dray_batch_commit(batch, &error));
}

int main(void)
{
    /* Checked against the job's table of tasks and columns. */
    static const char *const reads[] = {"answer", "response", NULL}, *const writes[] = {"reward",
                                                                                        NULL};
    dray_task_options options = DRAY_TASK_OPTIONS_INIT;
    dray_task *task;
    options.micro_batch = ROWS;
    must("task", dray_task_open(reads, writes, &options, &task, &error));
    for (;;) {
        dray_batch *batch;
        int status = dray_task_next(task, &batch, &error);
        if (status == DRAY_EEND)
            break;
        if (status == DRAY_ETIMEDOUT) /* slow is not wrong: `dray run` knows who hangs */
            continue;
        must("claim", status);
        grade_batch(batch);
    }
    dray_task_close(task);
    return 0;
}
