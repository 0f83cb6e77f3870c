#include "run/job/job_roles.h"

#include "base/error.h"
#include "base/wire.h"
#include "base/words.h"
#include "net/address.h"
#include "run/job/columns.h"
#include "run/job/contract.h"
#include "run/job/devices.h"
#include "run/job/schedule.h"
#include "run/supervisor/probe.h"

#include <dray/weights.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* "FILE:LINE:COLUMN: roles.NAME.KEY: message". */
static __attribute__((format(printf, 5, 6))) int refuse(const dray__places *at,
                                                        const dray__job_role *role, const char *key,
                                                        dray_error *error, const char *format, ...)
{
    char path[160], message[DRAY_ERROR_MESSAGE_MAX];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    snprintf(path, sizeof(path), "roles.%.64s.%s", role->name, key);
    return dray__setting_fail(at, path, error, "%s", message);
}

static bool is_builtin(const dray__job_role *role)
{
    return !role->command[0];
}

/* ---- defaults -------------------------------------------------------------------------------- */

static int add_task(dray__job_role *role, const char *task, dray_error *error)
{
    char **grown = realloc(role->tasks, (role->task_count + 2) * sizeof(*grown));
    char *copy = strdup(task);
    if (grown)
        role->tasks = grown;
    if (!grown || !copy) {
        free(copy);
        return dray__nomem(error);
    }
    role->tasks[role->task_count++] = copy;
    return DRAY_OK;
}

static int settle_score(dray__job *job, dray_error *error)
{
    static const char *const beside[] = {"reward", "driver"};
    if (dray__job_role_of(job, dray__task_score.name))
        return DRAY_OK;
    for (size_t i = 0; i < 2; i++)
        for (uint32_t r = 0; r < job->role_count; r++)
            if (is_builtin(&job->roles[r]) && dray__role_has(&job->roles[r], beside[i]))
                return add_task(&job->roles[r], dray__task_score.name, error);
    return DRAY_OK;
}

static bool trains(const dray__job_role *role)
{
    for (uint32_t i = 0; i < role->task_count; i++) {
        const dray__task_kind *kind = dray__task_find(role->tasks[i]);
        if (kind && kind->trains)
            return true;
    }
    return false;
}

int dray__roles_settle(dray__job *job, const dray__places *at, dray_error *error)
{
    char key[128];
    for (uint32_t i = 0; i < job->role_count; i++) {
        dray__job_role *role = &job->roles[i];
        snprintf(key, sizeof(key), "roles.%.64s.on_death", role->name);
        if (!dray__setting_given(at, key))
            role->on_death = trains(role) ? DRAY__ON_DEATH_END : DRAY__ON_DEATH_RESTART;
        if (role->local > dray__role_places(role))
            role->local = dray__role_places(role);
    }
    return settle_score(job, error);
}

/* ---- roles ----------------------------------------------------------------------------------- */

static int unknown_task(const dray__job *job, const dray__job_role *role, const char *name,
                        const dray__places *at, dray_error *error)
{
    const char *known[DRAY__TASK_COUNT + 1 + DRAY__JOB_TASKS];
    uint32_t count = 0;
    char hint[96];
    for (uint32_t t = 0; t < DRAY__TASK_COUNT; t++)
        known[count++] = dray__tasks[t].name;
    known[count++] = dray__task_score.name;
    for (uint32_t t = 0; t < job->task_count; t++)
        known[count++] = job->tasks[t].name;
    return refuse(at, role, "tasks", error, "unknown task '%.64s'%s", name,
                  dray__word_hint(name, known, count, hint, sizeof(hint)));
}

static bool is_task(const dray__job *job, const char *name)
{
    for (uint32_t i = 0; i < job->task_count; i++)
        if (strcmp(job->tasks[i].name, name) == 0)
            return true;
    return dray__task_find(name) != NULL;
}

