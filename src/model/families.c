/* The families' tables. Names and order: transformers' modeling_llama.py, modeling_qwen2.py,
 * modeling_qwen3.py; with experts, the checkpoints that their authors published, whose names
 * transformers keeps on disk (Qwen/Qwen3-30B-A3B, mistralai/Mixtral-8x7B-v0.1,
 * deepseek-ai/DeepSeek-V3, moonshotai/Kimi-K2-Instruct, zai-org/GLM-4.5). Fused parameters and
 * cuts: QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear, FusedMoE and
 * VocabParallelEmbedding, the same in vLLM and SGLang. */
#include "model/family.h"

#define COUNT(array) ((uint32_t)(sizeof(array) / sizeof *(array)))
#define LAYER "model.layers.*."
#define EXPERT LAYER "mlp.experts.*."
#define SHARED LAYER "mlp.shared_experts."

#define V DRAY__SIZE_VOCAB
#define H DRAY__SIZE_HIDDEN
#define I DRAY__SIZE_INTERMEDIATE
#define Q DRAY__SIZE_QUERY
#define KV DRAY__SIZE_KV
#define D DRAY__SIZE_HEAD
#define E DRAY__SIZE_EXPERTS
#define M DRAY__SIZE_EXPERT
#define S DRAY__SIZE_SHARED
#define QA DRAY__SIZE_Q_LORA
#define KVC DRAY__SIZE_KV_LORA
#define KVA DRAY__SIZE_KV_A
#define KVB DRAY__SIZE_KV_B
#define O DRAY__SIZE_VALUE
#define L DRAY__SIZE_LABELS

/* Tables share their parts; a part is a list of rows. */
#define EMBEDDING                                                                                  \
    {                                                                                              \
        .name = "model.embed_tokens.weight", .cut = DRAY__CUT_VOCAB, .shape = { V, H }             \
    }

/* What a layer of multi-token prediction adds to one of the model's. */
#define MTP_ENTRY                                                                                  \
    {.name = LAYER "embed_tokens.weight",                                                          \
     .tied = "model.embed_tokens.weight",                                                          \
     .layers = DRAY__LAYERS_MTP,                                                                   \
     .cut = DRAY__CUT_VOCAB,                                                                       \
     .shape = {V, H}},                                                                             \
        {.name = LAYER "enorm.weight", .layers = DRAY__LAYERS_MTP, .shape = {H}},                  \
        {.name = LAYER "hnorm.weight", .layers = DRAY__LAYERS_MTP, .shape = {H}},                  \
    {                                                                                              \
        .name = LAYER "eh_proj.weight", .layers = DRAY__LAYERS_MTP, .shape = {                     \
            H,                                                                                     \
            DRAY__SIZE_TWICE                                                                       \
        }                                                                                          \
    }

#define MTP_EXIT                                                                                   \
    {.name = LAYER "shared_head.norm.weight", .layers = DRAY__LAYERS_MTP, .shape = {H}},           \
    {                                                                                              \
        .name = LAYER "shared_head.head.weight", .tied = "lm_head.weight",                         \
        .layers = DRAY__LAYERS_MTP, .cut = DRAY__CUT_VOCAB, .shape = {                             \
            V,                                                                                     \
            H                                                                                      \
        }                                                                                          \
    }

/* Grouped-query attention. */
#define ATTENTION                                                                                  \
    {.name = LAYER "self_attn.q_proj.weight",                                                      \
     .fused = LAYER "self_attn.qkv_proj.weight",                                                   \
     .cut = DRAY__CUT_HEADS,                                                                       \
     .shape = {Q, H}},                                                                             \
        {.name = LAYER "self_attn.q_proj.bias",                                                    \
         .fused = LAYER "self_attn.qkv_proj.bias",                                                 \
         .when = DRAY__WHEN_QKV_BIAS,                                                              \
         .cut = DRAY__CUT_HEADS,                                                                   \
         .shape = {Q}},                                                                            \
        {.name = LAYER "self_attn.k_proj.weight",                                                  \
         .fused = LAYER "self_attn.qkv_proj.weight",                                               \
         .cut = DRAY__CUT_KV_HEADS,                                                                \
         .shape = {KV, H}},                                                                        \
        {.name = LAYER "self_attn.k_proj.bias",                                                    \
         .fused = LAYER "self_attn.qkv_proj.bias",                                                 \
         .when = DRAY__WHEN_QKV_BIAS,                                                              \
         .cut = DRAY__CUT_KV_HEADS,                                                                \
         .shape = {KV}},                                                                           \
        {.name = LAYER "self_attn.v_proj.weight",                                                  \
         .fused = LAYER "self_attn.qkv_proj.weight",                                               \
         .cut = DRAY__CUT_KV_HEADS,                                                                \
         .shape = {KV, H}},                                                                        \
        {.name = LAYER "self_attn.v_proj.bias",                                                    \
         .fused = LAYER "self_attn.qkv_proj.bias",                                                 \
         .when = DRAY__WHEN_QKV_BIAS,                                                              \
         .cut = DRAY__CUT_KV_HEADS,                                                                \
         .shape = {KV}},                                                                           \
        {.name = LAYER "self_attn.o_proj.weight", .cut = DRAY__CUT_HEADS_ROW, .shape = {H, Q}},    \
        {.name = LAYER "self_attn.o_proj.bias", .when = DRAY__WHEN_O_BIAS, .shape = {H}},          \
        {.name = LAYER "self_attn.q_norm.weight", .when = DRAY__WHEN_QK_NORM, .shape = {D}},       \
    {                                                                                              \
        .name = LAYER "self_attn.k_norm.weight", .when = DRAY__WHEN_QK_NORM, .shape = { D }        \
    }

