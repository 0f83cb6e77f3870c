/* Compares the simulator with closed forms of the schedules, when nothing but rollout and training
 * takes time, so that the model has no freedom. Times are within 1 %. */
#include "run/simulate/simulate.h"

#include "suite.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { GROUPS = 20000, MOST = 64 };

static dray__job *job_of(const char *schedule, const char *const *more)
{
    static const char *const base[] = {"rollout.prompts=8",
                                       "rollout.samples=4",
                                       "rollout.micro_batch=8",
                                       "rollout.max_new_tokens=64",
                                       "reward.micro_batch=8",
                                       "reference.micro_batch=8",
                                       "old_log_prob.micro_batch=8",
                                       "advantage.micro_batch=8",
                                       "actor.micro_batch=8",
                                       "actor.optimiser_steps=1",
                                       "steps=40",
                                       "warmup.max_steps=0",
                                       "model.max_positions=128",
                                       "eval.every=0"};
    const char *settings[MOST];
    char path[] = "/tmp/dray-simulate-XXXXXX", text[64];
    uint32_t count = 0;
    int file = mkstemp(path);
    assert_true(file >= 0);
    assert_int_equal(write(file, "{}\n", 3), 3);
    close(file);
    for (size_t i = 0; i < sizeof(base) / sizeof(base[0]); i++)
        settings[count++] = base[i];
    snprintf(text, sizeof(text), "schedule=%s", schedule);
    settings[count++] = text;
    for (; *more; more++)
        settings[count++] = *more;
    dray__job *job = NULL;
    dray_error error;
    int rc = dray__job_load(path, settings, count, &job, NULL, &error);
    unlink(path);
    if (rc)
        fail_msg("%s", error.message);
    return job;
}

/* All responses have 10 tokens; a micro-batch of rollout takes r, one of training t. */
static dray__services services_of(double r, double t)
{
    dray__services s = {
        .token_fixed = r / 10, .groups = GROUPS, .group = 4, .trainer_ranks = 1, .engine_ranks = 1};
    s.lengths = calloc(4 * GROUPS, sizeof(*s.lengths));
    assert_non_null(s.lengths);
    for (uint32_t i = 0; i < 4 * GROUPS; i++)
        s.lengths[i] = 10;
    s.tasks[DRAY__SIM_ACTOR].row = t / 8;
    return s;
}

static dray__simulated simulated(const dray__job *job, const dray__services *s, int64_t steps)
{
    dray__simulated out;
    dray_error error;
    if (dray__simulate_once(job, s, steps, 1, &out, &error))
        fail_msg("%s", error.message);
    return out;
}

static void takes(const char *schedule, const char *const *more, const dray__services *s,
                  double seconds)
{
    dray__job *job = job_of(schedule, more);
    dray__simulated is = simulated(job, s, 40);
    if (fabs(is.step_seconds / seconds - 1) > 0.01)
        fail_msg("%s: %g s a step, expected %g", schedule, is.step_seconds, seconds);
    dray__job_free(job);
}

#define MORE(...) ((const char *const[]){__VA_ARGS__, NULL})
#define NONE ((const char *const[]){NULL})

/* A step's rollout takes R = 4 r, its training T = 4 t, over m = 4 micro-batches. */
TEST(schedules_take_what_closed_forms_say)
{
    static const double pairs[][2] = {{0.1, 0.1}, {0.1, 0.07}, {0.1, 0.02}, {0.05, 0.2}};
    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++) {
        double r = pairs[i][0], t = pairs[i][1], R = 4 * r, T = 4 * t;
        dray__services s = services_of(r, t);
        takes("sync", MORE("stream=false"), &s, R + T);
        takes("one_step_async", NONE, &s, fmax(R, T));
        takes("async", MORE("staleness=1"), &s, fmax(R, T));
        takes("rolling", MORE("roles.engine.instances=2"), &s, fmax(R / 2, T));
        if (T <= R) {
            takes("sync", NONE, &s, R + T / 4);
            takes("sync", MORE("actor.optimiser_steps=4"), &s, R + (1 - 1.0 / 4) * T);
            takes("sync", MORE("actor.optimiser_steps=2"), &s, R + (1 - 1.0 / 2) * T);
        }
        free(s.lengths);
    }
}

