/* A run's checkpoints: one folder a version, a pointer to the newest, the last N kept.
 *
 *   DIR/step-000007/        whole; step-000007.2 when the number was written before
 *   DIR/latest              a symbolic link to the newest, replaced atomically
 *   DIR/step-000009/        may be what changed since another one (overlay.h), which stays then
 *   DIR/.step-000008.partial/   being written; in it .parts/, by which ranks tell each other
 *   DIR/.step-000003.gone/  on its way out
 *
 * A folder gets its name when it is whole and on the disk, so a writer that dies leaves what was
 * there; the next one clears up. No folder's files are ever replaced, so a reader that resolved
 * `latest` reads one version, or finds it gone.
 *
 * Several ranks meet at barriers of the coordinator between the steps; what they have to tell lies
 * in files, so that nothing large passes through it. */
#include "base/error.h"
#include "base/io.h"
#include "control/channel.h"
#include "weights/deposit.h"
#include "weights/overlay.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define FIRST dray__end_of(dray_checkpoint_options, timeout_ns)

enum { PATH_ROOM = 96 }; /* what this file appends to the caller's folder */

typedef struct save {
    dray_context *context;
    const dray_layout *layout;
    dray_region *const *regions;
    dray_checkpoint_options options;
    char folder[PATH_MAX - PATH_ROOM]; /* DIR */
    char partial[PATH_MAX];
    uint32_t number;       /* which delta after it */
    char base[64];         /* rank 0's: the step that this one is a delta on; "": none */
    int lock;              /* rank 0's, on DIR */
    uint32_t meetings;     /* so far */
    dray__party_of party;  /* who came */
    dray_layout **layouts; /* of all ranks */
    dray_layout *files;
    dray_plan *plan;
    dray__sums sums;
} save;

/* ---- folders --------------------------------------------------------------------------------- */

static int remove_entry(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)st, (void)flag, (void)ftw;
    return remove(path) && errno != ENOENT ? -1 : 0;
}

static int remove_tree(const char *path, dray_error *error)
{
    if (nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS) && errno != ENOENT)
        return dray__fail_errno(error, errno, "removing %.300s", path);
    return DRAY_OK;
}

static int sync_folder(const char *path, dray_error *error)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc = fd < 0 || fsync(fd) ? dray__fail_errno(error, errno, "%.300s: fsync", path) : DRAY_OK;
    if (fd >= 0)
        close(fd);
    return rc;
}

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

typedef struct step {
    struct timespec made;
    uint64_t version;
    unsigned again;
    char name[64];
} step;

static int by_age(const void *a, const void *b)
{
    const step *x = a, *y = b;
    if (x->made.tv_sec != y->made.tv_sec)
        return x->made.tv_sec < y->made.tv_sec ? -1 : 1;
    if (x->made.tv_nsec != y->made.tv_nsec)
        return x->made.tv_nsec < y->made.tv_nsec ? -1 : 1;
    return x->version < y->version ? -1 : x->version > y->version;
}

/* Whole checkpoints, the oldest first. With `clear`, what writers that died left is removed. */
static int list_steps(const char *folder, bool clear, step **out, size_t *count, dray_error *error)
{
    char path[PATH_MAX];
    size_t capacity = 0;
    int rc = DRAY_OK;
    DIR *dir = opendir(folder);
    *out = NULL;
    *count = 0;
    if (!dir)
        return dray__fail_errno(error, errno, "%.300s", folder);
    errno = 0;
    for (struct dirent *entry; !rc && (entry = readdir(dir)); errno = 0) {
        step one;
        struct stat st;
        snprintf(path, sizeof path, "%.*s/%.80s", PATH_MAX - PATH_ROOM, folder, entry->d_name);
        if (clear && strncmp(entry->d_name, ".step-", 6) == 0)
            rc = remove_tree(path, error);
        if (rc || strlen(entry->d_name) >= sizeof one.name ||
            !parse_step(entry->d_name, &one.version, &one.again) || stat(path, &st) ||
            !S_ISDIR(st.st_mode))
            continue;
        one.made = st.st_mtim;
        strcpy(one.name, entry->d_name);
        if (*count == capacity) {
            capacity = capacity ? 2 * capacity : 16;
            step *more = realloc(*out, capacity * sizeof *more);
            if (!more) {
                rc = dray__nomem(error);
                break;
            }
            *out = more;
        }
        (*out)[(*count)++] = one;
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
    return sync_folder(folder, error);
}

/* Gives a whole folder a name of its own. */
static int name_it(const save *s, const step *steps, size_t count, char *name, size_t capacity,
                   dray_error *error)
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
    return sync_folder(s->folder, error);
}