/* Multi-head latent attention. */
#define LATENT_ATTENTION                                                                           \
    {.name = LAYER "self_attn.q_proj.weight",                                                      \
     .when = DRAY__WHEN_NO_Q_LORA,                                                                 \
     .cut = DRAY__CUT_HEADS,                                                                       \
     .shape = {Q, H}},                                                                             \
        {.name = LAYER "self_attn.q_a_proj.weight",                                                \
         .fused = LAYER "self_attn.fused_qkv_a_proj_with_mqa.weight",                              \
         .when = DRAY__WHEN_Q_LORA,                                                                \
         .shape = {QA, H}},                                                                        \
        {.name = LAYER "self_attn.q_a_layernorm.weight",                                           \
         .when = DRAY__WHEN_Q_LORA,                                                                \
         .shape = {QA}},                                                                           \
        {.name = LAYER "self_attn.q_b_proj.weight",                                                \
         .when = DRAY__WHEN_Q_LORA,                                                                \
         .cut = DRAY__CUT_HEADS,                                                                   \
         .shape = {Q, QA}},                                                                        \
        {.name = LAYER "self_attn.kv_a_proj_with_mqa.weight",                                      \
         .fused = LAYER "self_attn.fused_qkv_a_proj_with_mqa.weight",                              \
         .when = DRAY__WHEN_Q_LORA,                                                                \
         .shape = {KVA, H}},                                                                       \
        {.name = LAYER "self_attn.kv_a_proj_with_mqa.weight",                                      \
         .when = DRAY__WHEN_NO_Q_LORA,                                                             \
         .shape = {KVA, H}},                                                                       \
        {.name = LAYER "self_attn.kv_a_layernorm.weight", .shape = {KVC}},                         \
        {.name = LAYER "self_attn.kv_b_proj.weight", .cut = DRAY__CUT_HEADS, .shape = {KVB, KVC}}, \
    {                                                                                              \
        .name = LAYER "self_attn.o_proj.weight", .cut = DRAY__CUT_HEADS_ROW, .shape = { H, O }     \
    }

#define DENSE_MLP                                                                                  \
    {.name = LAYER "mlp.gate_proj.weight",                                                         \
     .fused = LAYER "mlp.gate_up_proj.weight",                                                     \
     .layers = DRAY__LAYERS_DENSE,                                                                 \
     .cut = DRAY__CUT_COLUMN,                                                                      \
     .shape = {I, H}},                                                                             \
        {.name = LAYER "mlp.gate_proj.bias",                                                       \
         .fused = LAYER "mlp.gate_up_proj.bias",                                                   \
         .when = DRAY__WHEN_MLP_BIAS,                                                              \
         .layers = DRAY__LAYERS_DENSE,                                                             \
         .cut = DRAY__CUT_COLUMN,                                                                  \
         .shape = {I}},                                                                            \
        {.name = LAYER "mlp.up_proj.weight",                                                       \
         .fused = LAYER "mlp.gate_up_proj.weight",                                                 \
         .layers = DRAY__LAYERS_DENSE,                                                             \
         .cut = DRAY__CUT_COLUMN,                                                                  \
         .shape = {I, H}},                                                                         \
        {.name = LAYER "mlp.up_proj.bias",                                                         \
         .fused = LAYER "mlp.gate_up_proj.bias",                                                   \
         .when = DRAY__WHEN_MLP_BIAS,                                                              \
         .layers = DRAY__LAYERS_DENSE,                                                             \
         .cut = DRAY__CUT_COLUMN,                                                                  \
         .shape = {I}},                                                                            \
        {.name = LAYER "mlp.down_proj.weight",                                                     \
         .layers = DRAY__LAYERS_DENSE,                                                             \
         .cut = DRAY__CUT_ROW,                                                                     \
         .shape = {H, I}},                                                                         \
    {                                                                                              \
        .name = LAYER "mlp.down_proj.bias", .when = DRAY__WHEN_MLP_BIAS,                           \
        .layers = DRAY__LAYERS_DENSE, .shape = {                                                   \
            H                                                                                      \
        }                                                                                          \
    }