static int check_tasks(const dray__job *job, const dray__job_role *role, const dray__places *at,
                       dray_error *error)
{
    for (uint32_t i = 0; i < role->task_count; i++) {
        if (!is_task(job, role->tasks[i]))
            return unknown_task(job, role, role->tasks[i], at, error);
        for (uint32_t j = 0; j < i; j++)
            if (strcmp(role->tasks[i], role->tasks[j]) == 0)
                return refuse(at, role, "tasks", error, "task %s is there twice", role->tasks[i]);
    }
    return DRAY_OK;
}

static int check_env(const dray__job_role *role, const dray__places *at, dray_error *error)
{
    for (uint32_t i = 0; i < role->env_count; i++) {
        const char *text = role->env[i];
        size_t name = strcspn(text, "=");
        if (!name || !text[name])
            return refuse(at, role, "env", error, "expected NAME=VALUE, found '%.64s'", text);
        if (dray__contract_sets(text))
            return refuse(at, role, "env", error, "'%.*s' is set by dray run", (int)name, text);
    }
    return DRAY_OK;
}

static const dray__job_role *named(const dray__job *job, const char *name)
{
    for (uint32_t i = 0; i < job->role_count; i++)
        if (strcmp(job->roles[i].name, name) == 0)
            return &job->roles[i];
    return NULL;
}

/* Returns whether `role` starts after `other`, directly or through at most `depth` other roles. */
static bool comes_after(const dray__job *job, const dray__job_role *role,
                        const dray__job_role *other, uint32_t depth)
{
    for (uint32_t i = 0; i < role->after_count; i++) {
        const dray__job_role *before = named(job, role->after[i]);
        if (before == other || (before && depth && comes_after(job, before, other, depth - 1)))
            return true;
    }
    return false;
}

static int check_after(const dray__job *job, const dray__job_role *role, const dray__places *at,
                       dray_error *error)
{
    const char *known[16];
    char hint[96];
    for (uint32_t i = 0; i < job->role_count; i++)
        known[i] = job->roles[i].name;
    for (uint32_t i = 0; i < role->after_count; i++)
        if (!named(job, role->after[i]))
            return refuse(
                at, role, "after", error, "unknown role '%.64s'%s", role->after[i],
                dray__word_hint(role->after[i], known, job->role_count, hint, sizeof(hint)));
    if (comes_after(job, role, role, job->role_count))
        return refuse(at, role, "after", error, "the role waits for itself");
    return DRAY_OK;
}

static int check_role(const dray__job *job, const dray__job_role *role, const dray__places *at,
                      dray_error *error)
{
    dray_error inner;
    dray__devices devices;
    int rc = check_tasks(job, role, at, error);
    if (!rc)
        rc = check_env(role, at, error);
    if (!rc)
        rc = check_after(job, role, at, error);
    if (!rc && dray__devices_read(role->devices, 0, 1, &devices, &inner))
        rc = refuse(at, role, "devices", error, "%s", inner.message);
    if (!rc && dray__probe_check(role->ready, &inner))
        rc = refuse(at, role, "ready", error, "%s", inner.message);
    return rc;
}

/* Checks a role that other hosts take part in. */
static int check_elsewhere(const dray__job *job, const dray__job_role *role, const dray__places *at,
                           dray_error *error)
{
    /* The tasks whose built-in programs read and write the run's folder. */
    static const char *const home[] = {"driver", "actor", "critic", "reference"};
    if (!job->listen[0])
        return refuse(at, role, "local", error,
                      "expected %lld, or `listen`, where other hosts join, found %lld",
                      (long long)dray__role_places(role), (long long)role->local);
    for (size_t i = 0; i < sizeof(home) / sizeof(home[0]) && is_builtin(role); i++)
        if (dray__role_has(role, home[i]))
            return refuse(at, role, "local", error,
                          "expected %lld: the built-in %s works in the run's folder, found %lld",
                          (long long)dray__role_places(role), home[i], (long long)role->local);
    if (dray__role_has(role, "rollout") && job->weights.mode == DRAY_MODE_DISK)
        return dray__setting_fail(at, "weights.mode", error,
                                  "expected tensor, found disk: role %s is on other hosts, too",
                                  role->name);
    return DRAY_OK;
}

