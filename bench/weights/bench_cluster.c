/* The parent's side of a benchmark of updates: it starts the processes, has them work in rounds,
 * and ends them (bench_cluster.h). */
#include "bench/weights/bench_hosts.h"
#include "bench/weights/bench_ranks.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROUND_SECONDS = 900, FOLLOW_US = 20000 };

/* The running clusters. When the program ends early, their processes are killed and their folders
 * removed. */
static bench_cluster *running;
static pid_t parent;
static volatile sig_atomic_t interrupted;

/* ---- ends ------------------------------------------------------------------------------------ */

static void remove_folder(const bench_cluster *c)
{
    char path[64];
    snprintf(path, sizeof path, "%s/socket", c->folder);
    unlink(path);
    rmdir(c->folder);
}

static void on_exit_early(void)
{
    for (bench_cluster *c = running; c && getpid() == parent; c = c->next) {
        for (uint32_t i = 0; i < c->pid_count; i++)
            kill(c->pids[i], SIGKILL);
        remove_folder(c);
    }
}

static void on_signal(int number)
{
    interrupted = number;
}

static void check_children(bench_cluster *c)
{
    if (interrupted)
        exit(128 + interrupted);
    if (bench_get(&c->shared->failed)) {
        usleep(1000); /* the process that failed first may still be writing its message */
        bench_die(c->b, "%s", c->shared->message);
    }
    for (uint32_t i = 0; i < c->pid_count; i++) {
        int status;
        if (waitpid(c->pids[i], &status, WNOHANG) == c->pids[i] && !bench_get(&c->shared->failed))
            bench_die(c->b, "process %u of the benchmark ended (status %d)", i, status);
    }
}

/* Waits, in the parent, until *at is at least `value`. Ends the benchmark when a process fails or
 * does not answer in time. */
static void await(bench_cluster *c, int *at, int value)
{
    double deadline = bench_now() + ROUND_SECONDS;
    for (int now = bench_get(at); now < value; now = bench_get(at)) {
        bench_wait_change(at, now);
        bench_tick(c->b);
        check_children(c);
        if (bench_now() > deadline)
            bench_die(c->b, "%d of %d processes answered within %d s", bench_get(at), value,
                      ROUND_SECONDS);
    }
    check_children(c);
}

static void spawn(bench_cluster *c, void (*body)(bench_cluster *c, uint32_t rank), uint32_t rank)
{
    pid_t pid = bench_fork(c->b);
    if (pid == 0) {
        signal(SIGINT, SIG_DFL);
        signal(SIGTERM, SIG_DFL);
        if (getppid() == parent)
            body(c, rank);
        _exit(0);
    }
    c->pids[c->pid_count++] = pid;
}

/* ---- rounds ---------------------------------------------------------------------------------- */

/* Runs a round. Returns the seconds from its beginning to the end of its last rank. */
static double round_of(bench_cluster *c, bench_round *l, enum bench_work work)
{
    l->work = work;
    __atomic_store_n(&l->done, 0, __ATOMIC_SEQ_CST);
    double begin = bench_now(), end = begin;
    bench_add(&l->round);
    await(c, &l->done, (int)l->ranks);
    bench_result *results =
        c->shared->results + (l == &c->shared->engines ? 0 : c->shared->engines.ranks);
    for (uint32_t i = 0; i < l->ranks; i++) {
        bench_result *s = &results[i];
        end = s->end > end ? s->end : end;
        if (work != WORK_UPDATE && work != WORK_COMMIT)
            continue;
        s->began = s->begin - begin;
        s->ended = s->end - begin;
    }
    return end - begin;
}

static void publish(bench_cluster *c)
{
    c->shared->version++;
    if (!c->options->checkpoint)
        round_of(c, &c->shared->trainers, WORK_PUBLISH);
}

/* Drops the checkpoint from the page cache. Its pages are clean, because it was synced when it was
 * written. */
