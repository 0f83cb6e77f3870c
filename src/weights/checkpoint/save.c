/* A run's checkpoints: one folder a version, a pointer to the newest, the last N kept.
 *   DIR/step-000007/        complete; step-000007.2 if the number was published before
 *   DIR/step-000007/PART/   the parts in the options beside the model, as its files
 *   DIR/latest              a symbolic link to the newest, replaced atomically
 *   DIR/step-000009/        may be a delta on another one (overlay.h), which is kept then
 *   DIR/.step-000008.partial/   being written; in it .parts/, by which ranks exchange messages
 *   DIR/.step-000003.gone/  being removed
 * A folder gets its name when it is complete and synced, so a writer that dies leaves the earlier
 * ones unchanged, and the next writer cleans up. A folder's files are never replaced, so a reader
 * that resolved `latest` reads one version, or finds it removed.
 *
 * Several ranks meet at barriers of the coordinator between the steps. Their messages are in files,
 * so that nothing large passes through the coordinator. */
#include "weights/checkpoint/save.h"
#include "base/error.h"
#include "base/io.h"
#include "model/layout/layout.h"
#include "weights/checkpoint/overlay.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define FIRST dray__end_of(dray_checkpoint_options, timeout_ns)

enum { NAME_ROOM = 64 }; /* of parts and files */

/* ---- messages between ranks ------------------------------------------------------------------ */

static void word_path(const dray__save *s, const char *what, uint32_t rank, char *out)
{
    snprintf(out, PATH_MAX, "%.*s/.parts/%.90s-%" PRIu32, PATH_MAX - 128, s->partial, what, rank);
}

static int tell(const dray__save *s, const char *what, const void *data, size_t size,
                dray_error *error)
{
    char path[PATH_MAX];
    word_path(s, what, s->options.rank, path);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    int rc = fd < 0 || dray__write_all(fd, data, size)
                 ? dray__fail_errno(error, errno, "%.300s", path)
                 : DRAY_OK;
    if (fd >= 0 && close(fd) && !rc)
        rc = dray__fail_errno(error, errno, "%.300s", path);
    return rc;
}

/* Reserves a file in which this rank can report an error, so that it can report even a full disk.
 * For the report the file gets the name that other ranks look for. Where the file system cannot
 * reserve space, the report may be an empty file. */
static int keep_room(const dray__save *s, dray_error *error)
{
    char path[PATH_MAX];
    word_path(s, "room", s->options.rank, path);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    bool full =
        fd >= 0 && fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, DRAY_ERROR_MESSAGE_MAX) && errno == ENOSPC;
    int rc = fd < 0 || full ? dray__fail_errno(error, errno, "%.300s", path) : DRAY_OK;
    if (fd >= 0)
        close(fd);
    return rc;
}

static void tell_failure(const dray__save *s, const char *failed, const char *why)
{
    char room[PATH_MAX], path[PATH_MAX];
    word_path(s, "room", s->options.rank, room);
    word_path(s, failed, s->options.rank, path);
    int fd = open(room, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || dray__write_all(fd, why, strlen(why)) || rename(room, path))
        tell(s, failed, why, strlen(why), NULL);
    if (fd >= 0)
        close(fd);
}

