/* A table of Megatron-Core's parameters with the checkpoint's tensors. Names and shapes are those
 * of megatron/core/models/gpt, transformer/attention.py, multi_latent_attention.py, mlp.py,
 * multi_token_prediction.py and transformer/moe/ of NVIDIA/Megatron-LM. When a family has another
 * name for a tensor, there is a second row for it, and the first row with tensors that the family
 * has is used. Rows are in the order in which Megatron makes the parameters. */
#include "model/trainers/megatron.h"

#define COUNT(array) ((uint32_t)(sizeof(array) / sizeof *(array)))

/* A row: its scope, how it is cut, Megatron's name within the scope, and further fields. */
#define ENTRY(scope_, cut_, name_, ...)                                                            \
    {                                                                                              \
        .name = name_, .cut = DRAY__MEGATRON_##cut_, .scope = DRAY__MEGATRON_##scope_, __VA_ARGS__ \
    }
#define OF(...) .tensors = {__VA_ARGS__} /* the checkpoint's names */
#define FORM(form_) .form = DRAY__MEGATRON_##form_
#define GROUPED_QUERY .attention = DRAY__GROUPED_QUERY
#define LATENT .attention = DRAY__LATENT
#define DENSE .layers = DRAY__LAYERS_DENSE
#define MOE .layers = DRAY__LAYERS_MOE

/* The three ways to hold experts, for one family's names of them. */
#define EXPERTS(moe, gate, up, down)                                                               \
    ENTRY(LAYER, GATED, "mlp.experts.linear_fc1.weight*", MOE, FORM(IF_GROUPED),                   \
          OF(moe "experts.*." gate ".weight", moe "experts.*." up ".weight")),                     \
        ENTRY(LAYER, ROW, "mlp.experts.linear_fc2.weight*", MOE, FORM(IF_GROUPED),                 \
              OF(moe "experts.*." down ".weight")),                                                \
        ENTRY(LAYER, PACKED_IN, "mlp.experts.weight1", MOE, FORM(IF_PACKED),                       \
              OF(moe "experts.*." gate ".weight", moe "experts.*." up ".weight")),                 \
        ENTRY(LAYER, PACKED_OUT, "mlp.experts.weight2", MOE, FORM(IF_PACKED),                      \
              OF(moe "experts.*." down ".weight")),                                                \
        ENTRY(LAYER, GATED, "mlp.experts.local_experts.*.linear_fc1.weight", MOE,                  \
              FORM(IF_SEQUENTIAL),                                                                 \
              OF(moe "experts.*." gate ".weight", moe "experts.*." up ".weight")),                 \
        ENTRY(LAYER, ROW, "mlp.experts.local_experts.*.linear_fc2.weight", MOE,                    \
              FORM(IF_SEQUENTIAL), OF(moe "experts.*." down ".weight"))

/* Some modules fuse a norm into the projection after it, others keep it separate. The rows of
 * separate norms are BY_NAME. */
