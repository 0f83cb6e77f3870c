/* What a run reads before it starts: job files and settings, prompts. The first byte says which:
 *
 *  0  a job file (YAML)     1  a setting, "actor.lr=1e-3"     2  a file of prompts (JSONL)
 *
 * A job that is taken is taken again as it was resolved, and then it is the same. Prompts are found
 * under every number. */
#include "fuzz/fuzz.h"

#include "run/data/data.h"
#include "run/job/settings.h"

const int fuzz_rounds = 60;

static int load(const char *path, const char *setting, dray__job **job, char **resolved)
{
    return dray__job_load(path, &setting, setting ? 1 : 0, job, resolved, NULL);
}

static void check_job(const char *path, const char *setting)
{
    dray__job *job, *again;
    char *resolved, *same, file[192];
    if (load(path, setting, &job, &resolved))
        return;
    snprintf(file, sizeof file, "%s", fuzz_path("resolved.yaml"));
    fuzz_write(file, resolved, strlen(resolved));
    MUST(load(file, NULL, &again, &same) == DRAY_OK);
    MUST(strcmp(resolved, same) == 0 && again->steps == job->steps);
    MUST(job->role_count == again->role_count && dray__job_batch(job) == dray__job_batch(again));
    free(resolved);
    free(same);
    dray__job_free(job);
    dray__job_free(again);
}

static void job_file(const uint8_t *data, size_t size)
{
    char path[192];
    snprintf(path, sizeof path, "%s", fuzz_path("job.yaml"));
    fuzz_write(path, data, size);
    check_job(path, NULL);
}

static void setting(const uint8_t *data, size_t size)
{
    char path[192], text[512];
    if (size >= sizeof text || memchr(data, 0, size))
        return;
    memcpy(text, data, size);
    text[size] = 0;
    snprintf(path, sizeof path, "%s", fuzz_path("job.yaml"));
    fuzz_write(path, "steps: 3\n", 9);
    check_job(path, text);
}

static void prompts(const uint8_t *bytes, size_t size)
{
    char path[192], *prompt, *answer;
    dray__data *data;
    snprintf(path, sizeof path, "%s", fuzz_path("prompts.jsonl"));
    dray__job job = {.seed = 1,
                     .data = {.source = DRAY__SOURCE_JSONL, .path = path, .eval_path = path}};
    fuzz_write(path, bytes, size);
    if (dray__data_open(&job, &data, NULL))
        return;
    for (uint64_t i = 0; i < 20; i++) {
        MUST(dray__data_get(data, (dray__split)(i % 3), i * i * i, &prompt, &answer, NULL) == 0);
        MUST(prompt[0]);
        free(prompt);
        free(answer);
    }
    dray__data_close(data);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const all[])(const uint8_t *, size_t) = {job_file, setting, prompts};
    if (size)
        all[data[0] % 3](data + 1, size - 1);
    return 0;
}

void fuzz_seeds(fuzz_put put, void *user)
{
    static const char *const settings[] = {"actor.lr=1e-3", "roles=[{name: a, tasks: [driver]}]",
                                           "name='it''s'", "model.family=qwen3"};
    dray__job *job;
    char *defaults;
    MUST(dray__settings_default(&job, NULL) == DRAY_OK);
    MUST(dray__settings_yaml(job, &defaults, NULL) == DRAY_OK);
    fuzz_put_text(put, user, 0, defaults);
    free(defaults);
    dray__job_free(job);
    fuzz_put_text(
        put, user, 0,
        "name: \"a \\u00e9\"\nsteps: 3 # few\nactor: {lr: 1e-3, clip: .inf}\nqueue:\n"
        "  backend: redis\n  backend_address: unix:/tmp/r\nroles:\n- {name: all, tasks: "
        "[rollout, eval,\n    old_log_prob, actor, driver, reward, reference, advantage], "
        "ranks: 1}\n");
    fuzz_put_text(put, user, 0, "a: &x [1, 2]\nb: *x\n");
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        fuzz_put_text(put, user, 1, settings[i]);
    fuzz_put_text(put, user, 2,
                  "{\"prompt\": \"1+1=\", \"answer\": \"2\"}\n\n"
                  "{\"prompt\": \"\\ud83d\\ude00\", \"answer\": \"\", \"more\": [1]}\n");
}
