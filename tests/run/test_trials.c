/* A study whose runs cannot be made: each is a result, and is read again after it has ended. The
 * runs are processes of this program, which ends at once when it is called as `dray run`. */
#include "run/study/study.h"
#include "suite.h"

#include "base/io.h"
#include "base/json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void write_file(const char *folder, const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static void tell(void *user, const char *event, const json_t *object)
{
    (void)object;
    *(uint32_t *)user += strcmp(event, "begin") == 0;
}

TEST(runs_that_end_early_are_results)
{
    char folder[] = "/tmp/dray-trials-XXXXXX", job[64], out[64], *made = NULL;
    uint32_t begun = 0;
    assert_non_null(mkdtemp(folder));
    snprintf(job, sizeof(job), "%s/job.yaml", folder);
    snprintf(out, sizeof(out), "%s/study", folder);
    write_file(folder, "job.yaml", "name: trials\nsteps: 3\nwarmup: {max_steps: 0}\n");
    const dray__study_options options = {.job = job,
                                         .schedules = "sync,one_step_async",
                                         .seeds = 2,
                                         .accuracy = 0.9,
                                         .out = out,
                                         .tell = tell,
                                         .user = &begun};
    dray__run_end end;
    json_t *result = NULL;
    dray_error error;
    for (uint32_t again = 1; again <= 2; again++) {
        if (dray__study(&options, &end, &result, &made, &error))
            fail_msg("%s", error.message);
        assert_int_equal(end, DRAY__RUN_DONE);
        assert_int_equal(begun, 4 * again);
        const json_t *list = json_object_get(result, "schedules");
        for (size_t i = 0; i < 2; i++)
            assert_int_equal(dray__json_integer(json_array_get(list, i), "failed"), 2);
        json_decref(result);
        free(made);
    }
    assert_int_equal(dray__remove_tree(folder, NULL), 0);
}

int main(int argc, char **argv)
{
    return argc > 1 && strcmp(argv[1], "run") == 0 ? 3 : suite_run(NULL, NULL);
}