static int check_spread(const dray__job_role *role, const dray__places *at, dray_error *error)
{
    if (is_builtin(role))
        return refuse(at, role, "spread", error,
                      "expected false: the ranks of a built-in program share memory");
    if (role->instances != 1)
        return refuse(at, role, "spread", error, "expected one instance, found %lld",
                      (long long)role->instances);
    if (role->on_death != DRAY__ON_DEATH_END)
        return refuse(at, role, "on_death", error,
                      "expected end with spread, where no host can start all ranks anew");
    return DRAY_OK;
}

static int rule_hosts(const dray__job *job, const dray__places *at, dray_error *error)
{
    int rc = DRAY_OK;
    dray_error inner;
    dray__address address;
    if (job->listen[0] && (strncmp(job->listen, "tcp:", 4) != 0 ||
                           dray__address_parse(job->listen, &address, &inner) == DRAY_EINVALID))
        return dray__setting_fail(at, "listen", error, "expected tcp:HOST:PORT, found '%.100s'",
                                  job->listen);
    for (uint32_t i = 0; i < job->role_count && !rc; i++) {
        if (job->roles[i].spread)
            rc = check_spread(&job->roles[i], at, error);
        if (!rc && job->roles[i].local < dray__role_places(&job->roles[i]))
            rc = check_elsewhere(job, &job->roles[i], at, error);
    }
    return rc;
}

int dray__rule_roles(const dray__job *job, const dray__places *at, dray_error *error)
{
    for (uint32_t i = 0; i < job->role_count; i++) {
        const dray__job_role *role = &job->roles[i];
        if (!dray__job_name_ok(role->name) || strcmp(role->name, "coordinator") == 0)
            return dray__setting_fail(at, "roles", error,
                                      "role name '%.64s': expected 1 to 32 letters, digits, _ or "
                                      "-, and not 'coordinator'",
                                      role->name);
        if (named(job, role->name) != role)
            return dray__setting_fail(at, "roles", error, "two roles are called %s", role->name);
        int rc = check_role(job, role, at, error);
        if (rc)
            return rc;
    }
    return rule_hosts(job, at, error);
}

/* ---- the built-in programs ------------------------------------------------------------------- */

static int check_program(const dray__job_role *role, const dray__places *at, dray_error *error)
{
    const dray__task_kind *first = NULL;
    if (!role->task_count)
        return refuse(at, role, "command", error,
                      "expected a command: a role without tasks has no built-in program");
    for (uint32_t i = 0; i < role->task_count; i++) {
        const dray__task_kind *kind = dray__task_find(role->tasks[i]);
        if (!kind)
            return refuse(at, role, "command", error,
                          "expected a command: task %s has no built-in program", role->tasks[i]);
        if (first && first->program != kind->program)
            return refuse(at, role, "tasks", error,
                          "no built-in program runs both %s and %s: two roles expected",
                          first->name, kind->name);
        first = first ? first : kind;
    }
    if (first->program == DRAY__PROGRAM_DESK && role->ranks != 1)
        return refuse(at, role, "ranks", error, "%s takes 1 rank, found %lld", first->name,
                      (long long)role->ranks);
    return DRAY_OK;
}

/* Refuses a second instance of roles that may have only one: the built-in driver, and the built-in
 * trainer with its tasks. */
