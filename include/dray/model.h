/* model.h - dtypes, tensors, regions as plain data, blocks, layouts, and the builders that turn a
 * framework's own description of a placement into blocks over Hugging Face tensor names.
 *
 * A layout says, for one member: which rectangle of which tensor lies where in which region.
 * Nothing here touches data. Layouts are plain values: build in one thread, then share read-only
 * between any. Functions that build or read files block only for that; none waits. A function that
 * fails changes nothing that it was given. Shapes, starts and extents count elements, in the
 * tensor's dimension order; offsets and strides count bytes. Everything here: since 0.1.
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
/* "F32" (safetensors' name); "?" for an unknown dtype. Static storage. */
const char *dray_dtype_name(dray_dtype dtype);
/* Reads safetensors' ("BF16"), torch's ("bfloat16", "torch.bfloat16") or dray's names in any case;
 * DRAY_DTYPE_NONE for anything else. */
dray_dtype dray_dtype_parse(const char *name);

/* Where blocks lie. */
typedef enum dray_region_kind {
    DRAY_REGION_HOST = 1, /* private memory of the process */
    DRAY_REGION_SHARED,   /* memfd */
    DRAY_REGION_PINNED,   /* shared and registered with the GPU */
    DRAY_REGION_CUDA,     /* device memory */
    DRAY_REGION_FILE      /* a file */
} dray_region_kind;

const char *dray_region_kind_name(dray_region_kind kind); /* "host", "shared", ... */

typedef struct dray_region_info {
    int32_t kind; /* dray_region_kind */
    uint64_t bytes;
    const char *name;   /* for people; FILE: the path */
    uint8_t device[16]; /* CUDA: the GPU's UUID; else zero */
} dray_region_info;

typedef struct dray_tensor_info {
    const char *name;             /* Hugging Face checkpoint name */
    int32_t dtype;                /* dtype in which this member stores it */
    uint32_t ndim;                /* 0..DRAY_MAX_DIMS; 0 = scalar */
    int64_t shape[DRAY_MAX_DIMS]; /* global shape */
    int32_t alias_of; /* index of the tensor that this is another name of (tied); else -1 */
} dray_tensor_info;

typedef struct dray_block {
    uint32_t tensor;               /* index within the layout */
    uint32_t region;               /* index within the layout */
    int64_t start[DRAY_MAX_DIMS];  /* global coordinates, elements */
    int64_t extent[DRAY_MAX_DIMS]; /* elements; all > 0 */
    uint64_t offset;               /* bytes from the region's start to element `start` */
    int64_t stride[DRAY_MAX_DIMS]; /* bytes between neighbours along each dimension; >= 0 */
} dray_block;

/* How a tensor is quantised. */
typedef enum dray_quant_kind {
    DRAY_QUANT_NONE = 0,
    DRAY_QUANT_BLOCK, /* a scale for every block[0] x block[1] elements of the last two dimensions
                       */
    DRAY_QUANT_TENSOR /* one scale */
} dray_quant_kind;

typedef enum dray_scale_format {
    DRAY_SCALE_F32 = 0, /* any f32 */
    DRAY_SCALE_UE8M0    /* rounded up to a power of two, still stored as f32 */
} dray_scale_format;

/* value = quantised * scale, in f32. The last blocks of rows and columns may be cut short. */
typedef struct dray_quant {
    int32_t kind;         /* dray_quant_kind */
    int32_t scale_format; /* dray_scale_format */
    uint32_t scales;      /* index, in the same layout, of the tensor that holds the scales */
    int64_t block[2];     /* BLOCK: rows, columns, both > 0; TENSOR: not looked at, stored as 0 */
} dray_quant;

typedef struct dray_layout dray_layout;

/* An empty layout; the caller's, for dray_layout_free. DRAY_ENOMEM. */
int dray_layout_new(dray_layout **out, dray_error *error);
/* NULL is fine. Ends every pointer that was borrowed from the layout. */
void dray_layout_free(dray_layout *layout);
/* Adding copies everything it is given. Names are UTF-8 of at most 4,095 bytes without
 * control characters (DRAY_EINVALID).
 *
 * index: where the region is in the layout; may be NULL, as in the two functions below.
 * DRAY_EINVALID: an unknown kind, FILE without a name, or more than 2^63 - 1 bytes. */
