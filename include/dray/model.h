/* model.h - dtypes, tensors, blocks, layouts, and the builders that turn a framework's own
 * description of a placement into blocks over Hugging Face tensor names.
 *
 * A layout describes one member. It says for every rectangle of a tensor that the member holds (a
 * block) in which region the rectangle is, and at which offset and strides. Nothing here touches
 * the data.
 *
 * Units: shapes, starts and extents count elements, in the tensor's dimension order. Offsets and
 * strides count bytes. Ownership: functions copy what they are given. An *out is the caller's.
 * Threads: build a layout in one thread; then any threads may read it at the same time.
 * Blocking: functions that read or write files block for the disk. No function waits for another
 * process. Errors: a function that fails leaves its arguments as they were. Since 0.1.
 */
#ifndef DRAY_MODEL_H
#define DRAY_MODEL_H

#include <dray/dray.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DRAY_MAX_DIMS 4

/* XX(name, value, bytes, safetensors name, torch name) */
#define DRAY_DTYPE_MAP(XX)                                                                         \
    XX(F64, 1, 8, "F64", "float64")                                                                \
    XX(F32, 2, 4, "F32", "float32")                                                                \
    XX(BF16, 3, 2, "BF16", "bfloat16")                                                             \
    XX(F16, 4, 2, "F16", "float16")                                                                \
    XX(F8E4M3, 5, 1, "F8_E4M3", "float8_e4m3fn")                                                   \
    XX(F8E5M2, 6, 1, "F8_E5M2", "float8_e5m2")                                                     \
    XX(I64, 7, 8, "I64", "int64")                                                                  \
    XX(I32, 8, 4, "I32", "int32")                                                                  \
    XX(I16, 9, 2, "I16", "int16")                                                                  \
    XX(I8, 10, 1, "I8", "int8")                                                                    \
    XX(U64, 11, 8, "U64", "uint64")                                                                \
    XX(U32, 12, 4, "U32", "uint32")                                                                \
    XX(U16, 13, 2, "U16", "uint16")                                                                \
    XX(U8, 14, 1, "U8", "uint8")                                                                   \
    XX(BOOL, 15, 1, "BOOL", "bool")

typedef enum dray_dtype {
    DRAY_DTYPE_NONE = 0,
#define XX(name, value, bytes, safetensors, torch) DRAY_##name = value,
    DRAY_DTYPE_MAP(XX)
#undef XX
} dray_dtype;

/* Bytes of one element; 0 for an unknown dtype. */
size_t dray_dtype_size(dray_dtype dtype);
/* The name in safetensors files, such as "F32"; "?" for an unknown dtype. Static storage. */
const char *dray_dtype_name(dray_dtype dtype);
/* Reads a name as safetensors ("BF16"), torch ("bfloat16", "torch.bfloat16") or dray writes it, in
 * any case. Returns DRAY_DTYPE_NONE for any other text. */
dray_dtype dray_dtype_parse(const char *name);

/* Kinds of memory that blocks are in. */
typedef enum dray_region_kind {
    DRAY_REGION_HOST = 1, /* private memory of the process */
    DRAY_REGION_SHARED,   /* memory that other processes can map (a memfd) */
    DRAY_REGION_PINNED,   /* the same, registered with the GPUs */
    DRAY_REGION_CUDA,     /* device memory */
    DRAY_REGION_FILE      /* a file */
} dray_region_kind;

/* "host", "shared", "pinned", "cuda" or "file"; "?" for another number. Static storage. */
const char *dray_region_kind_name(dray_region_kind kind);

typedef struct dray_region_info {
    int32_t kind; /* dray_region_kind */
    uint64_t bytes;
    const char *name;   /* shown in messages; FILE: the path */
    uint8_t device[16]; /* CUDA: the GPU's UUID; else zero */
} dray_region_info;

typedef struct dray_tensor_info {
    const char *name;             /* Hugging Face checkpoint name */
    int32_t dtype;                /* dray_dtype in which this member stores it */
    uint32_t ndim;                /* 0..DRAY_MAX_DIMS; 0 is a scalar */
    int64_t shape[DRAY_MAX_DIMS]; /* global shape */
    int32_t
        alias_of; /* -1, or the index of the tensor that this is another name of (tied weights) */
} dray_tensor_info;

typedef struct dray_block {
    uint32_t tensor;               /* index within the layout */
    uint32_t region;               /* index within the layout */
    int64_t start[DRAY_MAX_DIMS];  /* first element, in global coordinates */
    int64_t extent[DRAY_MAX_DIMS]; /* elements along each dimension, > 0 */
    uint64_t offset;               /* bytes from the region's start to element `start` */
    int64_t
        stride[DRAY_MAX_DIMS]; /* bytes from an element to the next along each dimension, >= 0 */
} dray_block;

/* How a tensor is quantised. */
typedef enum dray_quant_kind {
    DRAY_QUANT_NONE = 0,
    DRAY_QUANT_BLOCK,  /* one scale for each block[0] x block[1] elements of the last two dimensions
                        */
    DRAY_QUANT_TENSOR, /* one scale for the tensor */
    DRAY_QUANT_DEEPGEMM,
    DRAY_QUANT_MXFP8,
    DRAY_QUANT_MXFP4,
    DRAY_QUANT_NVFP4,
    DRAY_QUANT_INT4,
    DRAY_QUANT_INT4_ZERO
} dray_quant_kind;