static int check_single(const dray__job *job, const dray__job_role *role, const dray__places *at,
                        dray_error *error)
{
    for (uint32_t i = 0; i < role->task_count; i++) {
        const dray__task_kind *kind = dray__task_find(role->tasks[i]);
        bool single = dray__program_trains(kind->program) || !dray__task_has_rows(kind);
        if (single && role->instances != 1)
            return refuse(at, role, "instances", error,
                          "the built-in %s is there once, found %lld instances", kind->name,
                          (long long)role->instances);
        for (uint32_t r = 0; single && r < job->role_count; r++) {
            const dray__job_role *other = &job->roles[r];
            if (other != role && dray__role_has(other, kind->name))
                return refuse(at, other, "tasks", error,
                              "the built-in %s is there once, found in role %s, too", kind->name,
                              role->name);
            for (uint32_t t = 0; other != role && is_builtin(other) && t < other->task_count; t++)
                if (dray__program_trains(kind->program) &&
                    dray__task_find(other->tasks[t])->program == kind->program)
                    return refuse(
                        at, other, "tasks", error,
                        "task %s: expected in role %s, beside the other tasks of its model",
                        other->tasks[t], role->name);
        }
    }
    return DRAY_OK;
}

/* Both trainers must be built in or neither, because built-in ones wait for each other at
 * checkpoints (critic.c). */
static int check_trainers(const dray__job *job, const dray__places *at, dray_error *error)
{
    const dray__job_role *actor = dray__job_role_of(job, "actor"),
                         *critic = dray__job_role_of(job, "critic");
    if (!dray__job_has(job, "critic") || !actor || !critic ||
        is_builtin(actor) == is_builtin(critic))
        return DRAY_OK;
    return refuse(at, is_builtin(actor) ? critic : actor, "command", error,
                  "task %s: expected the built-in program, as that of task %s is, with which it "
                  "takes checkpoints of the same step",
                  is_builtin(actor) ? "critic" : "actor", is_builtin(actor) ? "actor" : "critic");
}

/* When a step trains the samples that are complete first, the built-in trainer of the value model
 * chooses them (late.c). */
static int check_binding(const dray__job *job, const dray__places *at, dray_error *error)
{
    static const char *const tasks[] = {"value", "critic"};
    dray__schedule schedule = dray__schedule_of(job);
    if (!schedule.first_complete || !dray__job_has(job, "critic"))
        return DRAY_OK;
    for (int i = 0; i < 2; i++) {
        const dray__job_role *role = dray__job_role_of(job, tasks[i]);
        if (role && !is_builtin(role))
            return refuse(at, role, "command", error,
                          "task %s: expected the built-in program with schedule %s, where the "
                          "value model's trainer chooses the samples of a step for both models",
                          tasks[i], schedule.name);
    }
    return DRAY_OK;
}

int dray__rule_programs(const dray__job *job, const dray__places *at, dray_error *error)
{
    int rc = check_trainers(job, at, error);
    if (!rc)
        rc = check_binding(job, at, error);
    for (uint32_t i = 0; i < job->role_count && !rc; i++)
        if (is_builtin(&job->roles[i]))
            rc = check_program(&job->roles[i], at, error);
    for (uint32_t i = 0; i < job->role_count && !rc; i++)
        if (is_builtin(&job->roles[i]))
            rc = check_single(job, &job->roles[i], at, error);
    return rc;
}

/* ---- tasks and columns ----------------------------------------------------------------------- */

int dray__rule_tasks(const dray__job *job, const dray__places *at, dray_error *error)
{
    dray__task_view tasks[DRAY__JOB_TASKS];
    char key[128];
    for (uint32_t i = 0; i < job->task_count; i++) {
        const dray__job_task *task = &job->tasks[i];
        snprintf(key, sizeof(key), "tasks.%.64s", task->name);
        if (!dray__job_name_ok(task->name))
            return dray__setting_fail(at, "tasks", error,
                                      "task name '%.64s': expected 1 to 32 letters, digits, _ or -",
                                      task->name);
        for (uint32_t j = 0; j < i; j++)
            if (strcmp(job->tasks[j].name, task->name) == 0)
                return dray__setting_fail(at, "tasks", error, "two tasks are called %s",
                                          task->name);
        if (!dray__task_find(task->name) && !task->need_count)
            return dray__setting_fail(at, key, error, "expected columns that the task needs");
    }
    uint32_t count = dray__job_tasks(job, tasks);
    for (uint32_t i = 0; i < count; i++) {
        const char *by = dray__job_has_by(tasks[i].name);
        snprintf(key, sizeof(key), "roles %s", by);
        if (!dray__job_role_of(job, tasks[i].name))
            return dray__setting_fail(at, key, error, "task %s%s%s: expected in a role, found in 0",
                                      tasks[i].name, *by ? ", as it is in this job by " : "", by);
    }
    return DRAY_OK;
}