int dray_layout_add_region(dray_layout *layout, const dray_region_info *region, uint32_t *index,
                           dray_error *error);
/* Names are unique per layout (DRAY_EEXIST). shape: ndim global sizes from 0; may be NULL for a
 * scalar. DRAY_EINVALID: an unknown dtype, more than DRAY_MAX_DIMS dimensions, a negative size, or
 * bytes that overflow (zeros counted as ones). */
int dray_layout_add_tensor(dray_layout *layout, const char *name, dray_dtype dtype, uint32_t ndim,
                           const int64_t *shape, uint32_t *index, dray_error *error);
/* Another name of the tensor `target` (tied weights): no memory of its own. An alias of an alias
 * names the tensor itself. */
int dray_layout_add_alias(dray_layout *layout, const char *name, uint32_t target, uint32_t *index,
                          dray_error *error);
/* Adds one block. Dimensions beyond the tensor's are ignored and stored as start 0, extent 1,
 * stride 0. DRAY_EINVALID names what is outside: the rectangle the tensor, or its bytes the region;
 * an alias has no blocks. Blocks may overlap, in memory and in the tensor: whether they may is the
 * planner's. */
int dray_layout_add_block(dray_layout *layout, const dray_block *block, dray_error *error);
/* A block whose memory is dense, C order, at `offset`. start, extent: the tensor's dimensions. */
int dray_layout_add_dense(dray_layout *layout, uint32_t tensor, uint32_t region,
                          const int64_t *start, const int64_t *extent, uint64_t offset,
                          dray_error *error);

/* Says how the tensor is quantised; kind NONE takes it back. tensor: F8E4M3 or F8E5M2, with BLOCK
 * of two dimensions or more. quant->scales: an F32 tensor, with BLOCK of the tensor's shape divided
 * by the block (rounded up; dimensions before the last two as they are), with TENSOR of one
 * element. Neither may be an alias; scales belong to one tensor. DRAY_EINVALID says what does not
 * fit. */
int dray_layout_set_quant(dray_layout *layout, uint32_t tensor, const dray_quant *quant,
                          dray_error *error);
/* How the tensor (or the one that it is an alias of) is quantised; NULL when it is not, or the
 * index is out of range. Borrowed until the layout changes. */
const dray_quant *dray_layout_quant(const dray_layout *layout, uint32_t tensor);

uint32_t dray_layout_tensor_count(const dray_layout *layout);
uint32_t dray_layout_region_count(const dray_layout *layout);
uint32_t dray_layout_block_count(const dray_layout *layout);
/* Borrowed pointers, valid until the layout changes. NULL when the index is out of range. */
const dray_tensor_info *dray_layout_tensor(const dray_layout *layout, uint32_t index);
const dray_region_info *dray_layout_region(const dray_layout *layout, uint32_t index);
const dray_block *dray_layout_block(const dray_layout *layout, uint32_t index);
/* The tensor of this name. DRAY_ENOENT with the nearest names in the message (error NULL: not
 * searched for). */
int dray_layout_find(const dray_layout *layout, const char *name, uint32_t *index,
                     dray_error *error);
/* Bytes that the blocks cover, each block counted. */
uint64_t dray_layout_bytes(const dray_layout *layout);

/* Wire form: versioned, checksummed. *out is malloc'ed: free() it. Reading checks every field as
 * adding does: DRAY_EFORMAT, DRAY_EVERSION, DRAY_ECHECKSUM, or what adding says. */
int dray_layout_pack(const dray_layout *layout, void **out, size_t *size, dray_error *error);
int dray_layout_unpack(const void *data, size_t size, dray_layout **out, dray_error *error);

/* ---- model configurations -------------------------------------------------------------------- */

enum { DRAY_MODEL_DENSE_WORDS = 8 };

