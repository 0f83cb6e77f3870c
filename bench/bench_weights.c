/* Updates of weights in shared memory: a 0.5B model, sharded as FSDP over 4 trainer ranks, into two
 * tensor-parallel engine ranks, each rank a process. The limit is what the same two processes take
 * to memcpy out of the trainers' memory into the same destination, in the same run, with as many
 * bytes read and written as the update reads and writes. Other load disturbs both: they take turns,
 * and of each the quarter that was disturbed least counts. */
#include "bench.h"

#include "base/clock.h"
#include "run/coordinator.h"
#include <dray/weights.h>

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define MODEL "bench"

enum { TRAINERS = 4, ENGINES = 2 };
enum work { COPY, UPDATE, END };

/* What all processes see. A round: the parent sets the work and counts `round` up; each engine does
 * it and counts `done` up. */
typedef struct board {
    int ready, round, done, work, failed;
    dray_update_options options;
    dray_update_report reports[ENGINES];
    double seconds[ENGINES];
    char address[160];
} board;

typedef struct state {
    bench *b;
    board *board;
    dray_model_config config;
    dray_dtype from, to;
    dray_layout *sources[TRAINERS];
    dray_region *regions[TRAINERS];
    uint64_t bytes;
} state;

static bench *current;

static void must(int code, const dray_error *error)
{
    if (code)
        bench_die(current, "%s", error->message);
}

static int get(const int *at)
{
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}

static void add(int *at, int by)
{
    __atomic_add_fetch(at, by, __ATOMIC_SEQ_CST);
}

static void await(const int *at, int value)
{
    while (get(at) < value)
        usleep(50);
}

/* ---- processes ------------------------------------------------------------------------------ */

static pid_t spawn(void (*body)(state *s, uint32_t rank), state *s, uint32_t rank)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid < 0)
        bench_die(s->b, "fork failed");
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        body(s, rank);
        _exit(0);
    }
    return pid;
}

static void on_ready(void *user, const char *unix_address, const char *tcp_address)
{
    (void)unix_address, (void)tcp_address;
    add(&((board *)user)->ready, 1);
}

static void run_coordinator(state *s, uint32_t rank)
{
    (void)rank;
    dray_error error;
    dray__serve_options options = {
        .unix_path = s->board->address + 5, .ready = on_ready, .user = s->board};
    must(dray__serve(&options, &error), &error);
}

static dray_context *open_context(const state *s, const char *role, uint32_t rank)
{
    dray_error error;
    dray_context *context;
    dray_options options = DRAY_OPTIONS_INIT;
    options.address = s->board->address;
    options.role = role;
    options.rank = rank;
    must(dray_open(&options, &context, &error), &error);
    return context;
}

/* The trainers' regions were made by the parent, so that engines can copy from them without dray.
 */
static void run_trainer(state *s, uint32_t rank)
{
    dray_error error;
    dray_context *context = open_context(s, "trainer", rank);
    dray_publisher_options options = DRAY_PUBLISHER_OPTIONS_INIT;
    dray_publisher *publisher;
    options.regions = &s->regions[rank];
    options.rank = rank;
    options.world = TRAINERS;
    must(dray_publisher_open(context, MODEL, s->sources[rank], &options, &publisher, &error),
         &error);
    must(dray_publish(publisher, 1, NULL, &error), &error);
    add(&s->board->ready, 1);
    for (int round = 1; get(&s->board->work) != END; round++)
        await(&s->board->round, round);
    dray_publisher_close(publisher);
    dray_close(context);
}

/* A memcpy with the traffic of the update, from the trainers' memory into the engine's: as many
 * bytes read and written together. (A conversion from f32 to bf16 reads two bytes for each that it
 * writes: the traffic of a copy of one and a half times what is written.) */
static void copy_bytes(const state *s, dray_region *to, uint32_t rank)
{
    uint64_t size = dray_region_bytes(to), read = dray_dtype_size(s->from);
    uint64_t written = dray_dtype_size(s->to), left = size / (2 * written) * (read + written);
    uint64_t at = 0;
    for (uint32_t i = 0; left; i = (i + 1) % TRAINERS) {
        dray_region *from = s->regions[(i + rank * TRAINERS / ENGINES) % TRAINERS];
        uint64_t part = dray_region_bytes(from);
        part = part < left ? part : left;
        part = part < size - at ? part : size - at;
        memcpy((uint8_t *)dray_region_base(to) + at, dray_region_base(from), part);
        at = (at + part) % size;
        left -= part;
    }
}