typedef struct columns {
    dray__task_view tasks[DRAY__JOB_TASKS];
    uint32_t count;
    const char *written[DRAY__JOB_TASKS * DRAY__TASK_COLUMNS];
    uint32_t written_count;
} columns;

static const dray__task_view *writer_of(const columns *c, const char *column, uint32_t below)
{
    for (uint32_t i = 0; i < below; i++)
        for (uint32_t j = 0; j < c->tasks[i].write_count; j++)
            if (strcmp(c->tasks[i].writes[j], column) == 0)
                return &c->tasks[i];
    return NULL;
}

/* Checks the names of columns that the task needs or writes, as `key` says: they must be valid in
 * the queue, and different. */
static int check_names(const dray__task_view *t, const char *key, const char *const *names,
                       uint32_t count, const dray__places *at, dray_error *error)
{
    char keys[128];
    snprintf(keys, sizeof(keys), "tasks.%.64s.%s", t->name, key);
    for (uint32_t i = 0; i < count; i++) {
        size_t length = strlen(names[i]);
        if (!length || length > 255 || !dray__utf8_plain(names[i], length))
            return dray__setting_fail(at, keys, error,
                                      "column '%.64s': expected 1 to 255 bytes of UTF-8 without "
                                      "control characters",
                                      names[i]);
        for (uint32_t j = 0; j < i; j++)
            if (strcmp(names[i], names[j]) == 0)
                return dray__setting_fail(at, keys, error, "column %.64s is there twice", names[i]);
    }
    return DRAY_OK;
}

static int check_writes(columns *c, uint32_t task, const dray__places *at, dray_error *error)
{
    char keys[256];
    const dray__task_view *t = &c->tasks[task];
    int rc = check_names(t, "needs", t->needs, t->need_count, at, error);
    if (!rc)
        rc = check_names(t, "writes", t->writes, t->write_count, at, error);
    if (rc)
        return rc;
    for (uint32_t j = 0; j < t->write_count; j++) {
        const dray__task_view *other = writer_of(c, t->writes[j], task);
        snprintf(keys, sizeof(keys), "tasks.%.64s.writes tasks.%.64s.writes", t->name,
                 other ? other->name : "");
        if (other)
            return dray__setting_fail(at, keys, error, "column %.64s is written by %.64s and %.64s",
                                      t->writes[j], other->name, t->name);
        c->written[c->written_count++] = t->writes[j];
    }
    return DRAY_OK;
}

static int check_needs(const columns *c, const dray__task_view *t, const dray__places *at,
                       dray_error *error)
{
    char keys[256], hint[96];
    snprintf(keys, sizeof(keys), "tasks.%.64s.needs tasks", t->name);
    for (uint32_t j = 0; j < t->need_count; j++)
        if (!writer_of(c, t->needs[j], c->count))
            return dray__setting_fail(
                at, keys, error, "column %.64s is written by no task%s", t->needs[j],
                dray__word_hint(t->needs[j], c->written, c->written_count, hint, sizeof(hint)));
    return DRAY_OK;
}

static bool is_among(const char *name, const char *const *names, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (strcmp(names[i], name) == 0)
            return true;
    return false;
}

static bool is_run_built_in(const dray__job *job, const char *task)
{
    for (uint32_t i = 0; i < job->role_count; i++)
        if (is_builtin(&job->roles[i]) && dray__role_has(&job->roles[i], task))
            return true;
    return false;
}

