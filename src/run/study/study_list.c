#include "run/study/study_list.h"

#include "base/error.h"
#include "base/io.h"
#include "base/wire.h"
#include "run/data/data.h"
#include "run/host/host.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ENTRY_SETTINGS = 32, ENTRY_BYTES = 200, ENTRIES = 256, JOB_MOST = 1 << 22 };

/* ---- the list -------------------------------------------------------------------------------- */

static int check_name(const dray__study_plan *plan, const char *text, dray_error *error)
{
    if (!text[0] || text[0] == ':')
        return dray__fail(error, DRAY_EINVALID,
                          "--schedules: expected SCHEDULE[:KEY=VALUE...], found '%s'", text);
    if (text[0] == '.' || strchr(text, '/') || strlen(text) > ENTRY_BYTES ||
        !dray__utf8_valid(text, strlen(text)))
        return dray__fail(error, DRAY_EINVALID,
                          "--schedules: '%.80s' is no name for a folder: expected no '/', no '.' "
                          "at the beginning, and %d bytes at most; --set is for all schedules",
                          text, ENTRY_BYTES);
    for (uint32_t i = 0; i < plan->entry_count; i++)
        if (strcmp(plan->entries[i].text, text) == 0)
            return dray__fail(error, DRAY_EINVALID, "--schedules: '%s' is there twice", text);
    return DRAY_OK;
}

/* Gathers the settings of all runs, then "schedule=NAME", then those of the entry. Splits `copy` in
 * place. */
static int gather(const dray__study_options *options, const char *text, char *copy,
                  const char **settings, uint32_t *count, char schedule[ENTRY_BYTES + 16],
                  dray_error *error)
{
    char *state = NULL;
    uint32_t n = options->setting_count, most = n + ENTRY_SETTINGS;
    for (uint32_t i = 0; i < n; i++)
        settings[i] = options->settings[i];
    snprintf(schedule, ENTRY_BYTES + 16, "schedule=%s", strtok_r(copy, ":", &state));
    settings[n++] = schedule;
    for (char *part; (part = strtok_r(NULL, ":", &state)); settings[n++] = part)
        if (!strchr(part, '=') || n == most)
            return dray__fail(error, DRAY_EINVALID,
                              "--schedules: '%s': expected at most %d settings KEY=VALUE behind "
                              "the schedule, found '%s'",
                              text, ENTRY_SETTINGS - 1, part);
    *count = n;
    return DRAY_OK;
}

static int add_entry(dray__study_plan *plan, const char *text, dray_error *error)
{
    const dray__study_options *o = plan->options;
    char schedule[ENTRY_BYTES + 16];
    uint32_t count = 0;
    int rc = check_name(plan, text, error);
    if (!rc && plan->entry_count == ENTRIES)
        rc = dray__fail(error, DRAY_EINVALID, "--schedules: at most %d expected", ENTRIES);
    if (rc)
        return rc;
    dray__study_entry *e = &plan->entries[plan->entry_count++];
    char *copy = strdup(text);
    const char **settings = calloc(o->setting_count + (size_t)ENTRY_SETTINGS, sizeof(*settings));
    e->text = strdup(text);
    e->trials = calloc(plan->seed_count, sizeof(*e->trials));
    if (!copy || !settings || !e->text || !e->trials)
        rc = dray__nomem(error);
    if (!rc)
        rc = gather(o, text, copy, settings, &count, schedule, error);
    if (!rc)
        rc = dray__job_load(o->job, settings, count, &e->job, &e->resolved, error);
    if (!rc)
        rc = dray__data_check(e->job, error);
    free(copy);
    free(settings);
    return rc;
}

static int read_list(dray__study_plan *plan, dray_error *error)
{
    char *list = strdup(plan->options->schedules), *rest = list, *text;
    int rc = list ? DRAY_OK : dray__nomem(error);
    while (!rc && (text = strsep(&rest, ",")))
        rc = add_entry(plan, text, error);
    free(list);
    return rc;
}

