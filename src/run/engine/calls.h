/* Rows of a sampler that call the job's tool. A row whose newest token ends a call is held out of
 * the steps, and goes on behind the answer once that is there. Other rows go on meanwhile.
 *
 * Ordered, rows come back in an order that is the same in every run, and so does every bit. A step
 * of the sampler counts as a millisecond, an answer as the seconds that are drawn for it
 * (tool.min_seconds, tool.max_seconds), and answers that are due by that clock are waited for. When
 * no seconds are drawn, answers are taken when no row can go on without one, all at once. Not
 * ordered, rows come back as soon as they can.
 *
 * All functions except the closing are called on all ranks; rank 0 asks the tool. */
#pragma once

#include "engine/sampler.h"
#include "run/data/samples.h"
#include "run/host/host.h"

typedef struct dray__calls dray__calls;

/* slots: the sampler's. The sampler must outlive it. */
int dray__calls_open(dray__host *host, dray__sampler *sampler, uint32_t slots, bool ordered,
                     dray__calls **out, dray_error *error);
void dray__calls_close(dray__calls *calls);

/* The rows that were added to the sampler in these slots. mask: of the response tokens that they
 * have already; empty where they have none. */
int dray__calls_enter(dray__calls *calls, const dray__sampler_rows *rows, const int32_t *mask,
                      const uint32_t *slots, dray_error *error);
/* The row is removed from the sampler. Where it waits for the tool, its call goes on: if the row
 * comes back as it is, it gets that call's answer. */
void dray__calls_leave(dray__calls *calls, uint32_t slot);
/* The row was begun anew in the sampler. Calls that it makes again are not asked again: they have
 * the answers that they got. */
int dray__calls_restart(dray__calls *calls, uint32_t slot, dray_error *error);
/* A token for each row that is neither finished nor waits for the tool. Where there is none it
 * waits, a while at most. step: of the rows, for the trace. */
int dray__calls_step(dray__calls *calls, int64_t step, dray_error *error);

/* Whole responses as dray__generate makes them, greedy, with the tool: ordered. */
int dray__calls_generate(dray__host *host, dray__generator *generator,
                         const dray__sampler_options *options, const dray__sampler_rows *rows,
                         int64_t step, dray__generation *out, dray_error *error);

/* mask: 0 for tokens of a right answer that the calculator would have given behind a call, 1 for
 * all others. */
int dray__calls_mask(const dray__job *job, const dray__tokenizer *tokenizer, const int32_t *tokens,
                     uint64_t count, int32_t *mask, dray_error *error);
