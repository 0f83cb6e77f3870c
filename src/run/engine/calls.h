/* Rows of a sampler that call the job's tool. A row whose newest token ends a call is paused. Once
 * the answer is there, it is appended and the row goes on. Other rows go on meanwhile.
 *
 * With `ordered`, rows resume in an order that is the same in every run, so all results are the
 * same to the bit. A step of the sampler counts as a millisecond, an answer as the seconds that are
 * drawn for it (tool.min_seconds, tool.max_seconds), and answers that are due by that clock are
 * waited for. When no seconds are drawn, answers are taken when no row can go on without one, all
 * at once. Without `ordered`, rows resume as soon as their answers are there.
 *
 * All functions except the closing are called on all ranks; rank 0 asks the tool. */
#pragma once

#include "engine/sampler.h"
#include "run/data/samples.h"
#include "run/host/host.h"

typedef struct dray__calls dray__calls;

/* slots is the sampler's number of slots. The sampler must outlive the calls. */
int dray__calls_open(dray__host *host, dray__sampler *sampler, uint32_t slots, bool ordered,
                     dray__calls **out, dray_error *error);
void dray__calls_close(dray__calls *calls);

/* Registers the rows that were added to the sampler in these slots. mask covers the response tokens
 * that they already have; it is empty for rows that have none. */
int dray__calls_enter(dray__calls *calls, const dray__sampler_rows *rows, const int32_t *mask,
                      const uint32_t *slots, dray_error *error);
/* Is called when the row is removed from the sampler. If the row waits for the tool, its call goes
 * on, and the row gets that answer if it is added again unchanged. */
void dray__calls_leave(dray__calls *calls, uint32_t slot);
/* Is called when the row was restarted in the sampler. Calls that the row repeats get the answers
 * that they got before, without asking the tool again. */
int dray__calls_restart(dray__calls *calls, uint32_t slot, dray_error *error);
/* Samples one token for each row that is neither finished nor waiting for the tool. If there is no
 * such row, it waits a short time for an answer. step is the rows' step, for the trace. */
int dray__calls_step(dray__calls *calls, int64_t step, dray_error *error);

/* Generates whole responses as dray__generate does, greedily and with the tool, in `ordered`
 * mode. */
int dray__calls_generate(dray__host *host, dray__generator *generator,
                         const dray__sampler_options *options, const dray__sampler_rows *rows,
                         int64_t step, dray__generation *out, dray_error *error);

/* Sets mask to 0 for tokens of a right answer that the calculator would have given after a call,
 * and to 1 for all others. */
int dray__calls_mask(const dray__job *job, const dray__tokenizer *tokenizer, const int32_t *tokens,
                     uint64_t count, int32_t *mask, dray_error *error);
