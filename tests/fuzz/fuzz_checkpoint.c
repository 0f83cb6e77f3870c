/* Checkpoints that carry sums (weights/checkpoint/manifest.c) and deltas on them
 * (weights/checkpoint/overlay.h). The first byte: 1: the delta's base_sum is put right. Then three
 * files, of each u32 bytes of it, u32 zeros behind them, and the bytes: the base's
 * model.safetensors, the delta's delta.json and its model.safetensors. A last byte changes the
 * base's name: to the delta itself.
 *
 * What is taken is read whole: every element that a delta changes lies in its tensor. */
#include "fuzz/fuzz.h"

#include "weights/checkpoint/overlay.h"

#include <inttypes.h>
#include <sys/stat.h>

const int fuzz_rounds = 100;

enum { FILES = 3, ZEROS_MAX = 1 << 18, SUMS = 1, ROWS = 70000, FEW = 20 };

static struct world {
    char base[128], delta[128];
    char files[FILES][160];
} w;

static void make(void)
{
    snprintf(w.base, sizeof w.base, "%s", fuzz_path("base"));
    snprintf(w.delta, sizeof w.delta, "%s", fuzz_path("delta"));
    snprintf(w.files[0], sizeof *w.files, "%s/model.safetensors", w.base);
    snprintf(w.files[1], sizeof *w.files, "%s/delta.json", w.delta);
    snprintf(w.files[2], sizeof *w.files, "%s/model.safetensors", w.delta);
    MUST(mkdir(w.base, 0700) == 0 && mkdir(w.delta, 0700) == 0);
}

/* "base_sum": what the base's files say now. */
static void put_right(uint8_t *text, size_t size)
{
    static const char key[] = "\"base_sum\":\"";
    char digits[20];
    uint64_t sum;
    uint8_t *at = memmem(text, size, key, sizeof key - 1);
    if (!at || (size_t)(text + size - at) < sizeof key - 1 + 16 ||
        dray__overlay_result_sum(w.base, &sum, NULL))
        return;
    snprintf(digits, sizeof digits, "%016" PRIx64, sum);
    memcpy(at + sizeof key - 1, digits, 16);
}

static void write_files(dray__reader *r, uint8_t flags)
{
    for (int i = 0; i < FILES; i++) {
        size_t size = dray__get_u32(r), zeros = dray__get_u32(r) % ZEROS_MAX;
        size = size < r->size - r->at ? size : r->size - r->at;
        uint8_t *copy = calloc(1, size + zeros + 1);
        const void *from = dray__get_bytes(r, size);
        MUST(copy);
        if (from)
            memcpy(copy, from, size);
        if (i == 1 && flags & SUMS)
            put_right(copy, size);
        fuzz_write(w.files[i], copy, size + zeros);
        free(copy);
    }
}

typedef struct seen {
    const dray_tensor_info *tensor;
    uint64_t elements, count;
} seen;

static void see(void *user, uint64_t position, const dray__change *change)
{
    seen *s = user;
    uint8_t element[8] = {0};
    size_t size = dray_dtype_size((dray_dtype)s->tensor->dtype);
    dray__change_put(element, change, size, s->tensor->dtype);
    MUST(position < s->elements && change->step >= -127);
    s->count++;
}

/* As an engine does that holds the base. */
static void apply(const dray__overlay *overlay, const dray_tensor_info *tensor)
{
    seen s = {.tensor = tensor, .elements = 1};
    uint64_t at, bytes;
    for (uint32_t d = 0; d < tensor->ndim; d++)
        s.elements *= (uint64_t)tensor->shape[d];
    dray__overlay_way_of(overlay, tensor->name);
    const dray_region *from =
        dray__overlay_place(overlay, 0, tensor->name, 0, s.elements, &at, &bytes);
    if (!from)
        return;
    uint8_t *data = malloc(bytes);
    MUST(data && bytes <= 10 * s.elements + 10);
    MUST(pread(dray_region_fd(from), data, bytes, (off_t)at) == (ssize_t)bytes);
    int rc = dray__overlay_each(overlay, 0, tensor->name, 0, s.elements, data, see, &s, NULL);
    MUST(rc == DRAY_OK || rc == DRAY_EFORMAT);
    MUST(s.count <= s.elements && (rc == DRAY_OK || !s.count));
    free(data);
}

