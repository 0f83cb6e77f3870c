/* The folders of a run's checkpoints: which are whole, which is the newest, which stay (save.c). */
#include "base/array.h"
#include "base/error.h"
#include "base/io.h"
#include "weights/checkpoint/overlay.h"
#include "weights/checkpoint/save.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- folders --------------------------------------------------------------------------------- */

/* The version and the repetition of "step-000007.2"; false: another name. */
static bool parse_step(const char *name, uint64_t *version, unsigned *again)
{
    char rest[16] = "", text[64];
    *again = 1;
    if (sscanf(name, "step-%" SCNu64 "%15s", version, rest) < 1)
        return false;
    if (rest[0] && (sscanf(rest, ".%u", again) != 1 || *again < 2))
        return false;
    int n = snprintf(text, sizeof text, "step-%06" PRIu64, *version);
    if (rest[0])
        snprintf(text + n, sizeof text - (size_t)n, ".%u", *again);
    return strcmp(text, name) == 0;
}

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
    return x->version < y->version ? -1 : x->version > y->version;
}

/* Whole checkpoints, the oldest first. With `clear`, what writers that died left is removed. */
static int list_steps(const char *folder, bool clear, kept_step **out, size_t *count,
                      dray_error *error)
{
    char path[PATH_MAX];
    uint64_t capacity = 0;
    int rc = DRAY_OK;
    DIR *dir = opendir(folder);
    *out = NULL;
    *count = 0;
    if (!dir)
        return dray__fail_errno(error, errno, "%.300s", folder);
    errno = 0;
    for (struct dirent *entry; !rc && (entry = readdir(dir)); errno = 0) {
        kept_step one;
        struct stat st;
        snprintf(path, sizeof path, "%.*s/%.80s", PATH_MAX - DRAY__SAVE_ROOM, folder,
                 entry->d_name);
        if (clear && strncmp(entry->d_name, ".step-", 6) == 0)
            rc = dray__remove_tree(path, error);
        if (rc || strlen(entry->d_name) >= sizeof one.name ||
            !parse_step(entry->d_name, &one.version, &one.again) || stat(path, &st) ||
            !S_ISDIR(st.st_mode))
            continue;
        one.made = st.st_mtim;
        strcpy(one.name, entry->d_name);
        if (!DRAY__PUSH(*out, *count, capacity, one)) {
            rc = dray__nomem(error);
            break;
        }
    }
    if (!rc && errno) /* of half a list, what the rest needs would be removed */
        rc = dray__fail_errno(error, errno, "%.300s", folder);
    closedir(dir);
    if (!rc && *count)
        qsort(*out, *count, sizeof **out, by_age);
    return rc;
}

/* ---- publishing ------------------------------------------------------------------------------ */

static int point_at(const char *folder, const char *name, dray_error *error)
{
    char link[PATH_MAX], path[PATH_MAX];
    snprintf(link, sizeof link, "%s/.step-latest", folder);
    snprintf(path, sizeof path, "%s/latest", folder);
    if ((unlink(link) && errno != ENOENT) || symlink(name, link) || rename(link, path))
        return dray__fail_errno(error, errno, "%.300s", path);
    return dray__sync_folder(folder, error);
}

/* Gives a whole folder a name of its own. */
static int name_it(const dray__save *s, const kept_step *steps, size_t count, char *name,
                   size_t capacity, dray_error *error)
{
    char path[PATH_MAX];
    unsigned again = 0;
    for (size_t i = 0; i < count; i++)
        if (steps[i].version == s->options.version && steps[i].again > again)
            again = steps[i].again;
    int n = snprintf(name, capacity, "step-%06" PRIu64, s->options.version);
    if (again)
        snprintf(name + n, capacity - (size_t)n, ".%u", again + 1);
    snprintf(path, sizeof path, "%s/%.64s", s->folder, name);
    if (rename(s->partial, path))
        return dray__fail_errno(error, errno, "%.300s", path);
    return dray__sync_folder(s->folder, error);
}

