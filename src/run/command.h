/* Commands that the job names: a shell command that stays, is asked by a line of JSON on its
 * standard input, and answers with a line on its output. It dies with this process, and has its
 * environment without secrets. */
#pragma once

#include <dray/dray.h>
#include <jansson.h>

typedef struct dray__command dray__command;

/* Starts it. setting: its name, for messages; both are borrowed until close. */
int dray__command_open(const char *setting, const char *text, dray__command **out,
                       dray_error *error);
void dray__command_close(dray__command *command);

/* Sends a question: takes `question` over (NULL is DRAY_ENOMEM). Blocks until the command has read
 * enough of it. */
int dray__command_ask(dray__command *command, json_t *question, double timeout_seconds,
                      dray_error *error);
/* Returns the next line of its output, without its end; borrowed until the next call. Returns 0,
 * DRAY_EAGAIN while none is there, DRAY_ECLOSED when the command has ended, or DRAY_EFORMAT when
 * the line has no end. */
int dray__command_look(dray__command *command, char **line, dray_error *error);
/* The same, waiting for it: DRAY_ETIMEDOUT. */
int dray__command_wait(dray__command *command, double timeout_seconds, char **line,
                       dray_error *error);
int dray__command_late(const dray__command *command, double timeout_seconds, dray_error *error);
/* Polls readable when there may be a line. */
int dray__command_fd(const dray__command *command);

/* A JSON string; bytes that are no UTF-8 become U+FFFD: JSON can say nothing else. */
json_t *dray__json_clean(const char *bytes);
