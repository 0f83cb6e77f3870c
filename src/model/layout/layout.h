/* src/model/layout/: the layout, which is the list of a member's tensors, its regions of memory,
 * and the blocks of tensors that are in them. layout.c checks everything that is added, so that
 * planner and movers can trust it, and has the table of dtypes; layout_pack.c writes a layout for
 * other processes and reads it back; names.c has the table of tensor names. A layout is plain data:
 * it knows addresses only as offsets in regions. */

/* The declarations about layouts that the files of src/model share. */
#pragma once

#include <dray/model.h>
#include <stdbool.h>

/* Longest name of a tensor or region, without the terminator. */
#define DRAY__NAME_MAX 4095
/* The alignment of parameters in the builders' layouts, enough for any copy engine and SIMD
 * width. */
#define DRAY__PARAMETER_ALIGN 256
/* Enough for the text of any shape. */
#define DRAY__SHAPE_TEXT 96

/* Returns whether the dtype is f64, f32, bf16 or f16. Elements can be converted between these. */
bool dray__is_float(int32_t dtype);
/* Computes the bytes of a dense rectangle. Returns false when they do not fit int64. */
bool dray__dense_bytes(dray_dtype dtype, uint32_t ndim, const int64_t *extent, int64_t *bytes);
/* Advances *end by a dense rectangle that begins there, and rounds it up to the builders'
 * alignment. Returns false on overflow. */
bool dray__dense_end(dray_dtype dtype, uint32_t ndim, const int64_t *extent, uint64_t *end);
/* Computes the C-order strides in bytes of a rectangle that passed dray__dense_bytes. Unused
 * dimensions get 0. */
void dray__dense_strides(dray_dtype dtype, uint32_t ndim, const int64_t *extent, int64_t *stride);
/* Writes "[3, 4]" to `out` of DRAY__SHAPE_TEXT bytes, and returns it. */
char *dray__shape_text(uint32_t ndim, const int64_t *shape, char *out);
/* Gets the extent of a group of elements that are quantised together, at least 1 along each of
 * DRAY_MAX_DIMS dimensions. In all kinds but INT4_ZERO, these are the elements that share a
 * scale. */
void dray__quant_cell(const dray_tensor_info *tensor, const dray_quant *quant, int64_t *cell);

/* formats.c: the tensors of each quantised format. */
enum { DRAY__PART_VALUES, DRAY__PART_SCALES, DRAY__PART_SECOND, DRAY__QUANT_PARTS };
typedef struct dray__quant_format {
    const char *name; /* as in SPEC strings */
    /* rows and columns are those that one element of the part covers; 0 means block[] of the quant,
     * -1 means all. dtype NONE means the tensor's own dtype for values, and any float dtype for
     * scales. suffix NULL means that there is no such part or, for values, that they are the tensor
     * itself. */
    struct dray__quant_part {
        const char *suffix;
        int32_t dtype;
        int32_t rows, columns;
    } parts[DRAY__QUANT_PARTS];
    int32_t rows, columns; /* of elements that are quantised together, as above */
} dray__quant_format;
/* Returns NULL for an unknown kind, or NONE. */
const dray__quant_format *dray__quant_format_of(int32_t kind);
/* Finds the tensor that is this part of the quantised tensor `tensor`. Returns false when it has no
 * such part. cell gets the extent of the tensor's elements that one element of the part covers. */
bool dray__quant_part(const dray_layout *layout, uint32_t tensor, int part, uint32_t *index,
                      int64_t cell[DRAY_MAX_DIMS]);
/* The same without a layout, for a tensor that will be quantised in this way. */
bool dray__quant_part_cell(const dray_tensor_info *tensor, const dray_quant *quant, int part,
                           int64_t cell[DRAY_MAX_DIMS]);
/* Returns the dtype in which a quantised tensor's scales are computed; NONE when it is that of the
 * elements. */
int32_t dray__quant_as(const dray_layout *layout, uint32_t tensor);
/* Returns whether the elements are packed in another tensor. */
bool dray__quant_is_packed(const dray_quant *quant);
/* Returns true for a tensor whose elements are packed in another one. It is only a name and a
 * shape: no file has it. */
bool dray__layout_name_only(const dray_layout *layout, uint32_t tensor);
/* Returns whether the tensor is a part of a quantised one. *tensor is the quantised tensor and
 * *part the part. A quantised tensor that holds its own elements is a part of itself. */
bool dray__layout_part_of(const dray_layout *layout, uint32_t index, uint32_t *tensor, int *part);
/* Returns false when no tensor is quantised. */
bool dray__layout_quantised(const dray_layout *layout);
/* Sets the tensor's quantisation without checks (NULL: not quantised). Returns false when out of
 * memory. */
bool dray__layout_put_quant(dray_layout *layout, uint32_t tensor, const dray_quant *quant);
/* Finds the tensor, or adds it if the layout lacks it. `giver` is the parameter that needs it, for
 * messages. Returns 0, or DRAY_EINVALID when the layout has it with another dtype or shape, or as
 * an alias. */
int dray__layout_need_tensor(dray_layout *layout, const char *name, dray_dtype dtype, uint32_t ndim,
                             const int64_t *shape, const char *giver, uint32_t *tensor,
                             dray_error *error);
/* Ends a builder: sets *out to the layout if status is 0, else frees the layout. Returns the
 * status. */
int dray__layout_give(dray_layout *layout, int status, dray_layout **out);
/* Returns the hashes of the tensors' names (dray__name_hash), by index. */
const uint64_t *dray__layout_hashes(const dray_layout *layout);
/* Iterate over the blocks of a tensor (not an alias) in the order in which they were added; NULL at
 * the end. */
const dray_block *dray__layout_first_block(const dray_layout *layout, uint32_t tensor);
const dray_block *dray__layout_next_block(const dray_layout *layout, const dray_block *block);
/* Returns the index of one of the layout's own blocks. */
uint32_t dray__layout_block_index(const dray_layout *layout, const dray_block *block);
/* Sets the GPU of a region of kind CUDA. */
void dray__layout_set_device(dray_layout *layout, uint32_t region, const uint8_t device[16]);
/* module.c: elements [first, first + count) of the flattened parameter of a transformers module. */
typedef struct dray__module_range {
    const char *name;
    dray_dtype dtype;
    uint32_t ndim;
    const int64_t *shape; /* the module's */
    int64_t first, count;
} dray__module_range;
/* Adds these elements, which are dense at `offset` of the region, and the checkpoint's tensors that
 * the parameter is made of. Returns 0, or DRAY_ENOENT or DRAY_EINVALID as dray_layout_add_module
 * does. */
int dray__layout_add_module_range(dray_layout *layout, const dray_model_config *config,
                                  const dray__module_range *range, uint32_t region, uint64_t offset,
                                  dray_error *error);
/* The counts of a layout, to restore when adding several items fails half way. */
typedef struct dray__layout_state {
    uint32_t tensors, blocks;
    uint64_t bytes;
} dray__layout_state;

dray__layout_state dray__layout_state_of(const dray_layout *layout);
/* Removes the tensors and blocks that were added since. None of them may be quantised. */
void dray__layout_restore(dray_layout *layout, const dray__layout_state *before);
/* Rounds *at up to the builders' alignment. Returns false on overflow. */
bool dray__align(uint64_t *at);