static void forget_checkpoint(const bench_cluster *c)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/model.safetensors", c->options->checkpoint);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
}

static void set_update(bench_cluster *c, const dray_update_options *options)
{
    c->shared->update = *options;
    c->shared->update.min_version = c->shared->version;
    if (c->options->checkpoint) {
        c->shared->update.path = c->options->checkpoint; /* the same address in all processes */
        c->shared->update.path_version = c->shared->version;
    }
}

double bench_cluster_update(bench_cluster *c, const dray_update_options *options)
{
    round_of(c, &c->shared->engines, WORK_POISON);
    publish(c);
    if (c->options->checkpoint)
        forget_checkpoint(c);
    set_update(c, options);
    return round_of(c, &c->shared->engines, WORK_UPDATE);
}

double bench_cluster_follow(bench_cluster *c, const dray_update_options *options)
{
    bench_round *engines = &c->shared->engines;
    double begin = 0, end = 0;
    round_of(c, engines, WORK_POISON);
    c->shared->version++;
    set_update(c, options);
    engines->work = WORK_UPDATE;
    __atomic_store_n(&engines->done, 0, __ATOMIC_SEQ_CST);
    bench_add(&engines->round);
    usleep(FOLLOW_US); /* the engines begin to wait for the version */
    round_of(c, &c->shared->trainers, WORK_PUBLISH);
    await(c, &engines->done, (int)engines->ranks);
    for (uint32_t i = 0; i < engines->ranks; i++)
        end = c->shared->results[i].end > end ? c->shared->results[i].end : end;
    for (uint32_t i = 0; i < c->shared->trainers.ranks; i++) {
        const bench_result *s = &c->shared->results[engines->ranks + i];
        begin = s->begin > begin ? s->begin : begin;
    }
    return end - begin;
}

/* Returns the seconds of the slowest engine rank in the last round, each counted from its own
 * beginning. */
static double slowest(const bench_cluster *c)
{
    double seconds = 0;
    for (uint32_t i = 0; i < c->shared->engines.ranks; i++) {
        const bench_result *s = &c->shared->results[i];
        seconds = s->end - s->begin > seconds ? s->end - s->begin : seconds;
    }
    return seconds;
}

double bench_cluster_prefetch(bench_cluster *c, const dray_update_options *options)
{
    publish(c);
    set_update(c, options);
    round_of(c, &c->shared->engines, WORK_PREFETCH);
    double seconds = slowest(c); /* without the time in which engines decode alone */
    round_of(c, &c->shared->engines, WORK_POISON);
    return seconds;
}

double bench_cluster_commit(bench_cluster *c)
{
    c->shared->update.prefetch_seconds = 0; /* a commit is not spread over a time */
    return round_of(c, &c->shared->engines, WORK_COMMIT);
}

bench_slowed bench_cluster_slowed(const bench_cluster *c)
{
    bench_slowed all = {0};
    for (uint32_t i = 0; i < c->shared->engines.ranks; i++) {
        const bench_result *s = &c->shared->results[i];
        if (!s->alone.steps || !s->beside.steps)
            continue;
        if (s->beside.mean * all.mean_alone >= all.mean * s->alone.mean) {
            all.mean = s->beside.mean;
            all.mean_alone = s->alone.mean;
        }
        if (s->beside.p99 * all.p99_alone >= all.p99 * s->alone.p99) {
            all.p99 = s->beside.p99;
            all.p99_alone = s->alone.p99;
        }
        all.steps += s->beside.steps;
    }
    return all;
}

double bench_cluster_repeat(bench_cluster *c, const dray_update_options *options)
{
    set_update(c, options);
    round_of(c, &c->shared->engines, WORK_UPDATE);
    return slowest(c);
}

double bench_cluster_least(bench_cluster *c, bool verified)
{
    bench_round *l = &c->shared->engines;
    double pieces = round_of(c, l, verified ? WORK_COPY_AND_READ_BACK : WORK_COPY_PIECES);
    double whole = round_of(c, l, WORK_COPY) + (verified ? round_of(c, l, WORK_READ_OWN) : 0);
    return pieces < whole ? pieces : whole;
}

