/* The model that a job trains, its tokenizer, and how long its work takes. */
#pragma once

#include "engine/pace.h"
#include "engine/tokenizer.h"
#include "run/job/job.h"

#include <dray/model.h>
#include <limits.h>

/* Gets the file that the job's tokenizer is read from. Returns false when its tokens are bytes. */
bool dray__job_tokenizer_path(const dray__job *job, char path[PATH_MAX]);
/* Opens the tokenizer of the job: model.tokenizer, else the checkpoint's, if it has one, else
 * bytes. */
int dray__job_tokenizer(const dray__job *job, dray__tokenizer **out, dray_error *error);
/* The model of the job: the checkpoint's configuration, or the sizes of the job file. The
 * tokenizer's vocabulary must fit the checkpoint's; a model from scratch takes the tokenizer's.
 * With tokenizer NULL this is not checked, and a model from scratch has the vocabulary of bytes. */
int dray__job_model_config(const dray__job *job, const dray__tokenizer *tokenizer,
                           dray_model_config *out, dray_error *error);
/* Gets the durations by which work is slept instead of computed (clock.c). Returns false when the
 * work is computed. */
bool dray__job_pace(const dray__job *job, dray__pace *out);

/* Returns the name of the BLAS library that the built-in engine and trainer compute with; NULL when
 * it is not installed. Thread-safe. */
const char *dray__job_blas(void);