typedef struct dray_model_config {
    /* Hugging Face model_type: "llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3",
     * "kimi_k2", "glm4_moe" */
    char family[32];
    int64_t vocab_size, hidden_size, intermediate_size;
    int64_t layers, heads, kv_heads, head_dim;
    int64_t max_positions;
    double rms_norm_eps, rope_theta;
    int32_t qkv_bias, o_bias, mlp_bias, qk_norm, tied;
    int32_t dtype; /* checkpoint dtype (torch_dtype) */
    /* Mixture of experts; 0 experts: a dense model, and the rest is not looked at. */
    int64_t experts, moe_intermediate_size;
    int64_t shared_experts; /* as one MLP of shared_experts x moe_intermediate_size */
    /* Layer i is dense where i < first_k_dense, where sparse_step > 1 does not divide i + 1, or
     * where bit i % 64 of dense_layers[i / 64] is set (mlp_only_layers). */
    int64_t first_k_dense, sparse_step;
    uint64_t dense_layers[DRAY_MODEL_DENSE_WORDS];
    /* Multi-head latent attention; kv_lora_rank 0: grouped-query attention. q_lora_rank 0: queries
     * are projected in one step. kv_heads is heads, head_dim qk_nope_head_dim + qk_rope_head_dim.
     */
    int64_t q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim;
    /* Multi-token prediction: whole layers `layers`, `layers` + 1, ... that share the embedding and
     * the head. A trainer that has none sets 0. */
    int64_t mtp_layers;
    /* 0: a language model. Else the head is score.weight and score.bias, which give every token so
     * many numbers (...ForTokenClassification; 1: a value model), and there is no lm_head. */
    int64_t labels;
} dray_model_config;

/* A name of the built-in table ("qwen2.5-32b", ..., in any case) or the path of a config.json, or
 * of a folder that has one, written by transformers 4 or 5. Missing keys have transformers'
 * defaults (num_nextn_predict_layers: 0); the sizes must be there. DRAY_ENOENT lists the nearest
 * names; DRAY_EUNSUPPORTED names the key that gives a model other tensors; DRAY_EFORMAT and
 * DRAY_EINVALID name the key and what was found. Keys that change only how a model computes
 * (rope_scaling, sliding_window, hidden_act) are not looked at. A quantization_config of fp8 says
 * nothing here: the tensors are those of the model; dray_engine_quant_load reads it. */
int dray_model_config_load(const char *name_or_path, dray_model_config *out, dray_error *error);
/* Name i of the built-in table; NULL past the end. */
const char *dray_model_name(uint32_t index);
/* All tensors of the checkpoint, each one replicated dense block in one region of `kind` (memory;
 * 0: SHARED), in checkpoint order, each aligned to 256 bytes. The "full" layout: what a Hugging
 * Face state dict holds; a tied head is an alias, and so are the embedding and the head of a
 * multi-token prediction layer. dtype NONE: the config's; routers' e_score_correction_bias is F32
 * whatever dtype says, here and in all builders. *out is the caller's. */
int dray_layout_full(const dray_model_config *config, dray_dtype dtype, dray_region_kind kind,
                     dray_layout **out, dray_error *error);

/* ---- builder: dtensor ------------------------------------------------------------------------ */