/* The tensors of each kind, by the ends of their names (docs/formats.md has the arithmetic).
 *
 *   BLOCK      the tensor itself in F8E4M3 or F8E5M2; "_scale_inv": F32, one for each block
 *   TENSOR     the same; "_scale": F32, one
 *   DEEPGEMM   the tensor itself in F8E4M3; "_scale_inv": U8, the exponents of powers of two, one
 *              for each row and block[1] columns, equal in the block[0] rows that share it
 *   MXFP8      the tensor itself in F8E4M3; "_scale": U8 (E8M0), for each 32 elements of a row
 *   MXFP4      "_packed": U8, two E2M1 each; "_scale": U8 (E8M0), for each 32 elements of a row
 *   NVFP4      "_packed": U8, two E2M1 each; "_scale": F8E4M3, for each 16 elements of a row;
 *              "_global_scale": F32, one for the tensor and those that it is fused with
 *   INT4       "_packed": I32, eight 4-bit numbers each; "_scale": a float's dtype, for each
 *              block[1] elements of a row
 *   INT4_ZERO  the same; "_zero_point": I32, those of eight rows each */

typedef enum dray_scale_format {
    DRAY_SCALE_F32 = 0, /* any f32 */
    DRAY_SCALE_UE8M0    /* a power of two, rounded up, stored as f32 */
} dray_scale_format;

/* How a tensor is quantised: of BLOCK and TENSOR value = quantised * scale, computed in f32. The
 * last blocks of rows and columns may be smaller than the others. A tensor whose elements are
 * packed into those of another one has no memory of its own: it stands in the layout for its name
 * and shape, with the dtype of the floats that it is made of. */
typedef struct dray_quant {
    int32_t kind;         /* dray_quant_kind */
    int32_t scale_format; /* dray_scale_format: of BLOCK and TENSOR; else ignored and stored as 0 */
    uint32_t scales;      /* index, in the same layout, of the tensor that holds the scales */
    /* BLOCK, DEEPGEMM: rows and columns, both > 0; INT4, INT4_ZERO: 1 and the columns of a group, a
     * multiple of 8; else ignored and stored as 0 */
    int64_t block[2];
    uint32_t values; /* MXFP4, NVFP4, INT4...: index of the packed tensor; else ignored */
    uint32_t second; /* NVFP4: of the global scale; INT4_ZERO: of the zero points; else ignored */
    /* NVFP4: index of a tensor: all that name the same one, which names itself and comes first,
     * share the global scale of their largest element; else ignored */
    uint32_t shared;
} dray_quant;

typedef struct dray_layout dray_layout;

/* Makes an empty layout. The caller frees it with dray_layout_free, as all layouts. DRAY_ENOMEM. */
int dray_layout_new(dray_layout **out, dray_error *error);
/* Frees the layout and all that it has returned pointers to. NULL is fine. */
void dray_layout_free(dray_layout *layout);
/* Adds a region; *index gets its place in the layout. index may be NULL, here and in the two
 * functions below. Names of regions and tensors are UTF-8 of at most 4,095 bytes without control
 * characters, else DRAY_EINVALID. DRAY_EINVALID: the kind is unknown, a FILE region has no name, or
 * the region has more than 2^63 - 1 bytes. */
int dray_layout_add_region(dray_layout *layout, const dray_region_info *region, uint32_t *index,
                           dray_error *error);
/* Adds a tensor. shape: its `ndim` global sizes, each 0 or more; may be NULL for a scalar.
 * DRAY_EEXIST: the layout has a tensor of that name. DRAY_EINVALID: the dtype is unknown, ndim is
 * above DRAY_MAX_DIMS, a size is negative, or the tensor's bytes overflow int64 (sizes of 0 count
 * as 1). */
int dray_layout_add_tensor(dray_layout *layout, const char *name, dray_dtype dtype, uint32_t ndim,
                           const int64_t *shape, uint32_t *index, dray_error *error);
/* Adds another name of the tensor `target`, as tied weights have. An alias has no blocks. An alias
 * of an alias becomes an alias of the tensor itself. DRAY_EEXIST, DRAY_EINVALID. */
int dray_layout_add_alias(dray_layout *layout, const char *name, uint32_t target, uint32_t *index,
                          dray_error *error);
/* Adds one block. Dimensions beyond the tensor's are ignored; they are stored as start 0, extent 1
 * and stride 0. Blocks may overlap in memory and in the tensor; the planner decides whether it can
 * use them. DRAY_EINVALID: the tensor is an alias, the rectangle is not inside the tensor, or its
 * bytes are not inside the region. */
int dray_layout_add_block(dray_layout *layout, const dray_block *block, dray_error *error);
/* Adds a block whose elements are dense, in C order, at `offset` of the region. start and extent
 * have the tensor's dimensions. DRAY_EINVALID: as of dray_layout_add_block. */
int dray_layout_add_dense(dray_layout *layout, uint32_t tensor, uint32_t region,
                          const int64_t *start, const int64_t *extent, uint64_t offset,
                          dray_error *error);