/* A built-in program's columns are fixed; `tasks` may only add columns that it waits for. */
static int check_built_in(const dray__job *job, const dray__task_view *t, const dray__places *at,
                          dray_error *error)
{
    char needs[128], writes[128];
    if (!t->kind || !is_run_built_in(job, t->name))
        return DRAY_OK;
    dray__task_view own = dray__task_built_in(job, t->kind);
    snprintf(needs, sizeof(needs), "tasks.%.64s.needs", t->name);
    snprintf(writes, sizeof(writes), "tasks.%.64s.writes", t->name);
    for (uint32_t i = 0; i < own.need_count; i++)
        if (!is_among(own.needs[i], t->needs, t->need_count))
            return dray__setting_fail(at, needs, error,
                                      "column %s is missing, which the built-in %s begins with (a "
                                      "role of the job's own may do without)",
                                      own.needs[i], t->name);
    for (uint32_t i = 0; i < own.write_count; i++)
        if (!is_among(own.writes[i], t->writes, t->write_count))
            return dray__setting_fail(at, writes, error,
                                      "column %s is missing, which the built-in %s writes",
                                      own.writes[i], t->name);
    for (uint32_t i = 0; i < t->write_count; i++)
        if (!is_among(t->writes[i], own.writes, own.write_count))
            return dray__setting_fail(at, writes, error,
                                      "column %.64s is not written by the built-in %s",
                                      t->writes[i], t->name);
    return DRAY_OK;
}

/* Returns the first column that the task needs and that no task in `ready` (one bit for each)
 * writes. */
static const char *awaited(const columns *c, uint32_t task, uint64_t ready)
{
    const dray__task_view *t = &c->tasks[task];
    for (uint32_t j = 0; j < t->need_count; j++)
        if (!(ready >> (writer_of(c, t->needs[j], c->count) - c->tasks) & 1))
            return t->needs[j];
    return NULL;
}

/* Refuses tasks that need a column that they write, or that is written after them, because they
 * would never begin. */
static int check_order(const columns *c, const dray__places *at, dray_error *error)
{
    char keys[128];
    uint64_t ready = 0;
    uint32_t task = 0;
    for (uint32_t i = 0; i < c->count * c->count; i++)
        if (!awaited(c, i % c->count, ready))
            ready |= UINT64_C(1) << i % c->count;
    while (task < c->count && ready >> task & 1)
        task++;
    if (task == c->count)
        return DRAY_OK;
    for (uint32_t i = 0; i < c->count; i++) /* follows the waits until a task waits for itself */
        task = (uint32_t)(writer_of(c, awaited(c, task, ready), c->count) - c->tasks);
    snprintf(keys, sizeof(keys), "tasks.%.64s.needs tasks", c->tasks[task].name);
    return dray__setting_fail(at, keys, error,
                              "task %.64s would never begin: column %.64s, which it needs, is "
                              "written after what it writes",
                              c->tasks[task].name, awaited(c, task, ready));
}

int dray__rule_columns(const dray__job *job, const dray__places *at, dray_error *error)
{
    columns c = {.written_count = 0};
    int rc = DRAY_OK;
    c.count = dray__job_tasks(job, c.tasks);
    for (uint32_t i = 0; i < c.count && !rc; i++)
        rc = check_writes(&c, i, at, error);
    for (uint32_t i = 0; i < c.count && !rc; i++)
        rc = check_built_in(job, &c.tasks[i], at, error);
    for (uint32_t i = 0; i < c.count && !rc; i++)
        rc = check_needs(&c, &c.tasks[i], at, error);
    return rc ? rc : check_order(&c, at, error);
}

/* ---- is it there? ---------------------------------------------------------------------------- */

/* Returns whether the word is a command of the shell itself. All others are looked up as the shell
 * does. */
