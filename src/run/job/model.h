/* The model that a job trains, its tokenizer, and how long its work takes. */
#pragma once

#include "engine/pace.h"
#include "engine/tokenizer.h"
#include "run/job/job.h"

#include <dray/model.h>
#include <limits.h>

/* The file that the job's tokenizer is read from; false: its tokens are bytes. */
bool dray__job_tokenizer_path(const dray__job *job, char path[PATH_MAX]);
/* The tokenizer of the job: model.tokenizer; else the checkpoint's, if it has one; else bytes. */
int dray__job_tokenizer(const dray__job *job, dray__tokenizer **out, dray_error *error);
/* The model of the job: the checkpoint's configuration, or the sizes of the job file. The
 * tokenizer's vocabulary must fit the checkpoint's, and is that of a model from scratch. NULL skips
 * this, and takes bytes. */
int dray__job_model_config(const dray__job *job, const dray__tokenizer *tokenizer,
                           dray_model_config *out, dray_error *error);
/* How long work takes where it is slept; false: it is computed (clock.c). */
bool dray__job_pace(const dray__job *job, dray__pace *out);

/* The library that the built-in engine and trainer compute with, as it names itself; NULL when it
 * is not there. Thread-safe. */
const char *dray__job_blas(void);