/* Declares how a tensor is quantised; kind NONE withdraws the declaration. The tensor is F8E4M3 or
 * F8E5M2 (F8E4M3 of DEEPGEMM and MXFP8), or, where it is packed into another one, F32, BF16 or F16
 * and without blocks. All kinds but TENSOR need two or more dimensions. The kinds from MXFP8 on
 * need a last one that is a multiple of the elements that share a scale. quant->scales, values and
 * second are tensors of the same layout, with the dtypes of dray_quant_kind. Their shape is the
 * tensor's, with its last two sizes divided by the number of elements that one of theirs covers,
 * rounded up; the scale of TENSOR and the global one of NVFP4 have one element. None of them is an
 * alias, and each belongs to one tensor only. DRAY_EINVALID: one of these does not hold; the
 * message names it. */
int dray_layout_set_quant(dray_layout *layout, uint32_t tensor, const dray_quant *quant,
                          dray_error *error);
/* Returns the quantisation of the tensor, or of an alias' target. Returns NULL when it is not
 * quantised, or the index is out of range. The pointer is valid until the layout changes. */
const dray_quant *dray_layout_quant(const dray_layout *layout, uint32_t tensor);

uint32_t dray_layout_tensor_count(const dray_layout *layout);
uint32_t dray_layout_region_count(const dray_layout *layout);
uint32_t dray_layout_block_count(const dray_layout *layout);
/* Return pointers that are valid until the layout changes; NULL where the index is out of range. */
const dray_tensor_info *dray_layout_tensor(const dray_layout *layout, uint32_t index);
const dray_region_info *dray_layout_region(const dray_layout *layout, uint32_t index);
const dray_block *dray_layout_block(const dray_layout *layout, uint32_t index);
/* Finds the tensor or alias of this name. DRAY_ENOENT: there is none; the message has the nearest
 * names, which are searched for only where error is not NULL. */
int dray_layout_find(const dray_layout *layout, const char *name, uint32_t *index,
                     dray_error *error);
/* The sum of all blocks' bytes. */
uint64_t dray_layout_bytes(const dray_layout *layout);

/* Write and read the packed form of a layout, which has a version and a checksum (docs/wire.md).
 * pack: *out is malloc'ed; free it with free(). unpack: the data may come from an untrusted source
 * and is checked as the functions above check it: DRAY_EFORMAT, DRAY_EVERSION, DRAY_ECHECKSUM, or
 * one of their errors. */
int dray_layout_pack(const dray_layout *layout, void **out, size_t *size, dray_error *error);
int dray_layout_unpack(const void *data, size_t size, dray_layout **out, dray_error *error);

/* ---- model configurations -------------------------------------------------------------------- */

enum { DRAY_MODEL_DENSE_WORDS = 8, DRAY_MODEL_OWN = 32, DRAY_MODEL_KINDS = 3 };

typedef struct dray_model_config {
    char family[32]; /* Hugging Face model_type, such as "qwen3_moe": docs/families.md */
    int64_t vocab_size, hidden_size, intermediate_size;
    int64_t layers, heads, kv_heads, head_dim;
    int64_t max_positions;
    double rms_norm_eps, rope_theta;
    int32_t qkv_bias, o_bias, mlp_bias, qk_norm, tied;
    int32_t dtype; /* checkpoint dtype (torch_dtype) */
    /* Mixture of experts. experts 0: a dense model; the fields of experts below are then ignored.
     */
    int64_t experts, moe_intermediate_size;
    int64_t shared_experts; /* stored as one MLP of shared_experts x moe_intermediate_size */
    /* Layer i is dense where i < first_k_dense, where sparse_step > 1 does not divide i + 1, or
     * where bit i % 64 of dense_layers[i / 64] is set (mlp_only_layers). */
    int64_t first_k_dense, sparse_step;
    uint64_t dense_layers[DRAY_MODEL_DENSE_WORDS];
    /* Multi-head latent attention; kv_lora_rank 0: grouped-query attention. q_lora_rank 0: queries
     * are projected in one step. With latent attention kv_heads equals heads, and head_dim equals
     * qk_nope_head_dim + qk_rope_head_dim. */
    int64_t q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim;
    /* Layers of multi-token prediction, numbered from `layers` on, which share the embedding and
     * the head. A trainer that does not have them sets 0. */
    int64_t mtp_layers;
    /* 0: a language model. Else a model that gives every token `labels` numbers
     * (...ForTokenClassification; 1: a value model): its head is score.weight and score.bias, and
     * it has no lm_head. */
    int64_t labels;
    /* Further values that the family's file reads, in its order. For each kind of layers that the
     * file names: the layers of this kind, as in dense_layers. */
    int64_t own[DRAY_MODEL_OWN];
    uint64_t kind_layers[DRAY_MODEL_KINDS][DRAY_MODEL_DENSE_WORDS];
} dray_model_config;