static double idle_of(const dray__simulated *is, int role)
{
    double sum = 0;
    for (int c = 0; c < DRAY__SIM_CAUSES; c++)
        sum += is->idle[role][c];
    return sum;
}

/* Whoever is faster waits for the rest of each step. Of a job with more steps than are simulated,
 * engines have work behind the last of them; of one with as many the last step does not count. */
TEST(the_faster_one_waits_for_the_slower_one)
{
    static const double pairs[][2] = {{0.05, 0.1}, {0.03, 0.1}, {0.1, 0.05}, {0.1, 0.08}};
    static const char *const schedules[] = {"one_step_async", "async"};
    for (size_t i = 0; i < 2 * sizeof(pairs) / sizeof(pairs[0]); i++) {
        double r = pairs[i / 2][0], t = pairs[i / 2][1], step = fmax(r, t);
        dray__services s = services_of(r, t);
        dray__job *job = job_of(schedules[i % 2], i % 2 ? MORE("staleness=2") : NONE);
        const double wanted[] = {1 - r / step, 1 - t / step}; /* of the engine, of the trainer */
        for (int64_t steps = 14; steps <= 40; steps += 26) {
            if (i % 2 && steps == 40) /* its engines are through two steps before the trainer */
                continue;
            dray__simulated is = simulated(job, &s, steps);
            for (int role = 0; role < 2; role++)
                if (fabs(idle_of(&is, role) - wanted[role]) > 0.01)
                    fail_msg("%s, %g and %g s: role %d idle for %g of its time, expected %g",
                             schedules[i % 2], r, t, role, idle_of(&is, role), wanted[role]);
        }
        dray__job_free(job);
        free(s.lengths);
    }
}

/* R + T + U, with an update that takes U: its publication, and the engine's pause. */
TEST(updates_are_on_the_path_of_sync)
{
    dray__services s = services_of(0.1, 0.05);
    s.step_end = 0.03;
    s.take = 0.02;
    takes("sync", MORE("stream=false"), &s, 0.4 + 0.2 + 0.05);
    takes("one_step_async", NONE, &s, 0.4 + 0.02);
    free(s.lengths);
}

/* Two responses side by side, of normal length: the longer one takes m + d / sqrt(pi) on average
 * (Clark, "The Greatest of a Finite Set of Random Variables", 1961). */
TEST(batches_take_as_long_as_their_longest_response)
{
    const double mean = 1000, deviation = 200;
    dray__services s = services_of(0.1, 0.0001);
    s.token_fixed = 1e-4;
    s.group = 2;
    s.groups = 2 * GROUPS;
    srand48(7);
    for (uint32_t i = 0; i < 2 * s.groups; i++) {
        double normal = sqrt(-2 * log(1 - drand48())) * cos(2 * 3.14159265358979 * drand48());
        s.lengths[i] = (uint32_t)fmax(1, round(mean + deviation * normal));
    }
    dray__job *job =
        job_of("sync", MORE("rollout.prompts=256", "rollout.samples=2", "rollout.micro_batch=2",
                            "reward.micro_batch=512", "reference.micro_batch=512",
                            "model.max_positions=4096", "rollout.max_new_tokens=2048"));
    dray__simulated is = simulated(job, &s, 12);
    double want = 256 * 1e-4 * (mean + deviation / sqrt(3.14159265358979));
    if (fabs(is.step_seconds / want - 1) > 0.01)
        fail_msg("%g s a step, expected %g", is.step_seconds, want);
    dray__job_free(job);
    free(s.lengths);
}

/* Little's law: of S slots that are always full, S = rate x time of a response. A response of l
 * tokens takes l (a + b S). */