int dray__study_plan_open(const dray__study_options *options, dray__study_plan *out,
                          dray_error *error)
{
    dray__study_plan plan = {.options = options, .seed_count = options->seeds};
    plan.entries = calloc(ENTRIES, sizeof(*plan.entries));
    int rc = plan.entries ? read_list(&plan, error) : dray__nomem(error);
    if (rc)
        dray__study_plan_close(&plan);
    else
        *out = plan;
    return rc;
}

void dray__study_plan_close(dray__study_plan *plan)
{
    for (uint32_t i = 0; i < plan->entry_count; i++) {
        dray__study_entry *e = &plan->entries[i];
        for (uint32_t k = 0; k < plan->seed_count && e->trials; k++) {
            dray__study_run_free(&e->trials[k].run);
            free(e->trials[k].folder);
        }
        free(e->trials);
        free(e->text);
        free(e->folder);
        free(e->resolved);
        dray__job_free(e->job);
    }
    free(plan->entries);
    free(plan->folder);
    *plan = (dray__study_plan){0};
}

/* ---- folders --------------------------------------------------------------------------------- */

/* Gets the first line of each text in which they differ; "" for a text that has ended. */
static void first_difference(const char *was, const char *is, int *line, char a[120], char b[120])
{
    for (*line = 1;; ++*line) {
        size_t n = strcspn(was, "\n"), m = strcspn(is, "\n");
        if (n != m || memcmp(was, is, n) != 0 || !was[n] || !is[m]) {
            snprintf(a, 120, "%.*s", (int)n, was);
            snprintf(b, 120, "%.*s", (int)m, is);
            return;
        }
        was += n + 1;
        is += m + 1;
    }
}

/* Refuses a folder of another job, because runs of two jobs would be compared as if they were of
 * one. */
static int place_entry(dray__study_plan *plan, dray__study_entry *e, dray_error *error)
{
    char path[PATH_MAX], a[120], b[120], *was = NULL;
    size_t size;
    int line = 0;
    if (asprintf(&e->folder, "%s/%s", plan->folder, e->text) < 0)
        return dray__nomem(error);
    int rc = dray__make_folders(e->folder, error);
    dray__path(path, sizeof(path), "%s/job.yaml", e->folder);
    if (!rc)
        rc = dray__read_stream(dray__open_stream(path, "r"), path, JOB_MOST, &was, &size, error);
    if (rc == DRAY_ENOENT)
        rc = DRAY_OK;
    if (!rc && was && strcmp(was, e->resolved) != 0) {
        first_difference(was, e->resolved, &line, a, b);
        rc = dray__fail(error, DRAY_EEXIST,
                        "%s:%d: the study there is of another job: expected '%s', found '%s'; "
                        "--out DIR says where this one goes",
                        path, line, b, a);
    }
    if (!rc && !was)
        rc = dray__write_text(e->folder, "job.yaml", e->resolved, error);
    free(was);
    for (uint32_t i = 0; i < plan->seed_count && !rc; i++) {
        dray__study_trial *t = &e->trials[i];
        t->seed = e->job->seed + i;
        if (asprintf(&t->folder, "%s/seed-%lld", e->folder, (long long)t->seed) < 0)
            rc = dray__nomem(error);
    }
    return rc;
}

int dray__study_plan_place(dray__study_plan *plan, dray_error *error)
{
    char path[PATH_MAX];
    const char *name = plan->entries[0].job->name;
    int rc = plan->options->out ? DRAY_OK : dray__folder_name_check(name, "study", error);
    dray__path(path, sizeof(path), plan->options->out ? "%s%s" : "%sstudies/%s",
               plan->options->out ? plan->options->out : "", plan->options->out ? "" : name);
    if (!rc)
        rc = dray__make_folders(path, error);
    if (!rc && !(plan->folder = realpath(path, NULL)))
        rc = dray__fail_errno(error, errno, "%s", path);
    /* Messages and JSON need UTF-8. */
    if (!rc && !dray__utf8_valid(plan->folder, strlen(plan->folder)))
        rc =
            dray__fail(error, DRAY_EINVALID, "%s: the path of a study must be UTF-8", plan->folder);
    for (uint32_t i = 0; i < plan->entry_count && !rc; i++)
        rc = place_entry(plan, &plan->entries[i], error);
    return rc;
}