/* Loads a model's configuration: a name of the built-in table, such as "qwen2.5-32b", in any case;
 * or the path of a config.json that transformers 4 or 5 wrote, or of its folder. Missing keys have
 * the defaults of transformers, num_nextn_predict_layers 0; sizes must be given. Keys that change
 * only the model's computation (rope_scaling, sliding_window, hidden_act) are ignored. So is a
 * quantization_config of fp8, which dray_engine_quant_load reads. DRAY_ENOENT: no such name or
 * file; the message has the nearest names. DRAY_EUNSUPPORTED: a key gives the model other tensors.
 * DRAY_EFORMAT, DRAY_EINVALID: a key's value; the message has the value that was found. */
int dray_model_config_load(const char *name_or_path, dray_model_config *out, dray_error *error);
/* Returns name `index` of the built-in table, NULL past its end. */
const char *dray_model_name(uint32_t index);
/* Builds the "full" layout, which is that of a Hugging Face state dict: every tensor of the
 * checkpoint as one dense block, in checkpoint order, each aligned to 256 bytes, in one region.
 * kind: the region's, a kind of memory; 0 means SHARED. dtype NONE means the configuration's. A
 * tied head is an alias, and so are the embedding and head of layers of multi-token prediction. In
 * all builders a router's e_score_correction_bias is F32, for any dtype. */
int dray_layout_full(const dray_model_config *config, dray_dtype dtype, dray_region_kind kind,
                     dray_layout **out, dray_error *error);

/* ---- builder: dtensor ------------------------------------------------------------------------ */

typedef enum dray_placement_kind {
    DRAY_REPLICATE = 0,
    DRAY_SHARD,         /* torch.distributed.tensor.Shard(dim): torch.chunk sizes */
    DRAY_STRIDED_SHARD, /* _StridedShard(dim, split_factor) */
    DRAY_PARTIAL        /* refused: no rank has the value */
} dray_placement_kind;

typedef struct dray_placement {
    int32_t kind; /* dray_placement_kind */
    int32_t dim;
    int64_t split_factor; /* STRIDED_SHARD */
} dray_placement;

typedef struct dray_mesh {
    uint32_t ndim; /* 1..8 */
    int64_t shape[8];
    dray_placement placements[8]; /* one for each mesh dimension, as in DTensor */
} dray_mesh;

/* Adds the blocks of a DTensor's local shard, which is dense in C order at `offset` of the region.
 * Placements on one dimension apply from left to right, and sizes are uneven where torch.chunk cuts
 * them so (torch/distributed/tensor/placement_types.py). coordinate: this rank's place on each mesh
 * dimension, from 0. local_shape: gets the local tensor's shape, DRAY_MAX_DIMS entries; may be
 * NULL. Where a size is 0, no block is added. DRAY_EUNSUPPORTED: a Partial placement, or a shard of
 * more than 2^20 pieces. DRAY_EINVALID: an argument does not fit the tensor, or the shard does not
 * fit the region. */
int dray_layout_add_dtensor(dray_layout *layout, uint32_t tensor, uint32_t region, uint64_t offset,
                            const dray_mesh *mesh, const int64_t *coordinate, int64_t *local_shape,
                            dray_error *error);
/* Adds one parameter or buffer of a transformers module, whole or sharded, which is dense in C
 * order at `offset` of the region. name: as in named_parameters(). A parameter that is not a tensor
 * of the checkpoint is cut into the checkpoint's tensors that it packs: transformers 5 has one
 * model.layers.0.mlp.experts.gate_up_proj of shape [experts, 2 x moe_intermediate_size,
 * hidden_size]. dtype: the parameter's. mesh, coordinate, local_shape: as of
 * dray_layout_add_dtensor, for the module's dimensions; mesh NULL: this rank has the whole
 * parameter. Tensors that the layout lacks are added. A tied head adds an alias; the tensor that it
 * is tied to must be added before. DRAY_ENOENT: the model has no such parameter, or the layout
 * lacks the tied tensor. DRAY_EINVALID: the shapes or dtypes disagree, or the shard does not fit
 * the region. */
int dray_layout_add_module(dray_layout *layout, const dray_model_config *config, const char *name,
                           dray_dtype dtype, uint32_t region, uint64_t offset,
                           const dray_mesh *mesh, const int64_t *coordinate, int64_t *local_shape,
                           dray_error *error);
/* Builds the layout of one rank under FSDP2 (fully_shard): every tensor is Shard(0) over `world`
 * ranks. kind, dtype, order and alignment are as of dray_layout_full. A rank without rows of a
 * tensor has no block of it. DRAY_EINVALID: rank is not below world. */
int dray_layout_fsdp(const dray_model_config *config, dray_dtype dtype, uint32_t rank,
                     uint32_t world, dray_region_kind kind, dray_layout **out, dray_error *error);

/* ---- builder: FSDP1's flat parameters -------------------------------------------------------- */

/* Adds elements [first, first + count) of a tensor that is flattened in C order; they are dense at
 * `offset` of the region. They become at most 2 x ndim - 1 blocks; count 0 adds none.
 * DRAY_EINVALID: the elements are not inside the tensor, or their bytes not inside the region. */
int dray_layout_add_range(dray_layout *layout, uint32_t tensor, uint32_t region, uint64_t offset,
                          int64_t first, int64_t count, dray_error *error);