const dray__megatron_row dray__megatron_rows[] = {
    ENTRY(FIRST, VOCAB, "embedding.word_embeddings.weight", OF("model.embed_tokens.weight")),

    ENTRY(MTP, WHOLE, "enorm.weight", OF("enorm.weight")),
    ENTRY(MTP, WHOLE, "hnorm.weight", OF("hnorm.weight")),
    ENTRY(MTP, COLUMN, "eh_proj.weight", OF("eh_proj.weight")),

    ENTRY(LAYER, WHOLE, "input_layernorm.weight", LATENT, OF("input_layernorm.weight")),
    ENTRY(LAYER, WHOLE, "input_layernorm.weight", GROUPED_QUERY, FORM(BY_NAME),
          OF("input_layernorm.weight")),
    ENTRY(LAYER, WHOLE, "self_attention.linear_qkv.layer_norm_weight", GROUPED_QUERY,
          OF("input_layernorm.weight")),
    ENTRY(LAYER, QKV, "self_attention.linear_qkv.weight", GROUPED_QUERY,
          OF("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")),
    ENTRY(LAYER, QKV, "self_attention.linear_qkv.bias", GROUPED_QUERY,
          OF("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")),
    ENTRY(LAYER, WHOLE, "self_attention.q_layernorm.weight", GROUPED_QUERY,
          OF("self_attn.q_norm.weight")),
    ENTRY(LAYER, WHOLE, "self_attention.k_layernorm.weight", GROUPED_QUERY,
          OF("self_attn.k_norm.weight")),
    ENTRY(LAYER, HEADS, "self_attention.linear_q_proj.weight", LATENT,
          OF("self_attn.q_proj.weight")),
    ENTRY(LAYER, DOWN, "self_attention.linear_q_down_proj.weight", LATENT,
          OF("self_attn.q_a_proj.weight")),
    ENTRY(LAYER, WHOLE, "self_attention.linear_q_up_proj.layer_norm_weight", LATENT,
          OF("self_attn.q_a_layernorm.weight")),
    ENTRY(LAYER, WHOLE, "self_attention.q_layernorm.weight", LATENT, FORM(BY_NAME),
          OF("self_attn.q_a_layernorm.weight")),
    ENTRY(LAYER, HEADS, "self_attention.linear_q_up_proj.weight", LATENT,
          OF("self_attn.q_b_proj.weight")),
    ENTRY(LAYER, DOWN, "self_attention.linear_kv_down_proj.weight", LATENT,
          OF("self_attn.kv_a_proj_with_mqa.weight")),
    ENTRY(LAYER, WHOLE, "self_attention.linear_kv_up_proj.layer_norm_weight", LATENT,
          OF("self_attn.kv_a_layernorm.weight")),
    ENTRY(LAYER, WHOLE, "self_attention.kv_layernorm.weight", LATENT, FORM(BY_NAME),
          OF("self_attn.kv_a_layernorm.weight")),
    ENTRY(LAYER, HEADS, "self_attention.linear_kv_up_proj.weight", LATENT,
          OF("self_attn.kv_b_proj.weight")),
    ENTRY(LAYER, HEADS_ROW, "self_attention.linear_proj.weight", OF("self_attn.o_proj.weight")),
    ENTRY(LAYER, WHOLE, "self_attention.linear_proj.bias", OF("self_attn.o_proj.bias")),

    ENTRY(LAYER, WHOLE, "mlp.linear_fc1.layer_norm_weight", DENSE,
          OF("post_attention_layernorm.weight")),
    ENTRY(LAYER, WHOLE, "pre_mlp_layernorm.weight", DENSE, FORM(BY_NAME),
          OF("post_attention_layernorm.weight")),
    ENTRY(LAYER, WHOLE, "pre_mlp_layernorm.weight", MOE, OF("post_attention_layernorm.weight")),
    ENTRY(LAYER, GATED, "mlp.linear_fc1.weight", DENSE,
          OF("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    ENTRY(LAYER, GATED, "mlp.linear_fc1.bias", DENSE, OF("mlp.gate_proj.bias", "mlp.up_proj.bias")),
    ENTRY(LAYER, ROW, "mlp.linear_fc2.weight", DENSE, OF("mlp.down_proj.weight")),
    ENTRY(LAYER, WHOLE, "mlp.linear_fc2.bias", DENSE, OF("mlp.down_proj.bias")),

    ENTRY(LAYER, WHOLE, "mlp.router.weight", MOE, OF("mlp.gate.weight")),
    ENTRY(LAYER, WHOLE, "mlp.router.weight", MOE, OF("block_sparse_moe.gate.weight")),
    ENTRY(LAYER, WHOLE, "mlp.router.expert_bias", MOE, OF("mlp.gate.e_score_correction_bias")),
    EXPERTS("mlp.", "gate_proj", "up_proj", "down_proj"),
    EXPERTS("block_sparse_moe.", "w1", "w3", "w2"),
    ENTRY(LAYER, GATED, "mlp.shared_experts.linear_fc1.weight", MOE,
          OF("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight")),
    ENTRY(LAYER, ROW, "mlp.shared_experts.linear_fc2.weight", MOE,
          OF("mlp.shared_experts.down_proj.weight")),

    ENTRY(MTP, WHOLE, "final_layernorm.weight", OF("shared_head.norm.weight")),

    ENTRY(LAST, WHOLE, "decoder.final_layernorm.weight", OF("model.norm.weight")),
    ENTRY(LAST, VOCAB, "output_layer.weight", OF("lm_head.weight")),
};

const uint32_t dray__megatron_count = COUNT(dray__megatron_rows);