static void run_engine(state *s, uint32_t rank)
{
    dray_error error;
    dray_context *context = open_context(s, "engine", rank);
    dray_engine_spec spec = DRAY_ENGINE_SPEC_INIT;
    spec.tp = ENGINES;
    spec.tp_rank = rank;
    spec.dtype = (int32_t)s->to;
    dray_layout *layout;
    dray_region *region;
    must(dray_layout_engine(&s->config, &spec, &layout, &error), &error);
    must(dray_regions_for_layout(layout, 1, &region, &error), &error);
    memset(dray_region_base(region), 0xA5, dray_region_bytes(region));
    dray_subscriber_options options = DRAY_SUBSCRIBER_OPTIONS_INIT;
    dray_subscriber *subscriber;
    options.regions = &region;
    options.group = "engine";
    options.rank = rank;
    options.world = ENGINES;
    must(dray_subscriber_open(context, MODEL, layout, &options, &subscriber, &error), &error);
    add(&s->board->ready, 1);
    for (int round = 1;; round++) {
        await(&s->board->round, round);
        if (s->board->work == END)
            break;
        double begin = bench_now();
        if (s->board->work == COPY) {
            copy_bytes(s, region, rank);
        } else {
            dray_update_report report = DRAY_UPDATE_REPORT_INIT;
            if (dray_update_weights(subscriber, &s->board->options, &report, &error)) {
                fprintf(stderr, "rank %u: %s\n", rank, error.message);
                add(&s->board->failed, 1);
            }
            s->board->reports[rank] = report;
        }
        s->board->seconds[rank] = bench_now() - begin;
        add(&s->board->done, 1);
    }
    dray_subscriber_close(subscriber);
    dray_close(context);
}

/* ---- rounds --------------------------------------------------------------------------------- */

static double round_of(void *user)
{
    state *s = user;
    board *b = s->board;
    __atomic_store_n(&b->done, 0, __ATOMIC_SEQ_CST);
    double begin = bench_now();
    add(&b->round, 1);
    await(&b->done, ENGINES);
    if (get(&b->failed))
        bench_die(s->b, "an update failed");
    return bench_now() - begin;
}

enum { LIMIT, DIRECT, BUCKET, PARAMETER, UNVERIFIED, FIGURES, TURNS = 31 };

static double seconds_of(state *s, int figure)
{
    s->board->work = figure == LIMIT ? COPY : UPDATE;
    s->board->options = (dray_update_options)DRAY_UPDATE_OPTIONS_INIT;
    s->board->options.strategy = figure == BUCKET      ? DRAY_STRATEGY_BUCKET
                                 : figure == PARAMETER ? DRAY_STRATEGY_PARAMETER
                                                       : DRAY_STRATEGY_DIRECT;
    s->board->options.verify = figure == UNVERIFIED ? -1 : 0;
    return round_of(s);
}

static void make_sources(state *s)
{
    dray_error error;
    for (uint32_t rank = 0; rank < TRAINERS; rank++) {
        must(dray_layout_fsdp(&s->config, s->from, rank, TRAINERS, DRAY_REGION_SHARED,
                              &s->sources[rank], &error),
             &error);
        must(dray_regions_for_layout(s->sources[rank], 1, &s->regions[rank], &error), &error);
        uint64_t *words = dray_region_base(s->regions[rank]), x = rank + 1;
        for (uint64_t i = 0; i < dray_region_bytes(s->regions[rank]) / 8; i++) {
            x ^= x << 13, x ^= x >> 7, x ^= x << 17;
            words[i] = x & 0xbfffbfffbfffbfff; /* no infinities, no NaN */
        }
    }
}

