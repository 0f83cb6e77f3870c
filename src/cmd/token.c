/* dray token: tokens of roles, made from a coordinator's master token. */
#include "cmd/cmd.h"
#include "run/supervisor/coordinator.h"

#include <stdlib.h>

typedef struct arguments {
    const char *master, *out;
    int role; /* index in `roles`; -1 when not given */
} arguments;

static const char *const roles[] = {"trainer", "engine", "task", "tool", "master", NULL};

int cmd_token(int argc, char **argv)
{
    static const cmd_option options[] = {
        CMD_WORD(arguments, role, "role", 'r', roles, "role", "ROLE",
                 "trainer, engine, task, tool, or master: a new one"),
        CMD_TEXT(arguments, master, "master", 'm', "FILE",
                 "File of the coordinator's master token. Default: $DRAY_TOKEN_FILE"),
        CMD_TEXT(arguments, out, "out", 'o', "FILE",
                 "File to write, mode 0600. Default: the standard output"),
        CMD_END};
    static const cmd_usage usage = {
        .options = options,
        .doc = "Makes a token: what a process shows a coordinator over TCP to prove its "
               "role.\vOnly trainers publish, only engines subscribe, trainers, engines and tasks "
               "use queues, and tools only look. Processes find their token through "
               "$DRAY_TOKEN_FILE (a file of mode 0600) or $DRAY_TOKEN."};
    arguments a = {.role = -1};
    cmd_parse(&usage, argc, argv, &a);
    if (a.role < 0)
        return cmd_failf("token", "--role ROLE expected"), CMD_USAGE;
    char *text = NULL;
    dray_error error;
    if (dray__make_token(a.master, roles[a.role], a.out, &text, &error))
        return cmd_fail("token", &error);
    if (text)
        puts(text);
    free(text);
    return CMD_OK;
}
