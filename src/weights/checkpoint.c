/* Whole checkpoints: a plan between memory and files, carried out in this process. */
#include "base/error.h"
#include "base/io.h"
#include "mover/mover.h"
#include "weights/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void free_regions(dray_region **regions, const dray_layout *layout)
{
    for (uint32_t i = 0; regions && i < dray_layout_region_count(layout); i++)
        dray_region_free(regions[i]);
    free(regions);
}

static dray_region **open_regions(const dray_layout *layout, int writable, dray_error *error,
                                  int *rc)
{
    dray_region **regions =
        calloc((size_t)dray_layout_region_count(layout) + 1, sizeof(dray_region *));
    *rc = regions ? dray_regions_for_layout(layout, writable, regions, error) : dray__nomem(error);
    if (*rc == DRAY_OK)
        return regions;
    free(regions);
    return NULL;
}

/* Carries out the whole plan of one source into `layout`, run by run of copies between the same two
 * regions. */
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

/* Under another name first, so that a reader sees the old file or the new one. */
static int write_config(const char *directory, const char *text, dray_error *error)
{
    char *path = NULL, *partial = NULL;
    if (asprintf(&path, "%s/config.json", directory) < 0 ||
        asprintf(&partial, "%s/config.json.partial", directory) < 0) {
        free(path);
        return dray__nomem(error);
    }
    int fd = open(partial, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    int failed = fd < 0 || dray__write_all(fd, text, strlen(text)) < 0 || fsync(fd) < 0;
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

/* Lays out the files. What they say of their tensors is summed from memory before anything moves.
 */
static int begin(const char *directory, const dray_layout *layout, dray_region *const *regions,
                 dray_layout **files, dray_error *error)
{
    dray_checksums *sums;
    int rc = dray_checksums_compute(layout, regions, &sums, error);
    if (rc)
        return rc;
    char **values = dray__values_of(layout, &sums->sums);
    dray_safetensors_options options = DRAY_SAFETENSORS_OPTIONS_INIT;
    options.values_key = DRAY__SUMS_KEY;
    options.tensor_values = (const char *const *)values;
    rc = values ? dray_safetensors_begin(directory, layout, &options, files, error)
                : dray__nomem(error);
    dray__values_free(values, layout);
    dray_checksums_free(sums);
    return rc;
}

int dray_checkpoint_write(const char *directory, const dray_layout *layout,
                          dray_region *const *regions, const char *config_json, dray_error *error)
{
    if (!directory || !layout)
        return dray__fail(error, DRAY_EINVALID, "directory and layout must be given");
    dray_layout *files;
    int rc = begin(directory, layout, regions, &files, error);
    if (rc)
        return rc;
    dray_region **opened = open_regions(files, 1, error, &rc);
    if (rc == DRAY_OK)
        rc = dray__copy_all(layout, regions, "the layout", files, opened, error);
    free_regions(opened, files);
    if (rc == DRAY_OK && config_json)
        rc = write_config(directory, config_json, error);
    if (rc == DRAY_OK)
        rc = dray_safetensors_finish(directory, files, error);
    if (rc)
        remove_partial(files);
    dray_layout_free(files);
    return rc;
}

int dray_checkpoint_read(const char *directory, const dray_layout *layout,
                         dray_region *const *regions, dray_error *error)
{
    if (!directory || !layout)
        return dray__fail(error, DRAY_EINVALID, "directory and layout must be given");
    int rc = dray__regions_check(layout, regions, error);
    dray_layout *files;
    if (rc == DRAY_OK)
        rc = dray_layout_safetensors(directory, &files, error);
    if (rc)
        return rc;
    dray_region **opened = open_regions(files, 0, error, &rc);
    if (rc == DRAY_OK)
        rc = dray__copy_all(files, opened, directory, layout, regions, error);
    free_regions(opened, files);
    dray_layout_free(files);
    return rc;
}
