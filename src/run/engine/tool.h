/* The tool that responses call (`tool` of the job file): a calculator, or a command of the job.
 * Asking returns at once: answers come while tokens are generated. A tool belongs to one thread. */
#pragma once

#include "run/job/job.h"

typedef struct dray__tool dray__tool;

/* ids is how many calls may be open at once; each call is named by a number less than that. job is
 * borrowed until close. Commands are started with the first calls. */
int dray__tool_open(const dray__job_tool *job, uint32_t ids, dray__tool **out, dray_error *error);
void dray__tool_close(dray__tool *tool);

/* Returns whether the text ends with a call. */
bool dray__tool_called(const dray__job_tool *job, const char *text);
/* Writes the calculator's answer to a text that ends with a call: the value of the expression
 * before the call. An expression is whole numbers with +, - and *, where * binds tighter; blanks
 * are allowed. The answer is "" when there is no expression. */
enum { DRAY__CALCULATED_BYTES = 24 };
void dray__calculate(const dray__job_tool *job, const char *text, char out[DRAY__CALCULATED_BYTES]);

/* Opens the call `id`, with which the response ends. The answer comes no sooner than `seconds` from
 * now. */
int dray__tool_ask(dray__tool *tool, uint32_t id, const char *prompt, const char *response,
                   double seconds, dray_error *error);
/* With `aside`, dray__tool_wait does not return for this call's answer, because it cannot be taken
 * now. The call goes on. */
void dray__tool_set_aside(dray__tool *tool, uint32_t id, bool aside);
/* Drops the call, because its answer is not needed any more. An id that is not open is fine. */
void dray__tool_forget(dray__tool *tool, uint32_t id);
/* Reads the answers of commands. Returns 0, DRAY_ETIMEDOUT when an answer is late, DRAY_ECLOSED
 * when a command ended, or DRAY_EFORMAT. */
int dray__tool_look(dray__tool *tool, dray_error *error);
/* Returns the answer if dray__tool_look has read it, else NULL. It is borrowed until the call is
 * forgotten, and may be "". */
const char *dray__tool_answer(const dray__tool *tool, uint32_t id);
/* Waits until an answer may have come, `fd` (-1 for none) is readable, or the time is over. */
void dray__tool_wait(const dray__tool *tool, int fd, int64_t timeout_ns);