static bool is_shell_word(const char *word)
{
    static const char *const words[] = {".",     ":",      "!",       "{",        "alias", "break",
                                        "case",  "cd",     "command", "continue", "eval",  "exec",
                                        "exit",  "export", "for",     "if",       "read",  "return",
                                        "set",   "shift",  "trap",    "ulimit",   "umask", "unset",
                                        "until", "wait",   "while",   NULL};
    for (const char *const *at = words; *at; at++)
        if (strcmp(*at, word) == 0)
            return true;
    return false;
}

static bool can_run(const char *folder, const char *path)
{
    char whole[8192];
    struct stat st;
    bool relative = path[0] != '/' && folder[0];
    snprintf(whole, sizeof(whole), "%s%s%s", relative ? folder : "", relative ? "/" : "", path);
    return access(whole, X_OK) == 0 && stat(whole, &st) == 0 && S_ISREG(st.st_mode);
}

/* list has the folders of PATH; NULL when it is not set. */
static bool found(const char *folder, const char *list, const char *word)
{
    if (strchr(word, '/'))
        return can_run(folder, word);
    char at[4096 + 256];
    for (list = list ? list : "/usr/bin:/bin"; *list;) {
        size_t length = strcspn(list, ":");
        snprintf(at, sizeof(at), "%.*s/%s", (int)(length < 4096 ? length : 4096),
                 length ? list : ".", word);
        if (can_run(folder, at))
            return true;
        list += length + (list[length] == ':');
    }
    return is_shell_word(word);
}

enum { WORD_BYTES = 256 };

/* Returns true when the program that a command line begins with does not exist, and gets its name.
 * A word that only a shell can interpret is not checked. */
static bool is_missing(const char *folder, const char *list, const char *command,
                       char word[WORD_BYTES])
{
    const char *from = command + strspn(command, " \t\n");
    size_t length = strcspn(from, " \t\n");
    if (length >= WORD_BYTES || strcspn(from, "\"'`$&|;<>()*?[]#~=%\\{") < length)
        return false;
    memcpy(word, from, length);
    word[length] = 0;
    return !found(folder, list, word);
}

/* The role's own PATH, in which the shell looks for its command, or that of this process. */
static const char *path_of(const dray__job_role *role)
{
    for (uint32_t i = 0; i < role->env_count; i++)
        if (strncmp(role->env[i], "PATH=", 5) == 0)
            return role->env[i] + 5;
    return getenv("PATH");
}

static int check_devices(const dray__job_role *role, const dray__places *at, dray_error *error)
{
    dray_error inner;
    dray__devices devices;
    if (dray__devices_read(role->devices, 0, 1, &devices, &inner) ||
        dray__devices_look(&devices, &inner))
        return refuse(at, role, "devices", error, "%s", inner.message);
    return DRAY_OK;
}

int dray__role_there(const dray__job_role *role, const dray__places *at, dray_error *error)
{
    char word[WORD_BYTES];
    struct stat st;
    if (role->cwd[0] && (stat(role->cwd, &st) || !S_ISDIR(st.st_mode)))
        return refuse(at, role, "cwd", error, "no folder '%.200s' is there", role->cwd);
    if (!is_builtin(role) && is_missing(role->cwd, path_of(role), role->command, word))
        return refuse(at, role, "command", error, "no program '%s' is there", word);
    return check_devices(role, at, error);
}

int dray__rule_there(const dray__job *job, const dray__places *at, dray_error *error)
{
    char word[WORD_BYTES];
    int rc = DRAY_OK;
    if (job->reward.rule == DRAY__RULE_COMMAND &&
        is_missing("", getenv("PATH"), job->reward.command, word))
        rc = dray__setting_fail(at, "reward.command", error, "no program '%s' is there", word);
    for (uint32_t i = 0; i < job->role_count && !rc; i++)
        if (job->roles[i].local)
            rc = dray__role_there(&job->roles[i], at, error);
    return rc;
}
