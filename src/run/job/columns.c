#include "run/job/columns.h"

#include <string.h>

static const char *const inserted[] = {"prompt", "answer", "eval_prompt", "eval_answer"};

static uint32_t copy(const char *to[DRAY__TASK_COLUMNS], const char *const *from, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        to[i] = from[i];
    return count;
}

/* Copies the names of the columns that this job has. */
static uint32_t copy_used(const dray__job *job, const char *to[DRAY__TASK_COLUMNS],
                          const char *const *from)
{
    uint32_t count = 0;
    for (size_t i = 0; from[i]; i++)
        if (dray__job_has(job, from[i]))
            to[count++] = from[i];
    return count;
}

dray__task_view dray__task_built_in(const dray__job *job, const dray__task_kind *kind)
{
    dray__task_view out = {.name = kind->name, .kind = kind};
    out.need_count = copy_used(job, out.needs, kind->needs);
    out.write_count = copy_used(job, out.writes, kind->writes);
    if (strcmp(kind->name, "driver") == 0)
        out.write_count = copy(out.writes, inserted, sizeof(inserted) / sizeof(*inserted));
    return out;
}

static void lay_over(dray__task_view *task, const dray__job_task *given)
{
    if (given->need_count)
        task->need_count = copy(task->needs, (const char *const *)given->needs, given->need_count);
    if (given->write_count)
        task->write_count =
            copy(task->writes, (const char *const *)given->writes, given->write_count);
}

uint32_t dray__job_tasks(const dray__job *job, dray__task_view out[DRAY__JOB_TASKS])
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < DRAY__TASK_COUNT; i++)
        if (dray__task_used(job, &dray__tasks[i]))
            out[count++] = dray__task_built_in(job, &dray__tasks[i]);
    out[count++] = dray__task_built_in(job, &dray__task_score);
    for (uint32_t i = 0; i < job->task_count; i++) {
        const dray__job_task *given = &job->tasks[i];
        dray__task_view *found = NULL;
        for (uint32_t t = 0; t < count; t++)
            if (strcmp(out[t].name, given->name) == 0)
                found = &out[t];
        const dray__task_kind *kind = dray__task_find(given->name);
        if (!found && !(kind && dray__task_used(job, kind))) {
            found = &out[count++];
            *found = (dray__task_view){.name = given->name};
        }
        if (found)
            lay_over(found, given);
    }
    return count;
}

bool dray__task_claims(const dray__task_view *task)
{
    return !task->kind || dray__task_has_rows(task->kind);
}