double bench_cluster_read(bench_cluster *c)
{
    return round_of(c, &c->shared->engines, WORK_READ);
}

double bench_cluster_read_sources(bench_cluster *c)
{
    return round_of(c, &c->shared->trainers, WORK_READ_OWN);
}

double bench_cluster_link(bench_cluster *c, const char **how)
{
    const bench_side *from = &c->options->from, *to = &c->options->to;
    double most = 0;
    for (uint32_t h = 0; h < to->host_count; h++) {
        double bytes = 0;
        for (uint32_t i = 0; i < c->shared->engines.ranks; i++)
            if (strcmp(bench_host_of(to, i % to->count), to->hosts[h]) == 0)
                bytes += (double)bench_wanted_bytes(
                    c, i, c->shared->results[i].report.link_bytes[DRAY_LINK_NETWORK]);
        most = bytes > most ? bytes : most;
    }
    if (most <= 0)
        return 0;
    return most / bench_hosts_rate(c->b, bench_host_of(from, 0), bench_host_of(to, 0), most, how);
}

void bench_cluster_check(bench_cluster *c)
{
    round_of(c, &c->shared->engines, WORK_CHECK);
    for (uint32_t i = 0; i < c->shared->engines.ranks; i++)
        if (c->shared->results[i].wrong)
            bench_die(c->b, "%llu elements of engine rank %u are wrong, first in %s",
                      (unsigned long long)c->shared->results[i].wrong, i,
                      c->shared->results[i].first);
}

static int64_t longest(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

dray_update_report bench_cluster_report(const bench_cluster *c)
{
    dray_update_report all = c->shared->results[0].report;
    for (uint32_t i = 1; i < c->shared->engines.ranks; i++) {
        const dray_update_report *r = &c->shared->results[i].report;
        all.bytes += r->bytes;
        all.source_bytes += r->source_bytes;
        all.copies += r->copies;
        for (int link = 0; link < DRAY_LINK_COUNT; link++)
            all.link_bytes[link] += r->link_bytes[link];
        all.wait_ns = longest(all.wait_ns, r->wait_ns);
        all.plan_ns = longest(all.plan_ns, r->plan_ns);
        all.prepare_ns = longest(all.prepare_ns, r->prepare_ns);
        all.move_ns = longest(all.move_ns, r->move_ns);
        all.verify_ns = longest(all.verify_ns, r->verify_ns);
        all.device_ns = longest(all.device_ns, r->device_ns);
        all.commit_ns = longest(all.commit_ns, r->commit_ns);
        all.total_ns = longest(all.total_ns, r->total_ns);
        all.pause_ns = longest(all.pause_ns, r->pause_ns);
        all.exchanged_bytes += r->exchanged_bytes;
        all.spare_bytes += r->spare_bytes;
        all.spare_waste_bytes += r->spare_waste_bytes;
        all.fanned_bytes += r->fanned_bytes;
        all.delta_covered_bytes += r->delta_covered_bytes;
        all.delta_bytes += r->delta_bytes;
        all.steps += r->steps;
        all.step_ns = longest(all.step_ns, r->step_ns);
        all.step_before_ns = longest(all.step_before_ns, r->step_before_ns);
        if (r->held_ns > all.held_ns) {
            all.held_ns = r->held_ns;
            memcpy(all.held_by, r->held_by, sizeof all.held_by);
        }
        if (r->peak_extra_bytes > all.peak_extra_bytes)
            all.peak_extra_bytes = r->peak_extra_bytes;
    }
    return all;
}

json_t *bench_cluster_time_lines(const bench_cluster *c)
{
    json_t *lines = json_array();
    for (uint32_t i = 0; i < c->shared->engines.ranks; i++) {
        const bench_result *s = &c->shared->results[i];
        const dray_update_report *r = &s->report;
        json_array_append_new(
            lines,
            json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "began", s->began, "wait",
                      (double)r->wait_ns * 1e-9, "plan", (double)r->plan_ns * 1e-9, "prepare",
                      (double)r->prepare_ns * 1e-9, "move", (double)r->move_ns * 1e-9, "device",
                      (double)r->device_ns * 1e-9, "verify", (double)r->verify_ns * 1e-9, "commit",
                      (double)r->commit_ns * 1e-9, "ended", s->ended));
    }
    return lines;
}

