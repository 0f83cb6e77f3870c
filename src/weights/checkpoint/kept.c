/* Finds a run's complete checkpoints and the newest one, and removes old ones (save.c). */
#include "base/error.h"
#include "weights/checkpoint/overlay.h"
#include "weights/checkpoint/save.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct kept_step {
    struct timespec made;
    uint64_t version;
    unsigned again;
    char name[64];
} kept_step;

static int by_age(const void *a, const void *b)
{
    const kept_step *x = a, *y = b;
    if (x->made.tv_sec != y->made.tv_sec)
        return x->made.tv_sec < y->made.tv_sec ? -1 : 1;
    if (x->made.tv_nsec != y->made.tv_nsec)
        return x->made.tv_nsec < y->made.tv_nsec ? -1 : 1;
    if (x->version != y->version)
        return x->version < y->version ? -1 : 1;
    return (x->again > y->again) - (x->again < y->again);
}

/* Lists complete checkpoints, the oldest first. With `clear`, removes the files of writers that
 * died. */
static int list_steps(const dray__save *s, bool clear, kept_step **out, size_t *count,
                      dray_error *error)
{
    dray__store_step *found;
    size_t n;
    *out = NULL;
    *count = 0;
    int rc = s->store->steps(s->folder, clear, &found, &n, error);
    if (rc)
        return rc;
    kept_step *steps = calloc(n + 1, sizeof *steps);
    for (size_t i = 0; i < n && steps; i++) {
        steps[i].made = found[i].made;
        strcpy(steps[i].name, found[i].name);
        dray__store_step_parse(found[i].name, &steps[i].version, &steps[i].again);
    }
    free(found);
    if (!steps)
        return dray__nomem(error);
    qsort(steps, n, sizeof *steps, by_age);
    *out = steps;
    *count = n;
    return DRAY_OK;
}

/* ---- publishing ------------------------------------------------------------------------------ */

/* Adds a name to those that were given. */
static void note(dray__store_given *given, uint64_t version, unsigned again)
{
    given->version = !given->again || version > given->version ? version : given->version;
    given->again = again > given->again ? again : given->again;
}

/* Gives the complete folder a name that is not in use, and, in a store that keeps the names given,
 * never was: the first of a higher version than all of them, or of a higher repetition. */
static int name_it(const dray__save *s, const kept_step *steps, size_t count,
                   dray__store_given *given, char *name, size_t capacity, dray_error *error)
{
    unsigned again = 0;
    for (size_t i = 0; i < count; i++) {
        note(given, steps[i].version, steps[i].again);
        if (steps[i].version == s->options.version && steps[i].again > again)
            again = steps[i].again;
    }
    if (s->store->given && given->again && s->options.version <= given->version)
        again = given->again;
    note(given, s->options.version, again + 1);
    int n = snprintf(name, capacity, "step-%06" PRIu64, s->options.version);
    if (again)
        snprintf(name + n, capacity - (size_t)n, ".%u", again + 1);
    return s->store->place(s->folder, name, s->partial, error);
}

static int base_of(const char *folder, const char *name, char base[64], uint32_t *number,
                   dray_error *error)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%.*s/%.64s", PATH_MAX - DRAY__SAVE_ROOM, folder, name);
    return dray__overlay_base_name(path, base, number, error);
}

/* Returns true when a checkpoint is kept by its age and number. The new one is the newest. */
static bool stays(const dray__save *s, const kept_step *steps, size_t count, size_t i)
{
    size_t kept = 2; /* the new one, and this */
    for (uint32_t k = 0; k < s->options.stay_count; k++)
        if (steps[i].version == s->options.stay[k] && steps[i].version != s->options.version)
            return true;
    for (size_t k = i + 1; k < count; k++)
        kept += steps[k].version != s->options.version;
    return steps[i].version != s->options.version && (!s->options.keep || kept <= s->options.keep);
}

/* Does a step depend on another one, directly or through its bases? Returns true when the step
 * cannot be read now, and false when it is not a checkpoint. */
static bool builds_on(const dray__save *s, const char *name, const char *other)
{
    char at[64];
    snprintf(at, sizeof at, "%.63s", name);
    for (uint32_t i = 0; i <= DRAY__OVERLAY_CHAIN; i++) {
        char base[64];
        int rc = base_of(s->folder, at, base, NULL, NULL);
        if (rc || !base[0])
            return rc && rc != DRAY_EFORMAT;
        if (strcmp(base, other) == 0)
            return true;
        snprintf(at, sizeof at, "%s", base);
    }
    return false;
}

/* Does the new checkpoint, or one that is kept, depend on it? */
static bool needed(const dray__save *s, const kept_step *steps, size_t count, size_t at)
{
    bool is = strcmp(s->base, steps[at].name) == 0 ||
              (s->base[0] && builds_on(s, s->base, steps[at].name));
    for (size_t i = 0; i < count && !is; i++)
        is = stays(s, steps, count, i) && builds_on(s, steps[i].name, steps[at].name);
    return is;
}

