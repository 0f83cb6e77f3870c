/* A task of a running job, in four calls. Its settings come from the environment. */
#include <dray/task.h>

#include "base/error.h"
#include "base/options.h"
#include "queue/client/client.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct dray_task {
    dray_context *context;
    dray_queue *queue;
    dray_batch *batch;
    char *name;
    dray_claim_options claim;
};

static const char *from(const char *given, const char *variable, const char *fallback)
{
    const char *value = given ? given : getenv(variable);
    return value && *value ? value : fallback;
}

static int read_number(const char *variable, uint32_t *out, dray_error *error)
{
    const char *text = from(NULL, variable, "0");
    char *end;
    errno = 0;
    unsigned long value = strtoul(text, &end, 10);
    if (errno || *end || value > UINT32_MAX || *text == '-')
        return dray__fail(error, DRAY_EINVALID, "$%s: a number expected, found '%s'", variable,
                          text);
    *out = (uint32_t)value;
    return DRAY_OK;
}

/* Checks that every listed column is in the table, and with `complete` that every column of the
 * table is listed. */
static int check_columns(const char *const *listed, const char *const *table, uint32_t count,
                         const char *task, const char *what, bool complete, dray_error *error)
{
    for (const char *const *name = listed; *name; name++) {
        uint32_t i = 0;
        while (i < count && strcmp(table[i], *name) != 0)
            i++;
        if (i == count)
            return dray__fail(error, DRAY_EINVALID,
                              "task %s %s %s, which the job's table does not "
                              "say",
                              task, what, *name);
    }
    for (uint32_t i = 0; complete && i < count; i++) {
        const char *const *name = listed;
        while (*name && strcmp(*name, table[i]) != 0)
            name++;
        if (!*name)
            return dray__fail(error, DRAY_EINVALID,
                              "the job's table says that task %s %s %s, but "
                              "the task does not",
                              task, what, table[i]);
    }
    return DRAY_OK;
}

static int open_task(dray_task *task, const char *const *reads, const char *const *writes,
                     const dray_task_options *o, dray_error *error)
{
    const char *name = from(o->name, "DRAY_TASK", NULL);
    if (!name)
        return dray__fail(error, DRAY_EINVALID, "no name of the task: $DRAY_TASK is not set");
    task->name = strdup(name);
    if (!task->name)
        return dray__nomem(error);
    dray_options options = DRAY_OPTIONS_INIT;
    options.name = from(NULL, "DRAY_ROLE", name);
    options.role = "task";
    options.timeout_ns = o->timeout_ns > 0 ? o->timeout_ns : 0;
    int rc = read_number("DRAY_RANK", &options.rank, error);
    if (!rc)
        rc = dray_open(&options, &task->context, error);
    dray_queue_options queue = DRAY_QUEUE_OPTIONS_INIT;
    if (!rc)
        rc = dray_queue_open(task->context, from(o->queue, "DRAY_QUEUE", "samples"), &queue,
                             &task->queue, error);
    uint32_t index;
    if (!rc)
        rc = dray__queue_task(task->queue, name, &index, error);
    if (rc)
        return rc;
    const dray__task_names *info = &task->queue->tasks[index];
    if (reads)
        rc = check_columns(reads, info->needs, info->needs_count, name, "reads", false, error);
    if (!rc && writes)
        rc = check_columns(writes, info->writes, info->writes_count, name, "writes", true, error);
    return rc;
}

int dray_task_open(const char *const *reads, const char *const *writes,
                   const dray_task_options *options, dray_task **out, dray_error *error)
{
    dray_task_options o = DRAY_TASK_OPTIONS_INIT;
    int rc = DRAY__OPTIONS_READ(dray_task_options, timeout_ns, &o, options, error);
    if (rc)
        return rc;
    dray_task *task = calloc(1, sizeof *task);
    if (!task)
        return dray__nomem(error);
    rc = open_task(task, reads, writes, &o, error);
    if (rc) {
        dray_task_close(task);
        return rc;
    }
    task->claim = (dray_claim_options)DRAY_CLAIM_OPTIONS_INIT;
    task->claim.task = task->name;
    task->claim.count = o.micro_batch ? o.micro_batch : 32;
    task->claim.up_to = !o.exact;
    task->claim.policy = o.policy;
    task->claim.timeout_ns = o.timeout_ns;
    *out = task;
    return DRAY_OK;
}

int dray_task_next(dray_task *task, dray_batch **out, dray_error *error)
{
    dray_batch_free(task->batch);
    task->batch = NULL;
    int rc = dray_queue_claim(task->queue, &task->claim, &task->batch, error);
    if (!rc)
        *out = task->batch;
    return rc;
}

void dray_task_close(dray_task *task)
{
    if (!task)
        return;
    dray_batch_free(task->batch);
    dray_queue_close(task->queue);
    dray_close(task->context);
    free(task->name);
    free(task);
}