/* ---- beginning and end ----------------------------------------------------------------------- */

static void open_sources(bench_cluster *c)
{
    const bench_side *side = &c->options->from;
    for (uint32_t i = 0; i < side->count; i++)
        c->region_count += dray_layout_region_count(side->layouts[i]);
    c->regions = bench_alloc(c->b, c->region_count, sizeof *c->regions);
    for (uint32_t i = 0; i < side->count; i++)
        BENCH_MUST(c->b,
                   dray_regions_for_layout(side->layouts[i], 1, bench_regions_of(c, i), error));
}

void bench_watch_signals(void)
{
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

static void watch_ends(bench_cluster *c)
{
    static bool watched;
    parent = getpid();
    c->next = running;
    running = c;
    if (!watched)
        atexit(on_exit_early);
    watched = true;
    bench_watch_signals();
}

static bench_cluster *make(bench *b, const bench_cluster_options *options)
{
    bench_cluster *c = bench_alloc(b, 1, sizeof *c);
    uint32_t groups = options->engines ? options->engines : 1;
    uint32_t engines = groups * options->to.count;
    c->pids = bench_alloc(b, (size_t)1 + engines + options->from.count, sizeof *c->pids);
    c->b = b;
    c->options = options;
    c->groups = groups;
    c->shared_bytes = sizeof *c->shared + (engines + options->from.count) * sizeof(bench_result);
    c->shared = bench_shared(b, c->shared_bytes);
    strcpy(c->folder, "/tmp/dray-bench-XXXXXX");
    if (!mkdtemp(c->folder))
        bench_die(b, "no folder: %s", strerror(errno));
    snprintf(c->shared->address, sizeof c->shared->address, "unix:%s/socket", c->folder);
    c->shared->version = 1;
    c->shared->engines.ranks = engines;
    c->shared->trainers.ranks = options->checkpoint ? 0 : options->from.count;
    return c;
}

bench_cluster *bench_cluster_start(bench *b, const bench_cluster_options *options)
{
    bench_cluster *c = make(b, options);
    bench_cluster_state *s = c->shared;
    watch_ends(c);
    if (s->trainers.ranks && !options->cuda)
        open_sources(c);
    spawn(c, bench_run_coordinator, 0);
    await(c, &s->ready, 1);
    for (uint32_t i = 0; i < s->trainers.ranks; i++)
        spawn(c, bench_run_trainer, i);
    for (uint32_t i = 0; i < s->engines.ranks; i++)
        spawn(c, bench_run_engine, i);
    await(c, &s->ready, 1 + (int)(s->trainers.ranks + s->engines.ranks));
    return c;
}

void bench_cluster_stop(bench_cluster *c)
{
    bench_cluster_state *b = c->shared;
    b->trainers.work = b->engines.work = WORK_END;
    bench_add(&b->engines.round);
    bench_add(&b->trainers.round);
    for (uint32_t i = 1; i < c->pid_count; i++)
        waitpid(c->pids[i], NULL, 0);
    kill(c->pids[0], SIGTERM);
    waitpid(c->pids[0], NULL, 0);
    remove_folder(c);
    bench_cluster **at = &running;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    for (uint32_t i = 0; i < c->region_count; i++)
        dray_region_free(c->regions[i]);
    munmap(b, c->shared_bytes);
    free(c->regions);
    free(c->pids);
    free(c);
}
