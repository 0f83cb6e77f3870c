/* Runs a small job through the program itself, so that it also runs under the sanitizers:
 * undisturbed, with an engine and a desk killed, and with a trainer killed and the run resumed. All
 * three end with the same bytes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "suite.h"

static const char job[] = "name: tiny\n"
                          "steps: 4\n"
                          "model: {hidden_size: 16, intermediate_size: 32, layers: 1, heads: 2}\n"
                          "data: {digits: 2}\n"
                          "warmup: {max_steps: 20, reward: 0, batch: 8, check_every: 5}\n"
                          "rollout: {prompts: 4, samples: 4, max_new_tokens: 4, micro_batch: 4}\n"
                          "reward: {micro_batch: 4}\n"
                          "actor: {optimiser_steps: 2, micro_batch: 4, epochs: 2}\n"
                          "eval: {every: 2, prompts: 12, micro_batch: 4}\n"
                          "checkpoint: {every: 2}\n";

static char work[64];

FIXTURE(make_work)
{
    char path[128];
    strcpy(work, "/tmp/dray-program-XXXXXX");
    if (!getenv("DRAY_PROGRAM") || !mkdtemp(work))
        return -1;
    snprintf(path, sizeof(path), "%s/job.yaml", work);
    FILE *file = fopen(path, "w");
    if (!file)
        return -1;
    fputs(job, file);
    return fclose(file);
}

static int run_shell(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The exit status of a command line. */
static int run_shell(const char *format, ...)
{
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    int status = system(line);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

FIXTURE(remove_work)
{
    return run_shell("rm -rf '%s'", work);
}

static void must(int expected, int status, const char *what)
{
    if (status == expected)
        return;
    run_shell("tail -n 40 %s/*.out %s/*/logs/*.log >&2", work, work);
    fail_msg("%s: status %d, expected %d", what, status, expected);
}

static int dray(const char *fault, const char *name, const char *arguments)
{
    return run_shell("DRAY_FAULT='%s' \"$DRAY_PROGRAM\" run %s >%s/%s.out 2>&1 </dev/null", fault,
                     arguments, work, name);
}

static int new_run(const char *fault, const char *name)
{
    char arguments[256];
    snprintf(arguments, sizeof(arguments), "%s/job.yaml --out %s/%s", work, work, name);
    return dray(fault, name, arguments);
}

static void same_end(const char *name)
{
    must(0,
         run_shell("diff -r -x queue.cursor %s/whole/checkpoints/step-000004 "
                   "%s/%s/checkpoints/step-000004",
                   work, work, name),
         name);
}

TEST(undisturbed)
{
    must(0, new_run("", "whole"), "undisturbed");
}

TEST(engine_and_desk_killed)
{
    must(0, new_run("engine:0:generated:2:kill,desk:0:rewarded:3:kill", "restarted"), "restarted");
    must(0, run_shell("test $(grep -c anew %s/restarted.out) = 2", work), "two restarts");
    same_end("restarted");
}

TEST(trainer_killed)
{
    char arguments[256];
    must(1, new_run("trainer:1:after_step:3:kill", "resumed"), "killed");
    must(0, run_shell("grep -q 'dray run --resume' %s/resumed.out", work), "advice");
    snprintf(arguments, sizeof(arguments), "--resume %s/resumed", work);
    must(0, dray("", "resumed", arguments), "resumed");
    same_end("resumed");
}

TEST(nothing_left)
{
    must(1,
         run_shell("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | "
                   "grep -q 'host [^ ]* --folder %s'",
                   work),
         "processes left");
    must(0, run_shell("test -z \"$(find %s -name '*.socket' -o -name '*.partial')\"", work),
         "sockets or partial folders left");
}

SUITE(make_work, remove_work)