static void read_delta(void)
{
    dray_layout *layout;
    dray__overlay *overlay;
    uint64_t sum;
    if (dray__checkpoint_layout(w.delta, &layout, &overlay, NULL))
        return;
    if (overlay && dray__overlay_result_sum(w.base, &sum, NULL) == DRAY_OK &&
        dray__overlay_hold(overlay, sum) && dray__overlay_levels(overlay) > 0)
        for (uint32_t t = 0; t < dray_layout_tensor_count(layout); t++)
            apply(overlay, dray_layout_tensor(layout, t));
    dray__overlay_free(overlay);
    dray_layout_free(layout);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *const folders[] = {w.base, w.delta};
    dray__reader r = dray__reader_of(data, size);
    uint8_t flags = dray__get_u8(&r);
    if (!w.base[0])
        make();
    write_files(&r, flags);
    read_delta();
    for (int i = 0; i < 2; i++) {
        dray_checksums *sums = NULL;
        uint32_t compared = 0;
        if (dray_checksums_of_checkpoint(folders[i], &compared, &sums, NULL) == DRAY_OK)
            MUST(compared <= dray_checksums_count(sums));
        dray_checksums_free(sums);
    }
    return 0;
}

/* ---- what it begins with --------------------------------------------------------------------- */

static void save(const char *folder, uint64_t version)
{
    dray_layout *layout;
    dray_region *region;
    const dray_region_info info = {.kind = DRAY_REGION_HOST, .bytes = 2 * ROWS + 4 * FEW};
    const int64_t shapes[2][1] = {{ROWS}, {FEW}};
    dray_checkpoint_options options = DRAY_CHECKPOINT_OPTIONS_INIT;
    MUST(dray_layout_new(&layout, NULL) == 0);
    MUST(dray_layout_add_region(layout, &info, NULL, NULL) == 0);
    for (uint32_t t = 0; t < 2; t++) {
        const dray_block block = {.tensor = t,
                                  .offset = t ? 2 * ROWS : 0,
                                  .extent = {shapes[t][0]},
                                  .stride = {t ? 4 : 2}};
        MUST(dray_layout_add_tensor(layout, t ? "few" : "many", t ? DRAY_F32 : DRAY_BF16, 1,
                                    shapes[t], NULL, NULL) == 0);
        MUST(dray_layout_add_block(layout, &block, NULL) == 0);
    }
    MUST(dray_regions_for_layout(layout, 1, &region, NULL) == 0);
    memset(dray_region_base(region), 0, info.bytes);
    if (version > 1)
        for (uint32_t i = 0; i < ROWS; i += 3777)
            ((uint16_t *)dray_region_base(region))[i] =
                (uint16_t)(i > 65536 ? i : i / 3777 % 9 * 21); /* whole values, and codes */
    options.version = version;
    options.deltas = 2;
    MUST(dray_checkpoint_save(NULL, folder, layout, &region, &options, NULL) == 0);
    dray_region_free(region);
    dray_layout_free(layout);
}

/* What comes before the zeros at the file's end. */
static void put_file(dray__writer *out, const char *path)
{
    static uint8_t data[1 << 18];
    FILE *file = fopen(path, "rb");
    MUST(file);
    size_t all = fread(data, 1, sizeof data, file), size = all;
    fclose(file);
    while (size && !data[size - 1])
        size--;
    dray__put_u32(out, (uint32_t)size);
    dray__put_u32(out, (uint32_t)(all - size));
    dray__put_bytes(out, data, size);
}

static void rename_in(dray__writer *all, const char *from, const char *to)
{
    uint8_t *at = memmem(all->data, all->size, from, strlen(from));
    MUST(at && strlen(from) == strlen(to));
    memcpy(at, to, strlen(to));
}

void fuzz_seeds(fuzz_put put, void *user)
{
    static const char *const names[FILES] = {
        "step-000001/model.safetensors", "step-000002/delta.json", "step-000002/model.safetensors"};
    char folder[128], path[300];
    dray__writer all = {0};
    snprintf(folder, sizeof folder, "%s", fuzz_path("saved"));
    MUST(mkdir(folder, 0700) == 0);
    save(folder, 1);
    save(folder, 2);
    for (int i = 0; i < FILES; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        put_file(&all, path);
    }
    fuzz_put_kind(put, user, SUMS, &all);
    rename_in(&all, "step-000001", "base\",\"_\":\"");
    fuzz_put_kind(put, user, 0, &all);
    fuzz_put_kind(put, user, SUMS, &all);
    dray__writer_free(&all);
}
