/* A checkpoint that is written as the changes since an earlier one, its base, which is in the same
 * folder and may be a delta itself.
 *
 *   step-000008/delta.json      an object with these members:
 *     version   of this format: 3 where there are codes; else 2, or 1 where the base is whole
 *     base      the name of the base's folder
 *     base_sum  16 hexadecimal digits: XXH3 over "name=sum\n" for each tensor of the base's result,
 *               in the order of names
 *     slice     65536
 *     number    1 more than the base's; 0 for a whole checkpoint; at most DRAY__OVERLAY_CHAIN
 *     tensors   each tensor of the result -> its checksum, 16 digits
 *   step-000008/model...        per tensor NAME of the result: nothing, when its bits are the
 *                               base's; NAME itself, when too much changed; else
 *     NAME.dray_delta.table     U32 [slices, 2]: entries, and bytes of their gaps; or, where the
 *                               entries' highest bit is set, of gaps and codes together
 *     NAME.dray_delta.data      U8 [n]: slice by slice gaps, then values, or codes
 *
 * A slice is 65536 elements of the flattened tensor (C order), the last one the rest. Gaps and
 * codes are as weights/delta/entries.h says. Values are little-endian, of the tensor's dtype.
 *
 * Readers see the base's files through the delta: an overlay patches each range as it is read. */
#pragma once

#include "weights/delta/entries.h"
#include "weights/internal.h"

#define DRAY__OVERLAY_FILE "delta.json"
#define DRAY__OVERLAY_TABLE ".dray_delta.table"
#define DRAY__OVERLAY_DATA ".dray_delta.data"
#define DRAY__OVERLAY_CODES ((uint32_t)1 << 31)
enum { DRAY__OVERLAY_SLICE = 1 << 16, DRAY__OVERLAY_CHAIN = 64 };

typedef struct dray__overlay dray__overlay;

/* Gives the layout of a checkpoint, or of the result of a delta. For a delta, *overlay is set, and
 * regions that are opened for the layout must be attached before they are read; else it is NULL.
 * Returns 0, DRAY_ENOENT when a base is missing, or DRAY_ECHECKSUM when it is not the base that the
 * delta was made against. */
int dray__checkpoint_layout(const char *path, dray_layout **layout, dray__overlay **overlay,
                            dray_error *error);
void dray__overlay_free(dray__overlay *overlay); /* NULL is fine */
/* The overlay that a source of a checkpoint keeps, and the function that frees it. dray__overlay_of
 * returns NULL when the checkpoint is whole. */
void dray__overlay_forget(void *overlay);
static inline dray__overlay *dray__overlay_of(const dray__source *source)
{
    return dray__kept_find(source->kept, dray__overlay_forget);
}
/* Makes reads of the region, which is number `index` of the layout, apply the delta. The region
 * borrows the overlay until it is freed. */
void dray__overlay_attach(dray__overlay *overlay, uint32_t index, dray_region *region);
/* As dray__files_open for reading. overlay may be NULL, below as well. */
dray_region **dray__overlay_open(dray__overlay *overlay, const dray_layout *layout, int *rc,
                                 dray_error *error);
/* Gives the checksums of the tensors of the checkpoint, or of the delta's result. */
int dray__overlay_sums(const dray__overlay *overlay, const dray_layout *layout, dray__sums *out,
                       dray_error *error);
const char *dray__overlay_base(const dray__overlay *overlay); /* the folder's path */
/* ---- for a reader that holds the result of a checkpoint of the chain. `sum` identifies that
 * result (dray__overlay_sum_of). hold returns false when it is not in the chain. levels returns the
 * number of deltas from there to the result, which are applied in order, from 0. */
bool dray__overlay_hold(dray__overlay *overlay, uint64_t sum);
uint32_t dray__overlay_levels(const dray__overlay *overlay);

/* The effect of these levels on a tensor; FULL when one of them has the whole tensor. */
typedef enum dray__overlay_way {
    DRAY__OVERLAY_FULL,
    DRAY__OVERLAY_SAME,
    DRAY__OVERLAY_PATCHED
} dray__overlay_way;
dray__overlay_way dray__overlay_way_of(const dray__overlay *overlay, const char *tensor);
/* Returns the file with a level's entries of the elements first <= position < end, in whole slices,
 * and their place there; NULL when the level has none. */
const dray_region *dray__overlay_place(const dray__overlay *overlay, uint32_t level,
                                       const char *tensor, uint64_t first, uint64_t end,
                                       uint64_t *at, uint64_t *bytes);
/* Calls fn for each of these elements that changed, in ascending order. When any entry is wrong, it
 * fails without a call. data: the bytes read from that place. */
typedef void (*dray__overlay_fn)(void *user, uint64_t position, const dray__change *change);
int dray__overlay_each(const dray__overlay *overlay, uint32_t level, const char *tensor,
                       uint64_t first, uint64_t end, const uint8_t *data, dray__overlay_fn fn,
                       void *user, dray_error *error);

/* Gives the sum of a checkpoint's result; 0 when a tensor has no sum. */
int dray__overlay_result_sum(const char *path, uint64_t *out, dray_error *error);
/* Computes one number from all sums of a checkpoint; 0 when a tensor has none. */
int dray__overlay_sum_of(const dray_layout *layout, const dray__sums *sums, uint64_t *out,
                         dray_error *error);
/* Gives the name of the base's folder, "" for a whole checkpoint; at most 63 bytes. *number (may be
 * NULL) is the number in delta.json; 0 for a whole checkpoint. */
int dray__overlay_base_name(const char *folder, char out[64], uint32_t *number, dray_error *error);

/* ---- overlay_write.c */
/* Writes to `folder` the difference between `files` (a layout of whole tensors in opened files,
 * whose sums are given) and the result of `base`, beside `folder`'s place. held is a path where
 * that result may exist as a whole checkpoint, which is read instead if its sums are right; NULL
 * when there is none. */
int dray__overlay_write(const char *folder, const char *base, const char *held, uint32_t number,
                        const dray_layout *files, dray_region *const *opened,
                        const dray__sums *sums, dray_error *error);
