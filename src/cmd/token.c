/* dray token: tokens of roles, made from a coordinator's master token. */
#include "cmd/cmd.h"
#include "run/coordinator.h"

#include <stdlib.h>
#include <string.h>

typedef struct arguments {
    const char *role, *master, *out;
} arguments;

static const char *const roles[] = {"trainer", "engine", "task", "tool", "master"};

enum { ROLES = sizeof roles / sizeof *roles };

static void set_role(struct argp_state *state, arguments *a, const char *text)
{
    for (size_t i = 0; i < ROLES; i++)
        if (strcmp(roles[i], text) == 0)
            a->role = roles[i];
    if (!a->role)
        cmd_bad_word(state, "role", text, roles, ROLES);
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    arguments *a = state->input;
    switch (key) {
    case 'r':
        set_role(state, a, text);
        return 0;
    case 'm':
        a->master = text;
        return 0;
    case 'o':
        a->out = text;
        return 0;
    case ARGP_KEY_ARG:
        argp_error(state, "expected no arguments, found '%s'", text);
        return 0;
    case ARGP_KEY_END:
        if (!a->role)
            argp_error(state, "--role ROLE expected");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int cmd_token(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"role", 'r', "ROLE", 0, "trainer, engine, task, tool, or master: a new one", 0},
        {"master", 'm', "FILE", 0,
         "File of the coordinator's master token. Default: $DRAY_TOKEN_FILE", 0},
        {"out", 'o', "FILE", 0, "File to write, mode 0600. Default: the standard output", 0},
        {0}};
    static const struct argp argp = {
        .options = options,
        .parser = parse,
        .doc = "Makes a token: what a process shows a coordinator over TCP to prove its role."
               "\vOnly trainers publish, only engines subscribe, trainers, engines and tasks use "
               "queues, and tools only look. Processes find their token through $DRAY_TOKEN_FILE "
               "(a file of mode 0600) or $DRAY_TOKEN."};
    arguments a = {0};
    cmd_parse(&argp, argc, argv, &a);
    char *text = NULL;
    dray_error error;
    if (dray__make_token(a.master, a.role, a.out, &text, &error))
        return cmd_fail("token", &error);
    if (text)
        puts(text);
    free(text);
    return CMD_OK;
}
