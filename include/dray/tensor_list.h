/* tensor_list.h - lists of handles, as frameworks pass to an engine's update_weights_from_tensor:
 * for each name one handle for each TP rank, of which rank i opens entry i (SGLang's
 * LocalSerializedTensor), with load_format and flush_cache. The sender must not change the memory
 * until every rank has said that it is done. Lists have no versions, groups or checksums;
 * publishers and subscribers have them. Since 0.1. */
#ifndef DRAY_TENSOR_LIST_H
#define DRAY_TENSOR_LIST_H

#include <dray/memory.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dray_tensor_list dray_tensor_list;

/* Makes an empty list, which the caller frees. load_format: how the engine loads the tensors, UTF-8
 * of at most 255 bytes; NULL is "", its own load_weights. flush_cache: 1 if the engine must flush
 * its KV cache. */
int dray_tensor_list_new(const char *load_format, int32_t flush_cache, dray_tensor_list **out,
                         dray_error *error);
void dray_tensor_list_free(dray_tensor_list *list); /* NULL is fine */
/* Adds a tensor. handles: one for each rank, filled by dray_handle_describe and with the tensor's
 * shape, all of one dtype. fds: the descriptor of each handle's region (dray_region_fd), -1 where
 * it has none; borrowed until the last dray_tensor_list_pack. ranks: 1 or more, the same for all
 * tensors of a list. DRAY_EEXIST: the list has the name. DRAY_EFORMAT, DRAY_EINVALID. */
int dray_tensor_list_add(dray_tensor_list *list, const char *name, const dray_handle *handles,
                         const int *fds, uint32_t ranks, dray_error *error);
/* Writes the packed form, which has a version and a checksum. *out is malloc'ed; free it with
 * free(). *fds gets the descriptors that must be sent along (SCM_RIGHTS) in this order; the list
 * owns the array. */
int dray_tensor_list_pack(const dray_tensor_list *list, void **out, size_t *size, const int **fds,
                          uint32_t *fd_count, dray_error *error);
/* Reads the packed form; the data may come from an untrusted source. fds: the descriptors that came
 * along; they are duplicated. The caller frees *out. DRAY_EFORMAT, DRAY_EVERSION, DRAY_ECHECKSUM.
 * DRAY_EINVALID: descriptors are missing. */
int dray_tensor_list_unpack(const void *data, size_t size, const int *fds, uint32_t fd_count,
                            dray_tensor_list **out, dray_error *error);
uint32_t dray_tensor_list_count(const dray_tensor_list *list);
uint32_t dray_tensor_list_ranks(const dray_tensor_list *list);          /* 0: no tensor yet */
const char *dray_tensor_list_load_format(const dray_tensor_list *list); /* "": none. Borrowed */
int32_t dray_tensor_list_flush_cache(const dray_tensor_list *list);
/* Opens entry `rank` of tensor `index` of an unpacked list. Outputs may be NULL: *name is borrowed
 * from the list; *handle (its size is set by the caller) gets shape, strides and offset; *region is
 * mapped for reading and owned by the list. Each storage is mapped once and unmapped by
 * dray_tensor_list_free. DRAY_EINVALID: there is no such entry; other errors as of
 * dray_region_import. */
int dray_tensor_list_open(dray_tensor_list *list, uint32_t index, uint32_t rank, const char **name,
                          dray_handle *handle, dray_region **region, dray_error *error);
/* Loads with load_format "direct": fills the blocks of a layout from entry `rank` of the list's
 * tensors, which must be whole tensors, and converts dtypes. Blocks of other tensors stay as they
 * are, so that a model may come in several lists. Where a name, shape or dtype does not fit,
 * nothing is written: DRAY_ENOENT (with the nearest names), DRAY_ESHAPE, DRAY_EDTYPE. */
int dray_tensor_list_load(dray_tensor_list *list, uint32_t rank, const dray_layout *layout,
                          dray_region *const *regions, dray_error *error);

#ifdef __cplusplus
}
#endif
#endif
