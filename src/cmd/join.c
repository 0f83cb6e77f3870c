/* dray join: this host's part of a run that another host began. */
#include "run/join/guest.h"
#include "run/join/launcher.h"
#include "run/join/manifest.h"
#include "run/run.h"

#include "cmd/cmd.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct arguments {
    dray__guest_options guest;
    cmd_list address, roles, tokens;
    cmd_settings settings;
    const char *lead;
    int64_t wait;
    bool led; /* this process was the run itself (rank 0) */
} arguments;

/* Adds roles: several with commas between them, or the option several times. */
static void put_roles(const struct argp_state *state, const cmd_option *option, void *to,
                      const char *text)
{
    arguments *a = to;
    char *copy = strdup(text), *rest = NULL; /* kept until the program ends */
    for (char *one = copy ? strtok_r(copy, ",", &rest) : NULL; one;
         one = strtok_r(NULL, ",", &rest))
        cmd_put_list(state, option, &a->roles, one);
}

static void check(const struct argp_state *state, const void *to)
{
    const arguments *a = to;
    if (!a->guest.job)
        argp_error(state, "expected --job FILE, this host's own copy of the job file");
    if (!a->roles.count)
        argp_error(state, "expected --roles ROLE:COUNT, as in --roles rollout:2");
}

/* Runs as rank 0, which is the run itself: a new one, or the one that is in the folder. */
static int be_the_run(arguments *a, const dray__launcher *launcher)
{
    dray_error error;
    json_t *job = NULL;
    dray__manifest_options which = {.job = a->guest.job,
                                    .settings = a->settings.list.items,
                                    .setting_count = a->settings.list.count};
    char config[4200];
    dray__run_options run = {.job = a->guest.job,
                             .settings = a->settings.list.items,
                             .setting_count = a->settings.list.count,
                             .out = a->lead,
                             .json = a->guest.json};
    snprintf(config, sizeof(config), "%.4096s/config.yaml", a->lead);
    if (access(config, F_OK) == 0)
        run = (dray__run_options){.resume = a->lead, .json = a->guest.json};
    if (dray__launcher_lead(launcher, "", &error) || dray__manifest_job(&which, &job, &error))
        return cmd_refuse_job("join", &error);
    json_decref(job);
    dray__run_end end = DRAY__RUN_DONE;
    a->led = true;
    if (dray__run(&run, &end, &error))
        return cmd_refuse_job("join", &error);
    return end == DRAY__RUN_DONE ? CMD_OK : CMD_FAILED;
}

static int lead(arguments *a)
{
    dray_error error;
    dray__launcher launcher;
    if (dray__launcher_find(&launcher, &error))
        return cmd_refuse("join", &error);
    if (launcher.rank == 0)
        return be_the_run(a, &launcher);
    a->guest.launched = true;
    a->guest.shared = a->lead;
    return CMD_OK;
}

int cmd_join(int argc, char **argv)
{
    static const cmd_option options[] = {
        CMD_TEXT(arguments, guest.job, "job", 'J', "FILE",
                 "This host's own job file. It must say what the run's does: only its commands are "
                 "run here"),
        CMD_CALL(
            put_roles, "roles", 'r', "ROLE:COUNT,...",
            "What this host runs: so many instances of a role, or, where its ranks are spread over "
            "hosts, so many ranks"),
        CMD_LIST(arguments, tokens, "token", 't', "FILE",
                 "A token of the run, of the role that the programs have (engine, trainer, task); "
                 "may be given again. Default: $DRAY_TOKEN_FILE"),
        CMD_SET(arguments, settings.list,
                "Change a setting of the job, as the run was started with"),
        CMD_SEED(arguments, settings),
        CMD_TEXT(arguments, guest.name, "name", 'n', "NAME",
                 "What the run calls this host. Default: its hostname"),
        CMD_TEXT(
            arguments, guest.folder, "out", 'o', "DIR",
            "Folder of this host's logs and timelines, which are brought home. Default: one in "
            "$TMPDIR that is removed at the end"),
        CMD_TEXT(arguments, guest.shared, "shared", 'd', "DIR",
                 "The run's folder, where this host can reach it: checkpoints are written there"),
        CMD_TEXT(arguments, lead, "lead", 'l', "DIR",
                 "Started by srun, torchrun or mpirun: rank 0 is the run, in this folder, which "
                 "all ranks reach, and the others join it; --roles 1-3=rollout:1,4=trainer:2 says "
                 "which ranks have which roles"),
        CMD_NUMBER(arguments, wait, "wait", 'w', 0, 1000000, "SECONDS",
                   "How long the run, a free place or a link that is down is waited for (default: "
                   "60)"),
        CMD_JSON(arguments, guest.json),
        CMD_END};
    static const cmd_usage usage = {
        .options = options,
        .arguments = "[tcp:HOST:PORT]",
        .words = "one address",
        .words_at = offsetof(arguments, address),
        .most = 1,
        .check = check,
        .doc = "Joins the run whose job file says `listen: tcp:HOST:PORT`: starts processes of its "
               "roles on this host, and this host's keeper of samples, starts them again when they "
               "die, and brings logs and timelines home.\vWithout an address: the job file's "
               "`listen`. Ctrl-C and SIGTERM leave the run: no more rows are taken, what is under "
               "way is committed or given back, and others go on; a second one ends at once. Exit "
               "status: 0 the run is over, or was left, 1 failed, 2 wrong usage or a job that is "
               "refused."};
    arguments a = {.wait = 60};
    cmd_parse(&usage, argc, argv, &a);
    a.guest.address = a.address.items[0];
    a.guest.settings = a.settings.list.items;
    a.guest.setting_count = a.settings.list.count;
    a.guest.roles = a.roles.items;
    a.guest.role_count = a.roles.count;
    a.guest.tokens = a.tokens.items;
    a.guest.token_count = a.tokens.count;
    a.guest.wait_seconds = (double)a.wait;
    int status = a.lead ? lead(&a) : CMD_OK;
    if (status != CMD_OK || a.led)
        return status;
    bool left = false;
    dray_error error;
    return dray__guest(&a.guest, &left, &error) ? cmd_refuse_job("join", &error) : CMD_OK;
}
