/* The families' tables. Names and order: transformers' modeling_llama.py, modeling_qwen2.py,
 * modeling_qwen3.py; with experts, the checkpoints that their authors published, whose names
 * transformers keeps on disk (Qwen/Qwen3-30B-A3B, mistralai/Mixtral-8x7B-v0.1,
 * deepseek-ai/DeepSeek-V3, moonshotai/Kimi-K2-Instruct, zai-org/GLM-4.5). Fused parameters and
 * cuts: QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear, FusedMoE and
 * VocabParallelEmbedding, the same in vLLM and SGLang. */
#include "model/families/family.h"

#define COUNT(array) ((uint32_t)(sizeof(array) / sizeof *(array)))
#define LAYER "model.layers.*."
#define ATTN LAYER "self_attn."
#define SHARED_MLP LAYER "mlp.shared_experts."

/* A row: how it is cut, its shape (a vector where the second size is NONE), its name, and what else
 * there is to say of it. */
#define ENTRY(cut_, rows, columns, name_, ...)                                                     \
    {                                                                                              \
        .name = name_, .cut = DRAY__CUT_##cut_,                                                    \
        .shape = {DRAY__SIZE_##rows, DRAY__SIZE_##columns}, __VA_ARGS__                            \
    }
#define FUSED(name_) .fused = name_
#define TIED(name_) .tied = name_
#define IF(flag) .when = DRAY__WHEN_##flag
#define IN(layers_) .layers = DRAY__LAYERS_##layers_

/* Tables share their parts; a part is a list of rows. */
#define EMBEDDING ENTRY(VOCAB, VOCAB, HIDDEN, "model.embed_tokens.weight")

/* What a layer of multi-token prediction adds to one of the model's. */
#define MTP_ENTRY                                                                                  \
    ENTRY(VOCAB, VOCAB, HIDDEN, LAYER "embed_tokens.weight", TIED("model.embed_tokens.weight"),    \
          IN(MTP)),                                                                                \
        ENTRY(NONE, HIDDEN, NONE, LAYER "enorm.weight", IN(MTP)),                                  \
        ENTRY(NONE, HIDDEN, NONE, LAYER "hnorm.weight", IN(MTP)),                                  \
        ENTRY(NONE, HIDDEN, TWICE, LAYER "eh_proj.weight", IN(MTP))

#define MTP_EXIT                                                                                   \
    ENTRY(NONE, HIDDEN, NONE, LAYER "shared_head.norm.weight", IN(MTP)),                           \
        ENTRY(VOCAB, VOCAB, HIDDEN, LAYER "shared_head.head.weight", TIED("lm_head.weight"),       \
              IN(MTP))

/* Grouped-query attention. */
#define FUSED_QKV(kind) FUSED(ATTN "qkv_proj." kind)
#define ATTENTION                                                                                  \
    ENTRY(HEADS, QUERY, HIDDEN, ATTN "q_proj.weight", FUSED_QKV("weight")),                        \
        ENTRY(HEADS, QUERY, NONE, ATTN "q_proj.bias", FUSED_QKV("bias"), IF(QKV_BIAS)),            \
        ENTRY(KV_HEADS, KV, HIDDEN, ATTN "k_proj.weight", FUSED_QKV("weight")),                    \
        ENTRY(KV_HEADS, KV, NONE, ATTN "k_proj.bias", FUSED_QKV("bias"), IF(QKV_BIAS)),            \
        ENTRY(KV_HEADS, KV, HIDDEN, ATTN "v_proj.weight", FUSED_QKV("weight")),                    \
        ENTRY(KV_HEADS, KV, NONE, ATTN "v_proj.bias", FUSED_QKV("bias"), IF(QKV_BIAS)),            \
        ENTRY(HEADS_ROW, HIDDEN, QUERY, ATTN "o_proj.weight"),                                     \
        ENTRY(NONE, HIDDEN, NONE, ATTN "o_proj.bias", IF(O_BIAS)),                                 \
        ENTRY(NONE, HEAD, NONE, ATTN "q_norm.weight", IF(QK_NORM)),                                \
        ENTRY(NONE, HEAD, NONE, ATTN "k_norm.weight", IF(QK_NORM))

/* Multi-head latent attention. */
#define FUSED_A FUSED(ATTN "fused_qkv_a_proj_with_mqa.weight")
#define LATENT_ATTENTION                                                                           \
    ENTRY(HEADS, QUERY, HIDDEN, ATTN "q_proj.weight", IF(NO_Q_LORA)),                              \
        ENTRY(NONE, Q_LORA, HIDDEN, ATTN "q_a_proj.weight", FUSED_A, IF(Q_LORA)),                  \
        ENTRY(NONE, Q_LORA, NONE, ATTN "q_a_layernorm.weight", IF(Q_LORA)),                        \
        ENTRY(HEADS, QUERY, Q_LORA, ATTN "q_b_proj.weight", IF(Q_LORA)),                           \
        ENTRY(NONE, KV_A, HIDDEN, ATTN "kv_a_proj_with_mqa.weight", FUSED_A, IF(Q_LORA)),          \
        ENTRY(NONE, KV_A, HIDDEN, ATTN "kv_a_proj_with_mqa.weight", IF(NO_Q_LORA)),                \
        ENTRY(NONE, KV_LORA, NONE, ATTN "kv_a_layernorm.weight"),                                  \
        ENTRY(HEADS, KV_B, KV_LORA, ATTN "kv_b_proj.weight"),                                      \
        ENTRY(HEADS_ROW, HIDDEN, VALUE, ATTN "o_proj.weight")

#define MLP LAYER "mlp."
#define FUSED_GATE(kind) FUSED(MLP "gate_up_proj." kind)
#define DENSE_MLP                                                                                  \
    ENTRY(COLUMN, INTERMEDIATE, HIDDEN, MLP "gate_proj.weight", FUSED_GATE("weight"), IN(DENSE)),  \
        ENTRY(COLUMN, INTERMEDIATE, NONE, MLP "gate_proj.bias", FUSED_GATE("bias"), IF(MLP_BIAS),  \
              IN(DENSE)),                                                                          \
        ENTRY(COLUMN, INTERMEDIATE, HIDDEN, MLP "up_proj.weight", FUSED_GATE("weight"),            \
              IN(DENSE)),                                                                          \
        ENTRY(COLUMN, INTERMEDIATE, NONE, MLP "up_proj.bias", FUSED_GATE("bias"), IF(MLP_BIAS),    \
              IN(DENSE)),                                                                          \
        ENTRY(ROW, HIDDEN, INTERMEDIATE, MLP "down_proj.weight", IN(DENSE)),                       \
        ENTRY(NONE, HIDDEN, NONE, MLP "down_proj.bias", IF(MLP_BIAS), IN(DENSE))

/* moe: the checkpoint's name for the block; then its names of the three projections. */
#define FUSED_EXPERTS(moe, number) FUSED(LAYER moe "experts.w" number "_weight")
#define EXPERTS(moe, gate, up, down)                                                               \
    ENTRY(COLUMN, EXPERT, HIDDEN, LAYER moe "experts.*." gate ".weight", FUSED_EXPERTS(moe, "13"), \
          IN(MOE)),                                                                                \
        ENTRY(COLUMN, EXPERT, HIDDEN, LAYER moe "experts.*." up ".weight",                         \
              FUSED_EXPERTS(moe, "13"), IN(MOE)),                                                  \
        ENTRY(ROW, HIDDEN, EXPERT, LAYER moe "experts.*." down ".weight", FUSED_EXPERTS(moe, "2"), \
              IN(MOE))

#define ROUTER(moe) ENTRY(NONE, EXPERTS, HIDDEN, LAYER moe "gate.weight", IN(MOE))

/* The router's load balancing updates this buffer in steps that are too small for 16 bits. */
#define ROUTER_BIAS                                                                                \
    ENTRY(NONE, EXPERTS, NONE, MLP "gate.e_score_correction_bias", IN(MOE), .dtype = DRAY_F32)

#define FUSED_SHARED FUSED(SHARED_MLP "gate_up_proj.weight")
#define SHARED_EXPERTS                                                                             \
    ENTRY(COLUMN, SHARED, HIDDEN, SHARED_MLP "gate_proj.weight", FUSED_SHARED, IF(SHARED),         \
          IN(MOE)),                                                                                \
        ENTRY(COLUMN, SHARED, HIDDEN, SHARED_MLP "up_proj.weight", FUSED_SHARED, IF(SHARED),       \
              IN(MOE)),                                                                            \
        ENTRY(ROW, HIDDEN, SHARED, SHARED_MLP "down_proj.weight", IF(SHARED), IN(MOE))

#define LAYER_NORMS                                                                                \
    ENTRY(NONE, HIDDEN, NONE, LAYER "input_layernorm.weight"),                                     \
        ENTRY(NONE, HIDDEN, NONE, LAYER "post_attention_layernorm.weight")

#define MODEL_HEAD                                                                                 \
    ENTRY(NONE, HIDDEN, NONE, "model.norm.weight"),                                                \
        ENTRY(VOCAB, VOCAB, HIDDEN, "lm_head.weight", TIED("model.embed_tokens.weight"),           \
              IF(LANGUAGE)),                                                                       \
        ENTRY(NONE, LABELS, HIDDEN, "score.weight", IF(LABELS)),                                   \
        ENTRY(NONE, LABELS, NONE, "score.bias", IF(LABELS))

/* The modules that hold experts packed: transformers 5 (conversion_mapping.py). */
#define PACKED(moe, gate, up, down)                                                                \
    {LAYER "mlp.experts.gate_up_proj",                                                             \
     {LAYER moe "experts.*." gate ".weight", LAYER moe "experts.*." up ".weight"}},                \
    {                                                                                              \
        LAYER "mlp.experts.down_proj",                                                             \
        {                                                                                          \
            LAYER moe "experts.*." down ".weight"                                                  \
        }                                                                                          \
    }

/* The checkpoints' names of experts. */
#define IN_MLP "mlp.", "gate_proj", "up_proj", "down_proj"
#define IN_BLOCK_SPARSE "block_sparse_moe.", "w1", "w3", "w2"
#define EXPERTS_OF(names) EXPERTS(names)
#define PACKED_OF(names) PACKED(names)

static const dray__module packed[] = {PACKED_OF(IN_MLP), {0}};
static const dray__module mixtral_modules[] = {
    PACKED_OF(IN_BLOCK_SPARSE), {MLP "gate.weight", {LAYER "block_sparse_moe.gate.weight"}}, {0}};

static const dray__parameter dense[] = {EMBEDDING, ATTENTION, DENSE_MLP, LAYER_NORMS, MODEL_HEAD};
static const dray__parameter qwen3_moe[] = {
    EMBEDDING, ATTENTION, DENSE_MLP, ROUTER("mlp."), EXPERTS_OF(IN_MLP), LAYER_NORMS, MODEL_HEAD};
static const dray__parameter mixtral[] = {
    EMBEDDING,   ATTENTION, ROUTER("block_sparse_moe."), EXPERTS_OF(IN_BLOCK_SPARSE),
    LAYER_NORMS, MODEL_HEAD};
static const dray__parameter deepseek_v3[] = {
    EMBEDDING,          MTP_ENTRY,      LATENT_ATTENTION, DENSE_MLP, ROUTER("mlp."), ROUTER_BIAS,
    EXPERTS_OF(IN_MLP), SHARED_EXPERTS, LAYER_NORMS,      MTP_EXIT,  MODEL_HEAD};
static const dray__parameter glm4_moe[] = {
    EMBEDDING,          MTP_ENTRY,      ATTENTION,   DENSE_MLP, ROUTER("mlp."), ROUTER_BIAS,
    EXPERTS_OF(IN_MLP), SHARED_EXPERTS, LAYER_NORMS, MTP_EXIT,  MODEL_HEAD};

#define FAMILY(name_, rows, ...)                                                                   \
    {                                                                                              \
        .name = name_, .parameters = rows, .count = COUNT(rows), __VA_ARGS__                       \
    }
#define DEEPSEEK(name_)                                                                            \
    FAMILY(name_, deepseek_v3, .modules = packed, .moe = true, .latent = true, .mtp = true,        \
           .first_dense_key = true, .default_first_dense = 3,                                      \
           .experts_keys = {"n_routed_experts"}, .expert_size_key = "moe_intermediate_size")

const dray__family dray__families[] = {
    FAMILY("llama", dense, .bias_key = true, .o_bias_key = true, .mlp_bias_key = true),
    FAMILY("qwen2", dense, .default_kv_heads = 32, .qkv_bias = true),
    FAMILY("qwen3", dense, .default_kv_heads = 32, .default_head_dim = 128, .bias_key = true,
           .o_bias_key = true, .qk_norm = true),
    FAMILY("qwen3_moe", qwen3_moe, .modules = packed, .default_kv_heads = 4, .bias_key = true,
           .o_bias_key = true, .qk_norm = true, .moe = true, .dense_keys = true,
           .experts_keys = {"num_experts", "num_local_experts"},
           .expert_size_key = "moe_intermediate_size"),
    FAMILY("mixtral", mixtral, .modules = mixtral_modules, .default_kv_heads = 8,
           .default_theta = 1e6, .moe = true, .experts_keys = {"num_local_experts"}),
    DEEPSEEK("deepseek_v3"),
    DEEPSEEK("kimi_k2"),
    FAMILY("glm4_moe", glm4_moe, .modules = packed, .default_kv_heads = 8, .bias_key = true,
           .qk_norm_key = true, .moe = true, .mtp = true, .first_dense_key = true,
           .default_first_dense = 1, .experts_keys = {"n_routed_experts"},
           .expert_size_key = "moe_intermediate_size"),
};

_Static_assert(COUNT(dense) <= DRAY__MOST_PARAMETERS && COUNT(qwen3_moe) <= DRAY__MOST_PARAMETERS &&
                   COUNT(deepseek_v3) <= DRAY__MOST_PARAMETERS &&
                   COUNT(glm4_moe) <= DRAY__MOST_PARAMETERS &&
                   COUNT(dray__families) <= DRAY__MOST_FAMILIES,
               "");

const uint32_t dray__family_count = COUNT(dray__families);