/* One parameter of a torch.distributed.fsdp FlatParameter and this rank's elements of it: a row of
 * flat_param._fqns, _shapes and _shard_param_infos. */
typedef struct dray_flat_piece {
    const char *name; /* within the wrapped module: "self_attn.q_proj.weight" */
    uint32_t ndim;
    int64_t shape[DRAY_MAX_DIMS]; /* of the whole parameter, contiguous when it was flattened */
    int64_t offset;               /* offset_in_shard: elements from the shard's first one */
    int64_t first, last; /* intra_param_start_idx and intra_param_end_idx, the first and the last
                            element; last < first: the shard has none of this parameter */
} dray_flat_piece;

typedef struct dray_flat_parameter {
    size_t size;
    int32_t dtype;
    const char *prefix; /* put in front of every name, such as "model.layers.3."; NULL: "" */
    int64_t numel;      /* elements of the local shard with its padding: flat_param.numel() */
    int64_t padding;    /* padding elements at its end: flat_param._shard_numel_padded */
    const dray_flat_piece *pieces; /* `count` of them, in order of their offsets */
    uint32_t count;
    /* NULL: names are those of the checkpoint. Else names are those of a transformers module, as
     * dray_layout_add_module takes them. Borrowed for the call. */
    const dray_model_config *config;
} dray_flat_parameter;

#define DRAY_FLAT_PARAMETER_INIT                                                                   \
    {                                                                                              \
        sizeof(dray_flat_parameter), 0, NULL, 0, 0, NULL, 0, NULL                                  \
    }

/* Adds the blocks of this rank's shard of one FlatParameter, as FSDP1's local state dict has it,
 * and the tensors that the layout lacks. The shard is dense at `offset` of the region. Elements
 * that are in no piece are padding and in no block. The parts of names that FSDP, activation
 * checkpointing and torch.compile insert are removed.
 *
 * FSDP1's other state dicts need no function of their own. A full state dict is dray_layout_full. A
 * sharded one is Shard(0) for dray_layout_add_dtensor; the shard_offsets and shard_sizes of
 * ShardedTensors are the start and extent of dray_layout_add_dense.
 *
 * DRAY_EINVALID: the shard has elements but no pieces; a piece is not inside its parameter or the
 * shard, or overlaps the one before; the layout has a tensor with another shape or dtype.
 * DRAY_ENOENT: `config` has no such parameter. */
int dray_layout_add_flat(dray_layout *layout, uint32_t region, uint64_t offset,
                         const dray_flat_parameter *flat, dray_error *error);

typedef struct dray_fsdp1_spec {
    size_t size;
    uint32_t rank, world;    /* in the group that shards; with HYBRID_SHARD in one replica */
    int32_t dtype;           /* of the flat parameters; NONE: the config's */
    int32_t use_orig_params; /* 1: each parameter is aligned to 16 bytes of the compute dtype */
    int32_t compute_dtype;   /* MixedPrecision's param_dtype; NONE: dtype */
    int32_t kind;            /* dray_region_kind of the region; 0: SHARED */
} dray_fsdp1_spec;

#define DRAY_FSDP1_SPEC_INIT                                                                       \
    {                                                                                              \
        sizeof(dray_fsdp1_spec), 0, 1, 0, 0, 0, 0                                                  \
    }

/* Builds the layout of one rank under FSDP1 (FullyShardedDataParallel) when every decoder layer is
 * wrapped: one flat parameter for the root and one for each layer. Their local shards, with FSDP's
 * padding, follow one another in one region, each aligned to 256 bytes. Buffers are whole on every
 * rank. A tied head is an alias. spec NULL: its defaults. DRAY_EINVALID. */
int dray_layout_fsdp1(const dray_model_config *config, const dray_fsdp1_spec *spec,
                      dray_layout **out, dray_error *error);

/* ---- builder: megatron ----------------------------------------------------------------------- */

typedef enum dray_megatron_experts {
    DRAY_MEGATRON_GROUPED = 0, /* TEGroupedMLP: linear_fc1.weight0, linear_fc1.weight1, ... */
    DRAY_MEGATRON_PACKED,      /* GroupedMLP: weight1 and weight2 hold all local experts */
    DRAY_MEGATRON_SEQUENTIAL   /* SequentialMLP: local_experts.0.linear_fc1.weight, ... */
} dray_megatron_experts;

/* The sizes that Megatron's options of these names give, and the ranks of one process. A size of 0
 * is 1; etp 0 is tp. */
typedef struct dray_megatron_spec {
    size_t size;
    uint32_t tp, cp, ep, etp, dp, pp, vpp; /* dp: data parallel size of all but experts; vpp: model
                                              chunks of a stage */
    uint32_t tp_rank, ep_rank, etp_rank, pp_rank;
    int32_t experts;        /* dray_megatron_experts */
    int32_t dtype;          /* storage dtype; NONE: the config's */
    int32_t kind;           /* dray_region_kind of the region; 0: SHARED */
    int64_t vocab_multiple; /* make_vocab_size_divisible_by; 0: 128 */
    /* num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage; 0: as in other stages
     */
    int64_t first_stage_layers, last_stage_layers;
    /* account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split */
    int32_t embedding_in_split, loss_in_split;
} dray_megatron_spec;

