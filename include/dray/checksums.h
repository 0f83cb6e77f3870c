/* checksums.h - checksums of tensors, which do not depend on how a tensor is sharded.
 *
 *     sum(tensor) = Σ over elements A(row) · B(column) · bits  mod 2^64
 *
 * row is the flattened index over all dimensions but the last, column the index along the last; A
 * and B are odd numbers made of them (src/mover/kernels/checksum.h). An element of 8 bytes counts
 * as two columns of 4 bytes. The sums of disjoint rectangles add up to the sum of the tensor. Since
 * 0.1. */
#ifndef DRAY_CHECKSUMS_H
#define DRAY_CHECKSUMS_H

#include <dray/memory.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dray_checksums dray_checksums;

/* Computes the checksums of a layout's blocks, which it reads through `regions`, in the layout's
 * order. An element that is in several blocks counts once. *out is freed with dray_checksums_free,
 * as of the functions below. Blocks while it reads. */
int dray_checksums_compute(const dray_layout *layout, dray_region *const *regions,
                           dray_checksums **out, dray_error *error);
/* Gets the checksums of the newest version that the publishers of `model` announced, and its
 * number. Asks the coordinator, again while publishers still compute them: DRAY_EAGAIN at the
 * context's timeout, DRAY_ENOENT if they could not be computed. */
int dray_checksums_fetch(dray_context *context, const char *model, uint64_t *version,
                         dray_checksums **out, dray_error *error);
/* Gets the checksums of the tensors that a subscriber group read for the version that it holds,
 * and that version's number. DRAY_ENOENT: the group holds no version as a whole. Asks the
 * coordinator. */
int dray_checksums_fetch_group(dray_context *context, const char *model, const char *group,
                               uint64_t *version, dray_checksums **out, dray_error *error);
/* Computes the checksums of a checkpoint's tensors from its files, and compares them with those
 * that dray_checkpoint_write put into the files. *compared (may be NULL) gets the number of tensors
 * that had one; checkpoints of other writers have none. DRAY_ECHECKSUM: a tensor differs; the
 * message names it and its file. DRAY_EFORMAT: the stored checksums are malformed. Reads all of the
 * files. */
int dray_checksums_of_checkpoint(const char *path, uint32_t *compared, dray_checksums **out,
                                 dray_error *error);
uint32_t dray_checksums_count(const dray_checksums *sums);
/* Entry `index`: the tensor's name (borrowed), its dtype, how many elements were summed, and the
 * sum. */
int dray_checksums_entry(const dray_checksums *sums, uint32_t index, const char **name,
                         int32_t *dtype, uint64_t *elements, uint64_t *sum, dray_error *error);
void dray_checksums_free(dray_checksums *sums);

/* Called for every block that differs, with its index in the layout and the number of elements that
 * differ. */
typedef void (*dray_prove_fn)(void *user, uint32_t block, uint64_t elements);
/* Checks that a layout describes the memory of an engine which has loaded `checkpoint`, a
 * safetensors file or folder, by its own means. Every block is compared bit for bit with the
 * checkpoint's elements, converted to the block's dtype. A tensor that differs was changed after
 * loading (shuffled, fused or requantised); update it through load_weights (load.h). differs:
 * called for every such block; may be NULL. DRAY_ECHECKSUM: blocks differ; the message names the
 * first and says how many do. DRAY_EHOLE, DRAY_ESHAPE, DRAY_EDTYPE: the checkpoint cannot fill the
 * layout. DRAY_EUNSUPPORTED: a region is not memory. Uses 8 MiB of its own and reads all of the
 * memory and the checkpoint's part of it. Threads: any. Blocks. */
int dray_layout_prove(const dray_layout *layout, dray_region *const *regions,
                      const char *checkpoint, dray_prove_fn differs, void *user, dray_error *error);

#ifdef __cplusplus
}
#endif
#endif