/* Returns true when a delta can be computed against it. Files of other writers have no sums. */
static bool has_sums(const dray__save *s, const char *name)
{
    char path[PATH_MAX];
    uint64_t sum = 0;
    snprintf(path, sizeof path, "%.*s/%.64s", PATH_MAX - DRAY__SAVE_ROOM, s->folder, name);
    return dray__overlay_result_sum(path, &sum, NULL) == DRAY_OK && sum;
}

/* Chooses the newest step, other than the one that is replaced, as the base, unless the longest
 * permitted chain of deltas ends with it. After an error in an earlier checkpoint, the new one is
 * written whole. */
static void choose_base(dray__save *s, const kept_step *steps, size_t count)
{
    char base[64];
    uint32_t number = 0;
    const char *replaced = "";
    for (size_t i = 0; i < count; i++)
        if (steps[i].version == s->options.version)
            replaced = steps[i].name;
    while (count && steps[count - 1].version == s->options.version)
        count--;
    if (!s->options.deltas || !count)
        return;
    const char *newest = steps[count - 1].name;
    if (base_of(s->folder, newest, base, &number, NULL) || number >= s->options.deltas ||
        builds_on(s, newest, replaced) || !has_sums(s, newest))
        return;
    snprintf(s->base, sizeof s->base, "%s", newest);
    s->number = number + 1;
}

/* Removes a checkpoint of the same number whose writer died after naming it and before publishing
 * it as the newest. */
static int forget_unpublished(const dray__save *s, kept_step *steps, size_t *count,
                              dray_error *error)
{
    char *newest = NULL;
    uint64_t version = 0;
    int rc = dray_checkpoint_latest(s->folder, &version, &newest, NULL);
    dray_free(newest);
    if (rc ? rc != DRAY_ENOENT : version >= s->options.version)
        return DRAY_OK;
    size_t left = 0;
    rc = DRAY_OK;
    for (size_t i = 0; i < *count && !rc; i++)
        if (steps[i].version != s->options.version || needed(s, steps, *count, i))
            steps[left++] = steps[i];
        else
            rc = s->store->retire(s->folder, steps[i].name, error);
    *count = left;
    return rc;
}

int dray__save_publish(const dray__save *s, dray_error *error)
{
    kept_step *steps;
    size_t count;
    char name[64];
    dray__store_given given = {0, 0};
    int rc = list_steps(s, false, &steps, &count, error);
    /* In a bucket no name is given twice, because readers may have cached its content. */
    if (!rc && !s->store->given)
        rc = forget_unpublished(s, steps, &count, error);
    if (!rc && s->store->given)
        rc = s->store->given(s->folder, &given, error);
    if (!rc)
        rc = name_it(s, steps, count, &given, name, sizeof name, error);
    dray__hook_step("save named");
    if (!rc)
        rc = s->store->lead(s->folder, name, &given, error);
    dray__hook_step("save published");
    /* The new one is not in the list. Older ones of its number are removed, too. */
    for (size_t i = 0; i < count && !rc; i++)
        if (!stays(s, steps, count, i) && !needed(s, steps, count, i))
            rc = s->store->retire(s->folder, steps[i].name, error);
    free(steps);
    return rc;
}

/* Removes the version that a dead writer left on this machine before the upload. */
static int clear_stage(const dray__save *s, dray_error *error)
{
    dray__store_step *none = NULL;
    size_t count;
    int rc = dray__store_files.steps(s->stage, true, &none, &count, error);
    free(none);
    return rc;
}

int dray__save_clear(dray__save *s, dray_error *error)
{
    kept_step *steps;
    size_t count;
    int rc = list_steps(s, true, &steps, &count, error);
    if (!rc && s->store != &dray__store_files) /* there is a local stage */
        rc = clear_stage(s, error);
    if (!rc)
        choose_base(s, steps, count);
    free(steps);
    return rc;
}

int dray_checkpoint_get(const char *path, const char *file, void **data, size_t *bytes,
                        dray_error *error)
{
    char full[PATH_MAX], *text;
    if (!path || !file || !data || !bytes)
        return dray__fail(error, DRAY_EINVALID, "path, file, data and bytes must be given");
    if (snprintf(full, sizeof full, "%s/%s", path, file) >= (int)sizeof full)
        return dray__fail(error, DRAY_EINVALID, "%.300s...: path too long", path);
    int rc = dray__store_text(full, SIZE_MAX - 1, &text, bytes, error);
    if (!rc)
        *data = text;
    return rc;
}

int dray_checkpoint_latest(const char *directory, uint64_t *version, char **path, dray_error *error)
{
    char real[PATH_MAX];
    unsigned again;
    uint64_t found;
    if (!directory || !path)
        return dray__fail(error, DRAY_EINVALID, "directory and path must be given");
    int rc = dray__store_of(directory)->led(directory, real, error);
    if (rc)
        return rc;
    const char *name = strrchr(real, '/') + 1;
    if (!dray__store_step_parse(name, &found, &again))
        return dray__fail(error, DRAY_EFORMAT, "%.300s/latest: leads to %.100s, not to a step",
                          directory, name);
    *path = strdup(real);
    if (!*path)
        return dray__nomem(error);
    if (version)
        *version = found;
    return DRAY_OK;
}