#define DRAY_MEGATRON_SPEC_INIT                                                                    \
    {                                                                                              \
        sizeof(dray_megatron_spec), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0        \
    }

/* Sets the four ranks of *spec to those of global rank `rank` in Megatron's default order,
 * tp-cp-ep-dp-pp with tp innermost; experts have the same order with etp for tp and without cp.
 * *world gets the number of ranks; world may be NULL. DRAY_EINVALID: etp x ep does not divide tp x
 * cp x dp, or rank is not below the number of ranks. */
int dray_megatron_place(dray_megatron_spec *spec, uint32_t rank, uint32_t *world,
                        dray_error *error);

/* Builds the layout of one rank of Megatron-Core's GPT model: all its parameters, chunk after
 * chunk, each aligned to 256 bytes, in one region. The layout has the tensors of which the rank
 * holds elements. Data and context parallel ranks hold the same. The vocabulary's padding is in no
 * block. The last stage's copy of a tied embedding is a replica of it. Multi-token prediction is in
 * the last stage. spec NULL: its defaults. DRAY_EINVALID: sizes do not divide; the message names
 * them. DRAY_EUNSUPPORTED: config->labels is not 0. */
int dray_layout_megatron(const dray_model_config *config, const dray_megatron_spec *spec,
                         dray_layout **out, dray_error *error);

/* Adds one parameter of a Megatron-Core model, which is dense in C order at `offset` of the region:
 * the tensors of the checkpoint that it consists of, their aliases, and its blocks. name:
 * Megatron's, such as "decoder.layers.3.self_attention.linear_qkv.weight", with the layer's number
 * in its chunk; "module." in front is ignored. vp_stage: the chunk, from 0. ndim, local_shape: the
 * parameter's on this rank. linear_q_down_proj and linear_kv_down_proj may be whole or cut by rows;
 * the shape decides which. dtype: the parameter's. Tensors that the layout has already must have
 * the same shape and dtype. DRAY_ENOENT: the model has no such parameter. DRAY_EINVALID: the shape
 * is not the one that the sizes give, or dtype is not F32 for a buffer that must be. */
int dray_layout_add_megatron(dray_layout *layout, const dray_model_config *config,
                             const dray_megatron_spec *spec, uint32_t vp_stage, const char *name,
                             dray_dtype dtype, uint32_t ndim, const int64_t *local_shape,
                             uint32_t region, uint64_t offset, dray_error *error);

typedef struct dray_megatron_parameter {
    char name[192];    /* Megatron's, with the layer's number in its chunk */
    uint32_t vp_stage; /* the chunk */
    int32_t dtype;
    uint32_t ndim;
    int64_t shape[DRAY_MAX_DIMS]; /* local */
    uint64_t offset;              /* bytes from the region's start */
} dray_megatron_parameter;

/* Lists the parameters of dray_layout_megatron, in its order. *out is an array of *count entries;
 * free it with free(). Errors are those of dray_layout_megatron. */
int dray_megatron_parameters(const dray_model_config *config, const dray_megatron_spec *spec,
                             dray_megatron_parameter **out, uint32_t *count, dray_error *error);

/* ---- builder: engine ------------------------------------------------------------------------- */

/* The engine whose rules hold where SGLang and vLLM differ. */
typedef enum dray_engine_kind { DRAY_ENGINE_SGLANG = 0, DRAY_ENGINE_VLLM } dray_engine_kind;

/* The draft model that an engine makes of the layers of multi-token prediction. */
typedef enum dray_draft {
    DRAY_DRAFT_SHARED = 0, /* it shares the embedding and the head with the model */
    DRAY_DRAFT_COPIES,     /* it has copies of them, which are more blocks of the same tensors */
    DRAY_DRAFT_NONE        /* there is no draft model */
} dray_draft;

/* Whether gate or up comes first in the experts' w13_weight. Some kernels need up first: SGLang
 * then loads it so (load_up_proj_weight_first, with FlashInfer CUTLASS), and vLLM swaps it after
 * loading (swap_w13_to_w31). Names and shapes are the same for both; dray_layout_prove finds out
 * which it is. */
typedef enum dray_w13_order { DRAY_W13_GATE_UP = 0, DRAY_W13_UP_GATE } dray_w13_order;

/* Classes of parameters. */
enum {
    DRAY_PART_ATTENTION = 1,
    DRAY_PART_DENSE = 2,   /* MLPs of dense layers */
    DRAY_PART_SHARED = 4,  /* shared experts */
    DRAY_PART_EXPERTS = 8, /* routed experts */
    DRAY_PART_ROUTER = 16,
    DRAY_PART_LINEAR = 31 /* all of the above, that is all but embeddings, heads and norms */
};

/* The expert of each slot: EPLB's physical_to_logical_map. Row i is for layer i. Layers beyond the
 * last row have expert s % experts in slot s. When the map changes, build the layout again and open
 * the subscriber again with it. */
typedef struct dray_expert_map {
    size_t size;
    uint64_t version;       /* the caller's number of the map; part of the region's name */
    uint32_t layers;        /* number of rows */
    uint32_t slots;         /* slots of all expert-parallel ranks, redundant ones included */
    const int32_t *experts; /* [layers][slots]; rows of dense layers are ignored */
} dray_expert_map;

