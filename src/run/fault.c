#include "run/fault.h"

#include "base/error.h"
#include "base/words.h"

#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FAULTS = 8 };

typedef struct fault {
    char point[32];
    long long step;
    char action[8];
} fault;

static fault faults[FAULTS];
static int fault_count;

static const char *const points[] = {
    "claimed",       "generated",    "committed",     "updating",         "updated",
    "inserted",      "sealed",       "finished",      "cleared",          "scored",
    "rewarded",      "in_warmup",    "after_warmup",  "after_backward",   "after_step",
    "after_publish", "after_commit", "in_checkpoint", "after_checkpoint", "checkpoint_named",
};
static const char *const actions[] = {"kill", "exit", "stop"};

static bool is_word(const char *word, const char *const *words, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(word, words[i]) == 0)
            return true;
    return false;
}

#define COUNT(words) (sizeof(words) / sizeof((words)[0]))

static int add(const char *text, const char *role, uint32_t rank, uint32_t epoch, dray_error *error)
{
    char name[40] = "", end;
    unsigned of_rank;
    fault f = {.step = 0};
    int got = sscanf(text, "%39[^:]:%u:%31[^:]:%lld:%7[a-z]%c", name, &of_rank, f.point, &f.step,
                     f.action, &end);
    bool always = got == 6 && end == '!';
    if (got != 5 && !always)
        return dray__fail(error, DRAY_EINVALID,
                          "DRAY_FAULT: '%s': expected ROLE:RANK:POINT:STEP:ACTION", text);
    char hint[96];
    if (!is_word(f.point, points, COUNT(points)))
        return dray__fail(error, DRAY_EINVALID, "DRAY_FAULT: unknown point '%s'%s", f.point,
                          dray__word_hint(f.point, points, COUNT(points), hint, sizeof(hint)));
    if (!is_word(f.action, actions, COUNT(actions)))
        return dray__fail(error, DRAY_EINVALID, "DRAY_FAULT: unknown action '%s'%s", f.action,
                          dray__word_hint(f.action, actions, COUNT(actions), hint, sizeof(hint)));
    if (strcmp(name, role) == 0 && of_rank == rank && (epoch == 1 || always) &&
        fault_count < FAULTS)
        faults[fault_count++] = f;
    return DRAY_OK;
}

int dray__fault_open(const char *role, uint32_t rank, uint32_t epoch, dray_error *error)
{
    const char *text = getenv("DRAY_FAULT");
    char *copy = text ? strdup(text) : NULL, *state = NULL;
    int rc = DRAY_OK;
    for (char *one = copy ? strtok_r(copy, ",", &state) : NULL; one && !rc;
         one = strtok_r(NULL, ",", &state))
        rc = add(one, role, rank, epoch, error);
    free(copy);
    return rc;
}

void dray__fault_at(const char *point, int64_t step)
{
    for (int i = 0; i < fault_count; i++) {
        if (faults[i].step != step || strcmp(faults[i].point, point) != 0)
            continue;
        fprintf(stderr, "fault: %s at %s of step %lld\n", faults[i].action, point, (long long)step);
        if (strcmp(faults[i].action, "exit") == 0)
            _exit(1);
        kill(getpid(), strcmp(faults[i].action, "kill") == 0 ? SIGKILL : SIGSTOP);
    }
}