/* Under another name first: nobody finds half of it. */
static int retire(const char *folder, const char *name, dray_error *error)
{
    char path[PATH_MAX], gone[PATH_MAX];
    snprintf(path, sizeof path, "%s/%.64s", folder, name);
    snprintf(gone, sizeof gone, "%s/.%.64s.gone", folder, name);
    if (rename(path, gone))
        return errno == ENOENT ? DRAY_OK : dray__fail_errno(error, errno, "%.300s", path);
    return dray__remove_tree(gone, error);
}

static int base_of(const char *folder, const char *name, char base[64], uint32_t *number,
                   dray_error *error)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%.*s/%.64s", PATH_MAX - DRAY__SAVE_ROOM, folder, name);
    return dray__overlay_base_name(path, base, number, error);
}

/* By age and number alone, the new one being the newest. */
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

/* Does a step build on another one, itself or through its bases? One that cannot be read now may;
 * one that is no checkpoint does not. */
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

/* Do the new one, or one that stays, need it? */
static bool needed(const dray__save *s, const kept_step *steps, size_t count, size_t at)
{
    bool is = strcmp(s->base, steps[at].name) == 0 ||
              (s->base[0] && builds_on(s, s->base, steps[at].name));
    for (size_t i = 0; i < count && !is; i++)
        is = stays(s, steps, count, i) && builds_on(s, steps[i].name, steps[at].name);
    return is;
}

/* Can a delta be told from it? Files of other writers carry no sums. */
static bool has_sums(const dray__save *s, const char *name)
{
    char path[PATH_MAX];
    uint64_t sum = 0;
    snprintf(path, sizeof path, "%.*s/%.64s", PATH_MAX - DRAY__SAVE_ROOM, s->folder, name);
    return dray__overlay_result_sum(path, &sum, NULL) == DRAY_OK && sum;
}

/* The newest step but the one that is replaced, unless as many deltas as may be end with it. What
 * is wrong with an earlier one stops no later one: it is whole then. */
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

/* Of its own number one that was named, and that nobody was led to: its writer died before. */
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
            rc = retire(s->folder, steps[i].name, error);
    *count = left;
    return rc;
}

int dray__save_publish(const dray__save *s, dray_error *error)
{
    kept_step *steps;
    size_t count;
    char name[64];
    int rc = list_steps(s->folder, false, &steps, &count, error);
    if (!rc)
        rc = forget_unpublished(s, steps, &count, error);
    if (!rc)
        rc = name_it(s, steps, count, name, sizeof name, error);
    dray__hook_step("save named");
    if (!rc)
        rc = point_at(s->folder, name, error);
    dray__hook_step("save published");
    /* The new one is not in the list. Of its own number the older ones go, too. */
    for (size_t i = 0; i < count && !rc; i++)
        if (!stays(s, steps, count, i) && !needed(s, steps, count, i))
            rc = retire(s->folder, steps[i].name, error);
    free(steps);
    return rc;
}

int dray__save_clear(dray__save *s, dray_error *error)
{
    kept_step *steps;
    size_t count;
    int rc = list_steps(s->folder, true, &steps, &count, error);
    if (!rc)
        choose_base(s, steps, count);
    free(steps);
    return rc;
}

int dray_checkpoint_latest(const char *directory, uint64_t *version, char **path, dray_error *error)
{
    char link[PATH_MAX], real[PATH_MAX];
    unsigned again;
    uint64_t found;
    if (!directory || !path)
        return dray__fail(error, DRAY_EINVALID, "directory and path must be given");
    if (snprintf(link, sizeof link, "%s/latest", directory) >= (int)sizeof link)
        return dray__fail(error, DRAY_EINVALID, "%.300s...: path too long", directory);
    if (!realpath(link, real))
        return errno == ENOENT ? dray__fail(error, DRAY_ENOENT, "%.300s: no checkpoint", directory)
                               : dray__fail_errno(error, errno, "%.300s", link);
    const char *name = strrchr(real, '/') + 1;
    if (!parse_step(name, &found, &again))
        return dray__fail(error, DRAY_EFORMAT, "%.300s: leads to %.100s, not to a step", link,
                          name);
    *path = strdup(real);
    if (!*path)
        return dray__nomem(error);
    if (version)
        *version = found;
    return DRAY_OK;
}
