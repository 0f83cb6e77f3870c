#include "run/fault.h"

#include "base/error.h"
#include "base/io.h"
#include "base/words.h"

#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
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
    "covered",       "waiting",
};
static const char *const actions[] = {"kill", "exit", "stop", "hang"};

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
        while (strcmp(faults[i].action, "hang") == 0)
            pause();
        kill(getpid(), strcmp(faults[i].action, "kill") == 0 ? SIGKILL : SIGSTOP);
    }
}

/* Gets a column of the batch that holds integers; its cells are NULL when the task does not read
 * it. */
static dray_column integers(dray_batch *batch, const char *name)
{
    dray_column column = {0};
    if (dray_batch_column(batch, name, &column, NULL) || column.dtype != DRAY_I32)
        column = (dray_column){0};
    return column;
}

static int32_t integer_of(const dray_column *column, uint32_t row, uint64_t at)
{
    int32_t value;
    memcpy(&value, (const char *)column->cells[row] + at * sizeof(value), sizeof(value));
    return value;
}

static json_t *row_of(const dray_batch *batch, const dray_column *prompt,
                      const dray_column *versions, uint32_t i)
{
    double version = -1;
    dray_batch_tag(batch, i, DRAY_TAG_VERSION, &version, NULL);
    json_t *tokens = json_array();
    for (uint64_t k = 0; prompt->cells && k < prompt->lengths[i]; k++)
        json_array_append_new(tokens, json_integer(integer_of(prompt, i, k)));
    int32_t oldest = INT32_MAX, newest = -1;
    for (uint64_t k = 0; versions->cells && k < versions->lengths[i]; k++) {
        int32_t one = integer_of(versions, i, k);
        if (one < 0) /* the token was not sampled by a model */
            continue;
        oldest = one < oldest ? one : oldest;
        newest = one > newest ? one : newest;
    }
    return json_pack("[I, I, o, I, I]", (json_int_t)dray_batch_row(batch, i)->slot,
                     (json_int_t)version, tokens, (json_int_t)(newest < 0 ? -1 : oldest),
                     (json_int_t)newest);
}

void dray__fault_record(const char *task, dray_batch *batch, const uint32_t *rows, uint32_t count,
                        int64_t step, int64_t from)
{
    const char *path = getenv("DRAY_RECORD");
    int fd = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666) : -1;
    if (fd < 0)
        return;
    dray_column prompt = integers(batch, "prompt"), versions = integers(batch, "response_version");
    json_t *list = json_array();
    for (uint32_t i = 0; i < (rows ? count : dray_batch_rows(batch)); i++)
        json_array_append_new(list, row_of(batch, &prompt, &versions, rows ? rows[i] : i));
    json_t *line =
        json_pack("{s:s, s:I, s:I, s:I, s:s, s:o}", "task", task, "pid", (json_int_t)getpid(),
                  "from", (json_int_t)from, "step", (json_int_t)step, "partition",
                  dray_batch_partition(batch), "rows", list);
    char *text = line ? json_dumps(line, JSON_COMPACT) : NULL;
    size_t size = text ? strlen(text) : 0;
    if (text) {
        text[size] = '\n'; /* replaces the terminating zero, so that one write is one line */
        dray__write_all(fd, text, size + 1);
    }
    free(text);
    json_decref(line);
    close(fd);
}
