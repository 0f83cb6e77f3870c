/* Megatron-Core's parameters and the checkpoint's. Names and shapes: megatron/core/models/gpt,
 * transformer/attention.py, multi_latent_attention.py, mlp.py, multi_token_prediction.py and
 * transformer/moe/ of NVIDIA/Megatron-LM. Where a family calls a tensor otherwise, a second row
 * says so; the first whose tensors the family has counts. In the order in which Megatron makes
 * them. */
#include "model/megatron.h"

#define COUNT(array) ((uint32_t)(sizeof(array) / sizeof *(array)))

/* The three ways to hold experts, over one family's names of them. */
#define EXPERTS(moe, gate, up, down)                                                               \
    {.name = "mlp.experts.linear_fc1.weight*",                                                     \
     .cut = DRAY__MEGATRON_GATED,                                                                  \
     .scope = DRAY__MEGATRON_LAYER,                                                                \
     .form = DRAY__MEGATRON_IF_GROUPED,                                                            \
     .layers = DRAY__LAYERS_MOE,                                                                   \
     .tensors = {moe "experts.*." gate ".weight", moe "experts.*." up ".weight"}},                 \
        {.name = "mlp.experts.linear_fc2.weight*",                                                 \
         .cut = DRAY__MEGATRON_ROW,                                                                \
         .scope = DRAY__MEGATRON_LAYER,                                                            \
         .form = DRAY__MEGATRON_IF_GROUPED,                                                        \
         .layers = DRAY__LAYERS_MOE,                                                               \
         .tensors = {moe "experts.*." down ".weight"}},                                            \
        {.name = "mlp.experts.weight1",                                                            \
         .cut = DRAY__MEGATRON_PACKED_IN,                                                          \
         .scope = DRAY__MEGATRON_LAYER,                                                            \
         .form = DRAY__MEGATRON_IF_PACKED,                                                         \
         .layers = DRAY__LAYERS_MOE,                                                               \
         .tensors = {moe "experts.*." gate ".weight", moe "experts.*." up ".weight"}},             \
        {.name = "mlp.experts.weight2",                                                            \
         .cut = DRAY__MEGATRON_PACKED_OUT,                                                         \
         .scope = DRAY__MEGATRON_LAYER,                                                            \
         .form = DRAY__MEGATRON_IF_PACKED,                                                         \
         .layers = DRAY__LAYERS_MOE,                                                               \
         .tensors = {moe "experts.*." down ".weight"}},                                            \
        {.name = "mlp.experts.local_experts.*.linear_fc1.weight",                                  \
         .cut = DRAY__MEGATRON_GATED,                                                              \
         .scope = DRAY__MEGATRON_LAYER,                                                            \
         .form = DRAY__MEGATRON_IF_SEQUENTIAL,                                                     \
         .layers = DRAY__LAYERS_MOE,                                                               \
         .tensors = {moe "experts.*." gate ".weight", moe "experts.*." up ".weight"}},             \
    {                                                                                              \
        .name = "mlp.experts.local_experts.*.linear_fc2.weight", .cut = DRAY__MEGATRON_ROW,        \
        .scope = DRAY__MEGATRON_LAYER, .form = DRAY__MEGATRON_IF_SEQUENTIAL,                       \
        .layers = DRAY__LAYERS_MOE, .tensors = {                                                   \
            moe "experts.*." down ".weight"                                                        \
        }                                                                                          \
    }

#define LAYER_ROW(megatron, tensor, ...)                                                           \
    {                                                                                              \
        .name = megatron, .scope = DRAY__MEGATRON_LAYER, .tensors = {tensor}, __VA_ARGS__          \
    }

/* A norm that one module fuses into the projection behind it and another keeps by itself. */
#define NORM(megatron, tensor, ...)                                                                \
    LAYER_ROW(megatron, tensor, .cut = DRAY__MEGATRON_WHOLE, __VA_ARGS__)

#define BY_NAME .form = DRAY__MEGATRON_BY_NAME
#define GROUPED_QUERY .attention = DRAY__GROUPED_QUERY
#define LATENT .attention = DRAY__LATENT
#define DENSE .layers = DRAY__LAYERS_DENSE
#define MOE .layers = DRAY__LAYERS_MOE

