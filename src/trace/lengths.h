/* The responses of a process, in a file *.lengths beside its spans: a line for each, with the step,
 * the slot in the step's partition, the tokens of the prompt and of the response, and when it was
 * begun and ended (CLOCK_MONOTONIC, ns), in decimal digits. The file is made with the first one.
 * The callers hold the recorder's lock. */
#pragma once

#include <dray/dray.h>

/* Responses go beside this file of spans from now on; NULL: nowhere. What an earlier process left
 * there goes. */
void dray__lengths_open(const char *spans_path);
/* As dray_trace_response. */
void dray__lengths_add(int64_t step, uint32_t slot, uint64_t prompt_tokens, uint64_t tokens,
                       int64_t begin_ns, int64_t end_ns);
/* Appends what was added since the last time. */
int dray__lengths_flush(dray_error *error);
