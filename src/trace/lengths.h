/* The responses of a process, in a file *.lengths beside its spans. Each has a line with the step,
 * the slot in the step's partition, the tokens of the prompt and of the response, and when it began
 * and ended (CLOCK_MONOTONIC, ns), in decimal digits. The first response makes the file. The
 * callers hold the recorder's lock. */
#pragma once

#include <dray/dray.h>

/* Writes responses beside this file of spans from now on; with NULL, nowhere. Removes the file of
 * an earlier process. */
void dray__lengths_open(const char *spans_path);
/* As dray_trace_response. */
void dray__lengths_add(int64_t step, uint32_t slot, uint64_t prompt_tokens, uint64_t tokens,
                       int64_t begin_ns, int64_t end_ns);
/* Appends the responses that were added since the last call. When that fails, the log says so, and
 * no more are recorded. */
void dray__lengths_flush(void);
