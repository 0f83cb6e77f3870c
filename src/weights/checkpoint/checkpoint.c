/* Whole checkpoints: a plan between memory and files, carried out in this process. */
#include "base/clock.h"
#include "base/error.h"
#include "base/io.h"
#include "mover/mover.h"
#include "weights/checkpoint/deposit.h"
#include "weights/checkpoint/overlay.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Carries out the plan of one source into `layout`. Copies between the same two regions are moved
 * together. */
static int move_plan(const dray_plan *plan, const dray_layout *layout, dray_region *const *sources,
                     dray_region *const *destinations, dray_error *error)
{
    const dray_copy *copies = dray_plan_copies(plan);
    uint64_t count = dray_plan_count(plan);
    dray__move_options options = {.layout = layout};
    for (uint64_t from = 0, to; from < count; from = to) {
        for (to = from + 1; to < count && copies[to].source_region == copies[from].source_region &&
                            copies[to].destination_region == copies[from].destination_region;
             to++)
            ;
        int rc = dray__move_all(sources[copies[from].source_region],
                                destinations[copies[from].destination_region], copies + from,
                                to - from, &options, error);
        if (rc)
            return rc;
    }
    return DRAY_OK;
}

int dray__copy_all(const dray_layout *from, dray_region *const *sources, const char *name,
                   const dray_layout *to, dray_region *const *destinations, dray_error *error)
{
    dray_plan_member source = {.layout = from, .name = name, .host = 1, .process = 1};
    dray_plan_member destination = {.layout = to, .host = 1, .process = 1};
    dray_plan *plan;
    int rc = dray_plan_new(&source, 1, &destination, NULL, &plan, error);
    if (rc == DRAY_OK) {
        rc = move_plan(plan, to, sources, destinations, error);
        dray_plan_free(plan);
    }
    return rc;
}

