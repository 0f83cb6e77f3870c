#include "run/desk/reward.h"

#include "base/error.h"
#include "run/command.h"

#include <dray/trace.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct dray__grader {
    const dray__job_reward *reward;
    dray__command *command; /* NULL until it is started */
};

float dray__exact_match(const char *answer, const char *response)
{
    return strcmp(answer, response) == 0 ? 1 : 0;
}

int dray__grader_open(const dray__job_reward *reward, dray__grader **out, dray_error *error)
{
    dray__grader *grader = calloc(1, sizeof(*grader));
    if (!grader)
        return dray__nomem(error);
    grader->reward = reward;
    *out = grader;
    return DRAY_OK;
}

void dray__grader_close(dray__grader *grader)
{
    if (grader)
        dray__command_close(grader->command);
    free(grader);
}

static int take_number(const char *line, float *reward, dray_error *error)
{
    char *rest;
    float value = strtof(line, &rest);
    bool number = rest != line;
    rest += strspn(rest, " \t\r");
    if (!number || *rest || !isfinite(value))
        return dray__fail(error, DRAY_EFORMAT,
                          "reward.command: expected a number a line, found '%.64s'", line);
    *reward = value;
    return DRAY_OK;
}

static int ask_command(dray__grader *grader, const char *prompt, const char *answer,
                       const char *response, float *reward, dray_error *error)
{
    const dray__job_reward *asked = grader->reward;
    char *line;
    int rc = DRAY_OK;
    if (!grader->command)
        rc = dray__command_open("reward.command", asked->command, &grader->command, error);
    dray_trace_wait_briefly(DRAY_CAUSE_TOOL, "wait for reward.command", -1);
    /* A driver of the job's own may have made the prompt and the answer of any bytes, too. */
    if (!rc)
        rc = dray__command_ask(grader->command,
                               json_pack("{s:o, s:o, s:o}", "prompt", dray__json_clean(prompt),
                                         "answer", dray__json_clean(answer), "response",
                                         dray__json_clean(response)),
                               asked->timeout_seconds, error);
    if (!rc)
        rc = dray__command_wait(grader->command, asked->timeout_seconds, &line, error);
    dray_trace_leave();
    return rc ? rc : take_number(line, reward, error);
}

int dray__grade(dray__grader *grader, const char *prompt, const char *answer, const char *response,
                float *reward, dray_error *error)
{
    if (grader->reward->rule == DRAY__RULE_COMMAND)
        return ask_command(grader, prompt, answer, response, reward, error);
    *reward = dray__exact_match(answer, response);
    return DRAY_OK;
}
