/* The responses of a process, in a file *.lengths beside its spans: a line for each, with the step,
 * the slot in the step's partition, the tokens of the prompt and of the response, and when it was
 * begun and ended (CLOCK_MONOTONIC, ns), in decimal digits. The file is made with the first one.
 * The callers hold the recorder's lock. */
#pragma once

#include <dray/dray.h>

/* Responses go beside this file of spans from now on; NULL: nowhere. A file of an earlier process
 * is removed. */
void dray__lengths_open(const char *spans_path);
/* As dray_trace_response. */
void dray__lengths_add(int64_t step, uint32_t slot, uint64_t prompt_tokens, uint64_t tokens,
                       int64_t begin_ns, int64_t end_ns);
/* Appends the responses that were added since the last time. Where that fails, the log says so, and
 * no more are recorded. */
void dray__lengths_flush(void);