/* moe: "mlp." or whatever the checkpoint calls it; then its names of the three projections. */
#define EXPERTS(moe, gate, up, down)                                                               \
    {.name = LAYER moe "experts.*." gate ".weight",                                                \
     .fused = LAYER moe "experts.w13_weight",                                                      \
     .layers = DRAY__LAYERS_MOE,                                                                   \
     .cut = DRAY__CUT_COLUMN,                                                                      \
     .shape = {M, H}},                                                                             \
        {.name = LAYER moe "experts.*." up ".weight",                                              \
         .fused = LAYER moe "experts.w13_weight",                                                  \
         .layers = DRAY__LAYERS_MOE,                                                               \
         .cut = DRAY__CUT_COLUMN,                                                                  \
         .shape = {M, H}},                                                                         \
    {                                                                                              \
        .name = LAYER moe "experts.*." down ".weight", .fused = LAYER moe "experts.w2_weight",     \
        .layers = DRAY__LAYERS_MOE, .cut = DRAY__CUT_ROW, .shape = {                               \
            H,                                                                                     \
            M                                                                                      \
        }                                                                                          \
    }

#define ROUTER(moe)                                                                                \
    {                                                                                              \
        .name = LAYER moe "gate.weight", .layers = DRAY__LAYERS_MOE, .shape = { E, H }             \
    }

/* A buffer that the router's load balancing updates: too small a step for 16 bits. */
#define ROUTER_BIAS                                                                                \
    {                                                                                              \
        .name = LAYER "mlp.gate.e_score_correction_bias", .layers = DRAY__LAYERS_MOE,              \
        .shape = {E}, .dtype = DRAY_F32                                                            \
    }

#define SHARED_EXPERTS                                                                             \
    {.name = SHARED "gate_proj.weight",                                                            \
     .fused = SHARED "gate_up_proj.weight",                                                        \
     .when = DRAY__WHEN_SHARED,                                                                    \
     .layers = DRAY__LAYERS_MOE,                                                                   \
     .cut = DRAY__CUT_COLUMN,                                                                      \
     .shape = {S, H}},                                                                             \
        {.name = SHARED "up_proj.weight",                                                          \
         .fused = SHARED "gate_up_proj.weight",                                                    \
         .when = DRAY__WHEN_SHARED,                                                                \
         .layers = DRAY__LAYERS_MOE,                                                               \
         .cut = DRAY__CUT_COLUMN,                                                                  \
         .shape = {S, H}},                                                                         \
    {                                                                                              \
        .name = SHARED "down_proj.weight", .when = DRAY__WHEN_SHARED, .layers = DRAY__LAYERS_MOE,  \
        .cut = DRAY__CUT_ROW, .shape = {                                                           \
            H,                                                                                     \
            S                                                                                      \
        }                                                                                          \
    }

#define LAYER_NORMS                                                                                \
    {.name = LAYER "input_layernorm.weight", .shape = {H}},                                        \
    {                                                                                              \
        .name = LAYER "post_attention_layernorm.weight", .shape = { H }                            \
    }

#define HEAD                                                                                       \
    {.name = "model.norm.weight", .shape = {H}},                                                   \
        {.name = "lm_head.weight",                                                                 \
         .tied = "model.embed_tokens.weight",                                                      \
         .when = DRAY__WHEN_LANGUAGE,                                                              \
         .cut = DRAY__CUT_VOCAB,                                                                   \
         .shape = {V, H}},                                                                         \
        {.name = "score.weight", .when = DRAY__WHEN_LABELS, .shape = {L, H}},                      \
    {                                                                                              \
        .name = "score.bias", .when = DRAY__WHEN_LABELS, .shape = { L }                            \
    }

/* transformers 5 (conversion_mapping.py). */
#define PACKED(moe, gate, up, down)                                                                \
    {LAYER "mlp.experts.gate_up_proj",                                                             \
     {LAYER moe "experts.*." gate ".weight", LAYER moe "experts.*." up ".weight"}},                \
    {                                                                                              \
        LAYER "mlp.experts.down_proj",                                                             \
        {                                                                                          \
            LAYER moe "experts.*." down ".weight"                                                  \
        }                                                                                          \
    }

