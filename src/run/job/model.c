/* The model that a job trains. */
#include "run/job/model.h"
#include "base/error.h"
#include "engine/blas.h"
#include "engine/engine.h"
#include "engine/tokenizer.h"
#include "run/paths.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

bool dray__job_tokenizer_path(const dray__job *job, char path[PATH_MAX])
{
    const dray__job_model *m = &job->model;
    struct stat st;
    dray__path(path, PATH_MAX, "%s", m->tokenizer);
    if (path[0] && stat(path, &st) == 0 && S_ISDIR(st.st_mode))
        dray__path(path, PATH_MAX, "%s/tokenizer.json", m->tokenizer);
    if (!path[0] && m->checkpoint[0]) {
        dray__path(path, PATH_MAX, "%s/tokenizer.json", m->checkpoint);
        if (access(path, F_OK) < 0)
            path[0] = 0;
    }
    return path[0] != 0;
}

int dray__job_tokenizer(const dray__job *job, dray__tokenizer **out, dray_error *error)
{
    const dray__job_model *m = &job->model;
    char path[PATH_MAX];
    dray__tokenizer *t;
    dray__job_tokenizer_path(job, path);
    int rc = dray__tokenizer_open(path, &t, error);
    if (rc)
        return rc;
    if (m->end_token[0])
        rc = dray__tokenizer_set_end(t, m->end_token, error);
    else if (dray__tokenizer_end(t) < 0)
        rc = dray__fail(error, DRAY_EINVALID,
                        "%s: no token ends a response: model.end_token expected, or eos_token in "
                        "tokenizer_config.json beside it",
                        path);
    if (rc)
        dray__tokenizer_close(t);
    else
        *out = t;
    return rc;
}

int dray__job_model_config(const dray__job *job, const dray__tokenizer *tokenizer,
                           dray_model_config *out, dray_error *error)
{
    const dray__job_model *m = &job->model;
    int64_t vocabulary = tokenizer ? dray__tokenizer_size(tokenizer) : DRAY__BYTE_VOCABULARY;
    if (m->checkpoint[0]) {
        int rc = dray__engine_config_load(m->checkpoint, out, error);
        if (!rc && tokenizer && out->vocab_size < vocabulary)
            rc = dray__fail(error, DRAY_EUNSUPPORTED,
                            "%s: vocab_size %lld: expected at least the %lld of the tokenizer (%s)",
                            m->checkpoint, (long long)out->vocab_size, (long long)vocabulary,
                            m->tokenizer[0]                       ? m->tokenizer
                            : vocabulary == DRAY__BYTE_VOCABULARY ? "bytes and special tokens"
                                                                  : "its own");
        return rc;
    }
    if (m->hidden_size % m->heads)
        return dray__fail(error, DRAY_EINVALID,
                          "hidden_size: expected a multiple of %lld heads, found %lld",
                          (long long)m->heads, (long long)m->hidden_size);
    dray_model_config config = {.vocab_size = vocabulary,
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

const char *dray__job_blas(void)
{
    return dray__blas_config();
}