static int hear(const dray__save *s, const char *what, uint32_t rank, void **out, size_t *size,
                dray_error *error)
{
    char path[PATH_MAX];
    struct stat st;
    word_path(s, what, rank, path);
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

static void parts_path(const dray__save *s, char out[PATH_MAX])
{
    snprintf(out, PATH_MAX, "%.*s/.parts", PATH_MAX - 16, s->partial);
}

/* Reads the error that another rank reported before this meeting. The name of the report has the
 * meeting's number, because a fast rank may fail again before a slow one has read its first report.
 */
static int failed_rank(const dray__save *s, const char *failed, dray_error *error)
{
    for (uint32_t rank = 0; rank < s->options.world; rank++) {
        void *text;
        size_t size;
        if (hear(s, failed, rank, &text, &size, NULL))
            continue;
        int rc =
            dray__fail(error, DRAY_ECANCELED, "rank %" PRIu32 " could not write its part: %.*s",
                       rank, size ? (int)(size < 400 ? size : 400) : 80,
                       size ? (const char *)text : "nor could it write down why");
        free(text);
        return rc;
    }
    return DRAY_OK;
}

/* Waits for all ranks. Fails at once when a rank of the last meeting has died since. */
static int wait_for_all(dray__save *s, dray_error *error)
{
    char name[200];
    snprintf(name, sizeof name, "%.120s/%" PRIu64 "/%" PRIu32,
             s->options.name ? s->options.name : "checkpoint", s->options.version, s->meetings++);
    return dray__meet(s->context, name, s->options.world,
                      s->options.timeout_ns ? s->options.timeout_ns : DRAY_WAIT_DEFAULT, &s->party,
                      error);
}

/* At the first meeting, checks that rank 0 has made the folder. If it could not, it had no place to
 * report that, and meets the others once more. If it does not come, it had begun, and has cleaned
 * up because another rank did not come. */
static int find_begun(dray__save *s, dray_error *error)
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

/* Waits for all ranks. A rank that failed (status) comes, too, and reports its error. Then all
 * ranks end here, and meet once more, so that no rank removes files that another has not read. */
static int meet(dray__save *s, int status, dray_error *error)
{
    dray_error why = {0};
    char failed[32];
    if (s->options.world == 1)
        return status;
    snprintf(failed, sizeof failed, "failed-%" PRIu32, s->meetings);
    bool tells = s->options.rank || s->lock >= 0;
    if (status && tells)
        tell_failure(s, failed, error ? error->message : "?");
    int rc = wait_for_all(s, &why);
    dray__hook_step("save met");
    if (!rc && (status || (rc = failed_rank(s, failed, &why))))
        wait_for_all(s, NULL);
    else if (!rc)
        rc = find_begun(s, &why);
    /* When a rank died, rank 0 has cleared up, which may be the cause of this rank's error. */
    if (rc == DRAY_EDEAD)
        status = DRAY_OK;
    if (!status && rc && error)
        *error = why;
    return status ? status : rc;
}

/* ---- the steps ------------------------------------------------------------------------------- */

/* Rank 0: makes a folder that no other writer has used. */
static int make_partial(dray__save *s, dray_error *error)
{
    char parts[PATH_MAX];
    s->lock = open(s->stage, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (s->lock < 0)
        return dray__fail_errno(error, errno, "%.300s", s->stage);
    if (flock(s->lock, LOCK_EX | LOCK_NB)) {
        int why = errno;
        close(s->lock);
        s->lock = -1; /* the files in it belong to another writer */
        return why == EWOULDBLOCK
                   ? dray__fail(error, DRAY_EBUSY,
                                "%.300s: another process writes a checkpoint there", s->folder)
                   : dray__fail_errno(error, why, "%.300s", s->folder);
    }
    int rc = dray__save_clear(s, error);
    parts_path(s, parts);
    if (!rc && (mkdir(s->partial, 0777) || mkdir(parts, 0777)))
        rc = dray__fail_errno(error, errno, "%.300s", s->partial);
    return rc ? rc : keep_room(s, error);
}

/* Returns the name of a part's messages. */
static const char *word(const char *what, const dray__save_part *part, char out[96])
{
    snprintf(out, 96, "%s%s%s", what, part->name[0] ? "-" : "", part->name);
    return out;
}

static int tell_layout(const dray__save *s, const dray__save_part *part, dray_error *error)
{
    void *data;
    size_t size;
    char what[96];
    int rc = dray_layout_pack(part->layout, &data, &size, error);
    if (rc)
        return rc;
    rc = tell(s, word("layout", part, what), data, size, error);
    free(data);
    return rc;
}

static int tell_layouts(const dray__save *s, dray_error *error)
{
    int rc = s->options.rank ? keep_room(s, error) : DRAY_OK; /* rank 0 made the folder with it */
    for (uint32_t i = 0; i < s->part_count && !rc; i++)
        rc = tell_layout(s, &s->parts[i], error);
    return rc;
}

static int hear_layout(const dray__save *s, const char *what, uint32_t rank, dray_layout **out,
                       dray_error *error)
{
    void *data;
    size_t size;
    int rc = hear(s, what, rank, &data, &size, error);
    if (rc)
        return rc;
    rc = dray_layout_unpack(data, size, out, error);
    free(data);
    return rc;
}

static int hear_layouts(const dray__save *s, dray__save_part *part, dray_error *error)
{
    char what[96];
    int rc = DRAY_OK;
    part->layouts = calloc((size_t)s->options.world + 1, sizeof(dray_layout *));
    if (!part->layouts)
        return dray__nomem(error);
    for (uint32_t rank = 0; rank < s->options.world && !rc; rank++)
        rc = hear_layout(s, word("layout", part, what), rank, &part->layouts[rank], error);
    return rc;
}

/* Adds a rank's tensors to those of the checkpoint. */
static int merge(dray_layout *all, const dray_layout *layout, uint32_t rank, dray_error *error)
{
    for (uint32_t t = 0; t < dray_layout_tensor_count(layout); t++) {
        const dray_tensor_info *info = dray_layout_tensor(layout, t);
        uint32_t index;
        int rc = DRAY_OK;
        if (info->alias_of >= 0 || dray__layout_name_only(layout, t))
            continue;
        if (dray_layout_find(all, info->name, &index, NULL))
            rc = dray_layout_add_tensor(all, info->name, (dray_dtype)info->dtype, info->ndim,
                                        info->shape, &index, error);
        else if (!dray__tensor_like(info, dray_layout_tensor(all, index)))
            rc = dray__fail(error, DRAY_ESHAPE,
                            "tensor %.200s: rank %" PRIu32 " has another shape or dtype than an "
                            "earlier one",
                            info->name, rank);
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

/* Gives the folder where the part is written whole. If the model is saved as a delta, that is a
 * temporary one. */
static void whole_path(const dray__save *s, const dray__save_part *part, char out[PATH_MAX])
{
    const char *name = part->name[0] ? part->name : s->base[0] ? ".whole" : "";
    snprintf(out, PATH_MAX, "%.*s%s%s", PATH_MAX - NAME_ROOM - 1, s->partial, name[0] ? "/" : "",
             name);
}

/* Rank 0: lays out the files for the tensors of all ranks together. */
static int lay_out(const dray__save *s, dray__save_part *part, dray_error *error)
{
    dray_layout *all;
    void *data = NULL;
    size_t size;
    char whole[PATH_MAX], what[96];
    whole_path(s, part, whole);
    int rc = dray_layout_new(&all, error);
    if (rc)
        return rc;
    for (uint32_t rank = 0; rank < s->options.world && !rc; rank++)
        rc = merge(all, part->layouts[rank], rank, error);
    if (!rc)
        rc = dray__checkpoint_begin(whole, all, &part->files, error);
    dray_layout_free(all);
    if (!rc)
        rc = dray_layout_pack(part->files, &data, &size, error);
    if (!rc)
        rc = tell(s, word("files", part, what), data, size, error);
    free(data);
    return rc;
}

/* All ranks send their layouts, and rank 0 lays out the files. */
static int arrange(const dray__save *s, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < s->part_count && !rc; i++) {
        rc = hear_layouts(s, &s->parts[i], error);
        if (!rc && s->options.rank == 0)
            rc = lay_out(s, &s->parts[i], error);
    }
    return rc;
}

static int plan_it(const dray__save *s, dray__save_part *part, dray_error *error)
{
    char(*names)[32] = calloc(s->options.world, sizeof *names);
    dray_plan_member *sources = calloc(s->options.world, sizeof *sources);
    dray_plan_member files = {.layout = part->files, .host = 1, .process = 1};
    int rc = names && sources ? DRAY_OK : dray__nomem(error);
    for (uint32_t rank = 0; rank < s->options.world && !rc; rank++) {
        snprintf(names[rank], sizeof names[rank], "rank %" PRIu32, rank);
        sources[rank] = (dray_plan_member){
            .layout = part->layouts[rank], .name = names[rank], .host = 1, .process = 2 + rank};
    }
    if (!rc)
        rc = dray_plan_new(sources, s->options.world, &files, NULL, &part->plan, error);
    free(names);
    free(sources);
    return rc;
}

static int deposit(const dray__save *s, dray__save_part *part, dray_error *error)
{
    int rc;
    dray_region **opened = dray__files_open(part->files, 1, &rc, error);
    if (!rc)
        rc = dray__deposit(part->plan, s->options.rank, part->regions, part->files, opened,
                           &part->sums, error);
    if (!rc)
        rc = dray__files_sync(opened, part->files, error);
    dray__files_close(opened, part->files);
    return rc;
}

/* Writes this rank's bytes to the files, and sends their sums. */
static int write_own(const dray__save *s, dray__save_part *part, dray_error *error)
{
    char what[96];
    int rc =
        part->files ? DRAY_OK : hear_layout(s, word("files", part, what), 0, &part->files, error);
    if (!rc)
        rc = plan_it(s, part, error);
    if (!rc)
        rc = deposit(s, part, error);
    if (rc)
        return rc;
    dray__writer w = {0};
    dray__sums_put(&w, &part->sums);
    rc = w.failed ? dray__nomem(error) : tell(s, word("sums", part, what), w.data, w.size, error);
    dray__writer_free(&w);
    return rc;
}

static int write_all(const dray__save *s, dray_error *error)
{
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < s->part_count && !rc; i++)
        rc = write_own(s, &s->parts[i], error);
    return rc;
}

static int gather_sums(const dray__save *s, dray__save_part *part, dray_error *error)
{
    char what[96];
    for (uint32_t rank = 1; rank < s->options.world; rank++) {
        void *data;
        size_t size;
        int rc = hear(s, word("sums", part, what), rank, &data, &size, error);
        if (rc)
            return rc;
        dray__reader r = dray__reader_of(data, size);
        rc = dray__sums_get(&r, &part->sums, NULL)
                 ? dray__reader_finish(&r, "sums of a rank", error)
                 : dray__nomem(error);
        free(data);
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

static int finish_whole(const dray__save *s, const dray__save_part *part, dray_error *error)
{
    char whole[PATH_MAX];
    whole_path(s, part, whole);
    int rc = dray__values_set(part->files, &part->sums, error);
    return rc ? rc : dray_safetensors_finish(whole, part->files, error);
}

/* Returns the local folder that keeps the newest version of a bucket whole. The next delta is
 * computed against it, so that the version in the bucket need not be fetched. */
static const char *held_path(const dray__save *s, char out[PATH_MAX])
{
    snprintf(out, PATH_MAX, "%.*s/held", PATH_MAX - 16, s->stage);
    return s->store == &dray__store_files ? NULL : out;
}

static int finish_delta(const dray__save *s, const dray__save_part *part, dray_error *error)
{
    char whole[PATH_MAX], base[PATH_MAX], held[PATH_MAX];
    whole_path(s, part, whole);
    snprintf(base, sizeof base, "%s/%.63s", s->folder, s->base);
    int rc;
    dray_region **opened = dray__files_open(part->files, 0, &rc, error);
    if (!rc)
        rc = dray__overlay_write(s->partial, base, held_path(s, held), s->number, part->files,
                                 opened, &part->sums, error);
    dray__files_close(opened, part->files);
    if (rc)
        return rc;
    return s->store == &dray__store_files ? dray__remove_tree(whole, error)
                                          : finish_whole(s, part, error);
}

/* After a version was uploaded to a bucket, keeps or removes its local files. */
static int hold(const dray__save *s, dray_error *error)
{
    char held[PATH_MAX], whole[PATH_MAX];
    if (!held_path(s, held))
        return DRAY_OK;
    int rc = dray__remove_tree(held, error);
    whole_path(s, s->parts, whole);
    if (!rc && s->options.deltas && rename(whole, held))
        rc = dray__fail_errno(error, errno, "%.300s", held);
    return rc ? rc : dray__remove_tree(s->partial, error);
}

static int finish_part(const dray__save *s, dray__save_part *part, dray_error *error)
{
    int rc = gather_sums(s, part, error);
    if (rc)
        return rc;
    return part == s->parts && s->base[0] ? finish_delta(s, part, error)
                                          : finish_whole(s, part, error);
}

static int write_files(const dray__save *s, dray_error *error)
{
    const char *config = s->options.config_json;
    int rc = config
                 ? dray__checkpoint_file(s->partial, "config.json", config, strlen(config), error)
                 : DRAY_OK;
    for (uint32_t i = 0; i < s->options.file_count && !rc; i++) {
        const dray_checkpoint_file *file = &s->options.files[i];
        rc = dray__checkpoint_file(s->partial, file->name, file->data, file->bytes, error);
    }
    return rc;
}

/* Rank 0: completes the checkpoint when all ranks have written. */
static int finish(dray__save *s, dray_error *error)
{
    char parts[PATH_MAX];
    int rc = write_files(s, error);
    for (uint32_t i = 0; i < s->part_count && !rc; i++)
        rc = finish_part(s, &s->parts[i], error);
    dray__hook_step("save finished");
    parts_path(s, parts);
    if (!rc)
        rc = dray__remove_tree(parts, error);
    if (!rc)
        rc = dray__sync_folder(s->partial, error);
    if (!rc)
        rc = dray__save_publish(s, error);
    return rc ? rc : hold(s, error);
}

static int run(dray__save *s, dray_error *error)
{
    bool first = s->options.rank == 0;
    int rc = meet(s, first ? make_partial(s, error) : DRAY_OK, error);
    dray__hook_step("save begun");
    if (!rc)
        rc = meet(s, tell_layouts(s, error), error);
    if (!rc) {
        rc = arrange(s, error);
        dray__hook_step("save laid out");
        rc = meet(s, rc, error);
    }
    if (!rc)
        rc = meet(s, write_all(s, error), error);
    dray__hook_step("save written");
    return rc ? rc : meet(s, first ? finish(s, error) : DRAY_OK, error);
}

/* ---- opening --------------------------------------------------------------------------------- */

static int check_memory(const dray_layout *layout, dray_region *const *regions, dray_error *error)
{
    int rc = dray__regions_check(layout, regions, error);
    for (uint32_t i = 0; !rc && i < dray_layout_region_count(layout); i++)
        if (dray_region_get_kind(regions[i]) == DRAY_REGION_FILE)
            rc = dray__fail(error, DRAY_EUNSUPPORTED, "region %s: memory expected, not a file",
                            dray_region_name(regions[i]));
    return rc;
}

/* Checks the name of a file or a folder beside the model's files, which may not be one of them. */
static int check_name(const char *name, dray_error *error)
{
    static const char *const ours[] = {"config.json", DRAY__OVERLAY_FILE,
                                       "model.safetensors.index.json",
                                       "objects.json"}; /* of a bucket's version */
    const char *ending = name ? strrchr(name, '.') : NULL;
    bool taken = ending && strcmp(ending, ".safetensors") == 0;
    for (size_t i = 0; name && i < sizeof ours / sizeof *ours; i++)
        taken = taken || strcmp(name, ours[i]) == 0;
    if (!name || !name[0] || name[0] == '.' || strchr(name, '/') || strlen(name) >= NAME_ROOM)
        return dray__fail(
            error, DRAY_EINVALID,
            "checkpoint: '%.80s': a name of 1 to %d bytes expected, without '/', that "
            "does not begin with '.'",
            name ? name : "(none)", NAME_ROOM - 1);
    return taken ? dray__fail(error, DRAY_EINVALID,
                              "checkpoint: '%s' is the name of a file that a checkpoint has itself",
                              name)
                 : DRAY_OK;
}

static int check_names(const dray_checkpoint_options *o, dray_error *error)
{
    uint32_t count = o->part_count + o->file_count;
    const char *name[2];
    int rc = DRAY_OK;
    for (uint32_t i = 0; i < count && !rc; i++) {
        for (uint32_t k = 0; k <= i && !rc; k++) {
            const uint32_t at[2] = {i, k};
            for (int n = 0; n < 2; n++)
                name[n] = at[n] < o->part_count ? o->parts[at[n]].name
                                                : o->files[at[n] - o->part_count].name;
            if (k == i)
                rc = check_name(name[0], error);
            else if (name[0] && strcmp(name[0], name[1]) == 0)
                rc =
                    dray__fail(error, DRAY_EINVALID, "checkpoint: two have the name '%s'", name[0]);
        }
    }
    return rc;
}

static int check_options(dray__save *s, dray_error *error)
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
    if ((o->part_count && !o->parts) || (o->file_count && !o->files) ||
        (o->stay_count && !o->stay) || o->part_count > UINT32_MAX / 2 ||
        o->file_count > UINT32_MAX / 2)
        return dray__fail(error, DRAY_EINVALID,
                          "%" PRIu32 " parts, %" PRIu32 " files, %" PRIu32 " versions that stay: "
                          "each list must be given",
                          o->part_count, o->file_count, o->stay_count);
    return check_names(o, error);
}

static int find_folder(dray__save *s, const char *directory, dray_error *error)
{
    char stage[PATH_MAX], real[PATH_MAX];
    s->store = dray__store_of(directory);
    int rc = s->store->stage(directory, stage, error);
    if (!rc)
        rc = s->store->resolve(directory, real, error);
    if (rc)
        return rc;
    if (strlen(real) >= sizeof s->folder || strlen(stage) >= sizeof s->stage)
        return dray__fail(error, DRAY_EINVALID, "%.300s...: path too long", directory);
    strcpy(s->folder, real);
    strcpy(s->stage, stage);
    snprintf(s->partial, sizeof s->partial, "%s/.step-%06" PRIu64 ".partial", s->stage,
             s->options.version);
    return DRAY_OK;
}

static int open_parts(dray__save *s, const dray_layout *layout, dray_region *const *regions,
                      dray_error *error)
{
    int rc = DRAY_OK;
    s->parts = calloc((size_t)s->options.part_count + 1, sizeof *s->parts);
    if (!s->parts)
        return dray__nomem(error);
    s->part_count = s->options.part_count + 1;
    s->parts[0] = (dray__save_part){.name = "", .layout = layout, .regions = regions};
    for (uint32_t i = 1; i < s->part_count; i++) {
        const dray_checkpoint_part *given = &s->options.parts[i - 1];
        s->parts[i] = (dray__save_part){
            .name = given->name, .layout = given->layout, .regions = given->regions};
    }
    for (uint32_t i = 0; i < s->part_count && !rc; i++)
        rc = s->parts[i].layout
                 ? check_memory(s->parts[i].layout, s->parts[i].regions, error)
                 : dray__fail(error, DRAY_EINVALID, "checkpoint: part '%s' has no layout",
                              s->parts[i].name);
    return rc;
}

static void end(dray__save *s)
{
    for (uint32_t i = 0; s->parts && i < s->part_count; i++) {
        dray__save_part *part = &s->parts[i];
        for (uint32_t rank = 0; part->layouts && rank < s->options.world; rank++)
            dray_layout_free(part->layouts[rank]);
        free(part->layouts);
        dray_layout_free(part->files);
        dray_plan_free(part->plan);
        dray__sums_free(&part->sums);
    }
    free(s->parts);
    free(s->party.members);
    if (s->lock >= 0) {
        flock(s->lock, LOCK_UN); /* a process forked meanwhile has the descriptor, too */
        close(s->lock);
    }
}

int dray_checkpoint_save(dray_context *context, const char *directory, const dray_layout *layout,
                         dray_region *const *regions, const dray_checkpoint_options *given,
                         dray_error *error)
{
    if (!directory || !layout || !given)
        return dray__fail(error, DRAY_EINVALID, "directory, layout and options must be given");
    dray__save s = {.context = context, .lock = -1};
    s.options = (dray_checkpoint_options)DRAY_CHECKPOINT_OPTIONS_INIT;
    int rc = dray__options_read(&s.options, sizeof s.options, FIRST, given,
                                "dray_checkpoint_options", error);
    if (!rc)
        rc = check_options(&s, error);
    if (!rc)
        rc = open_parts(&s, layout, regions, error);
    if (!rc)
        rc = find_folder(&s, directory, error);
    if (!rc) {
        rc = run(&s, error);
        if (rc && s.lock >= 0)
            dray__remove_tree(s.partial, NULL);
    }
    end(&s);
    return rc;
}