/* Writes the file under another name first, so that a reader sees the old file or the new one. */
int dray__checkpoint_file(const char *directory, const char *name, const void *data, size_t size,
                          dray_error *error)
{
    char *path = NULL, *partial = NULL;
    if (asprintf(&path, "%s/%s", directory, name) < 0 ||
        asprintf(&partial, "%s/%s.partial", directory, name) < 0) {
        free(path);
        return dray__nomem(error);
    }
    int fd = open(partial, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    int failed = fd < 0 || dray__write_all(fd, data, size) < 0 || fsync(fd) < 0;
    int errnum = errno;
    if (fd >= 0 && close(fd) && !failed) {
        failed = 1;
        errnum = errno;
    }
    if (!failed && rename(partial, path)) {
        failed = 1;
        errnum = errno;
    }
    int rc = failed ? dray__fail_errno(error, errnum, "writing %s", path) : DRAY_OK;
    if (failed)
        unlink(partial);
    free(path);
    free(partial);
    return rc;
}

static void remove_partial(const dray_layout *files)
{
    for (uint32_t i = 0; i < dray_layout_region_count(files); i++)
        unlink(dray_layout_region(files, i)->name);
}

/* Are all regions memory, and none a file? */
static bool all_memory(const dray_layout *layout, dray_region *const *regions)
{
    for (uint32_t i = 0; i < dray_layout_region_count(layout); i++)
        if (dray_region_get_kind(regions[i]) == DRAY_REGION_FILE)
            return false;
    return true;
}

/* Lays out the files, with room for the sums of their tensors. */
int dray__checkpoint_begin(const char *directory, const dray_layout *layout, dray_layout **files,
                           dray_error *error)
{
    char **values = dray__values_later(layout);
    dray_safetensors_options options = DRAY_SAFETENSORS_OPTIONS_INIT;
    options.values_key = DRAY__SUMS_KEY;
    options.tensor_values = (const char *const *)values;
    int rc = values ? dray_safetensors_begin(directory, layout, &options, files, error)
                    : dray__nomem(error);
    dray__values_free(values, layout);
    return rc;
}

/* Fills the files, and writes the sums of their content. */
static int fill(const dray_layout *layout, dray_region *const *regions, const dray_layout *files,
                dray_region *const *opened, dray_error *error)
{
    dray_plan_member source = {.layout = layout, .name = "the layout", .host = 1, .process = 1};
    dray_plan_member destination = {.layout = files, .host = 1, .process = 1};
    dray_plan *plan;
    dray__sums sums = {0};
    int rc = dray_plan_new(&source, 1, &destination, NULL, &plan, error);
    if (rc)
        return rc;
    if (all_memory(layout, regions)) {
        rc = dray__deposit(plan, 0, regions, files, opened, &sums, error);
    } else {
        dray_checksums *read = NULL;
        rc = move_plan(plan, files, regions, opened, error);
        if (!rc)
            rc = dray_checksums_compute(layout, regions, &read, error);
        if (!rc && !dray__sums_join(&sums, &read->sums))
            rc = dray__nomem(error);
        dray_checksums_free(read);
    }
    if (!rc)
        rc = dray__values_set(files, &sums, error);
    dray__sums_free(&sums);
    dray_plan_free(plan);
    return rc;
}

int dray_checkpoint_write(const char *directory, const dray_layout *layout,
                          dray_region *const *regions, const char *config_json, dray_error *error)
{
    if (!directory || !layout)
        return dray__fail(error, DRAY_EINVALID, "directory and layout must be given");
    dray_layout *files;
    int rc = dray__regions_check(layout, regions, error);
    if (!rc)
        rc = dray__checkpoint_begin(directory, layout, &files, error);
    if (rc)
        return rc;
    dray_region **opened = dray__files_open(files, 1, &rc, error);
    if (rc == DRAY_OK)
        rc = fill(layout, regions, files, opened, error);
    dray__files_close(opened, files);
    if (rc == DRAY_OK && config_json)
        rc = dray__checkpoint_file(directory, "config.json", config_json, strlen(config_json),
                                   error);
    if (rc == DRAY_OK)
        rc = dray_safetensors_finish(directory, files, error);
    if (rc)
        remove_partial(files);
    dray_layout_free(files);
    return rc;
}

/* Reads a checkpoint into regions that are files, without comparing sums. */
static int read_into_files(const char *directory, const dray_layout *layout,
                           dray_region *const *regions, dray_error *error)
{
    dray_layout *files;
    dray__overlay *overlay;
    int rc = dray__checkpoint_layout(directory, &files, &overlay, error);
    if (rc)
        return rc;
    dray_region **opened = dray__overlay_open(overlay, files, &rc, error);
    if (rc == DRAY_OK)
        rc = dray__copy_all(files, opened, directory, layout, regions, error);
    dray__files_close(opened, files);
    dray__overlay_free(overlay);
    dray_layout_free(files);
    return rc;
}

/* Checks that tensors that were read as a whole have the sums in the files. */
static int compare_whole(const dray__sources *sources, const dray__transfer *transfer,
                         dray_error *error)
{
    dray__sums found = {0}, said = {0};
    int rc = dray__transfer_sums(transfer, &found, error);
    const dray__named_sum *wanted = dray__sums_items(&sources->stored);
    if (!rc && sources->stored.count && !wanted)
        rc = dray__nomem(error);
    for (uint32_t i = 0; i < sources->stored.count && !rc; i++) {
        const dray__named_sum *want = &wanted[i];
        const dray__named_sum *got = dray__sums_find(&found, want->name);
        if (got && got->elements == want->elements &&
            !dray__sums_add(&said, want->name, want->dtype, want->elements, want->sum))
            rc = dray__nomem(error);
    }
    if (!rc)
        rc = dray__stored_compare(sources->sources[0].layout, &said, &found, error);
    dray__sums_free(&found);
    dray__sums_free(&said);
    return rc;
}

static int transfer_all(dray__transfer *transfer, dray_error *error)
{
    int rc;
    while ((rc = dray__transfer_step(transfer, DRAY__SECOND, error)) == DRAY_EAGAIN) {
        struct pollfd p = {.fd = dray__transfer_fd(transfer), .events = POLLIN};
        if (dray__transfer_waits(transfer))
            poll(&p, 1, 1000);
    }
    return rc ? rc : dray__transfer_check(transfer, error);
}

int dray_checkpoint_read(const char *directory, const dray_layout *layout,
                         dray_region *const *regions, dray_error *error)
{
    if (!directory || !layout)
        return dray__fail(error, DRAY_EINVALID, "directory and layout must be given");
    int rc = dray__regions_check(layout, regions, error);
    if (rc || !all_memory(layout, regions))
        return rc ? rc : read_into_files(directory, layout, regions, error);
    dray__destination destination = {
        .layout = (dray_layout *)layout, .regions = (dray_region **)regions, .host = 1, .world = 1};
    dray__transfer_options options = {.bucket_bytes = DRAY__BUCKET_DEFAULT, .verify = true};
    dray__sources *sources;
    dray__transfer *transfer = NULL;
    rc = dray__sources_disk(directory, 0, &destination, &sources, error);
    if (rc)
        return rc;
    rc = dray__sources_plan(sources, NULL, 0, &destination, error);
    if (!rc)
        rc = dray__sources_disk_sums(sources, error);
    if (!rc)
        rc = dray__sources_import(sources, NULL, 0, error);
    if (!rc)
        rc = dray__transfer_open(sources, &destination, &options, &transfer, error);
    if (!rc)
        rc = transfer_all(transfer, error);
    if (!rc)
        rc = compare_whole(sources, transfer, error);
    dray__transfer_close(transfer);
    dray__sources_free(sources);
    return rc;
}