static void measure(state *s, const char *what, double target)
{
    static const char *const figures[] = {NULL, "update, direct", "update, bucket",
                                          "update, parameter", "update, direct, not verified"};
    static double seconds[FIGURES][TURNS];
    double best[FIGURES], bytes = 0;
    size_t turns = bench_quick(s->b) ? 2 : TURNS;
    for (int i = 0; i < FIGURES; i++)
        seconds_of(s, i); /* plans, touches memory */
    for (size_t turn = 0; turn < turns; turn++)
        for (int i = 0; i < FIGURES; i++)
            seconds[i][turn] = seconds_of(s, i);
    for (int i = 0; i < FIGURES; i++)
        best[i] = bench_percentile(seconds[i], turns, 0.25);
    char name[96];
    for (int i = DIRECT; i < FIGURES; i++) {
        snprintf(name, sizeof name, "%s, %s", figures[i], what);
        bench_row(s->b, name, best[i], "s", best[LIMIT],
                  i == DIRECT       ? target
                  : i == UNVERIFIED ? 1.3
                                    : 0);
    }
    for (int i = 0; i < ENGINES; i++)
        bytes += (double)s->board->reports[i].bytes;
    snprintf(name, sizeof name, "bytes written, update, direct, %s", what);
    bench_row(s->b, name, bytes / best[DIRECT], "B/s", bytes / best[LIMIT], 0);
}

/* What an update costs besides its bytes: a model of some kilobytes. */
static void measure_control(state *s, const char *what, double target)
{
    enum { ROUNDS = 300 };
    static double seconds[ROUNDS];
    s->board->work = UPDATE;
    s->board->options = (dray_update_options)DRAY_UPDATE_OPTIONS_INIT;
    for (int i = 0; i < ROUNDS; i++) {
        round_of(s);
        seconds[i] = 0;
        for (int rank = 0; rank < ENGINES; rank++)
            if (s->board->seconds[rank] > seconds[i])
                seconds[i] = s->board->seconds[rank];
    }
    char name[96];
    double echo = bench_echo(s->b, 200);
    snprintf(name, sizeof name, "update of next to nothing, %s, median", what);
    bench_row(s->b, name, bench_percentile(seconds, ROUNDS, 0.5), "s", 4 * echo, 0);
    snprintf(name, sizeof name, "update of next to nothing, %s, p99", what);
    bench_row(s->b, name, bench_percentile(seconds, ROUNDS, 0.99), "s", 0, target);
}

