/* How the supervisor sees who holds what (run/supervisor/watch.h): processes of other hosts may
 * have the numbers of its own. */
#include "control/fixture.h"
#include "suite.h"

#include "queue/server/controller.h"
#include "run/job/job.h"
#include "run/supervisor/watch.h"

#include <dray/lease.h>

static const char text[] = "steps: 2\n"
                           "roles:\n"
                           "- {name: engine, tasks: [rollout, eval]}\n"
                           "- {name: trainer, tasks: [old_log_prob, actor]}\n"
                           "- {name: desk, tasks: [driver, reward, reference, advantage]}\n";
static coordinator_fixture f;

static int add_services(dray__coordinator *coordinator, dray_error *error)
{
    int rc = dray__leases_add(coordinator, error);
    return rc ? rc : dray__queue_add(coordinator, f.base, NULL, NULL, NULL, error);
}

FIXTURE(start)
{
    f.tcp = true;
    fixture_start(&f, add_services);
    return 0;
}

FIXTURE(stop)
{
    fixture_stop(&f);
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

TEST(numbers_of_other_hosts_are_nobody_here)
{
    char path[160], held[256];
    static const char *const names[] = {"device"};
    dray_error error;
    dray__job *job;
    dray_lease *lease;
    snprintf(path, sizeof path, "%s/job.yaml", f.folder);
    FILE *file = fopen(path, "we");
    assert_true(file && fputs(text, file) >= 0 && fclose(file) == 0);
    assert_int_equal(dray__job_load(path, NULL, 0, &job, NULL, &error), DRAY_OK);
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
    unlink(path);
}

SUITE(start, stop)
