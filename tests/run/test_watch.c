/* Tests the supervisor's view of the holders of leases and claims (run/supervisor/watch.h).
 * Processes of other hosts may have the same process numbers as its own. */
#include "control/fixture.h"
#include "suite.h"

#include "base/hook.h"
#include "queue/server/controller.h"
#include "run/job/job.h"
#include "run/supervisor/watch.h"

#include <dray/lease.h>
#include <signal.h>
#include <stdatomic.h>

static const char text[] = "steps: 2\n"
                           "roles:\n"
                           "- {name: engine, tasks: [rollout, eval]}\n"
                           "- {name: trainer, tasks: [old_log_prob, actor]}\n"
                           "- {name: desk, tasks: [driver, reward, reference, advantage]}\n";
static coordinator_fixture f, other, *serving = &other;

static int add_services(dray__coordinator *coordinator, dray_error *error)
{
    int rc = dray__leases_add(coordinator, error);
    return rc ? rc : dray__queue_add(coordinator, serving->base, NULL, NULL, NULL, error);
}

FIXTURE(start)
{
    fixture_fork(&other, add_services); /* before there are threads */
    serving = &f;
    f.tcp = true;
    fixture_start(&f, add_services);
    return 0;
}

FIXTURE(stop)
{
    fixture_stop(&f);
    fixture_stop(&other);
    return 0;
}

/* What the group of this process holds, in the eyes of a supervisor. */
static void look(const dray__job *job, char *out, size_t size)
{
    dray__watch *watch;
    dray__sight sight = {.open = false};
    dray_error error;
    assert_int_equal(dray__watch_start(job, f.unix_address, &watch, &error), DRAY_OK);
    for (int i = 0; i < 4000 && !sight.open; i++) {
        assert_int_equal(dray__watch_last(watch, &sight, &error), DRAY_OK);
        usleep(5000);
    }
    assert_true(sight.open);
    dray__watch_holds(watch, getpgrp(), out, size);
    dray__watch_free(watch);
}

static dray__job *load(const char *more)
{
    char path[160];
    dray_error error;
    dray__job *job;
    snprintf(path, sizeof path, "%s/job.yaml", f.folder);
    FILE *file = fopen(path, "we");
    assert_true(file && fputs(text, file) >= 0 && fputs(more, file) >= 0 && fclose(file) == 0);
    assert_int_equal(dray__job_load(path, NULL, 0, &job, NULL, &error), DRAY_OK);
    unlink(path);
    return job;
}

TEST(numbers_of_other_hosts_are_nobody_here)
{
    char held[256];
    static const char *const names[] = {"device"};
    dray_error error;
    dray__job *job = load("");
    dray_lease *lease;
    for (int local = 0; local < 2; local++) { /* over TCP, it is what a process says of itself */
        const char *address = local ? f.unix_address : f.tcp_address;
        dray_context *context = fixture_open_at(address, "holder", "task", 0);
        assert_int_equal(dray_lease_acquire(context, names, 1, NULL, &lease, &error), DRAY_OK);
        look(job, held, sizeof held);
        assert_string_equal(held, local ? "the lease device" : "no rows");
        dray_lease_release(lease, NULL);
        dray_close(context);
    }
    dray__job_free(job);
}

/* The coordinator stands still when it is asked for the queue's state, which is after its opening.
 */
static void at_step(void *user, const char *step)
{
    static atomic_bool stopped;
    (void)user;
    if (strcmp(step, "asking") == 0 && !atomic_exchange(&stopped, true))
        kill(other.process, SIGSTOP);
}

TEST(a_first_look_has_a_deadline)
{
    dray__watch *watch;
    dray__sight sight;
    dray_error error = {0};
    dray__job *job = load("limits: {wait_seconds: 0.5}\n");
    int rc = DRAY_OK;
    dray__hook_set(at_step, NULL);
    assert_int_equal(dray__watch_start(job, other.unix_address, &watch, &error), DRAY_OK);
    for (int i = 0; i < 4000 && !rc; i++) {
        rc = dray__watch_last(watch, &sight, &error);
        assert_false(sight.open);
        usleep(5000);
    }
    assert_int_equal(rc, DRAY_ETIMEDOUT);
    kill(other.process, SIGCONT);
    dray__hook_set(NULL, NULL);
    dray__watch_free(watch);
    dray__job_free(job);
}

SUITE(start, stop)