typedef enum dray_placement_kind {
    DRAY_REPLICATE = 0,
    DRAY_SHARD,         /* torch.distributed.tensor.Shard(dim): torch.chunk sizes */
    DRAY_STRIDED_SHARD, /* _StridedShard(dim, split_factor) */
    DRAY_PARTIAL        /* always an error: the value is not there yet */
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

/* Adds the blocks of one DTensor's local shard, dense in C order at `offset` of `region`: as few
 * rectangles as it consists of. Placements on one dimension apply from left to right, uneven as
 * torch.chunk cuts.
 * coordinate: this rank's place on each mesh dimension, from 0. local_shape gets the local tensor's
 * shape (may hold zeros: then no block is added); NULL is fine.
 * DRAY_EUNSUPPORTED: Partial, or more than 2^20 pieces; DRAY_EINVALID: all else that does not fit,
 * the region too small included. */
int dray_layout_add_dtensor(dray_layout *layout, uint32_t tensor, uint32_t region, uint64_t offset,
                            const dray_mesh *mesh, const int64_t *coordinate, int64_t *local_shape,
                            dray_error *error);
/* Adds one parameter or buffer of transformers' module for this model, sharded or whole.
 * name: as named_parameters() says. Where it is not a tensor of the checkpoint, the blocks are
 * those of the checkpoint's tensors that it is packed of: transformers 5 has one
 * model.layers.0.mlp.experts.gate_up_proj, [experts, 2 x moe_intermediate_size, hidden_size].
 * dtype: the parameter's.
 * mesh, coordinate, local_shape: as for dray_layout_add_dtensor, of the module's own dimensions;
 * mesh NULL: all of it is here. Dense in C order at `offset` of `region`.
 * Tensors that the layout lacks are added; others must agree. A tied head adds its name alone,
 * behind what it is tied to. DRAY_ENOENT: the model has no such parameter, or the layout not what
 * it is tied to; DRAY_EINVALID: what does not agree or fit, a buffer that must be F32 included. */
int dray_layout_add_module(dray_layout *layout, const dray_model_config *config, const char *name,
                           dray_dtype dtype, uint32_t region, uint64_t offset,
                           const dray_mesh *mesh, const int64_t *coordinate, int64_t *local_shape,
                           dray_error *error);
/* The whole model as FSDP2 (fully_shard) cuts it: Shard(0) over `world` ranks, in one region of
 * `kind` (memory; 0: SHARED), tensors in checkpoint order, each aligned to 256 bytes. A rank that
 * holds no row of a tensor has no block of it. */
int dray_layout_fsdp(const dray_model_config *config, dray_dtype dtype, uint32_t rank,
                     uint32_t world, dray_region_kind kind, dray_layout **out, dray_error *error);

/* ---- builder: FSDP1's flat parameters -------------------------------------------------------- */

/* Elements [first, first + count) of a tensor flattened in C order, dense at `offset` of `region`:
 * at most 2 x ndim - 1 blocks; none for no elements. DRAY_EINVALID: elements outside the tensor or
 * the region. */
int dray_layout_add_range(dray_layout *layout, uint32_t tensor, uint32_t region, uint64_t offset,
                          int64_t first, int64_t count, dray_error *error);

/* One parameter of a torch.distributed.fsdp FlatParameter and this rank's elements of it: a row of
 * flat_param._fqns, _shapes and _shard_param_infos. */
typedef struct dray_flat_piece {
    const char *name; /* within the wrapped module: "self_attn.q_proj.weight" */
    uint32_t ndim;
    int64_t shape[DRAY_MAX_DIMS]; /* of the whole parameter, contiguous when it was flattened */
    int64_t offset;               /* offset_in_shard: from the shard's first element */
    int64_t first, last;          /* intra_param_start_idx and _end_idx (the last element's own);
                                     last < first: nothing of it is in this shard */
} dray_flat_piece;

typedef struct dray_flat_parameter {
    size_t size;
    int32_t dtype;
    const char
        *prefix;     /* put before every name: the wrapped module's, "model.layers.3."; NULL: "" */
    int64_t numel;   /* of the local shard: flat_param.numel(), padding included */
    int64_t padding; /* flat_param._shard_numel_padded, at its end */
    const dray_flat_piece *pieces; /* in order of `offset` */
    uint32_t count;
    /* Of transformers' module: names are those of its parameters, as dray_layout_add_module takes
     * them, and what packs experts is cut into the checkpoint's tensors. NULL: names are the
     * checkpoint's. Borrowed for the call. */
    const dray_model_config *config;
} dray_flat_parameter;

#define DRAY_FLAT_PARAMETER_INIT                                                                   \
    {                                                                                              \
        sizeof(dray_flat_parameter), 0, NULL, 0, 0, NULL, 0, NULL                                  \
    }

/* FSDP's local form: adds the blocks of this rank's shard of one FlatParameter, which lies dense at
 * `offset` of `region`, and the tensors that the layout lacks. The parts of names that FSDP,
 * activation checkpointing and torch.compile insert are taken out. Elements in no piece are
 * padding: memory in no block. (The other forms need no builder of their own: a full state dict is
 * dray_layout_full's replicated block; a sharded one is Shard(0), for dray_layout_add_dtensor, also
 * where FSDP hands out ShardedTensors, whose shard_offsets and shard_sizes
 * dray_layout_add_dense takes as they are.) DRAY_EINVALID: elements without pieces, with what to
 * do; a piece outside its parameter or the shard, or that overlaps the one before; a tensor that
 * the layout has in another shape or dtype. DRAY_ENOENT: `config` has no such parameter. */
int dray_layout_add_flat(dray_layout *layout, uint32_t region, uint64_t offset,
                         const dray_flat_parameter *flat, dray_error *error);

typedef struct dray_fsdp1_spec {
    size_t size;
    uint32_t rank, world;    /* within the group that shards (HYBRID_SHARD: within one replica) */
    int32_t dtype;           /* of the flat parameters; NONE: the config's */
    int32_t use_orig_params; /* 1: each parameter is aligned to 16 bytes of the compute dtype */
    int32_t compute_dtype;   /* MixedPrecision's param_dtype; NONE: dtype */
    int32_t kind;            /* dray_region_kind of the region; 0: SHARED */
} dray_fsdp1_spec;

#define DRAY_FSDP1_SPEC_INIT                                                                       \
    {                                                                                              \
        sizeof(dray_fsdp1_spec), 0, 1, 0, 0, 0, 0                                                  \
    }

/* The whole model as FSDP1 (FullyShardedDataParallel) cuts it when every decoder layer is wrapped:
 * one flat parameter for the root and one for each layer, in one region, the local shards one after
 * the other, each aligned to 256 bytes and with the padding that FSDP gives it. Tensors that
 * training holds as buffers are whole on every rank. A tied head is an alias. */
int dray_layout_fsdp1(const dray_model_config *config, const dray_fsdp1_spec *spec,
                      dray_layout **out, dray_error *error);

/* ---- builder: megatron ----------------------------------------------------------------------- */

typedef enum dray_megatron_experts {
    DRAY_MEGATRON_GROUPED = 0, /* TEGroupedMLP: linear_fc1.weight0, linear_fc1.weight1, ... */
    DRAY_MEGATRON_PACKED,      /* GroupedMLP: weight1 and weight2 hold all local experts */
    DRAY_MEGATRON_SEQUENTIAL   /* SequentialMLP: local_experts.0.linear_fc1.weight, ... */
} dray_megatron_experts;

/* Sizes as Megatron's options of these names, and one rank's place; 0: 1, but etp 0: tp. */
typedef struct dray_megatron_spec {
    size_t size;
    uint32_t tp, cp, ep, etp, dp, pp, vpp; /* dp: data parallel size of what is not an expert;
                                              vpp: model chunks a stage */
    uint32_t tp_rank, ep_rank, etp_rank, pp_rank;
    int32_t experts;        /* dray_megatron_experts */
    int32_t dtype;          /* storage dtype; NONE: the config's */
    int32_t kind;           /* dray_region_kind of the region; 0: SHARED */
    int64_t vocab_multiple; /* make_vocab_size_divisible_by; 0: 128 */
    /* num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage; 0: as the others */
    int64_t first_stage_layers, last_stage_layers;
    /* account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split */
    int32_t embedding_in_split, loss_in_split;
} dray_megatron_spec;

#define DRAY_MEGATRON_SPEC_INIT                                                                    \
    {                                                                                              \
        sizeof(dray_megatron_spec), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0        \
    }

/* Sets the four ranks of *spec to those of global rank `rank` in Megatron's default order
 * (tp-cp-ep-dp-pp, the first innermost; experts in the same order with etp for tp and without cp).
 * *world: how many ranks there are; NULL is fine. DRAY_EINVALID: sizes that do not go together
 * (etp x ep must divide tp x cp x dp), or a rank outside. */
int dray_megatron_place(dray_megatron_spec *spec, uint32_t rank, uint32_t *world,
                        dray_error *error);

/* What one rank of Megatron-Core's GPT model holds: all its parameters in one region, each aligned
 * to 256 bytes, chunk after chunk. Data and context parallel ranks hold the same. In the layout are
 * the tensors of which this rank has something. Padding of the vocabulary is memory in no block;
 * the last stage's copy of a tied embedding is a replica; multi-token prediction is in the last
 * stage. spec NULL: its defaults. *out is the caller's. DRAY_EINVALID names the numbers that do not
 * divide. */
int dray_layout_megatron(const dray_model_config *config, const dray_megatron_spec *spec,
                         dray_layout **out, dray_error *error);

/* One parameter of a model that is there already.
 * name: Megatron's ("decoder.layers.3.self_attention.linear_qkv.weight"), with the layer's number
 * within its chunk; leading "module." are passed over.
 * vp_stage: the chunk, from 0.
 * ndim, local_shape: the parameter's on this rank; dense in C order at `offset` of `region`.
 * Adds the checkpoint's tensors in `dtype` (those that the layout has already must agree), the
 * names that are tied to them, and their blocks. linear_q_down_proj and linear_kv_down_proj may be
 * duplicated or cut by rows: the shape says which.
 * DRAY_ENOENT: the model has no such parameter; DRAY_EINVALID: the shape is not what the sizes give
 * (both are named), or a buffer that must be F32 is not. */
int dray_layout_add_megatron(dray_layout *layout, const dray_model_config *config,
                             const dray_megatron_spec *spec, uint32_t vp_stage, const char *name,
                             dray_dtype dtype, uint32_t ndim, const int64_t *local_shape,
                             uint32_t region, uint64_t offset, dray_error *error);

typedef struct dray_megatron_parameter {
    char name[192];    /* Megatron's, within its chunk */
    uint32_t vp_stage; /* its chunk */
    int32_t dtype;
    uint32_t ndim;
    int64_t shape[DRAY_MAX_DIMS]; /* local */
    uint64_t offset;              /* bytes from the region's start */
} dray_megatron_parameter;

/* What dray_layout_megatron lays out, in its order. *out is malloc'ed: free() it. */
int dray_megatron_parameters(const dray_model_config *config, const dray_megatron_spec *spec,
                             dray_megatron_parameter **out, uint32_t *count, dray_error *error);

/* ---- builder: engine ------------------------------------------------------------------------- */

/* Where SGLang and vLLM differ. */
typedef enum dray_engine_kind { DRAY_ENGINE_SGLANG = 0, DRAY_ENGINE_VLLM } dray_engine_kind;

/* What an engine holds of the layers of multi-token prediction: its draft model. */
typedef enum dray_draft {
    DRAY_DRAFT_SHARED = 0, /* the draft model shares the embedding and the head */
    DRAY_DRAFT_COPIES,     /* it has copies of its own: blocks of the same tensors */
    DRAY_DRAFT_NONE        /* no draft model */
} dray_draft;

/* What lies first in experts' w13_weight. Upstream calls it w13, whatever the order: kernels that
 * compute up before gate have it loaded that way (SGLang's load_up_proj_weight_first, with
 * FlashInfer CUTLASS) or swap it after loading (vLLM's swap_w13_to_w31). Nothing in names or shapes
 * tells: dray_layout_prove does. */
typedef enum dray_w13_order { DRAY_W13_GATE_UP = 0, DRAY_W13_UP_GATE } dray_w13_order;

/* Classes of parameters. */
enum {
    DRAY_PART_ATTENTION = 1,
    DRAY_PART_DENSE = 2,   /* MLPs of dense layers */
    DRAY_PART_SHARED = 4,  /* shared experts */
    DRAY_PART_EXPERTS = 8, /* routed experts */
    DRAY_PART_ROUTER = 16,
    DRAY_PART_LINEAR = 31 /* all of them: not embeddings, heads and norms */
};

/* Which expert is in which slot, EPLB's physical_to_logical_map. Row i is for layer i; layers
 * beyond the last row, and all without a map, have expert s % experts in slot s. A map that changes
 * gives another layout: build it anew, and open what was opened with the old one anew. */
typedef struct dray_expert_map {
    size_t size;
    uint64_t version;       /* the caller's; becomes part of the region's name, for people */
    uint32_t layers;        /* rows */
    uint32_t slots;         /* of all expert-parallel ranks together: experts + redundant ones */
    const int32_t *experts; /* [layers][slots]; rows of dense layers are not looked at */
} dray_expert_map;

#define DRAY_EXPERT_MAP_INIT                                                                       \
    {                                                                                              \
        sizeof(dray_expert_map), 0, 0, 0, NULL                                                     \
    }

/* An engine's quantization_config. Linear layers of DRAY_PART_LINEAR but the router are stored as
 * F8E4M3, their scales in the tensors NAME_scale_inv (BLOCK) or NAME_scale (TENSOR) beside them. */
typedef struct dray_engine_quant {
    size_t size;
    int32_t kind;         /* DRAY_QUANT_BLOCK or DRAY_QUANT_TENSOR */
    int32_t scale_format; /* dray_scale_format */
    int64_t block[2];     /* BLOCK: weight_block_size; 0: 128 */
    /* Modules that stay as they are (modules_to_not_convert, ignored_layers, ignore), matched as
     * upstream does: the checkpoint's full module name, with or without "model." in front; of a
     * fused parameter either all parts or none; any module within a layer's experts is all of
     * them. */
    const char *const *ignore;
    uint32_t ignore_count;
} dray_engine_quant;

#define DRAY_ENGINE_QUANT_INIT                                                                     \
    {                                                                                              \
        sizeof(dray_engine_quant), 0, 0, {0, 0}, NULL, 0                                           \
    }

/* Reads the quantization_config of a config.json, or of a folder with one: quant_method fp8 with or
 * without weight_block_size, scale_fmt, modules_to_not_convert. *out is the caller's, for
 * dray_engine_quant_free; NULL where the model is not quantised. DRAY_EUNSUPPORTED names the
 * method. */
int dray_engine_quant_load(const char *path, dray_engine_quant **out, dray_error *error);
/* NULL is fine. */
void dray_engine_quant_free(dray_engine_quant *quant);

typedef struct dray_engine_spec {
    size_t size;
    uint32_t tp, tp_rank;   /* ranks of one pipeline stage: SGLang's tp_size, vLLM's tensor x data
                               parallel size */
    int32_t dtype;          /* storage dtype; NONE: the config's */
    int64_t vocab_multiple; /* vocabulary padded to a multiple of this; 0: 64 */
    int32_t kind;           /* dray_region_kind of the region; 0: SHARED */
    const uint32_t *pp_layers;      /* layers of each of the `pp` stages; NULL: as engines do */
    const dray_expert_map *experts; /* NULL: expert s % experts in slot s */
    const dray_engine_quant *quant; /* NULL: not quantised */
    uint32_t pp, pp_rank;           /* pipeline stages; 0: 1 */
    /* Experts are spread over `ep` groups of tp / ep neighbouring ranks, which cut each of them.
     * 0: 1. */
    uint32_t ep;
    uint32_t dp;    /* attention data parallelism: attention is cut over tp / dp; 0: 1 */
    int32_t engine; /* dray_engine_kind */
    int32_t draft;  /* dray_draft */
    /* Over how many neighbouring ranks these are cut, where it is not the engine's default: 1 is
     * whole on every rank (SGLang's moe_dense_tp_size, shared experts under DeepEP). With dp > 1
     * the default is tp for SGLang's dense MLPs, shared experts and head, tp / dp for the rest. */
    uint32_t dense_tp, shared_tp, embed_tp, head_tp;
    int32_t fuse_shared; /* SGLang's fusion: the shared expert is one more slot of every rank */
    uint32_t redundant;  /* slots beyond one an expert, where there is no map */
    uint32_t transposed; /* DRAY_PART_... whose matrices are stored [in, out], scales too */
    int32_t w13_order;   /* dray_w13_order, of weights and of their scales by block */
} dray_engine_spec;

#define DRAY_ENGINE_SPEC_INIT                                                                      \
    {                                                                                              \
        sizeof(dray_engine_spec), 1, 0, 0, 0, 0, NULL, NULL, NULL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,   \
            0, 0, 0, 0                                                                             \
    }

/* One rank's parameters as SGLang and vLLM load them: qkv_proj = [q; k; v] with KV heads replicated
 * where there are more ranks than heads, gate_up_proj = [gate; up], o_proj and down_proj cut along
 * the input, fused_qkv_a_proj_with_mqa = [q_a; kv_a], q_b and kv_b by heads, stacked experts
 * w13_weight = [slots, gate; up (or the other way round), in] and w2_weight = [slots, out, in],
 * vocabulary-parallel embedding and head with padding, norms and router replicated, a tied head as
 * an alias. What engines derive from these after loading (w_kc and w_vc, shuffled or requantised
 * weights) has no blocks. One region, each parameter aligned to 256 bytes; padding is memory in no
 * block; tensors of other stages and other ranks' experts are not in the layout; an expert in
 * several slots has a block for each. spec NULL: its defaults. DRAY_EINVALID names the numbers that
 * do not fit: heads, sizes and the padded vocabulary that the group they are cut over does not
 * divide, KV heads neither multiple nor divisor, experts and slots by ep, cuts that are not on the
 * edge of a quantised block, experts in no slot. */
int dray_layout_engine(const dray_model_config *config, const dray_engine_spec *spec,
                       dray_layout **out, dray_error *error);
/* Where the engine's parameter `name` ("model.layers.0.self_attn.qkv_proj.weight",
 * "model.layers.3.mlp.experts.w13_weight", "model.layers.3.mlp.experts.w2_weight_scale_inv", or any
 * unfused one) lies: bytes from the region's start and its local shape including padding, in the
 * order of memory; shape has room for DRAY_MAX_DIMS. A tied head lies where the embedding does. A
 * draft model's parameters have the checkpoint's layer numbers. DRAY_ENOENT: also for a parameter
 * of another stage. */
int dray_engine_parameter(const dray_model_config *config, const dray_engine_spec *spec,
                          const char *name, uint64_t *offset, uint32_t *ndim, int64_t *shape,
                          dray_error *error);

/* ---- builder: safetensors -------------------------------------------------------------------- */

/* A .safetensors file, a model.safetensors.index.json, or a folder (its index, else its
 * model.safetensors, else its only .safetensors file): each file a FILE region (absolute path),
 * each tensor with elements one dense block. Everything is checked: header length, names, duplicate
 * keys, dtypes, shapes against offsets, holes, overlaps, file size, index against files.
 * DRAY_ENOENT, DRAY_ESYS, DRAY_EFORMAT, DRAY_EUNSUPPORTED (a dtype, or more than DRAY_MAX_DIMS
 * dimensions). */
int dray_layout_safetensors(const char *path, dray_layout **out, dray_error *error);

typedef struct dray_safetensors_options {
    size_t size;
    uint64_t max_file_bytes;   /* 0: 5 GiB; a tensor that is larger gets a file of its own */
    const char *metadata_json; /* object of string values for every header's __metadata__; NULL:
                                  {"format":"pt"} */
    /* A key of every header's __metadata__ whose value is a JSON object: of the file's own tensors,
     * what `tensor_values` says. NULL: none. */
    const char *values_key;
    const char *const *tensor_values; /* for each tensor of `like`; NULL: nothing of this one */
} dray_safetensors_options;

#define DRAY_SAFETENSORS_OPTIONS_INIT                                                              \
    {                                                                                              \
        sizeof(dray_safetensors_options), 0, NULL, NULL, NULL                                      \
    }

/* Plans the files of a checkpoint that holds all tensors of `like` (global shapes and dtypes;
 * aliases left out; blocks not looked at) under `directory`, which is made if need be (its parent
 * must be there). Files are created with their headers written and their full size, as
 * "<name>.partial"; the layout's FILE regions name them. Fill them through a plan and a mover, then
 * call dray_safetensors_finish. Until then a reader sees the old checkpoint, or none. One writer a
 * folder. *out is the caller's. */
int dray_safetensors_begin(const char *directory, const dray_layout *like,
                           const dray_safetensors_options *options, dray_layout **out,
                           dray_error *error);
/* Makes what begin laid out the folder's checkpoint: checks that the files are those begun, fsyncs,
 * renames, writes the index last (several files), fsyncs the folder, then removes the files of an
 * earlier checkpoint. A writer that dies at any step leaves the old checkpoint or the new one.
 * Where the old one has as many shards, the new ones are called "model-b-..." (and "model-..." the
 * next time): the index says which. Blocks for the disk. DRAY_EINVALID, DRAY_EFORMAT or
 * DRAY_ENOENT: not a layout begun here; DRAY_EEXIST: an index that names shards of both kinds;
 * DRAY_ESYS. */
int dray_safetensors_finish(const char *directory, const dray_layout *layout, dray_error *error);

/* ---- SPEC strings ("fsdp:4", "engine:tp=4", "full", "safetensors:DIR") ----------------------- */

/* Makes the layouts of all members that a SPEC describes, ranks in order:
 *   full[:dtype=D]   fsdp:N[,dtype=D]   fsdp1:N[,dtype=D][,orig=1]
 *   megatron[:tp=N,cp=N,ep=N,etp=N,dp=N,pp=N,vpp=N,first=LAYERS,last=LAYERS,dtype=D,vocab=MULTIPLE,
 *            experts=grouped|packed|sequential]   (each optional; ranks as dray_megatron_place)
 *   engine:tp=N[,dtype=D][,vocab=MULTIPLE]   safetensors:PATH
 * *out is an array of *count layouts; free each and then the array with free(). model may be NULL
 * for safetensors. DRAY_EINVALID: unknown words get the nearest right one in the message. */
int dray_layouts_from_spec(const dray_model_config *model, const char *spec, dray_layout ***out,
                           uint32_t *count, dray_error *error);

#ifdef __cplusplus
}
#endif
#endif
