/* Rewards: by a rule of the table, or by a command that reads a line and answers with a number. */
#pragma once

#include "run/job/job.h"

/* 1 when the response is the answer, else 0. */
float dray__exact_match(const char *answer, const char *response);

typedef struct dray__grader dray__grader;

/* reward is borrowed until close. */
int dray__grader_open(const dray__job_reward *reward, dray__grader **out, dray_error *error);
void dray__grader_close(dray__grader *grader);
/* command: writes {"prompt", "answer", "response"} as a line to the command's standard input and
 * reads a number as a line from its output, within reward.timeout_seconds. The command is started
 * with the first sample and stays. DRAY_ETIMEDOUT, DRAY_ECLOSED (it ended), DRAY_EFORMAT. */
int dray__grade(dray__grader *grader, const char *prompt, const char *answer, const char *response,
                float *reward, dray_error *error);