TEST(full_slots_obey_littles_law)
{
    dray__services s = services_of(0.1, 1e-5);
    double sum = 0;
    for (uint32_t i = 0; i < 4 * GROUPS; i++)
        sum += s.lengths[i] = 1 + (i * 7919) % 60;
    s.token_fixed = 1e-3;
    s.token_row = 5e-4;
    dray__job *job = job_of("async", MORE("rollout.batching=continuous", "staleness=8",
                                          "update=in_flight", "rollout.prompts=64"));
    dray__prediction is;
    assert_int_equal(dray__simulate(job, &s, 8, &is, NULL), DRAY_OK);
    double time = sum / (4 * GROUPS) * (1e-3 + 5e-4 * 8), rate = 256 / is.step_seconds.mean;
    if (fabs(rate * time / 8 - 1) > 0.01)
        fail_msg("%g responses a second of %g s each, in 8 slots", rate, time);
    dray__job_free(job);
    free(s.lengths);
}

/* Where all responses are as long, a fit may give their whole time to the batches of rows. Where a
 * run takes long, what is left of a response may be too short to change the time. */
TEST(slots_go_on_without_a_time_for_tokens)
{
    alarm(60);
    dray__services s = services_of(0, 1e-5);
    s.tasks[DRAY__SIM_ROLLOUT].fixed = 0.01;
    takes("async", MORE("rollout.batching=continuous", "staleness=8"), &s, 32 * 0.01);
    free(s.lengths);
    s = services_of(0.01, 1e6);
    takes("async", MORE("rollout.batching=continuous", "staleness=8"), &s, 4e6);
    free(s.lengths);
    alarm(0);
}

/* Staleness follows from the rules: 0 in sync, 1 in one_step_async, at most that of async. */
TEST(staleness_is_the_schedules)
{
    dray__services s = services_of(0.01, 0.1);
    dray__job *job = job_of("one_step_async", NONE);
    assert_true(simulated(job, &s, 40).staleness_mean == 1);
    dray__job_free(job);
    for (int eta = 0; eta <= 4; eta++) {
        char text[32];
        snprintf(text, sizeof(text), "staleness=%d", eta);
        job = job_of("async", MORE(text));
        dray__simulated is = simulated(job, &s, 40);
        assert_true(is.staleness_max <= eta);
        assert_true(fabs(is.staleness_mean - eta) < 0.3); /* engines wait for the trainer */
        dray__job_free(job);
    }
    free(s.lengths);
}

/* One response in 40 takes so long that its group is too old and is made anew, while the rows that
 * came after it are under way: nothing of it may be forgotten. */
TEST(groups_that_got_too_old_are_made_anew)
{
    dray__services s = services_of(0.01, 0.02);
    for (uint32_t i = 0; i < 4 * GROUPS; i += 40)
        s.lengths[i] = 400;
    dray__job *job = job_of("async", MORE("rollout.batching=continuous", "staleness=1",
                                          "update=in_flight", "rollout.micro_batch=12"));
    for (uint64_t seed = 1; seed <= 20; seed++) {
        dray__simulated is;
        dray_error error;
        if (dray__simulate_once(job, &s, 40, seed, &is, &error))
            fail_msg("seed %d: %s", (int)seed, error.message);
        assert_true(is.made_anew > 0 && is.staleness_max <= 1);
    }
    dray__job_free(job);
    free(s.lengths);
}

TEST(jobs_that_are_not_modelled_are_refused)
{
    dray__services s = services_of(0.1, 0.1);
    dray__job *job = job_of("sync", NONE);
    dray__job changed = *job;
    dray__simulated out;
    dray_error error;
    changed.role_count = 1; /* engines alone */
    assert_int_equal(dray__simulate_once(&changed, &s, 10, 1, &out, &error), DRAY_EINVALID);
    assert_non_null(strstr(error.message, "a role for each task"));
    dray__job_free(job);
    free(s.lengths);
}

SUITE(NULL, NULL)