const dray__megatron_row dray__megatron_rows[] = {
    {.name = "embedding.word_embeddings.weight",
     .cut = DRAY__MEGATRON_VOCAB,
     .tensors = {"model.embed_tokens.weight"}},

    {.name = "enorm.weight", .scope = DRAY__MEGATRON_MTP, .tensors = {"enorm.weight"}},
    {.name = "hnorm.weight", .scope = DRAY__MEGATRON_MTP, .tensors = {"hnorm.weight"}},
    {.name = "eh_proj.weight",
     .cut = DRAY__MEGATRON_COLUMN,
     .scope = DRAY__MEGATRON_MTP,
     .tensors = {"eh_proj.weight"}},

    NORM("input_layernorm.weight", "input_layernorm.weight", LATENT),
    NORM("input_layernorm.weight", "input_layernorm.weight", GROUPED_QUERY, BY_NAME),
    NORM("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", GROUPED_QUERY),
    {.name = "self_attention.linear_qkv.weight",
     .cut = DRAY__MEGATRON_QKV,
     .scope = DRAY__MEGATRON_LAYER,
     .attention = DRAY__GROUPED_QUERY,
     .tensors = {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"}},
    {.name = "self_attention.linear_qkv.bias",
     .cut = DRAY__MEGATRON_QKV,
     .scope = DRAY__MEGATRON_LAYER,
     .attention = DRAY__GROUPED_QUERY,
     .tensors = {"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"}},
    NORM("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", GROUPED_QUERY),
    NORM("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", GROUPED_QUERY),
    LAYER_ROW("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", LATENT,
              .cut = DRAY__MEGATRON_HEADS),
    LAYER_ROW("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", LATENT,
              .cut = DRAY__MEGATRON_DOWN),
    NORM("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight",
         LATENT),
    NORM("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight", LATENT, BY_NAME),
    LAYER_ROW("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", LATENT,
              .cut = DRAY__MEGATRON_HEADS),
    LAYER_ROW("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight",
              LATENT, .cut = DRAY__MEGATRON_DOWN),
    NORM("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight",
         LATENT),
    NORM("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight", LATENT, BY_NAME),
    LAYER_ROW("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", LATENT,
              .cut = DRAY__MEGATRON_HEADS),
    LAYER_ROW("self_attention.linear_proj.weight", "self_attn.o_proj.weight",
              .cut = DRAY__MEGATRON_HEADS_ROW),
    LAYER_ROW("self_attention.linear_proj.bias", "self_attn.o_proj.bias",
              .cut = DRAY__MEGATRON_WHOLE),

    NORM("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", DENSE),
    NORM("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", DENSE, BY_NAME),
    NORM("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", MOE),
    {.name = "mlp.linear_fc1.weight",
     .cut = DRAY__MEGATRON_GATED,
     .scope = DRAY__MEGATRON_LAYER,
     .layers = DRAY__LAYERS_DENSE,
     .tensors = {"mlp.gate_proj.weight", "mlp.up_proj.weight"}},
    {.name = "mlp.linear_fc1.bias",
     .cut = DRAY__MEGATRON_GATED,
     .scope = DRAY__MEGATRON_LAYER,
     .layers = DRAY__LAYERS_DENSE,
     .tensors = {"mlp.gate_proj.bias", "mlp.up_proj.bias"}},
    LAYER_ROW("mlp.linear_fc2.weight", "mlp.down_proj.weight", DENSE, .cut = DRAY__MEGATRON_ROW),
    LAYER_ROW("mlp.linear_fc2.bias", "mlp.down_proj.bias", DENSE, .cut = DRAY__MEGATRON_WHOLE),

    LAYER_ROW("mlp.router.weight", "mlp.gate.weight", MOE, .cut = DRAY__MEGATRON_WHOLE),
    LAYER_ROW("mlp.router.weight", "block_sparse_moe.gate.weight", MOE,
              .cut = DRAY__MEGATRON_WHOLE),
    LAYER_ROW("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", MOE,
              .cut = DRAY__MEGATRON_WHOLE),
    EXPERTS("mlp.", "gate_proj", "up_proj", "down_proj"),
    EXPERTS("block_sparse_moe.", "w1", "w3", "w2"),
    {.name = "mlp.shared_experts.linear_fc1.weight",
     .cut = DRAY__MEGATRON_GATED,
     .scope = DRAY__MEGATRON_LAYER,
     .layers = DRAY__LAYERS_MOE,
     .tensors = {"mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"}},
    LAYER_ROW("mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.down_proj.weight", MOE,
              .cut = DRAY__MEGATRON_ROW),

    {.name = "final_layernorm.weight",
     .scope = DRAY__MEGATRON_MTP,
     .tensors = {"shared_head.norm.weight"}},

    {.name = "decoder.final_layernorm.weight",
     .scope = DRAY__MEGATRON_LAST,
     .tensors = {"model.norm.weight"}},
    {.name = "output_layer.weight",
     .cut = DRAY__MEGATRON_VOCAB,
     .scope = DRAY__MEGATRON_LAST,
     .tensors = {"lm_head.weight"}},
};

const uint32_t dray__megatron_count = COUNT(dray__megatron_rows);