/* Under another name first: nobody finds half of it. */
static int retire(const char *folder, const char *name, dray_error *error)
{
    char path[PATH_MAX], gone[PATH_MAX];
    snprintf(path, sizeof path, "%s/%.64s", folder, name);
    snprintf(gone, sizeof gone, "%s/.%.64s.gone", folder, name);
    if (rename(path, gone))
        return errno == ENOENT ? DRAY_OK : dray__fail_errno(error, errno, "%.300s", path);
    return remove_tree(gone, error);
}

static int base_of(const char *folder, const char *name, char base[64], uint32_t *number,
                   dray_error *error)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%.*s/%.64s", PATH_MAX - PATH_ROOM, folder, name);
    return dray__overlay_base_name(path, base, number, error);
}

/* By age and number alone, the new one being the newest. */
static bool stays(const save *s, const step *steps, size_t count, size_t i)
{
    size_t kept = 2; /* the new one, and this */
    for (size_t k = i + 1; k < count; k++)
        kept += steps[k].version != s->options.version;
    return steps[i].version != s->options.version && (!s->options.keep || kept <= s->options.keep);
}

/* Does a step build on another one, itself or through its bases? One that cannot be read now may;
 * one that is no checkpoint does not. */
static bool builds_on(const save *s, const char *name, const char *other)
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
static bool needed(const save *s, const step *steps, size_t count, size_t at)
{
    bool is = strcmp(s->base, steps[at].name) == 0 ||
              (s->base[0] && builds_on(s, s->base, steps[at].name));
    for (size_t i = 0; i < count && !is; i++)
        is = stays(s, steps, count, i) && builds_on(s, steps[i].name, steps[at].name);
    return is;
}

/* Can a delta be told from it? Files of other writers carry no sums. */
static bool has_sums(const save *s, const char *name)
{
    char path[PATH_MAX];
    uint64_t sum = 0;
    snprintf(path, sizeof path, "%.*s/%.64s", PATH_MAX - PATH_ROOM, s->folder, name);
    return dray__overlay_result_sum(path, &sum, NULL) == DRAY_OK && sum;
}

/* The newest step but the one that is replaced, unless as many deltas as may be end with it. What
 * is wrong with an earlier one stops no later one: it is whole then. */
static void choose_base(save *s, const step *steps, size_t count)
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

static int publish(const save *s, dray_error *error)
{
    step *steps;
    size_t count;
    char name[64];
    int rc = list_steps(s->folder, false, &steps, &count, error);
    if (!rc)
        rc = name_it(s, steps, count, name, sizeof name, error);
    dray__weights_step("save named");
    if (!rc)
        rc = point_at(s->folder, name, error);
    dray__weights_step("save published");
    /* The new one is not in the list. Of its own number the older ones go, too. */
    for (size_t i = 0; i < count && !rc; i++)
        if (!stays(s, steps, count, i) && !needed(s, steps, count, i))
            rc = retire(s->folder, steps[i].name, error);
    free(steps);
    return rc;
}

/* ---- what ranks tell each other -------------------------------------------------------------- */

static void part_path(const save *s, const char *what, uint32_t rank, char *out)
{
    snprintf(out, PATH_MAX, "%.*s/.parts/%s-%" PRIu32, PATH_MAX - 64, s->partial, what, rank);
}

static int write_part(const save *s, const char *what, const void *data, size_t size,
                      dray_error *error)
{
    char path[PATH_MAX];
    part_path(s, what, s->options.rank, path);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    int rc = fd < 0 || dray__write_all(fd, data, size)
                 ? dray__fail_errno(error, errno, "%.300s", path)
                 : DRAY_OK;
    if (fd >= 0 && close(fd) && !rc)
        rc = dray__fail_errno(error, errno, "%.300s", path);
    return rc;
}