#define DRAY_EXPERT_MAP_INIT                                                                       \
    {                                                                                              \
        sizeof(dray_expert_map), 0, 0, 0, NULL                                                     \
    }

/* An engine's quantization_config. The linear layers of DRAY_PART_LINEAR, without the router, are
 * stored as F8E4M3. Their scales are tensors of their own, NAME_scale_inv (BLOCK) or NAME_scale
 * (TENSOR). */
typedef struct dray_engine_quant {
    size_t size;
    int32_t kind;         /* DRAY_QUANT_BLOCK or DRAY_QUANT_TENSOR */
    int32_t scale_format; /* dray_scale_format */
    int64_t block[2];     /* BLOCK: weight_block_size; 0: 128 */
    /* Modules that are not quantised (modules_to_not_convert, ignored_layers, ignore): full module
     * names of the checkpoint, with or without "model." in front. Of a fused parameter all parts
     * are listed or none. One module of a layer's experts stands for all of them. */
    const char *const *ignore;
    uint32_t ignore_count;
} dray_engine_quant;

#define DRAY_ENGINE_QUANT_INIT                                                                     \
    {                                                                                              \
        sizeof(dray_engine_quant), 0, 0, {0}, NULL, 0                                              \
    }

/* Reads the quantization_config of a config.json, or of the folder that has one: quant_method fp8,
 * weight_block_size, scale_fmt and modules_to_not_convert; or compressed-tensors, with one group of
 * weights in one of the formats that dray makes (docs/formats.md), and ignore. *out is freed with
 * dray_engine_quant_free; it is NULL where the model is not quantised. DRAY_EUNSUPPORTED: another
 * quant_method. */
int dray_engine_quant_load(const char *path, dray_engine_quant **out, dray_error *error);
/* NULL is fine. */
void dray_engine_quant_free(dray_engine_quant *quant);

typedef struct dray_engine_spec {
    size_t size;
    uint32_t tp, tp_rank;   /* ranks of one pipeline stage: SGLang's tp_size, vLLM's tensor parallel
                               size x data parallel size */
    int32_t dtype;          /* storage dtype; NONE: the config's */
    int64_t vocab_multiple; /* the vocabulary is padded to a multiple of this; 0: 64 */
    int32_t kind;           /* dray_region_kind of the region; 0: SHARED */
    const uint32_t *pp_layers;      /* layers of each of the `pp` stages; NULL: the engine's rule */
    const dray_expert_map *experts; /* NULL: expert s % experts in slot s */
    const dray_engine_quant *quant; /* NULL: not quantised */
    uint32_t pp, pp_rank;           /* pipeline stages; 0: 1 */
    /* Experts are spread over `ep` groups of tp / ep neighbouring ranks; the ranks of a group cut
     * each expert. 0: 1. */
    uint32_t ep;
    uint32_t dp;    /* attention data parallelism: attention is cut over tp / dp ranks; 0: 1 */
    int32_t engine; /* dray_engine_kind */
    int32_t draft;  /* dray_draft */
    /* How many neighbouring ranks cut dense MLPs, shared experts, the embedding and the head. 1:
     * every rank has all of it (SGLang's moe_dense_tp_size, shared experts under DeepEP). 0: the
     * engine's default, which is tp for SGLang's dense MLPs, shared experts and head, else tp / dp.
     */
    uint32_t dense_tp, shared_tp, embed_tp, head_tp;
    int32_t fuse_shared; /* 1: the shared expert is one more slot of every rank (SGLang) */
    uint32_t redundant;  /* slots beyond one for each expert, where there is no map */
    uint32_t transposed; /* DRAY_PART_... whose matrices and scales are stored [in, out] */
    int32_t w13_order;   /* dray_w13_order, also of scales by block */
} dray_engine_spec;

#define DRAY_ENGINE_SPEC_INIT                                                                      \
    {                                                                                              \
        sizeof(dray_engine_spec), 1, 0, 0, 0, 0, NULL, NULL, NULL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,   \
            0, 0, 0, 0                                                                             \
    }

/* Builds the layout of one rank of an inference engine, as SGLang and vLLM load parameters:
 *   qkv_proj = [q; k; v], with KV heads replicated where there are more ranks than heads
 *   gate_up_proj = [gate; up]; o_proj and down_proj are cut along the input
 *   fused_qkv_a_proj_with_mqa = [q_a; kv_a]; q_b and kv_b are cut by heads
 *   w13_weight = [slots, gate; up, in] and w2_weight = [slots, out, in] of the experts
 *   embedding and head are cut by the padded vocabulary; norms and router are on every rank
 * A tied head is an alias. All parameters are in one region, each aligned to 256 bytes; padding is
 * in no block. Tensors of other stages and experts of other ranks are not in the layout. An expert
 * in several slots has a block for each slot. Weights that engines derive after loading (w_kc and
 * w_vc, shuffled or requantised ones) have no blocks. spec NULL: its defaults.
 * DRAY_EINVALID: sizes do not fit; the message names them. Heads, sizes and the padded vocabulary
 * must be divisible by the number of ranks that cut them, KV heads a multiple or a divisor of it,
 * slots divisible by ep; cuts must be at the edge of a quantised block, and every expert in a slot.
 */
