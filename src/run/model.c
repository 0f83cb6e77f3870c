/* The model that a job trains. */
#include "base/error.h"
#include "engine/engine.h"
#include "engine/tokenizer.h"
#include "run/host.h"

#include <stdio.h>
#include <string.h>

int dray__job_model_config(const dray__job *job, dray_model_config *out, dray_error *error)
{
    const dray__job_model *m = &job->model;
    if (m->checkpoint[0]) {
        int rc = dray__engine_config_load(m->checkpoint, out, error);
        if (!rc && out->vocab_size < DRAY__BYTE_VOCABULARY)
            rc = dray__fail(error, DRAY_EUNSUPPORTED,
                            "%s: vocab_size %lld: expected at least %d (bytes and special tokens)",
                            m->checkpoint, (long long)out->vocab_size, DRAY__BYTE_VOCABULARY);
        return rc;
    }
    if (m->hidden_size % m->heads)
        return dray__fail(error, DRAY_EINVALID,
                          "hidden_size: expected a multiple of %lld heads, found %lld",
                          (long long)m->heads, (long long)m->hidden_size);
    dray_model_config config = {.vocab_size = DRAY__BYTE_VOCABULARY,
                                .hidden_size = m->hidden_size,
                                .intermediate_size = m->intermediate_size,
                                .layers = m->layers,
                                .heads = m->heads,
                                .kv_heads = m->kv_heads,
                                .head_dim = m->hidden_size / m->heads,
                                .max_positions = m->max_positions,
                                .rms_norm_eps = m->rms_norm_eps,
                                .rope_theta = m->rope_theta,
                                .qkv_bias = m->qkv_bias,
                                .qk_norm = strcmp(m->family, "qwen3") == 0,
                                .tied = m->tied,
                                .dtype = DRAY_F32};
    snprintf(config.family, sizeof(config.family), "%s", m->family);
    int rc = dray__engine_config_check(&config, error);
    if (rc)
        return rc;
    *out = config;
    return DRAY_OK;
}