static const dray__module packed[] = {PACKED("mlp.", "gate_proj", "up_proj", "down_proj"), {0}};
static const dray__module mixtral_modules[] = {
    PACKED("block_sparse_moe.", "w1", "w3", "w2"),
    {LAYER "mlp.gate.weight", {LAYER "block_sparse_moe.gate.weight"}},
    {0}};

static const dray__parameter dense[] = {EMBEDDING, ATTENTION, DENSE_MLP, LAYER_NORMS, HEAD};

static const dray__parameter qwen3_moe[] = {EMBEDDING,
                                            ATTENTION,
                                            DENSE_MLP,
                                            ROUTER("mlp."),
                                            EXPERTS("mlp.", "gate_proj", "up_proj", "down_proj"),
                                            LAYER_NORMS,
                                            HEAD};

static const dray__parameter mixtral[] = {EMBEDDING,
                                          ATTENTION,
                                          ROUTER("block_sparse_moe."),
                                          EXPERTS("block_sparse_moe.", "w1", "w3", "w2"),
                                          LAYER_NORMS,
                                          HEAD};

static const dray__parameter deepseek_v3[] = {EMBEDDING,
                                              MTP_ENTRY,
                                              LATENT_ATTENTION,
                                              DENSE_MLP,
                                              ROUTER("mlp."),
                                              ROUTER_BIAS,
                                              EXPERTS("mlp.", "gate_proj", "up_proj", "down_proj"),
                                              SHARED_EXPERTS,
                                              LAYER_NORMS,
                                              MTP_EXIT,
                                              HEAD};

static const dray__parameter glm4_moe[] = {EMBEDDING,
                                           MTP_ENTRY,
                                           ATTENTION,
                                           DENSE_MLP,
                                           ROUTER("mlp."),
                                           ROUTER_BIAS,
                                           EXPERTS("mlp.", "gate_proj", "up_proj", "down_proj"),
                                           SHARED_EXPERTS,
                                           LAYER_NORMS,
                                           MTP_EXIT,
                                           HEAD};

_Static_assert(COUNT(dense) <= DRAY__MOST_PARAMETERS && COUNT(qwen3_moe) <= DRAY__MOST_PARAMETERS &&
                   COUNT(deepseek_v3) <= DRAY__MOST_PARAMETERS &&
                   COUNT(glm4_moe) <= DRAY__MOST_PARAMETERS,
               "");

#define DEEPSEEK                                                                                   \
    .parameters = deepseek_v3, .count = COUNT(deepseek_v3), .modules = packed, .moe = true,        \
    .latent = true, .mtp = true, .first_dense_key = true, .default_first_dense = 3,                \
    .experts_keys = {"n_routed_experts"}, .expert_size_key = "moe_intermediate_size"

const dray__family dray__families[] = {
    {.name = "llama",
     .parameters = dense,
     .count = COUNT(dense),
     .bias_key = true,
     .o_bias_key = true,
     .mlp_bias_key = true},
    {.name = "qwen2",
     .parameters = dense,
     .count = COUNT(dense),
     .default_kv_heads = 32,
     .qkv_bias = true},
    {.name = "qwen3",
     .parameters = dense,
     .count = COUNT(dense),
     .default_kv_heads = 32,
     .default_head_dim = 128,
     .bias_key = true,
     .o_bias_key = true,
     .qk_norm = true},
    {.name = "qwen3_moe",
     .parameters = qwen3_moe,
     .count = COUNT(qwen3_moe),
     .modules = packed,
     .default_kv_heads = 4,
     .bias_key = true,
     .o_bias_key = true,
     .qk_norm = true,
     .moe = true,
     .dense_keys = true,
     .experts_keys = {"num_experts", "num_local_experts"},
     .expert_size_key = "moe_intermediate_size"},
    {.name = "mixtral",
     .parameters = mixtral,
     .count = COUNT(mixtral),
     .modules = mixtral_modules,
     .default_kv_heads = 8,
     .default_theta = 1e6,
     .moe = true,
     .experts_keys = {"num_local_experts"}},
    {.name = "deepseek_v3", DEEPSEEK},
    {.name = "kimi_k2", DEEPSEEK},
    {.name = "glm4_moe",
     .parameters = glm4_moe,
     .count = COUNT(glm4_moe),
     .modules = packed,
     .default_kv_heads = 8,
     .bias_key = true,
     .qk_norm_key = true,
     .moe = true,
     .mtp = true,
     .first_dense_key = true,
     .default_first_dense = 1,
     .experts_keys = {"n_routed_experts"},
     .expert_size_key = "moe_intermediate_size"},
};

_Static_assert(COUNT(dray__families) <= DRAY__MOST_FAMILIES, "");

const uint32_t dray__family_count = COUNT(dray__families);
