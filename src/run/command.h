/* Commands that the job names. A command is a shell command that keeps running: it reads questions
 * as lines of JSON from its standard input and answers each with a line on its standard output. It
 * is killed when this process ends, and gets this process's environment without secrets. */
#pragma once

#include <dray/dray.h>
#include <jansson.h>

typedef struct dray__command dray__command;

/* Starts the command `text`. setting is the name of its setting in the job file, for messages. Both
 * are borrowed until close. */
int dray__command_open(const char *setting, const char *text, dray__command **out,
                       dray_error *error);
void dray__command_close(dray__command *command);

/* Sends a question: takes `question` over (NULL is DRAY_ENOMEM). Blocks until the command has read
 * enough of it. */
int dray__command_ask(dray__command *command, json_t *question, double timeout_seconds,
                      dray_error *error);
/* Returns the next line of its output, without its end; borrowed until the next call. Returns 0,
 * DRAY_EAGAIN while there is no line, DRAY_ECLOSED when the command has ended, or DRAY_EFORMAT when
 * the line has no end. */
int dray__command_look(dray__command *command, char **line, dray_error *error);
/* The same, but waits for the line. Returns DRAY_ETIMEDOUT when none came in time. */
int dray__command_wait(dray__command *command, double timeout_seconds, char **line,
                       dray_error *error);
int dray__command_late(const dray__command *command, double timeout_seconds, dray_error *error);
/* Returns a descriptor that polls readable when there may be a line. */
int dray__command_fd(const dray__command *command);

/* Returns a JSON string. Bytes that are not UTF-8 become U+FFFD, because JSON strings are
 * Unicode. */
json_t *dray__json_clean(const char *bytes);