static int read_part(const save *s, const char *what, uint32_t rank, void **out, size_t *size,
                     dray_error *error)
{
    char path[PATH_MAX];
    struct stat st;
    part_path(s, what, rank, path);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    void *data = NULL;
    int rc = fd < 0 || fstat(fd, &st) ? dray__fail_errno(error, errno, "%.300s", path) : DRAY_OK;
    if (!rc && !(data = malloc((size_t)st.st_size + 1)))
        rc = dray__nomem(error);
    if (!rc && dray__read_at(fd, data, (size_t)st.st_size, 0))
        rc = dray__fail_errno(error, errno, "%.300s", path);
    if (fd >= 0)
        close(fd);
    if (rc) {
        free(data);
        return rc;
    }
    *out = data;
    *size = (size_t)st.st_size;
    return DRAY_OK;
}

static void parts_path(const save *s, char out[PATH_MAX])
{
    snprintf(out, PATH_MAX, "%.*s/.parts", PATH_MAX - 16, s->partial);
}

/* Why another rank could not go on before this meeting; one that is fast may fail again before a
 * slow one has looked. */
static int failed_rank(const save *s, const char *failed, dray_error *error)
{
    for (uint32_t rank = 0; rank < s->options.world; rank++) {
        void *text;
        size_t size;
        if (read_part(s, failed, rank, &text, &size, NULL))
            continue;
        int rc =
            dray__fail(error, DRAY_ECANCELED, "rank %" PRIu32 " could not write its part: %.*s",
                       rank, (int)(size < 400 ? size : 400), (const char *)text);
        free(text);
        return rc;
    }
    return DRAY_OK;
}

/* A rank that came to the last meeting and died since then is missed at once. */
static int wait_for_all(save *s, dray_error *error)
{
    char name[200];
    snprintf(name, sizeof name, "%.120s/%" PRIu64 "/%" PRIu32,
             s->options.name ? s->options.name : "checkpoint", s->options.version, s->meetings++);
    return dray__meet(s->context, name, s->options.world,
                      s->options.timeout_ns ? s->options.timeout_ns : DRAY_WAIT_DEFAULT, &s->party,
                      error);
}

/* Rank 0 may have found no place to say that it failed in. Then it meets the others once more. If
 * it does not, it had begun, and has cleared up because another one did not come. */
static int find_begun(save *s, dray_error *error)
{
    char parts[PATH_MAX];
    parts_path(s, parts);
    if (s->meetings != 1 || access(parts, F_OK) == 0)
        return DRAY_OK;
    int rc = wait_for_all(s, error);
    return rc ? rc
              : dray__fail(error, DRAY_ECANCELED, "rank 0 could not begin: %.300s is not there",
                           parts);
}

/* Waits for all ranks. One that failed (status) comes, too, and says so: all of them end here, and
 * meet once more, so that nobody clears up what another has not read. */
static int meet(save *s, int status, dray_error *error)
{
    dray_error why = {0};
    char failed[32];
    if (s->options.world == 1)
        return status;
    snprintf(failed, sizeof failed, "failed-%" PRIu32, s->meetings);
    bool tells = s->options.rank || s->lock >= 0;
    if (status && tells)
        write_part(s, failed, error ? error->message : "?", error ? strlen(error->message) : 1,
                   NULL);
    int rc = wait_for_all(s, &why);
    dray__weights_step("save met");
    if (!rc && (status || (rc = failed_rank(s, failed, &why))))
        wait_for_all(s, NULL);
    else if (!rc)
        rc = find_begun(s, &why);
    /* Where one died, rank 0 has cleared up, which may be what this rank stumbled over. */
    if (rc == DRAY_EDEAD)
        status = DRAY_OK;
    if (!status && rc && error)
        *error = why;
    return status ? status : rc;
}

/* ---- the steps ------------------------------------------------------------------------------- */