int dray_layout_engine(const dray_model_config *config, const dray_engine_spec *spec,
                       dray_layout **out, dray_error *error);
/* Finds a parameter in the region of dray_layout_engine.
 * name: the engine's, such as "model.layers.0.self_attn.qkv_proj.weight",
 * "model.layers.3.mlp.experts.w13_weight" or "model.layers.3.mlp.experts.w2_weight_scale_inv".
 * Parameters of a draft model have the checkpoint's layer numbers. *offset gets bytes from the
 * region's start; *ndim and shape (DRAY_MAX_DIMS entries) the local shape with its padding, in
 * memory order. A tied head has the embedding's place. DRAY_ENOENT: this rank has no such
 * parameter. */
int dray_engine_parameter(const dray_model_config *config, const dray_engine_spec *spec,
                          const char *name, uint64_t *offset, uint32_t *ndim, int64_t *shape,
                          dray_error *error);

/* ---- builder: safetensors -------------------------------------------------------------------- */

/* Builds the layout of a checkpoint in the safetensors format
 * (https://github.com/huggingface/safetensors#format). path: a .safetensors file, an index
 * (model.safetensors.index.json), or a folder, of which the index is read, else model.safetensors,
 * else its only .safetensors file. Each file is a FILE region with an absolute path, each tensor
 * that has elements one dense block. The headers are checked completely: lengths, names, duplicate
 * keys, dtypes, shapes against offsets, holes, overlaps, file sizes, and the index against the
 * files. The data is not read. DRAY_ENOENT, DRAY_ESYS, DRAY_EFORMAT. DRAY_EUNSUPPORTED: a dtype, or
 * more than DRAY_MAX_DIMS dimensions. */
int dray_layout_safetensors(const char *path, dray_layout **out, dray_error *error);

typedef struct dray_safetensors_options {
    size_t size;
    uint64_t max_file_bytes;   /* 0: 5 GiB; a larger tensor gets a file of its own */
    const char *metadata_json; /* every header's __metadata__, an object of strings; NULL:
                                  {"format":"pt"} */
    /* One more key of every header's __metadata__. Its value is a JSON object, as text, with the
     * tensor_values of the file's own tensors. NULL: no such key. */
    const char *values_key;
    const char *const
        *tensor_values; /* one text for each tensor of `like`; NULL: this one has none */
} dray_safetensors_options;

#define DRAY_SAFETENSORS_OPTIONS_INIT                                                              \
    {                                                                                              \
        sizeof(dray_safetensors_options), 0, NULL, NULL, NULL                                      \
    }

/* Begins to write a checkpoint of all tensors of `like`, with their global shapes and dtypes;
 * aliases are left out, and blocks are ignored. Makes `directory` if its parent is there, and
 * creates the files as
 * "<name>.partial", of their full size and with their headers. *out is the layout of these files:
 * fill them at its offsets, then call dray_safetensors_finish. Until then readers see the old
 * checkpoint, or none. One process writes a folder at a time. options may be NULL. DRAY_EINVALID,
 * DRAY_ESYS. */
int dray_safetensors_begin(const char *directory, const dray_layout *like,
                           const dray_safetensors_options *options, dray_layout **out,
                           dray_error *error);
/* Makes the files of dray_safetensors_begin the folder's checkpoint: checks and fsyncs them,
 * renames them, writes the index where there are several, and removes the files of an earlier
 * checkpoint. A process that dies at any step leaves the old checkpoint or the new one. Where the
 * old checkpoint has as many files, the new ones are called "model-b-..." and the next time
 * "model-..." again; the index names them. DRAY_EINVALID, DRAY_EFORMAT, DRAY_ENOENT: the layout was
 * not begun in this folder, or its files changed. DRAY_EEXIST: the folder's index names files of
 * both kinds. DRAY_ESYS. */
int dray_safetensors_finish(const char *directory, const dray_layout *layout, dray_error *error);

/* ---- SPEC strings ("fsdp:4", "engine:tp=4", "full", "safetensors:DIR") ----------------------- */

/* Builds the layouts of all members that a SPEC describes, in the order of their ranks:
 *   full[:dtype=D]   fsdp:N[,dtype=D]   fsdp1:N[,dtype=D][,orig=1]
 *   megatron[:tp=N,cp=N,ep=N,etp=N,dp=N,pp=N,vpp=N,first=LAYERS,last=LAYERS,dtype=D,vocab=MULTIPLE,
 *            experts=grouped|packed|sequential]   (each optional; ranks as dray_megatron_place)
 *   engine:tp=N[,dtype=D][,vocab=MULTIPLE]   safetensors:PATH
 * *out is an array of *count layouts; free each with dray_layout_free and the array with free().
 * model may be NULL for safetensors. DRAY_EINVALID: the SPEC is malformed; the message has the
 * nearest known word. */
int dray_layouts_from_spec(const dray_model_config *model, const char *spec, dray_layout ***out,
                           uint32_t *count, dray_error *error);

#ifdef __cplusplus
}
#endif
#endif