/* One cluster: processes, measurements, end. model NULL: a tiny one. */
static void run(bench *b, const char *model, dray_dtype from, dray_dtype to, const char *what,
                double target, void (*measured)(state *s, const char *what, double target))
{
    dray_error error;
    char folder[] = "/tmp/dray-bench-XXXXXX";
    state s = {.b = b,
               .from = from,
               .to = to,
               .config = {.family = "qwen2",
                          .vocab_size = 64,
                          .hidden_size = 32,
                          .intermediate_size = 64,
                          .layers = 2,
                          .heads = 4,
                          .kv_heads = 2,
                          .head_dim = 8,
                          .max_positions = 64,
                          .rms_norm_eps = 1e-6,
                          .rope_theta = 10000,
                          .tied = 1,
                          .dtype = DRAY_BF16}};
    s.board =
        mmap(NULL, sizeof *s.board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (s.board == MAP_FAILED || !mkdtemp(folder))
        bench_die(b, "no shared memory or no folder");
    snprintf(s.board->address, sizeof s.board->address, "unix:%s/socket", folder);
    if (model)
        must(dray_model_config_load(model, &s.config, &error), &error);
    make_sources(&s);
    pid_t pids[1 + TRAINERS + ENGINES];
    int count = 0;
    pids[count++] = spawn(run_coordinator, &s, 0);
    await(&s.board->ready, 1);
    for (uint32_t i = 0; i < TRAINERS; i++)
        pids[count++] = spawn(run_trainer, &s, i);
    for (uint32_t i = 0; i < ENGINES; i++)
        pids[count++] = spawn(run_engine, &s, i);
    await(&s.board->ready, 1 + TRAINERS + ENGINES);
    measured(&s, what, target);
    s.board->work = END;
    add(&s.board->round, 1);
    for (int i = 1; i < count; i++)
        waitpid(pids[i], NULL, 0);
    kill(pids[0], SIGTERM);
    waitpid(pids[0], NULL, 0);
    rmdir(folder);
    for (uint32_t i = 0; i < TRAINERS; i++) {
        dray_region_free(s.regions[i]);
        dray_layout_free(s.sources[i]);
    }
    munmap(s.board, sizeof *s.board);
}

/* ---- disk ------------------------------------------------------------------------------------ */

typedef struct disk {
    char folder[64], checkpoint[96], file[128];
    dray_layout *layout;
    dray_region *region;
} disk;

static void write_checkpoint(void *user)
{
    disk *d = user;
    dray_error error;
    must(dray_checkpoint_write(d->checkpoint, d->layout, &d->region, NULL, &error), &error);
}

static void read_checkpoint(void *user)
{
    disk *d = user;
    dray_error error;
    must(dray_checkpoint_read(d->checkpoint, d->layout, &d->region, &error), &error);
}

/* The limits: the same bytes as one file, by plain write and read of 1 MiB. */
static void plain(disk *d, int flags, ssize_t (*transfer)(int fd, void *at, size_t size))
{
    int fd = open(d->file, flags | O_CLOEXEC, 0600);
    uint8_t *base = dray_region_base(d->region);
    uint64_t size = dray_region_bytes(d->region);
    for (uint64_t at = 0; fd >= 0 && at < size;) {
        size_t part = size - at < 1 << 20 ? size - at : 1 << 20;
        ssize_t n = transfer(fd, base + at, part);
        if (n <= 0)
            bench_die(current, "plain file: %s", strerror(errno));
        at += (uint64_t)n;
    }
    if (fd < 0 || ((flags & O_WRONLY) && fsync(fd)) || close(fd))
        bench_die(current, "plain file: %s", strerror(errno));
}

static ssize_t write_part(int fd, void *at, size_t size)
{
    return write(fd, at, size);
}

static void write_plain(void *user)
{
    plain(user, O_WRONLY | O_CREAT | O_TRUNC, write_part);
}

static void read_plain(void *user)
{
    plain(user, O_RDONLY, read);
}

static void measure_disk(bench *b)
{
    disk d = {.folder = "/tmp/dray-bench-XXXXXX"};
    dray_model_config config;
    dray_error error;
    must(dray_model_config_load("qwen2.5-0.5b", &config, &error), &error);
    if (bench_quick(b)) {
        config.layers = 2;
        config.vocab_size = 1024;
    }
    if (!mkdtemp(d.folder))
        bench_die(b, "no folder");
    snprintf(d.checkpoint, sizeof d.checkpoint, "%s/checkpoint", d.folder);
    snprintf(d.file, sizeof d.file, "%s/file", d.folder);
    must(dray_layout_full(&config, DRAY_BF16, DRAY_REGION_HOST, &d.layout, &error), &error);
    must(dray_regions_for_layout(d.layout, 1, &d.region, &error), &error);
    memset(dray_region_base(d.region), 1, dray_region_bytes(d.region));
    double bytes = (double)dray_layout_bytes(d.layout);
    double written = bench_median(b, write_plain, &d), read_back = bench_median(b, read_plain, &d);
    bench_row(b, "checkpoint, write and fsync", bytes / bench_median(b, write_checkpoint, &d),
              "B/s", bytes / written, 0.9);
    bench_row(b, "checkpoint, read out of the page cache",
              bytes / bench_median(b, read_checkpoint, &d), "B/s", bytes / read_back, 0.9);
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", d.folder);
    if (system(command) != 0)
        bench_die(b, "cannot remove %s", d.folder);
    dray_region_free(d.region);
    dray_layout_free(d.layout);
}

int main(int argc, char **argv)
{
    bench *b = current = bench_open(argc, argv, "weights");
    const char *model = "qwen2.5-0.5b";
    run(b, model, DRAY_BF16, DRAY_BF16, "0.5B, bf16, FSDP 4 -> TP 2", 1.25, measure);
    run(b, NULL, DRAY_BF16, DRAY_BF16, "FSDP 4 -> TP 2", 1e-3, measure_control);
    if (bench_quick(b))
        bench_skip(b, "update, direct, 0.5B, f32 -> bf16, FSDP 4 -> TP 2", "--quick");
    else
        run(b, model, DRAY_F32, DRAY_BF16, "0.5B, f32 -> bf16, FSDP 4 -> TP 2", 2, measure);
    measure_disk(b);
    return bench_close(b);
}