/* Rank 0: a folder that nobody else wrote to. */
static int make_partial(save *s, dray_error *error)
{
    char parts[PATH_MAX];
    step *steps = NULL;
    size_t count;
    s->lock = open(s->folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (s->lock < 0)
        return dray__fail_errno(error, errno, "%.300s", s->folder);
    if (flock(s->lock, LOCK_EX | LOCK_NB)) {
        int why = errno;
        close(s->lock);
        s->lock = -1; /* what lies there is another's */
        return why == EWOULDBLOCK
                   ? dray__fail(error, DRAY_EBUSY,
                                "%.300s: another process writes a checkpoint there", s->folder)
                   : dray__fail_errno(error, why, "%.300s", s->folder);
    }
    int rc = list_steps(s->folder, true, &steps, &count, error);
    if (!rc)
        choose_base(s, steps, count);
    free(steps);
    parts_path(s, parts);
    if (!rc && (mkdir(s->partial, 0777) || mkdir(parts, 0777)))
        rc = dray__fail_errno(error, errno, "%.300s", s->partial);
    return rc;
}

static int tell_layout(const save *s, dray_error *error)
{
    void *data;
    size_t size;
    int rc = dray_layout_pack(s->layout, &data, &size, error);
    if (rc)
        return rc;
    rc = write_part(s, "layout", data, size, error);
    free(data);
    return rc;
}

static int read_layout(const save *s, const char *what, uint32_t rank, dray_layout **out,
                       dray_error *error)
{
    void *data;
    size_t size;
    int rc = read_part(s, what, rank, &data, &size, error);
    if (rc)
        return rc;
    rc = dray_layout_unpack(data, size, out, error);
    free(data);
    return rc;
}

static int read_layouts(save *s, dray_error *error)
{
    int rc = DRAY_OK;
    s->layouts = calloc((size_t)s->options.world + 1, sizeof(dray_layout *));
    if (!s->layouts)
        return dray__nomem(error);
    for (uint32_t rank = 0; rank < s->options.world && !rc; rank++)
        rc = read_layout(s, "layout", rank, &s->layouts[rank], error);
    return rc;
}

static bool same_shape(const dray_tensor_info *a, const dray_tensor_info *b)
{
    if (a->dtype != b->dtype || a->ndim != b->ndim)
        return false;
    return memcmp(a->shape, b->shape, a->ndim * sizeof *a->shape) == 0;
}

/* Adds a rank's tensors to those of the checkpoint. */
static int merge(dray_layout *all, const dray_layout *layout, uint32_t rank, dray_error *error)
{
    for (uint32_t t = 0; t < dray_layout_tensor_count(layout); t++) {
        const dray_tensor_info *info = dray_layout_tensor(layout, t);
        uint32_t index;
        int rc = DRAY_OK;
        if (info->alias_of >= 0)
            continue;
        if (dray_layout_find(all, info->name, &index, NULL))
            rc = dray_layout_add_tensor(all, info->name, (dray_dtype)info->dtype, info->ndim,
                                        info->shape, &index, error);
        else if (!same_shape(info, dray_layout_tensor(all, index)))
            rc = dray__fail(error, DRAY_ESHAPE,
                            "tensor %.200s: rank %" PRIu32 " has another shape or dtype than an "
                            "earlier one",
                            info->name, rank);
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

/* Where the whole version is written, of which a delta is made. */
static void whole_path(const save *s, char out[PATH_MAX])
{
    snprintf(out, PATH_MAX, "%.*s%s", PATH_MAX - 16, s->partial, s->base[0] ? "/.whole" : "");
}

/* Rank 0: lays out the files for what all ranks have together. */
static int lay_out(save *s, dray_error *error)
{
    dray_layout *all;
    void *data = NULL;
    size_t size;
    char whole[PATH_MAX];
    whole_path(s, whole);
    int rc = dray_layout_new(&all, error);
    if (rc)
        return rc;
    for (uint32_t rank = 0; rank < s->options.world && !rc; rank++)
        rc = merge(all, s->layouts[rank], rank, error);
    if (!rc)
        rc = dray__checkpoint_begin(whole, all, &s->files, error);
    dray_layout_free(all);
    if (!rc)
        rc = dray_layout_pack(s->files, &data, &size, error);
    if (!rc)
        rc = write_part(s, "files", data, size, error);
    free(data);
    return rc;
}

static int plan_it(save *s, dray_error *error)
{
    char(*names)[32] = calloc(s->options.world, sizeof *names);
    dray_plan_member *sources = calloc(s->options.world, sizeof *sources);
    dray_plan_member files = {.layout = s->files, .host = 1, .process = 1};
    int rc = names && sources ? DRAY_OK : dray__nomem(error);
    for (uint32_t rank = 0; rank < s->options.world && !rc; rank++) {
        snprintf(names[rank], sizeof names[rank], "rank %" PRIu32, rank);
        sources[rank] = (dray_plan_member){
            .layout = s->layouts[rank], .name = names[rank], .host = 1, .process = 2 + rank};
    }
    if (!rc)
        rc = dray_plan_new(sources, s->options.world, &files, NULL, &s->plan, error);
    free(names);
    free(sources);
    return rc;
}

static int sync_files(const dray_layout *files, dray_region *const *opened, dray_error *error)
{
    for (uint32_t i = 0; i < dray_layout_region_count(files); i++)
        if (fsync(dray_region_fd(opened[i])))
            return dray__fail_errno(error, errno, "%.300s: fsync", dray_region_name(opened[i]));
    return DRAY_OK;
}

/* Every rank: its own bytes, and what they add up to. */
static int write_own(save *s, dray_error *error)
{
    int rc = s->files ? DRAY_OK : read_layout(s, "files", 0, &s->files, error);
    if (!rc)
        rc = plan_it(s, error);
    if (rc)
        return rc;
    uint32_t count = dray_layout_region_count(s->files);
    dray_region **opened = calloc((size_t)count + 1, sizeof *opened);
    rc = opened ? dray_regions_for_layout(s->files, 1, opened, error) : dray__nomem(error);
    if (!rc) {
        rc = dray__deposit(s->plan, s->options.rank, s->regions, s->files, opened, &s->sums, error);
        if (!rc)
            rc = sync_files(s->files, opened, error);
        for (uint32_t i = 0; i < count; i++)
            dray_region_free(opened[i]);
    }
    free(opened);
    dray__writer w = {0};
    dray__sums_put(&w, &s->sums);
    if (!rc && w.failed)
        rc = dray__nomem(error);
    if (!rc)
        rc = write_part(s, "sums", w.data, w.size, error);
    dray__writer_free(&w);
    return rc;
}

static int gather_sums(save *s, dray_error *error)
{
    for (uint32_t rank = 1; rank < s->options.world; rank++) {
        void *data;
        size_t size;
        int rc = read_part(s, "sums", rank, &data, &size, error);
        if (rc)
            return rc;
        dray__reader r = dray__reader_of(data, size);
        rc = dray__sums_get(&r, &s->sums, NULL) ? dray__reader_finish(&r, "sums of a rank", error)
                                                : dray__nomem(error);
        free(data);
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

static int finish_whole(save *s, dray_error *error)
{
    int rc = dray__values_set(s->files, &s->sums, error);
    return rc ? rc : dray_safetensors_finish(s->partial, s->files, error);
}

static int finish_delta(save *s, dray_error *error)
{
    char whole[PATH_MAX], base[PATH_MAX];
    whole_path(s, whole);
    snprintf(base, sizeof base, "%s/%.63s", s->folder, s->base);
    uint32_t count = dray_layout_region_count(s->files);
    dray_region **opened = calloc((size_t)count + 1, sizeof *opened);
    int rc = opened ? dray_regions_for_layout(s->files, 0, opened, error) : dray__nomem(error);
    if (!rc) {
        rc = dray__overlay_write(s->partial, base, s->number, s->files, opened, &s->sums, error);
        for (uint32_t i = 0; i < count; i++)
            dray_region_free(opened[i]);
    }
    free(opened);
    return rc ? rc : remove_tree(whole, error);
}

/* Rank 0, when all have written. */
static int finish(save *s, dray_error *error)
{
    char parts[PATH_MAX];
    int rc = gather_sums(s, error);
    if (!rc && s->options.config_json)
        rc = dray__checkpoint_config(s->partial, s->options.config_json, error);
    if (!rc)
        rc = s->base[0] ? finish_delta(s, error) : finish_whole(s, error);
    dray__weights_step("save finished");
    parts_path(s, parts);
    if (!rc)
        rc = remove_tree(parts, error);
    if (!rc)
        rc = sync_folder(s->partial, error);
    return rc ? rc : publish(s, error);
}

static int run(save *s, dray_error *error)
{
    bool first = s->options.rank == 0;
    int rc = meet(s, first ? make_partial(s, error) : DRAY_OK, error);
    dray__weights_step("save begun");
    if (!rc)
        rc = meet(s, tell_layout(s, error), error);
    if (!rc) {
        rc = read_layouts(s, error);
        if (!rc && first)
            rc = lay_out(s, error);
        dray__weights_step("save laid out");
        rc = meet(s, rc, error);
    }
    if (!rc)
        rc = meet(s, write_own(s, error), error);
    dray__weights_step("save written");
    return rc ? rc : meet(s, first ? finish(s, error) : DRAY_OK, error);
}

static int check(save *s, const char *directory, dray_error *error)
{
    dray_checkpoint_options *o = &s->options;
    o->world = o->world ? o->world : 1;
    if (o->rank >= o->world || o->timeout_ns < 0 || (o->world > 1 && !s->context))
        return dray__fail(
            error, DRAY_EINVALID,
            "rank %" PRIu32 " of %" PRIu32 "%s, timeout %lld: a rank below the world, "
            "a context for more than one, and a timeout expected",
            o->rank, o->world, s->context ? "" : " without a context", (long long)o->timeout_ns);
    if (o->deltas > DRAY__OVERLAY_CHAIN)
        return dray__fail(error, DRAY_EINVALID, "deltas %" PRIu32 ": at most %d expected",
                          o->deltas, DRAY__OVERLAY_CHAIN);
    for (uint32_t i = 0; i < dray_layout_region_count(s->layout); i++)
        if (dray_region_get_kind(s->regions[i]) == DRAY_REGION_FILE)
            return dray__fail(error, DRAY_EUNSUPPORTED, "region %s: memory expected, not a file",
                              dray_region_name(s->regions[i]));
    char real[PATH_MAX];
    if (mkdir(directory, 0777) && errno != EEXIST)
        return dray__fail_errno(error, errno, "%.300s", directory);
    if (!realpath(directory, real))
        return dray__fail_errno(error, errno, "%.300s", directory);
    if (strlen(real) >= sizeof s->folder)
        return dray__fail(error, DRAY_EINVALID, "%.300s...: path too long", directory);
    strcpy(s->folder, real);
    snprintf(s->partial, sizeof s->partial, "%s/.step-%06" PRIu64 ".partial", s->folder,
             o->version);
    return DRAY_OK;
}

static void end(save *s)
{
    for (uint32_t rank = 0; s->layouts && rank < s->options.world; rank++)
        dray_layout_free(s->layouts[rank]);
    free(s->layouts);
    free(s->party.members);
    dray_layout_free(s->files);
    dray_plan_free(s->plan);
    dray__sums_free(&s->sums);
    if (s->lock >= 0)
        close(s->lock);
}

int dray_checkpoint_save(dray_context *context, const char *directory, const dray_layout *layout,
                         dray_region *const *regions, const dray_checkpoint_options *given,
                         dray_error *error)
{
    if (!directory || !layout || !given)
        return dray__fail(error, DRAY_EINVALID, "directory, layout and options must be given");
    save s = {.context = context, .layout = layout, .regions = regions, .lock = -1};
    s.options = (dray_checkpoint_options)DRAY_CHECKPOINT_OPTIONS_INIT;
    int rc = dray__options_read(&s.options, sizeof s.options, FIRST, given,
                                "dray_checkpoint_options", error);
    if (!rc)
        rc = dray__regions_check(layout, regions, error);
    if (!rc)
        rc = check(&s, directory, error);
    if (!rc) {
        rc = run(&s, error);
        if (rc && s.lock >= 0)
            remove_tree(s.partial, NULL);
    }
    end(&s);
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
